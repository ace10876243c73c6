"""What is in a captured graph: which kernels each segment holds, what it reads and writes, and where it is cut.

    print(explain(llm))        after some steps; the command lines print it with --explain

On CUDA the nodes come from the captured graph itself, through NVIDIA's bindings of the driver. On the CPU they are the
operations of the tape, whose arguments also show which static buffers a segment reads and writes; a CUDA kernel's
arguments cannot be told apart, so there only what crosses a break, and the logits, is named.

Read first: capture.py, tape.py. Read next: diff.py.
"""

import re
import textwrap
from collections import Counter
from inspect import signature

import torch

from nanograph.capture import Break


def explain(llm):
    """The graphs that an LLM has captured, as text: a line for each segment and break, one for all that are alike."""
    graphs = {bucket: graph for bucket, graph in llm.executor.graphs.items() if graph}
    lines = [f"captured graphs: {len(graphs)}, in {llm.stats.graph_bytes:,} bytes that they share"]
    for bucket, graph in sorted(graphs.items()):
        lines.append(f"bucket {bucket}: segments {len(graph.segments)}, breaks {len(graph.breaks)}, run in turn")
        for title, text in describe_steps(graph, static_buffers(llm, graph)):
            lines.append(textwrap.fill(text, 120, initial_indent=f"  {title}: ", subsequent_indent="      "))
    return "\n".join(lines)


def static_buffers(llm, graph):
    """Where everything lies that outlives a graph: [(first address, end, name)]."""
    batch, packed = llm.batch, llm.batch.device_buffer
    starts = [packed.data_ptr() + 4 * offset for offset in batch.offsets.values()]
    ends = [*starts[1:], packed.data_ptr() + packed.nbytes]
    others = [("KV cache", batch.kv_cache.data), ("logits", llm.executor.logits)]
    for step in graph.breaks:
        operands, results = mailboxes(step)
        others += [*operands.items(), *results.items()]
    placed = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name) for name, tensor in others]
    return [*zip(starts, ends, batch.offsets), *placed]


def mailboxes(step):
    """The buffers through which a break gets its operands and hands on its results: two dicts {name: tensor}."""
    owner = step.function.__qualname__.removesuffix(".forward")
    arguments = signature(step.function).bind(*step.args, **step.kwargs).arguments
    operands = {f"{owner}'s {name}": value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    return operands, {f"{owner}'s result {index or ''}".strip(): tensor for index, tensor in enumerate(step.results)}


def describe_steps(graph, buffers):
    """(title, text) for each kind of segment or break; the title has the numbers of all that are like it."""
    alike, counts = {}, Counter()
    for before, step, after in zip([None, *graph.steps], graph.steps, [*graph.steps[1:], None]):
        if isinstance(step, Break):
            kind, text = "break", f"{step.function.__qualname__}, eagerly{reads_and_writes(*mailboxes(step))}"
        else:
            kind, text = "segment", describe_segment(step, before, after, buffers)
        alike.setdefault((kind, text), []).append(counts[kind])
        counts[kind] += 1
    for (kind, text), numbers in alike.items():
        dense = numbers[-1] - numbers[0] == len(numbers) - 1 > 0
        listed = f"{numbers[0]}-{numbers[-1]}" if dense else ", ".join(map(str, numbers))
        yield f"{kind}{'s' * (len(numbers) > 1)} {listed}", text


def describe_segment(segment, before, after, buffers):
    nodes = describe_nodes(node_names(segment))
    if not hasattr(segment, "operations"):
        reads = mailboxes(before)[1] if before else ["the static inputs"]
        return nodes + reads_and_writes(reads, mailboxes(after)[0] if after else ["logits"])
    storages = [tensor.untyped_storage() for *_, results in segment.operations for tensor in results]
    held = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    return f"{nodes}{reads_and_writes(*touched(segment, buffers))}; {held:,} bytes of the pool"


def describe_nodes(names, most=8):
    if names is None:
        return "unknown nodes (pip install cuda-bindings)"
    kinds = [f"{count} {name}" for name, count in Counter(names).most_common()]
    return f"{len(names)} nodes ({', '.join(kinds[:most] + ['…'] * (len(kinds) > most))})"


def reads_and_writes(reads, writes):
    return "".join(f"; {verb} {', '.join(names)}" for verb, names in (("reads", reads), ("writes", writes)) if names)


def touched(tape, buffers):
    """Names of the static buffers that a tape's operations read and write, in order of first use."""
    reads, writes = {}, {}
    for func, args, kwargs, _ in tape.operations:
        for argument, value in zip(func._schema.arguments, [*args, *kwargs.values()]):
            names = writes if argument.alias_info is not None and argument.alias_info.is_write else reads
            for tensor in value if isinstance(value, list) else [value]:
                if isinstance(tensor, torch.Tensor):
                    address = tensor.data_ptr()
                    names |= dict.fromkeys(name for start, end, name in buffers if start <= address < end)
    return reads, writes


def node_names(segment):
    """What a segment runs, in order of its recording: a name a node. None on CUDA without NVIDIA's bindings."""
    if hasattr(segment, "operations"):
        return [str(func.overloadpacket).removeprefix("aten.") for func, *_ in segment.operations]
    try:
        from cuda.bindings import driver
    except ImportError:
        return None
    graph = driver.CUgraph(segment.graph.raw_cuda_graph())
    _, _, count = driver.cuGraphGetNodes(graph)  # each call returns its status first
    return [node_name(driver, node) for node in driver.cuGraphGetNodes(graph, count)[1]] if count else []


def node_name(driver, node):
    """The kernel's name, without namespaces and template arguments, or the kind of another node."""
    _, kind = driver.cuGraphNodeGetType(node)
    if kind != driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL:
        return kind.name.removeprefix("CU_GRAPH_NODE_TYPE_").lower()
    status, kernel = driver.cuGraphKernelNodeGetParams(node)
    if int(status):
        return "kernel"
    has_function = int(kernel.func) != 0  # kernels of some libraries are known by their other handle alone
    _, symbol = driver.cuFuncGetName(kernel.func) if has_function else driver.cuKernelGetName(kernel.kern)
    name = torch._C._demangle((symbol or b"kernel").decode()).replace("(anonymous namespace)::", "")
    return re.search(r"(\w+)\s*([<(]|$)", name)[1]
