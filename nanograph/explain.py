"""What is in a captured graph: which kernels each segment holds, what it reads and writes, and where it is cut.

    print(explain(llm))        after some steps; the command lines print it with --explain

On CUDA the nodes come from the captured graph itself, through NVIDIA's bindings of the driver; on the CPU they are the
operations of the tape, whose arguments also show which static inputs a segment reads. Leaves out the arguments of CUDA
kernels: there only what crosses a break, and the logits, can be said.

Read first: capture.py, tape.py. Read next: diff.py.
"""

import re
import textwrap
from collections import Counter
from inspect import signature

from nanograph.capture import Break, CaptureError


def explain(llm):
    """The graphs that an LLM has captured, as text: a line for each segment and break, one for all that are alike."""
    graphs = {bucket: graph for bucket, graph in getattr(llm.executor, "graphs", {}).items() if graph}
    if not graphs:
        return f"no graph: mode {llm.options.mode}, {llm.stats.steps} steps, none of them captured"
    lines = []
    for bucket, graph in sorted(graphs.items()):
        lines += [f"bucket {bucket}: {len(graph.segments)} segments, {len(graph.breaks)} breaks, run in turn"]
        lines += [*describe_steps(graph, static_buffers(llm, graph)), ""]
    held = llm.stats.graph_bytes
    return "\n".join(lines) + f"{len(graphs)} graphs hold {held:,} bytes together: they share one pool, so they overlap"


def static_buffers(llm, graph):
    """Where everything lies that outlives a graph: [(first address, end, name)]."""
    batch, mailboxes = llm.batch, {}
    offsets = [*batch.offsets.items(), (None, batch.device_buffer.numel())]
    packed = batch.device_buffer.data_ptr()
    found = [(packed + 4 * start, packed + 4 * end, name) for (name, start), (_, end) in zip(offsets, offsets[1:])]
    for step in graph.breaks:
        operands, results = mailboxes_of(step)
        mailboxes |= operands | results
    others = {"KV cache": batch.kv_cache.data, "logits": llm.executor.logits, **mailboxes}
    return found + [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name) for name, tensor in others.items()]


def mailboxes_of(step):
    """The buffers through which a break gets its operands and hands on its results: two dicts {name: tensor}."""
    owner = step.function.__qualname__.removesuffix(".forward")
    arguments = signature(step.function).bind(*step.args, **step.kwargs).arguments
    operands = {f"{owner}'s {name}": value for name, value in arguments.items() if hasattr(value, "data_ptr")}
    return operands, {f"{owner}'s result": tensor for tensor in step.results}


def describe_steps(graph, buffers):
    """One paragraph for each kind of segment or break, with the numbers of those that are like it."""
    alike, counts = {}, Counter()
    for index, step in enumerate(graph.steps):
        if isinstance(step, Break):
            kind, text = "break", describe_break(step)
        else:
            around = [graph.steps[i] if 0 <= i < len(graph.steps) else None for i in (index - 1, index + 1)]
            kind, text = "segment", describe_segment(step, buffers, *around)
        alike.setdefault((kind, text), []).append(counts[kind])
        counts[kind] += 1
    for (kind, text), numbers in alike.items():
        title = f"  {kind}{'s' * (len(numbers) > 1)} {ranges(numbers)}: "
        yield textwrap.fill(text, 120, initial_indent=title, subsequent_indent="      ", break_long_words=False)


def ranges(numbers):
    """Ascending numbers in short.

    >>> ranges([3]), ranges([1, 2, 3]), ranges([0, 2, 4, 6])
    ('3', '1-3', '0, 2 … 6')
    """
    first, *rest = numbers
    stride = rest[0] - first if rest else 1
    if numbers != list(range(first, numbers[-1] + 1, stride)):
        return ", ".join(map(str, numbers))
    return f"{first}" if not rest else f"{first}-{rest[-1]}" if stride == 1 else f"{first}, {rest[0]} … {rest[-1]}"


def describe_break(step):
    operands, results = mailboxes_of(step)
    return f"{step.function.__qualname__}, eagerly; {reads_and_writes(operands, results)}"


def reads_and_writes(reads, writes):
    return "; ".join(f"{verb} {', '.join(names)}" for verb, names in (("reads", reads), ("writes", writes)) if names)


def describe_segment(segment, buffers, before, after):
    names = node_names(segment)
    kinds = ", ".join(f"{count} {name}" for name, count in Counter(names).most_common())
    nodes = f"{len(names)} nodes ({kinds})" if names is not None else "nodes unknown: pip install cuda-bindings"
    if hasattr(segment, "operations"):
        return "; ".join(filter(None, (nodes, reads_and_writes(*touched(segment, buffers)), held(segment))))
    reads = mailboxes_of(before)[1] if before else ["the static inputs"]
    return f"{nodes}; {reads_and_writes(reads, mailboxes_of(after)[0] if after else ['logits'])}"


def touched(tape, buffers):
    """Names of the static buffers that a tape's operations read and write, each in order of first use."""
    reads, writes = {}, {}
    for func, args, kwargs, _ in tape.operations:
        for argument, value in zip(func._schema.arguments, [*args, *kwargs.values()]):
            written = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in value if isinstance(value, list) else [value]:
                if hasattr(tensor, "data_ptr"):
                    names = [name for start, end, name in buffers if start <= tensor.data_ptr() < end]
                    (writes if written else reads).update(dict.fromkeys(names))
    return reads, writes


def held(tape):
    """What a tape's results take of the pool, each piece of memory counted once."""
    storages = {tensor.untyped_storage() for *_, results in tape.operations for tensor in results}
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return f"{sum(sizes.values()):,} bytes"


def node_names(segment):
    """What a segment runs, in order of its recording: a name a node. None on CUDA without NVIDIA's bindings."""
    if hasattr(segment, "operations"):
        return [str(func).removeprefix("aten.") for func, *_ in segment.operations]
    try:
        from cuda.bindings import driver
    except ImportError:
        return None
    raw = driver.CUgraph(segment.graph.raw_cuda_graph())
    _, count = driver_results(driver.cuGraphGetNodes(raw))
    nodes, _ = driver_results(driver.cuGraphGetNodes(raw, count))
    return [node_name(driver, node) for node in nodes[:count]]


def driver_results(answer):
    """Every call of the bindings returns (status, results …). Raises CaptureError unless it succeeded."""
    status, *results = answer
    if int(status):
        raise CaptureError(f"the CUDA driver refuses to describe a graph: {status!r}")
    return results


def node_name(driver, node):
    """The kernel's name without its namespaces and template arguments, or the kind of another node."""
    [kind] = driver_results(driver.cuGraphNodeGetType(node))
    if kind != driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL:
        return kind.name.removeprefix("CU_GRAPH_NODE_TYPE_").lower()
    [params] = driver_results(driver.cuGraphKernelNodeGetParams(node))
    by_function = int(params.func) != 0  # a library's kernel may be known by its other handle alone
    answer = driver.cuFuncGetName(params.func) if by_function else driver.cuKernelGetName(params.kern)
    [name] = driver_results(answer)
    return short_name(name.decode())


def short_name(symbol):
    """A C++ kernel's own name, from its mangled symbol; other names stay.

    >>> short_name("_ZN2at6native18elementwise_kernelILi128ELi4EEEvi"), short_name("paged_attention_kernel")
    ('elementwise_kernel', 'paged_attention_kernel')
    """
    name, rest = symbol, symbol.removeprefix("_ZN").removeprefix("_Z")
    while rest != symbol and (length := re.match(r"\d+", rest)):
        end = length.end() + int(length[0])
        name, rest = rest[length.end() : end], rest[end:]
    return name
