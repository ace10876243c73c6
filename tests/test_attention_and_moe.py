"""Attention and the mixture of experts against naive code (dense.py): windows, sinks, positions, chunks, routing.

Errors here leave short prompts right and long ones slightly wrong, so the lengths cross windows, blocks and tiles.
"""

import dataclasses
import math
import random

import pytest
import torch
from conftest import GPT2, NANO, make_model
from dense import assert_close, assert_greedy, attend, dense_logits, experts

from nanograph import LLM, SamplingParams
from nanograph.kernels import reference
from nanograph.kv_cache import BLOCK_SIZE
from nanograph.model import MoE, Rope, rotary_table


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def logits_by_chunk(model, token_ids, chunk):
    """Logits at every position, of a prompt computed `chunk` tokens at a time: [tokens, vocab]."""
    llm = LLM(model, "eager", max_batch_tokens=chunk)
    llm.add(token_ids, SamplingParams(max_new_tokens=1))
    logits = []
    while scheduled := llm.scheduler.schedule():
        llm.batch.fill(scheduled)
        logits.append(model.head(model.norm(model.hidden_states(llm.batch))))
        [(request, count)] = scheduled
        llm.scheduler.update(scheduled, [0] if count == request.num_uncomputed else [])
    return torch.cat(logits)


def random_tokens(count, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(64) for _ in range(count)]


# The whole model


@pytest.mark.parametrize("chunk", [150, 17, 1])
@pytest.mark.parametrize("config", [NANO, GPT2])
def test_the_model_is_the_naive_one_at_every_position(config, chunk):
    model, token_ids = make_model(config), random_tokens(150)
    assert_close(logits_by_chunk(model, token_ids, chunk), dense_logits(model, token_ids))


@pytest.mark.parametrize("chunk", [64, 16, 17, 1])
def test_chunks_longer_and_shorter_than_the_window(chunk):
    """ATT-5: no chunk sees the future, or loses keys that it should see."""
    model, token_ids = make_model(dataclasses.replace(NANO, windows=(16, 16))), random_tokens(150)
    assert_close(logits_by_chunk(model, token_ids, chunk), dense_logits(model, token_ids))


@pytest.mark.parametrize("chunk", [201, 64, 200])
def test_a_window_of_128_counts_the_current_token(chunk):
    """ATT-1: the query at position 200 sees keys from 73 on, in a whole prompt, in chunks, and alone like a decode."""
    model, token_ids = make_model(dataclasses.replace(NANO, num_layers=1, windows=(128,))), random_tokens(201)
    logits = logits_by_chunk(model, token_ids, chunk)[-1]
    for position, seen in ((0, False), (72, False), (73, True), (199, True)):
        changed = [*token_ids]
        changed[position] = (changed[position] + 1) % 64
        assert torch.equal(logits_by_chunk(model, changed, chunk)[-1], logits) != seen, position


@pytest.mark.parametrize("mode", ["eager", "breakable", "full"])
def test_decoding_far_past_the_window(mode):
    """ATT-3: positions go on counting, whatever the window forgets."""
    model = make_model(dataclasses.replace(NANO, windows=(8, 8)))
    llm, logits = LLM(model, mode), []
    result = llm.add([5, 4, 3, 2, 1], SamplingParams(temperature=0, max_new_tokens=41))
    run = llm.executor.run
    llm.executor.run = lambda: logits.append(run().clone()) or logits[-1]
    while result.finish_reason is None:
        llm.step()
    token_ids = [5, 4, 3, 2, 1, *result.token_ids[:-1]]
    assert_close(torch.cat(logits), logits_by_chunk(model, token_ids, 64)[4:])
    assert_close(torch.cat(logits), dense_logits(model, token_ids)[4:])


@pytest.mark.parametrize("length", [1, 15, 16, 17])
def test_every_token_is_written_to_the_cache_once(length):
    """ATT-7: in a pool of NaN exactly the computed tokens' slots become finite, and the text is right."""
    model = make_model()
    llm, prompt = LLM(model, kv_blocks=4), random_tokens(length)
    llm.kv_cache.data.fill_(torch.nan)
    result = llm.add(prompt, SamplingParams(temperature=0, max_new_tokens=4))
    for computed in range(length, length + 4):
        llm.step()
        finite = llm.kv_cache.data[:, :, 1:].isfinite().flatten(4).all(-1)
        assert (finite.flatten(2).sum(-1) == computed).all()
    assert_greedy(model, prompt, result.token_ids)


# The attention operation: ragged, paged, grouped


class Paged:
    """Sequences scattered over a cache of NaN, and the arguments of paged_attention for their last tokens."""

    def __init__(self, lengths, num_heads=4, num_kv_heads=2, head_dim=8, num_slots=0, spare_rows=0):
        """lengths: [(query tokens, all tokens)] of each request."""
        torch.manual_seed(0)
        shape = (num_kv_heads, head_dim)
        self.queries = [torch.randn(new, num_heads, head_dim) for new, _ in lengths]
        self.keys, self.values = ([torch.randn(total, *shape) for _, total in lengths] for _ in range(2))
        width = max(-(-total // BLOCK_SIZE) for _, total in lengths) + 1
        blocks = torch.randperm(width * len(lengths)) + 1
        self.tables = torch.zeros(num_slots + len(lengths), width, dtype=torch.int32)
        self.tables[: len(lengths)] = blocks.view(len(lengths), width)
        caches = torch.full((2, 1 + blocks.numel(), BLOCK_SIZE, *shape), torch.nan)
        for table, keys, values in zip(self.tables, self.keys, self.values):
            for position in range(len(keys)):
                block, offset = table[position // BLOCK_SIZE], position % BLOCK_SIZE
                caches[0, block, offset], caches[1, block, offset] = keys[position], values[position]
        self.caches = caches
        self.spare = torch.full((spare_rows, num_heads, head_dim), torch.nan)
        counts = [new for new, _ in lengths] + [0] * num_slots
        self.cu_seqlens = torch.tensor([0, *counts]).cumsum(0).int()
        self.seq_lens = torch.tensor([total for _, total in lengths] + [0] * num_slots, dtype=torch.int32)

    def attend(self, window=0, sinks=None, max_seq_len=None):
        bound = max_seq_len or self.seq_lens.max().item()
        rows = torch.cat([*self.queries, self.spare])
        scale = rows.shape[2] ** -0.5
        arguments = (self.cu_seqlens, self.seq_lens, self.tables, sinks, window, scale, bound)
        return reference.paged_attention(rows, *self.caches, *arguments)

    def expected(self, window=0, sinks=None):
        parts = zip(self.queries, self.keys, self.values)
        return torch.cat([attend(q, k, v, window, sinks) for q, k, v in parts])


MIXES = {
    "one token": [(1, 1)],
    "whole prompts": [(1, 1), (15, 15), (16, 16), (17, 17), (40, 40)],
    "decodes": [(1, 1), (1, 16), (1, 17), (1, 300)],
    "chunks and decodes": [(1, 33), (1, 500), (20, 70), (3, 3)],
    "a chunk far into a long prompt": [(50, 290)],
}


@pytest.mark.parametrize("sinks", [None, torch.tensor([-2.0, 0.0, 1.0, 5.0])], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("window", [0, 1, 8, 16, 128])
@pytest.mark.parametrize("lengths", MIXES.values(), ids=MIXES)
def test_ragged_paged_attention(lengths, window, sinks):
    paged = Paged(lengths)
    assert_close(paged.attend(window, sinks), paged.expected(window, sinks))


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (4, 4), (4, 1), (6, 2)])
def test_heads_share_keys_in_groups(num_heads, num_kv_heads):
    paged = Paged([(5, 20), (1, 7)], num_heads, num_kv_heads)
    assert_close(paged.attend(), paged.expected())


@pytest.mark.parametrize("sinks", [None, torch.zeros(4)], ids=["no sinks", "sinks"])
def test_unused_slots_and_spare_rows_are_zero(sinks):
    """PAD-3: a softmax over nothing is 0, not 0/0; rows of NaN stay alone."""
    paged = Paged([(5, 20), (1, 7)], num_slots=3, spare_rows=4)
    out = paged.attend(sinks=sinks)
    assert_close(out[:6], paged.expected(sinks=sinks))
    assert (out[6:] == 0).all()


def test_a_larger_bound_changes_no_bit():
    """A graph walks to the longest context there can be; an eager step stops at the longest there is."""
    paged = Paged([(1, 40), (20, 60)])
    for window in (0, 16):
        assert torch.equal(paged.attend(window), paged.attend(window, max_seq_len=5000))


def test_huge_scores_do_not_overflow():
    paged = Paged([(4, 30)])
    paged.queries[0].mul_(1e4)
    assert_close(paged.attend(), paged.expected())


def test_a_sink_takes_its_share_of_the_attention():
    """One key with score 0 beside a sink of log 3: a quarter for the key."""
    paged = Paged([(1, 1)])
    paged.queries[0].zero_()
    out = paged.attend(sinks=torch.full((4,), 3.0).log())
    assert_close(out, paged.values[0].repeat_interleave(2, dim=1) / 4)


# Positions


def test_positions_without_yarn_are_plain_rotations():
    table = rotary_table(Rope(theta=10000.0), 8, 50, "cpu")
    angles = torch.outer(torch.arange(50.0), 10000.0 ** -(torch.arange(4) / 4))
    assert_close(table, torch.stack([angles.cos(), angles.sin()]))


def frequencies(rope, head_dim=64):
    """Radians per position of each pair of dimensions, and the factor on attention, read from the table."""
    cos, sin = rotary_table(rope, head_dim, 2, "cpu")[:, 1].double()
    return torch.atan2(sin, cos), torch.hypot(cos, sin)


GPT_OSS_ROPE = Rope(theta=150000.0, factor=32.0, truncate=False)


def test_yarn_keeps_fast_dimensions_and_slows_down_slow_ones():
    """gpt-oss: what turns more than 32 times in 4,096 positions is kept, less than once is slowed 32 times."""
    stretched, attention_factor = frequencies(GPT_OSS_ROPE)
    plain, _ = frequencies(dataclasses.replace(GPT_OSS_ROPE, factor=1.0))
    turns = plain * 4096 / (2 * torch.pi)
    slowing = plain / stretched
    assert_close(slowing[turns > 32], torch.ones(9, dtype=torch.float64))
    assert_close(slowing[turns < 1], torch.full((14,), 32.0, dtype=torch.float64))
    assert (slowing.diff() > -1e-4).all()
    assert ((slowing > 1.001) & (slowing < 31.9)).sum() == 9
    # 0.1 ln 32 + 1 = 1.3466, from the paper
    assert_close(attention_factor, torch.full((32,), 1.3465736, dtype=torch.float64))


def test_yarn_can_round_its_bounds_and_take_a_given_factor():
    exact, _ = frequencies(GPT_OSS_ROPE)
    rounded, _ = frequencies(dataclasses.replace(GPT_OSS_ROPE, truncate=True))
    assert not torch.equal(exact, rounded)
    assert torch.equal(exact[:9], rounded[:9])  # bounds 8.09 and 17.40 become 8 and 18
    assert torch.equal(exact[18:], rounded[18:])
    _, given = frequencies(dataclasses.replace(GPT_OSS_ROPE, attention_factor=2.0))
    assert_close(given, torch.full((32,), 2.0, dtype=torch.float64))


# The mixture of experts


def test_the_softmax_runs_over_the_chosen_experts():
    """MOE-1: softmax after the choice, along the experts, also for a batch of one."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    routing = reference.route(logits, 2, torch.tensor([1]))
    assert_close(routing.weights, torch.tensor([[0.7310586, 0.2689414]]), 1e-6)
    assert routing.expert_of_row.tolist() == [0, 1]
    assert routing.offsets.tolist() == [0, 1, 2, 2, 2]


def make_experts(num_experts=8, experts_per_token=2):
    torch.manual_seed(0)
    config = dataclasses.replace(NANO, num_experts=num_experts, experts_per_token=experts_per_token)
    mlp = MoE(config, reference)
    for parameter in mlp.parameters():
        parameter.normal_(0, 0.5)
    return mlp


def compute(mlp, x, num_live=None):
    num_live = len(x) if num_live is None else num_live
    routing = reference.route(mlp.router(x), mlp.experts_per_token, torch.tensor([num_live]))
    hidden = reference.expert_gate_up(x, mlp.gate_up, mlp.gate_up_bias, routing, mlp.limit)
    return reference.expert_down(hidden, mlp.down, mlp.down_bias, routing)


@pytest.mark.parametrize("num_tokens", [1, 2, 4, 5, 61])
@pytest.mark.parametrize("experts_per_token", [1, 2, 8])
def test_experts_are_those_of_the_loop_over_tokens(num_tokens, experts_per_token):
    """Few rows gather their weights, many are computed by every expert: both are the loop's."""
    mlp = make_experts(experts_per_token=experts_per_token)
    x = torch.randn(num_tokens, 32)
    assert_close(compute(mlp, x), experts(x.double(), mlp))


@pytest.mark.parametrize("num_tokens", [1, 61])
@pytest.mark.parametrize("favourites", [(0, 1), (6, 7), (3, 4), (0, 7)])
def test_experts_without_tokens(favourites, num_tokens):
    """MOE-3: the first, the last and the middle experts get nothing, and nobody gets their leftovers."""
    mlp = make_experts()
    mlp.router.bias[list(favourites)] += 1000
    x = torch.randn(num_tokens, 32)
    out = compute(mlp, x)
    assert_close(out, experts(x.double(), mlp))
    others = [expert for expert in range(8) if expert not in favourites]
    mlp.gate_up[others], mlp.down[others] = torch.nan, torch.nan
    assert torch.equal(compute(mlp, x), out)


def test_every_expert_gets_one_token():
    mlp = make_experts()
    mlp.router.weight.zero_()
    mlp.router.weight[:, :8] = torch.eye(8)
    mlp.router.bias.zero_()
    x = torch.zeros(4, 32)
    for token in range(4):
        x[token, 2 * token], x[token, 2 * token + 1] = 2, 1
    routing = reference.route(mlp.router(x), 2, torch.tensor([4]))
    assert routing.offsets.tolist() == list(range(9))
    assert_close(compute(mlp, x), experts(x.double(), mlp))


def test_padding_changes_no_token_and_comes_out_zero():
    mlp, x = make_experts(), torch.randn(12, 32)
    out = compute(mlp, x, num_live=9)
    assert_close(out[:9], experts(x[:9].double(), mlp))
    assert (out[9:] == 0).all()
    x[9:] = torch.nan
    assert torch.equal(compute(mlp, x, num_live=9), out)


def test_swiglu_is_clamped_and_interleaved():
    """gpt-oss: gates at even places, at most 7; ups at odd places, between -7 and 7, plus 1."""
    gates, ups = torch.tensor([0.0, 1.0, -1.0, 7.0, 100.0, -100.0]), torch.tensor([5.0, 0.0, -1.0, 7.0, 100.0, -100.0])
    out = reference.swiglu(torch.stack([gates, ups], dim=1).flatten()[None], 7.0)[0]
    sigmoid = 1 / (1 + math.exp(-1.702))
    assert_close(out[:5], torch.tensor([0.0, sigmoid, 0.0, 56.0, 56.0]), 1e-5)
    assert out[5].abs() < 1e-30
    only_up = reference.swiglu(torch.tensor([[1.0, -100.0]]), 7.0)
    assert_close(only_up, torch.tensor([[-6 * sigmoid]]), 1e-5)
