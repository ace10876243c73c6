"""The Triton attention kernels against kernels/reference.py: on CUDA compiled, elsewhere in Triton's interpreter.

The interpreter multiplies bfloat16 matrices as if they were integers (Triton 3.6 to 3.9), so bfloat16 needs a GPU.
"""

import os
import random
from dataclasses import dataclass, replace

import pytest
import torch

from nanograph.kernels import reference

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported
tl = pytest.importorskip("triton.language", reason="triton is not installed")
if not torch.cuda.is_available() and "Interpreted" not in type(tl.sum).__name__:
    pytest.skip("triton was imported before TRITON_INTERPRET=1 was set", allow_module_level=True)
attention = pytest.importorskip("nanograph.kernels.triton.attention")
paged_attention = attention.paged_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
bfloat16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)
NAN = float("nan")


@dataclass
class Step:
    """What the kernel is called with, and where in it nothing may be read."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    sinks: torch.Tensor | None
    window: int
    owned: torch.Tensor  # bool [flat slots]: holds a key of some request

    def run(self, function=paged_attention, max_seq_len=None):
        bound = int(self.seq_lens.max()) if max_seq_len is None else max_seq_len
        lengths = (self.cu_seqlens_q, self.seq_lens, self.block_tables)
        scale = self.q.shape[-1] ** -0.5
        return function(self.q, self.k_cache, self.v_cache, *lengths, self.sinks, self.window, scale, bound)

    def poisoned(self, filler):
        """The same step with `filler` wherever nobody's data lies: padded rows, other slots, the trash block, unused
        table entries stay as they are (they name the trash block)."""
        q, caches = self.q.clone(), [self.k_cache.clone(), self.v_cache.clone()]
        q[int(self.cu_seqlens_q[-1]) :] = filler
        for cache in caches:
            cache.flatten(0, 1)[~self.owned] = filler
        return replace(self, q=q, k_cache=caches[0], v_cache=caches[1])


def make_step(
    requests, rows=None, slots=None, heads=(4, 1), head_dim=32, window=0, sinks=True, dtype=torch.float32, blocks=20
):
    """requests: [(rows of this step, tokens before them)]; rows, slots: the bucket, the least that fits by default."""
    generator = torch.Generator().manual_seed(0)
    counts, lengths = [count for count, _ in requests], [sum(request) for request in requests]
    rows, slots = rows or sum(counts), slots or len(requests)
    tables, needed = torch.zeros(slots, blocks, dtype=torch.int32), [-(-length // 16) for length in lengths]
    numbers = 1 + torch.randperm(sum(needed) + 3, generator=generator).int()
    owned = torch.zeros(len(numbers) + 1, 16, dtype=torch.bool)
    for slot, (count, mine) in enumerate(zip(needed, numbers[: sum(needed)].split(needed))):
        tables[slot, :count] = mine
        for index, block in enumerate(mine):
            owned[block, : lengths[slot] - 16 * index] = True
    cu_seqlens_q, seq_lens = torch.full((slots + 1,), sum(counts)), torch.zeros(slots)
    cu_seqlens_q[: len(counts) + 1] = torch.tensor([0, *counts]).cumsum(0)
    seq_lens[: len(lengths)] = torch.tensor(lengths)

    def normal(*shape, scale=1.0):
        return (torch.randn(shape, generator=generator) * scale).to(DEVICE, dtype)

    caches = [normal(len(owned), 16, heads[1], head_dim) for _ in range(2)]
    sinks = normal(heads[0], scale=3.0) if sinks else None
    integers = [tensor.int().to(DEVICE) for tensor in (cu_seqlens_q, seq_lens, tables)]
    q = normal(rows, heads[0], head_dim, scale=2.0)
    return Step(q, *caches, *integers, sinks, window, owned.flatten().to(DEVICE)).poisoned(0)


def check(step):
    out, expected = step.run(), step.run(reference.paged_attention)
    assert (out.dtype, out.shape) == (expected.dtype, expected.shape)
    error = (out.float() - expected.float()).abs().max().item()
    assert error <= TOLERANCE[out.dtype] * expected.abs().max().item(), f"max |Δ| {error}"
    assert not out[int(step.cu_seqlens_q[-1]) :].any()


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch):
    """What a kernel gets to write on is NaN before: each element must be written, none read that was not."""
    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(NAN))
    monkeypatch.setattr(torch, "empty_like", lambda tensor: empty_like(tensor).fill_(NAN))


MIXED = [(5, 0), (1, 40), (20, 17), (1, 0), (16, 16)]  # a prompt, decodes, chunks
DECODE = [(1, 0), (1, 15), (1, 16), (1, 310)]
SHAPES = [  # requests, rows, slots: with padded rows and empty slots, and without
    (MIXED, 60, 8),
    (MIXED, None, None),
    (DECODE, 6, 6),
    (DECODE, None, None),
    ([(4, 30), (2, 150)], 8, 8),  # chunks in a bucket of one row a slot
    ([], 4, 2),
    ([], 3, 3),
]
WINDOWS = [0, 16, 140]  # 140 is more than a split of 128


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("requests", "rows", "slots"), SHAPES)
def test_ragged_batches(requests, rows, slots, window):
    check(make_step(requests, rows, slots, window=window))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, bfloat16])
@pytest.mark.parametrize(("heads", "head_dim"), [((4, 2), 8), ((3, 3), 64), ((8, 2), 96), ((8, 1), 128), ((6, 2), 32)])
@pytest.mark.parametrize("requests", [[(18, 30), (1, 70)], [(1, 140), (1, 3)]])
def test_heads_and_dtypes(requests, heads, head_dim, dtype):
    check(make_step(requests, heads=heads, head_dim=head_dim, dtype=dtype, sinks=heads != (3, 3)))


@pytest.mark.parametrize("seed", range(9))
def test_random_batches(seed):
    rng = random.Random(seed)
    decode = seed % 3 == 0
    counts = [1] if decode else [1, 1, 3, 16, 17, 40]
    requests = [(rng.choice(counts), rng.randrange(200)) for _ in range(rng.randint(1, 5))]
    slots = len(requests) + rng.choice([0, 0, 3])
    rows = slots if decode else sum(count for count, _ in requests) + rng.choice([0, 1, 9])
    check(make_step(requests, rows, slots, window=rng.choice([0, 0, 16]), sinks=rng.random() < 0.5))


@pytest.mark.parametrize("window", WINDOWS[:2])
@pytest.mark.parametrize(("requests", "rows", "slots"), SHAPES)
def test_padding_is_inert(requests, rows, slots, window):
    step = make_step(requests, rows, slots, window=window)
    assert torch.equal(step.poisoned(NAN).run(), step.poisoned(0).run())


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("requests", "rows", "slots"), SHAPES[1:5])
def test_the_bound_changes_no_bit(requests, rows, slots, window):
    step = make_step(requests, rows, slots, window=window)
    assert torch.equal(step.run(), step.run(max_seq_len=320))


@pytest.mark.parametrize(("requests", "rows", "slots"), [(MIXED, 60, 8), (DECODE, 6, 6)])
def test_a_request_does_not_see_its_neighbours(requests, rows, slots):
    """At one padded shape, bits depend on the request alone. Here the first one has lost its keys."""
    step = make_step(requests, rows, slots)
    changed = replace(step, seq_lens=step.seq_lens.clone())
    changed.seq_lens[0] = 0
    start, out = int(step.cu_seqlens_q[1]), changed.run()
    assert torch.equal(step.run()[start:], out[start:])
    assert not out[:start].any()


@pytest.mark.parametrize("sinks", [True, False])
@pytest.mark.parametrize("rows", [1, 2])
def test_decode_at_the_longest_context(rows, sinks):
    """All of the block table, and many splits: 40 of 128 keys, more than are combined at a time."""
    step = make_step([(1, 5119)], rows, rows, heads=(2, 1), head_dim=16, sinks=sinks, blocks=320)
    assert attention.tiles(rows, rows, 2, 1, 16, torch.float32).split == 128
    check(step)


@pytest.mark.parametrize("requests", [[(1, 200)], [(20, 181)]])
def test_a_window_counts_the_query_itself(requests):
    """The last query, at position 200, sees the 128 keys from 73 on."""
    step = make_step(requests, window=128)
    last = requests[0][0] - 1
    before = step.run()[last]
    for position, seen in ((72, False), (73, True), (200, True)):
        slot = step.block_tables[0, position // 16] * 16 + position % 16
        changed = replace(step, v_cache=step.v_cache.clone())
        changed.v_cache.flatten(0, 1)[slot] += 100
        assert torch.equal(changed.run()[last], before) != seen


@pytest.mark.parametrize(("requests", "rows", "slots"), [(MIXED, 60, 8), (DECODE, 6, 6)])
def test_sinks_far_above_and_below_the_scores(requests, rows, slots):
    step = make_step(requests, rows, slots)
    assert replace(step, sinks=torch.full_like(step.sinks, 300.0)).run().abs().max() < 1e-30
    faint = replace(step, sinks=torch.full_like(step.sinks, -300.0)).run()
    torch.testing.assert_close(faint, replace(step, sinks=None).run())


GPU_SHAPES = [([(700, 300), (1, 4000), (40, 0)], 768, 8), ([(1, 4000), (1, 130), (1, 7)], 4, 4)]


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize(("requests", "rows", "slots"), GPU_SHAPES)
def test_runs_repeat_bit_for_bit(requests, rows, slots, window):
    step = make_step(requests, rows, slots, (64, 8), 64, window, dtype=torch.bfloat16, blocks=512)
    check(step)
    first = step.run()
    for _ in range(20):
        assert torch.equal(step.run(), first)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize(("requests", "rows", "slots"), GPU_SHAPES)
def test_a_graph_captured_at_one_length_serves_others(requests, rows, slots, window):
    """Captured with the largest bound while every slot is empty, replayed on live lengths."""
    step = make_step(requests, rows, slots, (64, 8), 64, window, dtype=torch.bfloat16, blocks=512)
    expected = step.run()
    static = replace(step, cu_seqlens_q=step.cu_seqlens_q * 0, seq_lens=step.seq_lens * 0)
    static.run(max_seq_len=8192)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = static.run(max_seq_len=8192)
    graph.replay()
    assert not out.any()
    static.cu_seqlens_q.copy_(step.cu_seqlens_q)
    static.seq_lens.copy_(step.seq_lens)
    graph.replay()
    assert torch.equal(out, expected)
