"""Draw one step: what the CPU launches and what the GPU runs, one mode below the other on one time axis.

    python -m nanograph.trace --modes eager,breakable,full --tokens 64 --out step.svg

On CUDA the times come from torch's profiler, after a warm-up; it records launches and kernels alone, because recording
every operation of torch would slow the CPU that is to be seen. Without a GPU the CPU computes, too: then the picture
shows the tape's segments and breaks, or the operations of mode eager. `record_step` collects, `draw` draws: each can be
used without the other. Times to compare come from bench.py: a profiler costs about a microsecond a launch.

Read first: executors/. Read next: bench.py.
"""

import json
import sys
from collections import Counter
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from nanograph.generate import CommandLine, add_engine_arguments, exit_code, open_llms
from nanograph.options import SamplingParams

# CUDA's functions that put work on the GPU, by the beginning of their names.
LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")
# Colours that colour-blind people can tell apart (Okabe & Ito 2008), and what they stand for on the lanes.
KINDS = {
    "graph": ("#0072B2", "captured: a graph segment, launched as a whole"),
    "eager": ("#E69F00", "eager: launched one by one"),
    "host": ("#F7E6C4", "CPU prepares the next launch"),
    "idle": ("#E3E3E3", "idle"),
}
ENLARGED = 40  # how much of the longest step the right half of a picture shows: a 40th


class Span(NamedTuple):
    """Something that took from `start` to `end`, in microseconds since the step began."""

    lane: str  # "CPU" or "GPU"
    kind: str  # a key of KINDS
    start: float
    end: float
    name: str


def fill_step(llm, num_tokens, decode):
    """Write a step into an idle LLM's batch: one prompt of `num_tokens` tokens, or that many requests decoding."""
    params = SamplingParams(temperature=0, max_new_tokens=2, ignore_eos=True)
    prompts, length = 1, num_tokens
    if decode:  # prompts that are computed together, in one step before
        prompts, length = num_tokens, max(1, min(64, llm.options.max_batch_tokens // num_tokens))
    for number in range(prompts):
        llm.add([(17 * i + 31 * number) % llm.config.vocab_size for i in range(length)], params)
    if decode:
        llm.step()
    llm.batch.fill(llm.scheduler.schedule(), llm.executor.bucket_for(num_tokens))


def record_step(llm, warmups=3):
    """Spans of the step that the batch holds: it is idempotent, so it can run again and again."""
    import torch

    record = cuda_spans if llm.device.type == "cuda" else host_spans
    with torch.no_grad():
        for _ in range(warmups):
            record(llm.executor)
        spans = record(llm.executor)
    began = min(span.start for span in spans)
    return [span._replace(start=span.start - began, end=span.end - began) for span in spans]


def cuda_spans(executor):
    """Launches on the CPU, kernels and copies on the GPU; those that a graph launch has brought are of kind graph."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        executor.run()
        torch.cuda.synchronize()
    spans, graph_launches = [], set()  # a kernel has the number of its launch
    for event in sorted(profiler.events(), key=lambda event: event.device_type != DeviceType.CPU):
        on_gpu, from_graph = event.device_type == DeviceType.CUDA, "GraphLaunch" in event.name
        if from_graph:
            graph_launches.add(event.id)
        if on_gpu or event.name.startswith(LAUNCHES):
            kind = "graph" if event.id in graph_launches else "eager"
            lane = "GPU" if on_gpu else "CPU"
            spans.append(Span(lane, kind, event.time_range.start, event.time_range.end, event.name))
    return spans


def host_spans(executor):
    """What the CPU computes: the segments and breaks of the batch's graph, or one operation after the other."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from nanograph.capture import Break

    spans = []

    def timed(kind, name, function, *args, **kwargs):
        started = perf_counter()
        result = function(*args, **kwargs)
        spans.append(Span("CPU", kind, 1e6 * started, 1e6 * perf_counter(), name))
        return result

    class Stopwatch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.is_view:  # computes nothing
                return func(*args, **(kwargs or {}))
            return timed("eager", str(func), func, *args, **(kwargs or {}))

    executor.run()  # captures where that has not been done
    graph = getattr(executor, "graphs", {}).get(executor.batch.num_rows)
    if graph is None:
        with Stopwatch():
            executor.run()
    for index, step in enumerate(graph.steps if graph else []):
        if isinstance(step, Break):
            timed("eager", step.function.__qualname__, step.replay)
        else:
            timed("graph", f"segment {index}", step.replay)
    return spans


def union(spans):
    """Times covered by spans, each once: [(start, end)] in order, without overlaps.

    >>> union([Span("GPU", "eager", 0, 3, ""), Span("GPU", "eager", 2, 4, ""), Span("GPU", "eager", 6, 7, "")])
    [(0, 4), (6, 7)]
    """
    covered = []
    for span in sorted(spans, key=lambda span: span.start):
        if covered and span.start <= covered[-1][1]:
            covered[-1] = (covered[-1][0], max(covered[-1][1], span.end))
        else:
            covered.append((span.start, span.end))
    return covered


def summarize(spans):
    """The sentence over a mode's lanes: how long, how busy, and how many launches."""
    total = max(span.end for span in spans) / 1e3
    kinds = Counter(span.kind for span in spans if span.lane == "CPU")
    counts = ((kinds["graph"], "graph segment"), (kinds["eager"], "single operation"))
    launched = " + ".join(f"{count:,} {noun}{'s' * (count > 1)}" for count, noun in counts if count)
    text = f"total {total:.2f} ms; launched: {launched}"
    if on_gpu := [span for span in spans if span.lane == "GPU"]:
        busy = sum(end - start for start, end in union(on_gpu)) / 1e3
        text += f"; GPU busy {busy:.2f} ms ({busy / total:.0%}), idle {total - busy:.2f} ms"
    return text


def draw(modes, title, path):
    """Draw {mode: spans}, whole and enlarged, to a file whose name ends in .svg, .png or .pdf.

    Raises ValueError where matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise ValueError("drawing needs matplotlib: pip install matplotlib") from None

    everything = [span for spans in modes.values() for span in spans]
    lanes = [lane for lane in ("GPU", "CPU") if any(span.lane == lane for span in everything)]
    longest = max(span.end for span in everything) / 1e3
    figure = Figure(figsize=(13, 1.4 + len(modes) * (0.4 + 0.4 * len(lanes))), layout="constrained")
    axes = figure.subplots(len(modes), 2, sharex="col", sharey=True, squeeze=False, width_ratios=(3, 2))
    for (left, right), (mode, spans) in zip(axes, modes.items()):
        for y, lane in enumerate(lanes):
            draw_lane((left, right), y, [span for span in spans if span.lane == lane], max(span.end for span in spans))
        left.set_title(f"{mode}: {summarize(spans)}", loc="left", fontsize=10)
        left.set_yticks(range(len(lanes)), ("GPU runs", "CPU launches") if len(lanes) == 2 else lanes)
    for axis, end, label in zip(axes[-1], (longest, longest / ENLARGED), ("the whole step", "its beginning, enlarged")):
        axis.set_xlim(0, end)
        axis.set_xlabel(f"{label} (milliseconds)")
    for axis in axes.flat:
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.tick_params(left=False)
    patches = [Patch(color=colour, label=label) for colour, label in KINDS.values()]
    figure.legend(handles=patches, loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(title, x=0.01, ha="left", weight="bold")
    figure.savefig(path, dpi=150)


def draw_lane(axes, y, spans, total):
    """One row: the background says what happens between the spans."""
    background = [("idle", 0, total)]
    if spans[0].lane == "CPU":
        background.append(("host", 0, max(span.end for span in spans)))
    bars = [Span("", kind, start, end, "") for kind, start, end in background] + spans
    for kind in reversed(KINDS):
        intervals = [(start / 1e3, (end - start) / 1e3) for start, end in union(s for s in bars if s.kind == kind)]
        width = float(kind == "graph" and spans[0].lane == "CPU")  # a graph's only launch would be too thin to be seen
        for axis in axes:
            axis.broken_barh(intervals, (y - 0.4, 0.8), color=KINDS[kind][0], linewidth=width, snap=False)


def chrome_trace(modes):
    """{mode: spans} in the Trace Event Format that ui.perfetto.dev and chrome://tracing open: a process a mode."""
    events = []
    for pid, (mode, spans) in enumerate(modes.items()):
        events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": mode}})
        events += [
            {"ph": "X", "pid": pid, "tid": s.lane, "name": s.name, "cat": s.kind, "ts": s.start, "dur": s.end - s.start}
            for s in spans
        ]
    return {"traceEvents": events}


def parse_arguments(argv):
    parser = CommandLine("python -m nanograph.trace", description="Draw what CPU and GPU do in one step.")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of the step (default: 64)")
    parser.add_argument("--decode", action="store_true", help="one token each of that many requests, not one prompt")
    parser.add_argument("--out", type=Path, help="picture to write: .svg, .png or .pdf")
    parser.add_argument("--chrome", type=Path, help="JSON to write, for ui.perfetto.dev or chrome://tracing")
    add_engine_arguments(parser, several=True)
    args = parser.parse_args(argv)
    if not (args.out or args.chrome):
        parser.error("nothing to write: give --out step.svg, or --chrome step.json, or both")
    if args.out and args.out.suffix not in (".svg", ".png", ".pdf"):
        parser.error(f"--out must end in .svg, .png or .pdf, not {args.out.name!r}")
    if not 1 <= args.tokens <= args.max_batch_tokens:
        parser.error(f"--tokens must be from 1 to --max-batch-tokens ({args.max_batch_tokens}), not {args.tokens}")
    return args


def run(args):
    """Record the step in every mode, write the files, print the summaries. Raises ValueError."""
    modes = {}
    for llm in open_llms(args, max_requests=max(64, args.tokens)):
        fill_step(llm, args.tokens, args.decode)
        modes[f"{llm.options.mode} {llm.options.kernels or ''}".strip()] = record_step(llm)
    if args.chrome:
        args.chrome.write_text(json.dumps(chrome_trace(modes)))
    if args.out:
        kind = "decode" if args.decode else "prefill"
        draw(modes, f"One {kind} step of {args.tokens} tokens, {args.model}", args.out)
    for mode, spans in modes.items():
        print(f"{mode}: {summarize(spans)}")


def main(argv=None):
    return exit_code("python -m nanograph.trace", run, parse_arguments(argv))


if __name__ == "__main__":
    sys.exit(main())
