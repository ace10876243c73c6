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


def engine_name(llm):
    """Its mode, and the kernels where they were asked for."""
    return f"{llm.options.mode} {llm.options.kernels or ''}".strip()


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


def record_step(llm):
    """Spans of the step that the batch holds. It is idempotent: the first runs capture it and warm everything up."""
    import torch

    record = cuda_spans if llm.device.type == "cuda" else host_spans
    with torch.no_grad():
        llm.executor.run()
        *_, spans = (record(llm.executor) for _ in range(3))
    began = min(span.start for span in spans)
    return [span._replace(start=span.start - began, end=span.end - began) for span in spans]


def cuda_spans(executor):
    """Launches on the CPU; kernels and copies on the GPU, of kind graph where a graph's launch has brought them."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        executor.run()
        torch.cuda.synchronize()
    graph_launches = {event.id for event in profiler.events() if "GraphLaunch" in event.name}
    spans = []
    for event in profiler.events():
        on_gpu = event.device_type == DeviceType.CUDA
        if on_gpu or event.name.startswith(LAUNCHES):
            kind = "graph" if event.id in graph_launches else "eager"  # what runs has the number of its launch
            lane, time = "GPU" if on_gpu else "CPU", event.time_range
            spans.append(Span(lane, kind, time.start, time.end, event.name))
    return spans


def host_spans(executor):
    """What the CPU computes: the segments and breaks of the batch's graph, or one operation after the other."""
    from nanograph.capture import Break
    from nanograph.executors import OperationTimer

    graph, spans = executor.graphs.get(executor.batch.num_rows), []
    if graph is None:
        began = perf_counter()
        executor.run()
        took = perf_counter() - began
        with OperationTimer() as timer:  # slows what it watches: its times are scaled to those of the run without it
            executor.run()
        scale = 1e6 * took / (timer.times[-1][2] - timer.times[0][1])
        return [Span("CPU", "eager", scale * began, scale * ended, name) for name, began, ended in timer.times]
    for step in graph.steps:
        kind, name = ("eager", step.function.__qualname__) if isinstance(step, Break) else ("graph", "segment")
        began = perf_counter()
        step.replay()
        spans.append(Span("CPU", kind, 1e6 * began, 1e6 * perf_counter(), name))
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
    shape = {"sharex": "col", "sharey": True, "squeeze": False, "width_ratios": (3, 2)}
    axes = figure.subplots(len(modes), 2, **shape, subplot_kw={"frame_on": False})
    for (left, right), (mode, spans) in zip(axes, modes.items()):
        for y, lane in enumerate(lanes):
            draw_lane((left, right), y, [span for span in spans if span.lane == lane], max(span.end for span in spans))
        left.set_title(f"{mode}: {summarize(spans)}", loc="left", fontsize=10)
        left.set_yticks(range(len(lanes)), ("GPU runs", "CPU launches") if len(lanes) == 2 else lanes)
    for axis, end, label in zip(axes[-1], (longest, longest / ENLARGED), ("the whole step", "its beginning, enlarged")):
        axis.set_xlim(0, end)
        axis.set_xlabel(f"{label} (milliseconds)")
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
        width = float(len(intervals) == 1)  # a lonely launch would be too thin to be seen
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
    parser.add_argument("--out", type=Path, default="step.svg", help="picture: .svg, .png or .pdf (default: step.svg)")
    parser.add_argument("--chrome", type=Path, help="also write JSON for ui.perfetto.dev or chrome://tracing")
    add_engine_arguments(parser, several=True)
    return parser.parse_args(argv)


def run(args):
    """Record the step in every mode, write the files, print the summaries. Raises ValueError."""
    if not 1 <= args.tokens <= args.max_batch_tokens:
        raise ValueError(f"tokens must be from 1 to max_batch_tokens={args.max_batch_tokens}, not {args.tokens}")
    modes, kind = {}, "decode" if args.decode else "prefill"
    for llm in open_llms(args, max_requests=args.tokens if args.decode else 1):
        fill_step(llm, args.tokens, args.decode)
        modes[engine_name(llm)] = spans = record_step(llm)
        print(f"{engine_name(llm)}: {summarize(spans)}")
    if args.chrome:
        args.chrome.write_text(json.dumps(chrome_trace(modes)))
    model = f"{args.random_weights} (random weights)" if args.random_weights else args.model
    draw(modes, f"One {kind} step of {args.tokens} tokens: {model} on {llm.device.type}", args.out)


def main(argv=None):
    return exit_code("python -m nanograph.trace", run, parse_arguments(argv))


if __name__ == "__main__":
    sys.exit(main())
