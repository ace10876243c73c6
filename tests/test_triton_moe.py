"""The Triton experts against the reference: in Triton's interpreter without a GPU, natively with one."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
tl = pytest.importorskip("triton.language", reason="triton is not installed")
if not torch.cuda.is_available() and "Interpreted" not in type(tl.sum).__name__:
    pytest.skip("triton was imported before TRITON_INTERPRET=1 was set", allow_module_level=True)

from nanograph.kernels import reference  # noqa: E402
from nanograph.kernels.reference import Mxfp4, decode_mxfp4  # noqa: E402
from nanograph.kernels.triton import moe  # noqa: E402

bfloat16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)  # the interpreter multiplies it as if it were integers
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random_mxfp4(generator, experts, outputs, inputs):
    blocks = torch.randint(0, 256, (experts, outputs, inputs // 2), generator=generator, dtype=torch.uint8)
    scales = torch.randint(119, 128, (experts, outputs, inputs // 32), generator=generator, dtype=torch.uint8)
    return Mxfp4(blocks.to(DEVICE), scales.to(DEVICE))


def make(num_rows=8, live=6, experts=4, top=2, hidden=64, inner=96, kind=torch.float32, seed=0, logits=None):
    """x, routing, (gate_up, bias), (down, bias)."""
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float32 if kind == "mxfp4" else kind

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    logits = normal(num_rows, experts) if logits is None else logits.to(DEVICE)
    routing = reference.route(logits, top, torch.tensor([live], device=DEVICE))
    if kind == "mxfp4":
        weights = random_mxfp4(generator, experts, 2 * inner, hidden), random_mxfp4(generator, experts, hidden, inner)
    else:
        weights = normal(experts, 2 * inner, hidden), normal(experts, hidden, inner)
    biases = normal(experts, 2 * inner), normal(experts, hidden)
    return normal(num_rows, hidden), routing, (weights[0], biases[0]), (weights[1], biases[1])


def experts(ops, x, routing, gate_up, down, limit=7.0):
    return ops.expert_down(ops.expert_gate_up(x, *gate_up, routing, limit), *down, routing)


def close(one, other, dtype):
    tolerance = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}[dtype]
    return (one.float() - other.float()).norm() <= tolerance * other.float().norm()


@pytest.mark.parametrize("kind", [torch.float32, bfloat16, torch.float16, "mxfp4"])
@pytest.mark.parametrize(("num_rows", "live"), [(1, 1), (16, 16), (8, 6), (64, 61)])
def test_equals_the_reference(kind, num_rows, live):
    x, routing, gate_up, down = make(num_rows, live, kind=kind, seed=num_rows)
    out = experts(moe, x, routing, gate_up, down)
    assert close(out, experts(reference, x, routing, gate_up, down), x.dtype)
    assert (out[live:] == 0).all()


@pytest.mark.parametrize(("hidden", "inner"), [(32, 32), (96, 160), (288, 64)])
def test_sizes_that_no_tile_divides(hidden, inner):
    for kind in (torch.float32, "mxfp4"):
        x, routing, gate_up, down = make(hidden=hidden, inner=inner, kind=kind)
        assert close(experts(moe, x, routing, gate_up, down), experts(reference, x, routing, gate_up, down), x.dtype)


@pytest.mark.parametrize("chosen", [(0, 1), (2, 3), (0, 3), (1, 2)])
def test_experts_without_rows(chosen):
    logits = torch.full((20, 4), -9.0)
    logits[:, chosen[0]], logits[:, chosen[1]] = 2.0, 1.0
    x, routing, gate_up, down = make(20, 17, logits=logits)
    assert close(experts(moe, x, routing, gate_up, down), experts(reference, x, routing, gate_up, down), x.dtype)


def test_every_expert_once():
    logits = torch.eye(4)[:, [0, 2, 1, 3]] + torch.eye(4).roll(1, 0) * 0.5
    x, routing, gate_up, down = make(4, 4, top=1, logits=logits)
    assert routing.offsets.tolist() == [0, 1, 2, 3, 4]
    assert close(experts(moe, x, routing, gate_up, down), experts(reference, x, routing, gate_up, down), x.dtype)


def test_all_codes_in_order_and_extreme_scales():
    """Packed weights times the identity give the decoded weights, exactly."""
    blocks = torch.arange(16, dtype=torch.uint8).repeat(4).view(1, 4, 16) * 17
    blocks[0, 1] = torch.arange(16) + 16 * torch.arange(16).flip(0)
    blocks[0, 2] = 0x21
    scales = torch.tensor([127, 120, 1, 250], dtype=torch.uint8).view(1, 4, 1)
    weight = Mxfp4(blocks.to(DEVICE), scales.to(DEVICE))
    routing = reference.route(torch.zeros(32, 1, device=DEVICE), 1, torch.tensor([32], device=DEVICE))
    out = moe.grouped_linear(torch.eye(32, device=DEVICE), weight, torch.zeros(1, 4, device=DEVICE), routing)
    assert torch.equal(out.T, decode_mxfp4(weight, torch.float32)[0])
    assert out[:4, 2].tolist() == [2**-126 * value for value in (0.5, 1.0, 0.5, 1.0)]


def test_the_softmax_runs_over_the_chosen():
    routing = reference.route(torch.tensor([[2.0, 1.0, 0.0, -1.0]]), 2, torch.tensor([1]))
    assert torch.allclose(routing.weights, torch.tensor([[0.7310586, 0.2689414]]))


@pytest.mark.parametrize("kind", [torch.float32, "mxfp4"])
def test_poisoned_padding_changes_no_bit(kind):
    x, routing, gate_up, down = make(16, 11, kind=kind)
    clean = experts(moe, x, routing, gate_up, down)
    x[11:] = torch.nan
    hidden = moe.expert_gate_up(x, *gate_up, routing, 7.0)
    hidden[routing.offsets[-1] :] = torch.nan
    assert torch.equal(moe.expert_down(hidden, *down, routing), clean)


def test_runs_repeat_bit_for_bit():
    x, routing, gate_up, down = make(16, 16, kind=torch.float16)
    first = experts(moe, x, routing, gate_up, down)
    assert all(torch.equal(experts(moe, x, routing, gate_up, down), first) for _ in range(3))


@pytest.mark.gpu
@pytest.mark.parametrize("num_experts", [32, 128])
@pytest.mark.parametrize("num_rows", [1, 16, 64, 300])
def test_gpt_oss_shapes_in_a_graph(num_rows, num_experts):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_rows, 2880, generator=generator).to("cuda", torch.bfloat16)
    logits = torch.randn(num_rows, num_experts, generator=generator).cuda()
    routing = reference.route(logits, 4, torch.tensor([num_rows], device="cuda"))
    gate_up, down = (random_mxfp4(generator, num_experts, outputs, 2880) for outputs in (5760, 2880))
    biases = torch.zeros(num_experts, 5760, device="cuda", dtype=torch.bfloat16)
    for weight, run in ((gate_up, moe.expert_gate_up), (down, None)):
        decoded = decode_mxfp4(Mxfp4(*(part[: weight.shape[0]] for part in weight)), torch.bfloat16)
        if run:
            out = run(x, weight, biases, routing, 7.0)
            expected = reference.expert_gate_up(x, decoded, biases, routing, 7.0)
        else:
            rows = x[routing.token_of_row]
            out = moe.grouped_linear(rows, weight, biases[:, :2880].contiguous(), routing)
            expected = reference.grouped_linear(rows, decoded, biases[:, :2880].contiguous(), routing)
        assert (out.float() - expected.float()).norm() < 1e-2 * expected.float().norm()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = moe.expert_gate_up(x, gate_up, biases, routing, 7.0)
    graph.replay()
    assert torch.equal(captured, moe.expert_gate_up(x, gate_up, biases, routing, 7.0))
