"""Run the same requests in several modes, step by step, and show where they differ: logits, launches, time.

    python -m nanograph.diff --modes eager,breakable,full --at-bucket

All engines compute the same schedules: the tokens of the first drive all of them, so that a difference stays where it
arose. Where logits differ, everything runs once more with taps in the model, to name the first operation that parts;
what is measured has none. Mode eager is unpadded, and another shape may round differently: a small difference is no
fault. With --at-bucket all modes compute the padded shape, and any difference is one (exit code 1), except to another
set of kernels, which rounds as it likes.

Times are of single runs: bench.py measures. Read first: engine.py. Read next: explain.py, trace.py.
"""

import json
import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import cycle, groupby
from math import inf, isfinite
from operator import attrgetter
from pathlib import Path
from statistics import median
from time import perf_counter

from nanograph.generate import CommandLine, add_engine_arguments, exit_code, open_llms
from nanograph.options import SamplingParams
from nanograph.scheduler import Request
from nanograph.trace import cuda_spans, engine_name


@dataclass
class Row:
    """One step in one engine, or several alike. Differences are to the first engine of the comparison."""

    steps: str  # "3", or "3-9" where rows have been joined
    kind: str  # "prefill", "decode" or "mixed"
    engine: str
    # what it computed
    max_delta: float  # largest |Δlogit|: 0 where bit-equal, inf where one is no number
    agreeing: int  # requests whose likeliest token is the same
    num_requests: int
    num_tokens: int
    num_rows: int  # with padding: the bucket
    parted: str | None  # the first operation whose results differ
    # how
    launched: str  # "eager", "captured" or "replayed"
    kernels: int  # operations that the device runs
    calls: int  # launches by which the CPU asks for them
    host_ms: float  # until the CPU has launched everything; without a GPU: has computed it
    device_ms: float | None  # on the GPU, from its first operation to its last


def compare(llms, prompts, max_new_tokens=16):
    """Run prompts greedily through idle LLMs over models of one shape, in lockstep.

    prompts: texts or lists of token ids. Returns a list of Rows: for each step one for each LLM. Raises ValueError for
    prompts that are refused and for LLMs whose schedules differ.
    """
    import torch

    token_ids = [llms[0].tokenizer.encode(p) if isinstance(p, str) else llms[0]._check_ids(p) for p in prompts]
    rows = []
    with torch.no_grad():
        for step, (kind, outcomes) in enumerate(lockstep(llms, token_ids, max_new_tokens, measure), 1):
            for llm, (logits, measured) in zip(llms, outcomes):
                max_delta, agreeing = difference(logits, outcomes[0][0])
                rows.append(Row(str(step), kind, engine_name(llm), max_delta, agreeing, parted=None, **measured))
        if any(row.max_delta for row in rows):
            find_partings(llms, rows, token_ids, max_new_tokens)
    return rows


def lockstep(llms, token_ids, max_new_tokens, run):
    """Compute requests in all LLMs. Yields after each step its kind and, for each LLM, what `run(llm)` returned.

    That is a tuple that begins with the logits [num_requests, vocab].
    """
    from nanograph.engine import step_kind

    params = SamplingParams(temperature=0, max_new_tokens=max_new_tokens, ignore_eos=True)
    try:
        for llm in llms:
            for number, ids in enumerate(token_ids):
                llm.scheduler.add(Request(f"diff {number}", list(ids), params, seed=0))
        while llms[0].scheduler.requests:
            plans = [llm.scheduler.schedule() for llm in llms]
            if len({tuple((request.request_id, count) for request, count in plan) for plan in plans}) > 1:
                raise ValueError("the schedules differ: give all LLMs the same limits and kv_blocks")
            for llm, plan in zip(llms, plans):
                llm.batch.fill(plan, llm.executor.bucket_for(sum(count for _, count in plan)))
            outcomes = [run(llm) for llm in llms]
            yield step_kind(plans[0]), outcomes
            advanced = sum(count == request.num_uncomputed for request, count in plans[0])
            tokens = outcomes[0][0][:advanced].argmax(-1).tolist()
            for llm, plan in zip(llms, plans):
                llm.scheduler.update(plan, tokens)
    finally:
        for llm in llms:
            for request in llm.scheduler.requests:
                llm.scheduler.cancel(request.request_id)


def difference(values, wanted):
    """(largest |Δ|, inf if it is no number; rows whose largest value is at the same place) of two tensors [R, N]."""
    largest = (values - wanted).abs().nan_to_num(nan=inf).max()
    return float(largest), int((values.argmax(-1) == wanted.argmax(-1)).sum())


def measure(llm):
    """Compute the step that the batch holds: (logits, fields of a Row).

    What is counted afterwards runs the step again, which changes nothing.
    """
    import torch

    executor, stats = llm.executor, llm.executor.stats
    captures, replays = stats.captures, stats.replays
    timeline = torch.cuda if llm.device.type == "cuda" else None
    if timeline:
        begin, end = (timeline.Event(enable_timing=True) for _ in range(2))
        timeline.synchronize()
        begin.record()
    started = perf_counter()
    logits = executor.run()
    host_ms = 1e3 * (perf_counter() - started)
    if timeline:
        end.record()
        end.synchronize()
    logits = logits.clone()  # the buffer is valid until the next run
    launched = "captured" if stats.captures > captures else "replayed" if stats.replays > replays else "eager"
    calls, kernels = count_launches(llm)
    sizes = {name: getattr(llm.batch, name) for name in ("num_requests", "num_tokens", "num_rows")}
    device_ms = begin.elapsed_time(end) if timeline else None
    return logits, dict(sizes, launched=launched, kernels=kernels, calls=calls, host_ms=host_ms, device_ms=device_ms)


def count_launches(llm):
    """(calls of the CPU, kernels that they launch) to compute the batch's step; on CUDA a profiler counts them."""
    if llm.device.type == "cuda":
        lanes = Counter(span.lane for span in cuda_spans(llm.executor))
        return lanes["CPU"], lanes["GPU"]
    calls, graph = llm.executor.count_launches(), llm.executor.graphs.get(llm.batch.num_rows)
    return calls, calls + sum(len(segment.operations) - 1 for segment in (graph.segments if graph else []))


@contextmanager
def tapped(llm, buffers):
    """While in here, what each operation of a forward returns is also copied to a fixed buffer: {name: tensor}.

    Forward hooks do it, which a capture records like everything else: for a replay to fill the buffers, they must have
    been there when the graph was captured. The model knows nothing of them.
    """

    def copy(name, module, args, result):
        if name not in buffers:  # in an eager run, or in the warm-up of a capture
            buffers[name] = result.new_empty(llm.options.max_batch_tokens, *result.shape[1:])
        buffers[name][: result.shape[0]].copy_(result)

    watched = [("embedding", llm.model.embedding), ("positions", llm.model.positions)]
    for layer, block in enumerate(llm.model.blocks):
        watched += [(f"layer {layer} {name}", module) for name, module in block.named_children()]
    hooks = [module.register_forward_hook(partial(copy, name)) for name, module in watched if module is not None]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def find_partings(llms, rows, token_ids, max_new_tokens):
    """Run everything again, with taps in newly captured graphs, and note in each Row that differs where it parts."""
    taps, graphs = {llm: {} for llm in llms}, {llm: llm.executor.graphs for llm in llms}

    def run(llm):
        with tapped(llm, taps[llm]):
            return (llm.executor.run(),)

    for llm in llms:
        llm.executor.graphs = {}
    remaining = iter(rows)
    for _ in lockstep(llms, token_ids, max_new_tokens, run):
        for llm, row in zip(llms, remaining):
            if row.max_delta:
                row.parted = first_parting(taps[llm], taps[llms[0]], row.num_tokens)
    for llm in llms:
        llm.executor.graphs = graphs[llm]


def first_parting(taps, wanted, num_tokens):
    """The first operation whose results differ, and how far they are apart."""
    for name in wanted:
        ours, theirs = (buffers[name][:num_tokens].float().flatten(1) for buffers in (taps, wanted))
        if not ours.equal(theirs):
            return f"{name} (max |Δ| {difference(ours, theirs)[0]:.2g} of {float(theirs.abs().max()):.2g})"
    return "no block (the last norm or the head parts, or the difference has not come back)"


def join(rows, engines):
    """Rows of `engines` engines, with successive steps that look alike put together: their times are medians."""
    steps = [rows[start : start + engines] for start in range(0, len(rows), engines)]
    look = attrgetter("kind", "num_tokens", "num_rows", "launched", "kernels", "calls")
    for _, alike in groupby(steps, key=lambda step: [(look(row), row.max_delta > 0) for row in step]):
        for same in zip(*alike):
            yield replace(
                same[0],
                steps="-".join(dict.fromkeys((same[0].steps, same[-1].steps))),
                max_delta=max(row.max_delta for row in same),
                agreeing=sum(row.agreeing for row in same),
                num_requests=sum(row.num_requests for row in same),
                host_ms=median(row.host_ms for row in same),
                device_ms=same[0].device_ms and median(row.device_ms for row in same),
            )


def table(rows, engines):
    """Rows of `engines` engines as text."""
    widths = (6, 8, 7, 19, 6, 7, 9, 9, 8, 8, 7, 9, 9)
    titles = ("step", "kind", "tokens", "engine", "rows", "padded", "launched", "max|Δ|", "top-1")
    lines = [(*titles, "kernels", "calls", "host ms", "GPU ms")]
    for index, row in enumerate(rows):
        first = index % engines == 0
        step = (row.steps, row.kind, row.num_tokens) if first else ("", "", "")
        rest = (row.num_rows, row.num_rows - row.num_tokens, row.launched, "-" if first else f"{row.max_delta:.2g}")
        counts = (f"{row.agreeing}/{row.num_requests}", row.kernels, row.calls, f"{row.host_ms:.2f}")
        lines.append((*step, row.engine, *rest, *counts, "-" if row.device_ms is None else f"{row.device_ms:.2f}"))
    return "\n".join("".join(f"{cell:>{width}}" for cell, width in zip(line, widths)) for line in lines)


def verdict(rows, first):
    """One line on an engine's rows: whether, how far and from where it differs from the first engine."""
    differing = [row for row in rows if row.max_delta]
    if not differing:
        return f"{rows[0].engine}: bit-equal to {first} in all {len(rows)} steps"
    largest, where = max(row.max_delta for row in differing), f"step {differing[0].steps}: {differing[0].parted}"
    return f"{rows[0].engine}: {len(differing)} of {len(rows)} steps differ, by up to {largest:.2g}; first in {where}"


def parse_arguments(argv):
    parser = CommandLine("python -m nanograph.diff", description="Compare modes step by step.")
    parser.add_argument("--prompt", action="append", help="a prompt; may be given several times (default: ROMEO:)")
    parser.add_argument("--max-new-tokens", type=int, default=16, help="tokens to generate (default: 16)")
    parser.add_argument("--at-bucket", action="store_true", help="pad mode eager, too: any difference is an error")
    parser.add_argument("--all", action="store_true", help="a line for every step, also where they look alike")
    parser.add_argument("--json", type=Path, help="write every row to this file")
    parser.add_argument("--explain", action="store_true", help="print what the captured graphs hold")
    add_engine_arguments(parser, several=True)
    return parser.parse_args(argv)


def run(args):
    """Compare and print. Returns 1 if engines differ that must not, else 0. Raises ValueError."""
    prompts = args.prompt or ["ROMEO:"]
    llms = open_llms(args, max_requests=len(prompts), pad_to_bucket=args.at_bucket)
    rows = compare(llms, prompts, args.max_new_tokens)
    if args.json:
        finite = [asdict(row) | ({} if isfinite(row.max_delta) else {"max_delta": None}) for row in rows]
        args.json.write_text(json.dumps(finite))
    print(table(rows if args.all else join(rows, len(llms)), len(llms)))
    for index in range(1, len(llms)):
        print(verdict(rows[index :: len(llms)], rows[0].engine))
    if args.explain:
        from nanograph.explain import explain

        print(*(f"\n{engine_name(llm)}: {explain(llm)}" for llm in llms), sep="\n")
    judged = [llm.options.kernels == llms[0].options.kernels for llm in llms]
    return int(args.at_bucket and any(row.max_delta and equal for row, equal in zip(rows, cycle(judged))))


def main(argv=None):
    return exit_code("python -m nanograph.diff", run, parse_arguments(argv))


if __name__ == "__main__":
    sys.exit(main())
