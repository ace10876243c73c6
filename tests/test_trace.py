"""trace collects what happened in a step, and draws any spans that it is given."""

import json
import sys
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from conftest import GPU, make_model

from nanograph import LLM, trace
from nanograph.trace import Span, chrome_trace, draw, fill_step, record_step, summarize

# A step as on a GPU: eager keeps it waiting, a graph is launched once.
EAGER = [Span("CPU", "eager", 20 * i, 20 * i + 5, "cudaLaunchKernel") for i in range(100)]
EAGER += [Span("GPU", "eager", 20 * i + 10, 20 * i + 14, "kernel") for i in range(100)]
FULL = [Span("CPU", "graph", 0, 6, "cudaGraphLaunch")]
FULL += [Span("GPU", "graph", 10 + 5 * i, 14 + 5 * i, "kernel") for i in range(100)]


def make_llm(mode, **options):
    return LLM(make_model(), mode, max_batch_tokens=64, max_requests=16, **options)


@pytest.mark.parametrize(("decode", "requests"), [(False, 1), (True, 12)])
def test_a_step_of_the_size_that_was_asked_for(decode, requests):
    llm = make_llm("eager")
    fill_step(llm, 12, decode)
    assert (llm.batch.num_tokens, llm.batch.num_requests) == (12, requests)
    assert len(set(llm.batch.input_ids.tolist())) > 4


@pytest.mark.parametrize(
    ("mode", "kinds"), [("full", ["graph"]), ("breakable", ["graph", "eager", "graph", "eager", "graph"])]
)
def test_on_the_cpu_a_graph_is_its_segments_and_breaks(mode, kinds):
    llm = make_llm(mode)
    fill_step(llm, 5, decode=False)
    spans = record_step(llm)
    assert [span.kind for span in spans] == kinds
    assert spans[0].start == 0
    assert all(a.start < a.end <= b.start < b.end for a, b in pairwise(spans))
    assert {span.name for span in spans if span.kind == "eager"} == ({"Attention.forward"} if len(kinds) > 1 else set())
    assert llm.stats.captures == 1


def test_on_the_cpu_eager_is_its_operations():
    llm = make_llm("eager")
    fill_step(llm, 5, decode=False)
    spans = record_step(llm)
    with torch.no_grad():
        assert len(spans) == llm.executor.count_launches() > 100
    assert {span.kind for span in spans} == {"eager"}
    assert "aten.addmm.default" in {span.name for span in spans}


def test_the_summary_adds_up():
    assert summarize(EAGER) == ("total 1.99 ms; launched: 100 single operations; GPU busy 0.40 ms (20%), idle 1.59 ms")
    assert summarize(FULL) == "total 0.51 ms; launched: 1 graph segment; GPU busy 0.40 ms (79%), idle 0.11 ms"
    both = [*FULL, Span("CPU", "eager", 7, 9, "cudaMemcpyAsync")]
    assert "launched: 1 graph segment + 1 single operation;" in summarize(both)


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_drawing_needs_spans_alone(tmp_path, suffix):
    path = tmp_path / f"step.{suffix}"
    draw({"eager": EAGER, "full": FULL}, "One step", path)
    assert path.stat().st_size > 5000
    if suffix == "svg":  # matplotlib writes texts as outlines, each after a comment that holds it
        texts = path.read_text()
        for text in ("One step", f"eager: {summarize(EAGER)}", f"full: {summarize(FULL)}", "GPU runs", "idle"):
            assert f"<!-- {text} -->" in texts


def test_no_text_is_cut_off_and_none_overlaps(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, dpi: figures.append(figure))
    long = {f"{mode} reference": EAGER + FULL[:1] for mode in ("eager", "breakable", "full")}
    draw(long, "One prefill step of 2048 tokens: gpt-oss-120b on cuda", tmp_path / "unused.png")
    [figure] = figures
    figure.draw_without_rendering()
    texts = [figure._suptitle, *figure.legends[0].get_texts()]
    for axis in figure.axes:
        texts += [axis._left_title, axis.xaxis.label, *axis.get_xticklabels()[1:-1], *axis.get_yticklabels()]
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts if text.get_text() and text.get_visible()]
    width, height = figure.bbox.size
    for index, (text, box) in enumerate(boxes):
        assert min(box.x0, box.y0) >= 0, text
        assert box.x1 <= width, text
        assert box.y1 <= height, text
        assert not [other for other, its_box in boxes[:index] if box.overlaps(its_box)], text


def test_without_matplotlib_one_line_says_what_to_install(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    arguments = [
        "--tokens",
        "4",
        "--max-batch-tokens",
        "8",
        "--modes",
        "eager",
        "--chrome",
        str(tmp_path / "step.json"),
    ]
    assert trace.main([*arguments, "--out", str(tmp_path / "step.svg")]) == 2
    assert capsys.readouterr().err == "python -m nanograph.trace: drawing needs matplotlib: pip install matplotlib\n"
    assert (tmp_path / "step.json").exists()


def test_the_chrome_trace_is_one_process_a_mode(tmp_path):
    events = json.loads(json.dumps(chrome_trace({"eager": EAGER, "full": FULL})))["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {0: "eager", 1: "full"}
    assert len(events) == 2 + len(EAGER) + len(FULL)
    last = {"ph": "X", "pid": 1, "tid": "GPU", "name": "kernel", "cat": "graph", "ts": 505, "dur": 4}
    assert events[-1] == last


def test_what_the_profiler_saw_is_told_apart(monkeypatch):
    """A kernel belongs to the launch whose number it has; waiting and bookkeeping are no launches."""
    from torch.autograd import DeviceType

    def event(name, number, start, on_gpu=False):
        device = DeviceType.CUDA if on_gpu else DeviceType.CPU
        time = SimpleNamespace(start=start, end=start + 1)
        return SimpleNamespace(name=name, id=number, device_type=device, time_range=time)

    events = [event("cudaGraphLaunch", 7, 10), event("cuLaunchKernelEx", 8, 12), event("cudaDeviceSynchronize", 9, 14)]
    events += [event("gemm", 7, 20, True), event("norm", 7, 22, True), event("Memcpy DtoD", 8, 24, True)]

    class Profile:
        def __init__(self, activities, acc_events):
            assert [activity.name for activity in activities] == ["CUDA"]

        __enter__ = __exit__ = lambda self, *exception: self

        def events(self):
            return events

    ran = []
    monkeypatch.setattr(torch.profiler, "profile", Profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: ran.append("synchronize"))
    spans = trace.cuda_spans(SimpleNamespace(run=lambda: ran.append("run")))
    assert ran == ["synchronize", "run", "synchronize"]
    assert [(span.lane, span.kind, span.name) for span in spans] == [
        ("CPU", "graph", "cudaGraphLaunch"),
        ("CPU", "eager", "cuLaunchKernelEx"),
        ("GPU", "graph", "gemm"),
        ("GPU", "graph", "norm"),
        ("GPU", "eager", "Memcpy DtoD"),
    ]
    assert spans[0][2:4] == (10, 11)


def test_the_command_line_writes_its_files(tmp_path, capsys):
    out, chrome = tmp_path / "step.svg", tmp_path / "step.json"
    arguments = ["--tokens", "6", "--decode", "--max-batch-tokens", "8", "--modes", "eager,full"]
    assert trace.main([*arguments, "--out", str(out), "--chrome", str(chrome)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("eager: total ")
    assert said[1].startswith("full: total ")
    assert "One decode step of 6 tokens: nano on " in out.read_text()
    assert len(json.loads(chrome.read_text())["traceEvents"]) > 100


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--tokens", "0"], "tokens must be from 1 to max_batch_tokens=2048, not 0"),
        (["--tokens", "9", "--max-batch-tokens", "8"], "tokens must be from 1 to max_batch_tokens=8, not 9"),
        (["--modes", "fall"], "unknown mode 'fall'"),
        (["--tokens", "2", "--max-batch-tokens", "2", "--modes", "eager", "--out", "/nowhere/step.png"], "/nowhere"),
        (["--tokens", "2", "--max-batch-tokens", "2", "--modes", "eager", "--out", "step.txt"], "txt"),
    ],
)
def test_bad_arguments_are_one_line(capsys, arguments, complaint):
    assert trace.main(arguments) == 2
    said = capsys.readouterr().err
    assert complaint in said
    assert len(said.splitlines()) == 1


@pytest.mark.gpu
def test_a_step_on_a_gpu():
    kernels = {}
    for mode in ("eager", "breakable", "full"):
        llm = LLM(make_model(device=GPU), mode, max_batch_tokens=64, max_requests=16)
        fill_step(llm, 16, decode=False)
        spans = record_step(llm)
        launches = [span for span in spans if span.lane == "CPU"]
        kernels[mode] = [span for span in spans if span.lane == "GPU"]
        assert sum(span.kind == "graph" for span in launches) == {"eager": 0, "breakable": 3, "full": 1}[mode]
        assert {span.kind for span in kernels[mode]} == {
            "eager": {"eager"},
            "breakable": {"eager", "graph"},
            "full": {"graph"},
        }[mode]
    assert min(map(len, kernels.values())) > 100
