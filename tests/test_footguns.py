"""The mistake laboratory: what goes wrong with graphs, what one sees in each mode, and the cure.

Each test is one mistake, as a function of a few lines, run eagerly, in a breakable and in a full graph. A refusal is
the good case: the dangerous mistakes are those that return a wrong number in silence, in CAPITALS here.

| mistake | eager | breakable | full |
|---|---|---|---|
| a value read on the CPU (`.item()`) | works | refused; works in a break | refused |
| as many rows as values say (boolean index) | works | refused; works in a break | refused |
| random numbers drawn inside | works | refused; works in a break | refused |
| data made from Python values inside | works | refused; works in a break | refused |
| a new input tensor instead of the static buffer | works | STALE, unless addresses are checked | STALE, likewise |
| a Python number read inside | works | FROZEN; live in a break, unless it is its argument | FROZEN |
| a branch on a Python value | works | FROZEN; live in a break | FROZEN |
| counting, printing, appending | each step | at capture only; each step in a break | at capture only |
| an output that the graph owns | works | OVERWRITTEN by another graph | OVERWRITTEN |
| padding multiplied away | NaN | NaN | NaN |
"""

import pytest
import torch
from conftest import GPU

from nanograph.capture import CaptureError, Recorder, graph_break
from nanograph.executors import make_pool
from nanograph.options import MODES

DEVICES = ["cpu", pytest.param(GPU or "cuda", marks=pytest.mark.gpu)]
pytestmark = [pytest.mark.parametrize("device", DEVICES), pytest.mark.parametrize("mode", MODES)]


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def prepare(mode, device):
    """prepare(forward) computes `forward()` once, in the mode, and returns the function that computes it again.

    `addresses()` says where its inputs lie, for those who want this checked.
    """
    breaks = {"breakable": {"attention"}, "full": set()}
    recorder = Recorder(make_pool(torch.device(device)), breaks[mode], max_rows=8) if mode != "eager" else None

    def prepare(forward, addresses=dict):
        if recorder is None:
            forward()
            return forward
        graph = recorder.capture(forward, addresses())
        return lambda: graph.replay(addresses())

    return prepare


def refused_outside_a_break(mode, prepare, operation, forward, broken):
    """Run `forward`, and the same with the operation in a break, in a mode; say whether it is refused as it must be."""
    cases = ((forward, mode != "eager"), (broken, mode == "full"))
    for function, refused in cases:
        if refused:
            with pytest.raises(RuntimeError, match=operation):
                prepare(function)
        else:
            prepare(function)()


def test_a_value_read_on_the_cpu(mode, device, prepare):
    """A replay runs no Python: there is nobody to read the value. The error names the operation and the line."""
    x, out = torch.tensor([1.0, 2.0, 4.0], device=device), torch.zeros(3, device=device)

    def forward():
        out.copy_(x / x.max().item())

    refused_outside_a_break(
        mode, prepare, r"test_footguns.py:\d+ in forward.*graph_break", forward, graph_break(forward)
    )
    if mode != "full":
        assert out.tolist() == [0.25, 0.5, 1.0]

    def cured():  # the value stays on the device
        out.copy_(x / x.max())

    again = prepare(cured)
    x.copy_(torch.tensor([5.0, 10.0, 5.0]))
    again()
    assert out.tolist() == [0.5, 1.0, 0.5]


def test_as_many_rows_as_the_values_say(mode, device, prepare):
    """A graph's shapes are frozen. `torch.where` keeps the shape; what is not wanted becomes 0."""
    x, out = torch.tensor([1.0, -2.0, 4.0], device=device), torch.zeros(1, device=device)

    def forward():
        out.copy_(x[x > 0].sum(0, keepdim=True))

    refused_outside_a_break(mode, prepare, "boolean index", forward, graph_break(forward))

    def cured():
        out.copy_(torch.where(x > 0, x, 0).sum(0, keepdim=True))

    again = prepare(cured)
    x.copy_(torch.tensor([1.0, 2.0, -4.0]))
    again()
    assert out.item() == 3.0


def test_random_numbers_drawn_inside(mode, device, prepare):
    """A replay would draw the same numbers again. Draw outside, and copy the numbers into a buffer."""
    uniform, out = torch.zeros(1, device=device), torch.zeros(1, device=device)

    def forward():
        out.copy_(torch.rand(1, device=device))

    refused_outside_a_break(mode, prepare, "random numbers are drawn outside", forward, graph_break(forward))

    def cured():
        out.copy_(1 - uniform)

    again = prepare(cured)
    uniform.fill_(0.25)
    again()
    assert out.item() == 0.75


def test_data_made_from_python_values_inside(mode, device, prepare):
    """The list would be read at capture and never again. (CUDA may refuse the copy to the GPU before we do.)"""
    lengths, out = [3, 5], torch.zeros(2, dtype=torch.int64, device=device)

    def forward():
        out.copy_(torch.tensor(lengths, device=device))

    message = "would be frozen" if device == "cpu" else ""
    refused_outside_a_break(mode, prepare, message, forward, graph_break(forward))

    static = torch.tensor(lengths, device=device)

    def cured():
        out.copy_(static)

    again = prepare(cured)
    static.copy_(torch.tensor([4, 6]))
    again()
    assert out.tolist() == [4, 6]


def test_a_new_tensor_instead_of_the_static_buffer(mode, device, prepare):
    """A graph reads the address of its capture. Nothing raises: the answer is that of an old question."""
    first, second = torch.full((2,), 1.0, device=device), torch.full((2,), 7.0, device=device)
    inputs, out = {"x": first}, torch.zeros(2, device=device)

    def forward():
        out.copy_(2 * inputs["x"])

    again = prepare(forward)
    inputs["x"] = second
    again()
    assert out.tolist() == ([14.0, 14.0] if mode == "eager" else [2.0, 2.0])

    inputs["x"] = first
    checked = prepare(forward, addresses=lambda: {"x": inputs["x"].data_ptr()})
    inputs["x"] = second
    if mode == "eager":
        checked()
    else:
        with pytest.raises(CaptureError, match="static input moved: x captured at"):
            checked()

    inputs["x"] = first
    inputs["x"].copy_(second)  # the cure: new values at the old address
    again()
    checked()
    assert out.tolist() == [14.0, 14.0]


def test_a_number_frozen_in_the_graph(mode, device, prepare):
    """A Python number becomes part of the graph: of a segment, and of the arguments of a break. What a break looks up
    itself is live, and so is what a segment reads from a buffer."""
    x, scale = torch.ones(1, device=device), {"number": 2.0, "buffer": torch.full((1,), 2.0, device=device)}
    out = {name: torch.zeros(1, device=device) for name in ("segment", "argument", "looked up", "buffer")}

    @graph_break
    def multiply(x, number):
        return x * number

    @graph_break
    def look_up(x):
        return x * scale["number"]

    def forward():
        out["segment"].copy_(x * scale["number"])
        out["argument"].copy_(multiply(x, scale["number"]))
        out["looked up"].copy_(look_up(x))
        out["buffer"].copy_(x * scale["buffer"])

    again = prepare(forward)
    scale["number"] = 3.0
    scale["buffer"].fill_(3.0)
    again()
    seen = {name: value.item() for name, value in out.items()}
    live, frozen = 3.0, 2.0
    assert (
        seen
        == {
            "eager": {"segment": live, "argument": live, "looked up": live, "buffer": live},
            "breakable": {"segment": frozen, "argument": frozen, "looked up": live, "buffer": live},
            "full": {"segment": frozen, "argument": frozen, "looked up": frozen, "buffer": live},
        }[mode]
    )


def test_a_branch_taken_at_capture(mode, device, prepare):
    """The graph holds the side of the branch that was taken. A choice among tensors is made by `torch.where`."""
    x, out = torch.tensor([4.0], device=device), torch.zeros(2, device=device)
    request = {"greedy": True, "greedy on the device": torch.tensor([True], device=device)}

    def forward():
        out[:1].copy_(x + 1 if request["greedy"] else x - 1)
        out[1:].copy_(torch.where(request["greedy on the device"], x + 1, x - 1))

    again = prepare(forward)
    request["greedy"] = False
    request["greedy on the device"].fill_(False)
    again()
    assert out.tolist() == [3.0 if mode == "eager" else 5.0, 3.0]


def test_what_python_does_on_the_side(mode, device, prepare):
    """Counting, printing and appending happen while Python runs: in the warm-up, in the capture, and in breaks."""
    happened = {"segment": 0, "break": 0}

    @graph_break
    def count_in_a_break():
        happened["break"] += 1

    def forward():
        happened["segment"] += 1
        count_in_a_break()

    again = prepare(forward)
    happened.update({"segment": 0, "break": 0})
    for _ in range(3):
        again()
    assert (
        happened
        == {
            "eager": {"segment": 3, "break": 3},
            "breakable": {"segment": 0, "break": 3},
            "full": {"segment": 0, "break": 0},
        }[mode]
    )


def test_an_output_that_the_graph_owns(mode, device, prepare):
    """All graphs take their memory from one pool, so they overlap: what one returned, the next one overwrites."""
    x, kept, safe = torch.ones(4, device=device), {}, torch.zeros(4, device=device)

    def large_bucket():
        for number in (10, 20, 30):  # results that live on in no variable: their memory is free for the next graph
            safe.copy_(x * number + 1)

    def small_bucket():
        kept["output"] = x * 3
        safe.copy_(kept["output"])

    run_large, run_small = prepare(large_bucket), prepare(small_bucket)
    run_small()
    assert kept["output"].tolist() == [3.0] * 4
    copied = safe.clone()  # the cure: a copy, made inside the capture, in a buffer that no graph owns
    run_large()
    assert (kept["output"].tolist() == [3.0] * 4) == (mode == "eager")
    assert copied.tolist() == [3.0] * 4


def test_padding_multiplied_away(mode, device, prepare):
    """0 x NaN is NaN. As long as padding happens to hold zeros nobody notices; selecting is safe whatever it holds."""
    rows, live = torch.tensor([[1.0], [2.0], [0.0]], device=device), torch.tensor([[1.0], [1.0], [0.0]], device=device)
    multiplied, selected = torch.zeros(1, device=device), torch.zeros(1, device=device)

    def forward():
        multiplied.copy_((rows * live).sum(0))
        selected.copy_(torch.where(live > 0, rows, 0).sum(0))

    again = prepare(forward)
    assert multiplied.item() == selected.item() == 3.0
    rows[2] = torch.nan
    again()
    assert multiplied.isnan().item()
    assert selected.item() == 3.0
