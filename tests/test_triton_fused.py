"""The small Triton kernels against kernels/reference.py: on CUDA compiled, elsewhere in Triton's interpreter."""

import inspect
import os

import pytest
import torch

from nanograph.kernels import reference

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
tl = pytest.importorskip("triton.language", reason="triton is not installed")
if not torch.cuda.is_available() and "Interpreted" not in type(tl.sum).__name__:
    pytest.skip("triton was imported before TRITON_INTERPRET=1 was set", allow_module_level=True)
kernels = pytest.importorskip("nanograph.kernels.triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # of the largest value: one last place
NAN = float("nan")
every_dtype = pytest.mark.parametrize("dtype", list(TOLERANCE))


def normal(*shape, dtype=torch.float32, scale=1.0, seed=0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(DEVICE, dtype)


def check(out, expected):
    assert (out.dtype, out.shape) == (expected.dtype, expected.shape)
    error = (out.double() - expected.double()).abs().max().item()
    assert error <= TOLERANCE[out.dtype] * expected.abs().max().item(), f"max |Δ| {error}"


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch):
    """What a kernel gets to write on is NaN before: each element must be written."""
    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(NAN))
    monkeypatch.setattr(torch, "empty_like", lambda tensor: empty_like(tensor).fill_(NAN))


EXPERTS = ["route", "expert_gate_up", "expert_down", "grouped_linear"]
OPERATIONS = ["rms_norm", "rotate_and_cache", "paged_attention", "swiglu", *EXPERTS]


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_mirror_has_the_same_signatures(name):
    ours, theirs = (inspect.signature(getattr(module, name)) for module in (kernels, reference))
    assert ours == theirs


@every_dtype
@pytest.mark.parametrize("width", [8, 100, 2880])
def test_rms_norm(width, dtype):
    x, weight = normal(5, width, dtype=dtype, scale=3.0), normal(width, dtype=dtype, seed=1)
    check(kernels.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    x[3:] = 0  # the epsilon alone keeps it from dividing by zero
    assert not kernels.rms_norm(x, weight, 1e-5)[3:].any()


@every_dtype
@pytest.mark.parametrize(("rows", "width"), [(7, 90), (1, 16), (3, 2880)])
def test_swiglu(rows, width, dtype):
    gate_up = normal(rows, 2 * width, dtype=dtype, scale=6.0)  # beyond the limit of 7, on both sides
    check(kernels.swiglu(gate_up, 7.0), reference.swiglu(gate_up.float(), 7.0).to(dtype))
    check(kernels.swiglu(gate_up, 3, 1.0), reference.swiglu(gate_up.float(), 3, 1.0).to(dtype))


def test_swiglu_keeps_nan():
    gate_up = normal(2, 32)
    gate_up[0, 4] = gate_up[1, 7] = NAN
    assert torch.equal(kernels.swiglu(gate_up, 7.0).isnan(), reference.swiglu(gate_up, 7.0).isnan())


POSITIONS, SLOTS = [0, 3, 49, 7, 0, 0], [17, 20, 33, 47, 0, 0]  # the last two rows are padding, of the trash block


def rotate(module, qkv, heads, table, caches=None):
    """(queries, keys, values): the two caches begin as sevens."""
    num_kv_heads, head_dim = heads[1:]
    caches = caches or [torch.full((4, 16, num_kv_heads, head_dim), 7.0).to(qkv) for _ in range(2)]
    positions, slots = (torch.tensor(values, dtype=torch.int32, device=DEVICE) for values in (POSITIONS, SLOTS))
    return module.rotate_and_cache(qkv, table, positions, *caches, slots), *caches


@every_dtype
@pytest.mark.parametrize("heads", [(8, 2, 32), (12, 12, 8), (3, 1, 96), (20, 4, 64)])
@pytest.mark.parametrize("rotary", [True, False])
def test_rotate_and_cache(rotary, heads, dtype):
    qkv = normal(6, (heads[0] + 2 * heads[1]) * heads[2], dtype=dtype)
    table = normal(2, 50, heads[2] // 2, seed=1) if rotary else None
    queries, keys, values = rotate(kernels, qkv, heads, table)
    expected_queries, expected_keys, expected_values = rotate(reference, qkv, heads, table)
    check(queries, expected_queries)
    check(keys[1:], expected_keys[1:])
    assert torch.equal(values[1:], expected_values[1:])
    untouched = [slot for slot in range(64) if slot not in SLOTS]
    assert (keys.flatten(0, 1)[untouched] == 7).all()
    assert (values.flatten(0, 1)[untouched] == 7).all()


def test_padded_rows_reach_no_other():
    qkv, table = normal(6, 12 * 32), normal(2, 50, 16, seed=1)
    poisoned = qkv.clone()
    poisoned[4:] = NAN
    queries, keys, values = rotate(kernels, qkv, (8, 2, 32), table)
    with_nan = rotate(kernels, poisoned, (8, 2, 32), table)
    assert torch.equal(with_nan[0][:4], queries[:4])
    assert torch.equal(with_nan[1][1:], keys[1:])
    assert torch.equal(with_nan[2][1:], values[1:])
    x, weight = normal(6, 100), normal(100, seed=1)
    poisoned = x.clone()
    poisoned[4:] = NAN
    assert torch.equal(kernels.rms_norm(poisoned, weight, 1e-5)[:4], kernels.rms_norm(x, weight, 1e-5)[:4])


@pytest.mark.gpu
def test_a_graph_replays_what_eager_computes():
    x, weight = normal(64, 2880, dtype=torch.bfloat16), normal(2880, dtype=torch.bfloat16, seed=1)
    gate_up = normal(64, 5760, dtype=torch.bfloat16, scale=6.0)
    qkv, table = normal(6, 80 * 64, dtype=torch.bfloat16), normal(2, 50, 32, seed=1)
    caches = [torch.zeros(4, 16, 8, 64, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
    positions, slots = (torch.tensor(values, dtype=torch.int32, device=DEVICE) for values in (POSITIONS, SLOTS))

    def run():
        queries = kernels.rotate_and_cache(qkv, table, positions, *caches, slots)
        return kernels.rms_norm(x, weight, 1e-5), kernels.swiglu(gate_up, 7.0), queries

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run()
    for tensor in (x, gate_up, qkv):
        tensor.copy_(normal(*tensor.shape, dtype=tensor.dtype, scale=2.0, seed=2))
    positions.fill_(11)
    slots[:4] += 10
    graph.replay()
    captured = [*outputs, *(cache[1:].clone() for cache in caches)]
    for out, expected in zip(captured, [*run(), *(cache[1:] for cache in caches)]):
        assert torch.equal(out, expected)
