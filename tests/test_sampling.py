"""From logits to a token: the distribution, its filters and their edges, and random numbers that belong to a request.

The expected token is computed here once more, number by number, in plain Python.
"""

import math
import random

import pytest
import torch
from conftest import NANO, make_model

from nanograph import LLM, SamplingParams
from nanograph.sampling import sample, uniform

MODES = ("eager", "breakable", "full")


def draw(logits, temperature=1.0, top_k=0, top_p=1.0, u=0.5):
    """sample() with plain numbers or lists of them: logits [vocab], one row for each `u`, or [rows, vocab]."""
    u = torch.as_tensor(u, dtype=torch.float32).reshape(-1)
    logits = logits.expand(len(u), -1) if logits.ndim == 1 else logits

    def column(value, dtype):
        return torch.as_tensor(value, dtype=dtype).expand(len(logits))

    fields = column(temperature, torch.float32), column(top_k, torch.int32), column(top_p, torch.float32)
    return sample(logits, *fields, u.expand(len(logits))).tolist()


def expected_probabilities(logits, temperature=1.0, top_k=0, top_p=1.0):
    """temperature, then top_k, then top_p over what it left, of equal ones the first: a list of floats."""
    peak = max(logits)
    weights = [math.exp((logit - peak) / temperature) for logit in logits]
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))[: top_k or None]
    total, reached, kept = sum(weights[token] for token in order), 0.0, []
    for token in order:
        if kept and reached >= top_p:
            break
        kept.append(token)
        reached += weights[token] / total
    mass = sum(weights[token] for token in kept)
    return [weights[token] / mass if token in kept else 0.0 for token in range(len(logits))]


def kept_tokens(logits, **params):
    """Which tokens sample() can draw: those seen over a fine grid of numbers."""
    return set(draw(logits, u=torch.arange(4096) / 4096, **params))


# The distribution


@pytest.mark.parametrize("params", [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.8}, {"top_k": 6, "top_p": 0.7}])
def test_tokens_follow_the_distribution(params):
    """A chi-square test over 100 seeds times 200 steps; its 99.9 % point for 7 degrees of freedom is 24.3."""
    logits = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.5, -0.5, 1.0, 0.25])
    numbers = [uniform(seed, step) for seed in range(100) for step in range(200)]
    tokens = draw(logits, u=numbers, **params)
    chi_square = 0.0
    for token, probability in enumerate(expected_probabilities(logits.tolist(), **params)):
        if probability == 0.0:
            assert tokens.count(token) == 0
        else:
            wanted = probability * len(tokens)
            chi_square += (tokens.count(token) - wanted) ** 2 / wanted
    assert chi_square < 24.3


def test_every_token_is_where_its_number_falls():
    """1,000 random rows of all kinds in one call, against plain Python. (None lies on a boundary.)"""
    rng, rows = random.Random(0), []
    for _ in range(1000):
        logits = [rng.gauss(0, 3) for _ in range(20)]
        rows.append((logits, rng.choice([0.3, 1.0, 2.0]), rng.choice([0, 1, 5]), rng.choice([1.0, 0.9, 0.5])))
    numbers = torch.tensor([uniform(1, step) for step in range(1000)])
    logits, temperature, top_k, top_p = (list(column) for column in zip(*rows))
    drawn = draw(torch.tensor(logits, dtype=torch.float64), temperature, top_k, top_p, numbers)
    for token, u, row in zip(drawn, numbers.tolist(), rows):
        probabilities = expected_probabilities(*row)
        assert sum(probabilities[:token]) <= u + 1e-6
        assert u < sum(probabilities[: token + 1]) + 1e-6
        assert probabilities[token] > 0


# Temperature


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-24])
@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-30, 1e-45])
def test_a_temperature_of_zero_or_next_to_it_is_greedy(temperature, u):
    """SMP-1: no division by zero, no infinity."""
    logits = torch.tensor([1.0, 3.0, 2.99, -500.0, 3e38])
    assert draw(logits[:4], temperature, u=u) == [1]
    assert draw(logits, temperature, u=u) == [4]


@pytest.mark.parametrize("mode", MODES)
def test_greedy_is_the_largest_logit_in_every_mode(mode):
    model = make_model()
    tokens = [
        LLM(model, mode, max_batch_tokens=16).generate([[1, 2, 3]], SamplingParams(temperature=t, max_new_tokens=6))[0]
        for t in (0, 0.0, 1e-6)
    ]
    assert tokens[0].token_ids == tokens[1].token_ids == tokens[2].token_ids


def test_a_huge_temperature_makes_all_tokens_equally_likely():
    assert kept_tokens(torch.tensor([100.0, 0.0, -100.0, 50.0]), temperature=1e38) == {0, 1, 2, 3}


# top_k and top_p


@pytest.mark.parametrize("top_k", [None, 0, 64, 65, 10**9, 10**30])
def test_a_top_k_of_the_vocabulary_or_more_is_none(top_k):
    """SMP-3."""
    llm = LLM(make_model(NANO))
    plain, cut = (
        llm.generate([[1, 2]], SamplingParams(temperature=2.0, seed=4, top_k=k, top_p=1.0, max_new_tokens=20))[0]
        for k in (None, top_k)
    )
    assert cut.token_ids == plain.token_ids


@pytest.mark.parametrize("top_k", [-1, 2.5, True, "3"])
def test_a_top_k_that_is_none(top_k):
    with pytest.raises(ValueError, match="top_k must be"):
        SamplingParams(top_k=top_k)


def test_top_k_comes_first_and_top_p_shares_out_what_it_left():
    """SMP-5: of .4 .3 .2 .1, three are kept and .4 becomes .444, which alone reaches .43."""
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert kept_tokens(logits, top_k=3, top_p=0.43) == {0}
    assert kept_tokens(logits, top_k=3, top_p=0.45) == {0, 1}
    assert kept_tokens(logits, top_p=0.43) == {0, 1}
    assert kept_tokens(logits, top_k=1, top_p=0.8) == {0}
    assert kept_tokens(logits, top_k=3) == {0, 1, 2}


@pytest.mark.parametrize("top_p", [1e-50, 1e-9, 0.3])
def test_the_likeliest_token_is_always_kept(top_p):
    assert kept_tokens(torch.tensor([1.0, 1.5, 0.5]), top_p=top_p) == {1}


def test_filters_filter_and_defaults_do_not_make_it_greedy():
    """SMP-7: negative logits, and flat ones."""
    numbers = [uniform(seed, 0) for seed in range(1000)]
    assert set(draw(-torch.arange(1.0, 51), top_k=1, u=numbers)) == {0}
    defaults = SamplingParams()
    tokens = draw(torch.zeros(50), 1.0, defaults.top_k or 0, defaults.top_p, numbers[:100])
    assert len(set(tokens)) > 20


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_over_a_large_vocabulary_do_not_saturate(dtype):
    """SMP-9: one logit of 3 and 50,256 of 0: top_p .9 keeps 45,230 tokens, as in float64."""
    logits = torch.zeros(50257, dtype=dtype)
    logits[-1] = 3
    kept = math.ceil(0.9 * (50256 + math.exp(3)) - math.exp(3)) + 1
    assert kept == 45230
    # In the order of the vocabulary the likeliest comes last: just before it ends what top_p has kept of the others.
    others = torch.tensor([1 - math.exp(3) / (0.9 * (50256 + math.exp(3))) - 1e-6])
    [last] = draw(logits, top_p=0.9, u=others)
    assert last + 2 == pytest.approx(kept, rel=1e-3)
    assert draw(logits, top_p=0.9, u=1 - 2**-24) == [50256]


def test_logits_are_widened_before_anything_else():
    torch.manual_seed(0)
    logits, numbers = 4 * torch.randn(50, dtype=torch.bfloat16), torch.arange(10000) / 10000
    assert draw(logits, 0.7, u=numbers) == draw(logits.float(), 0.7, u=numbers)


# Ties, infinities, NaN


def test_of_equal_logits_the_first():
    logits = torch.tensor([1.0, 5.0, 5.0, 5.0])
    assert draw(logits, 0.0) == [1]
    assert kept_tokens(logits, top_k=2) == {1, 2}
    assert kept_tokens(logits, top_k=3, top_p=0.5) == {1, 2}


@pytest.mark.parametrize("u", [0.0, 1 - 2**-24])
def test_a_token_without_probability_is_never_drawn(u):
    logits = torch.tensor([-torch.inf, 1.0, 2.0, -torch.inf])
    assert draw(logits, u=u)[0] in (1, 2)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_meaningless_logits_yield_a_token_of_the_vocabulary(bad, temperature):
    """An index beyond it would break the next step of every request in the batch."""
    for logits in (torch.full((4,), bad), torch.tensor([1.0, bad, 2.0, 0.0])):
        [token] = draw(logits, temperature)
        assert 0 <= token < 4


# Rows are independent


def test_a_row_does_not_depend_on_its_neighbours():
    torch.manual_seed(0)
    logits, rows = 3 * torch.randn(64, 100), torch.arange(64)
    fields = (rows % 3) * 0.7, torch.where(rows % 4 == 0, 5, 0), 1 - (rows % 5) * 0.15, torch.rand(64)
    together = draw(logits, *fields)
    alone = [draw(logits[i : i + 1], *(field[i : i + 1] for field in fields))[0] for i in range(64)]
    assert together == alone
    logits[::2] = torch.nan
    assert draw(logits, *fields)[1::2] == alone[1::2]
    turned = draw(logits.flip(0), *(field.flip(0) for field in fields))
    assert turned[::-1][1::2] == alone[1::2]


# Random numbers


def test_numbers_are_uniform_and_fit_float32():
    for numbers in ([uniform(7, step) for step in range(10000)], [uniform(seed, 7) for seed in range(10000)]):
        assert all(0 <= u < 1 and u * 2**24 == int(u * 2**24) for u in numbers)
        counts = [0] * 100
        for u in numbers:
            counts[int(100 * u)] += 1
        assert sum((count - 100) ** 2 / 100 for count in counts) < 148  # 99.9 % of chi-square, 99 degrees of freedom
        mean = sum(numbers) / 10000
        for lag in (1, 2, 64):
            pairs = zip(numbers, numbers[lag:])
            assert abs(sum((a - mean) * (b - mean) for a, b in pairs)) / 10000 < 0.004  # 5 standard deviations


def test_any_integer_is_a_seed():
    seeds = [0, 1, -1, 2**63, 2**64 - 2, -(2**40), 123456789]
    assert len({uniform(seed, 0) for seed in seeds}) == len(seeds)
    assert uniform(5, 0) != uniform(0, 5)


@pytest.mark.parametrize("mode", MODES)
def test_a_seed_decides_alone_whatever_runs_beside_it(mode):
    """RNG-1, RNG-3. The user's own random state is not touched."""
    llm = LLM(make_model(), mode, max_batch_tokens=32)
    torch.manual_seed(3)
    state = torch.get_rng_state()

    def run(*seeds):
        params = [SamplingParams(temperature=1.5, top_p=1.0, seed=seed, max_new_tokens=20) for seed in seeds]
        return [result.token_ids for result in llm.generate([[1, 2, 3]] * len(seeds), params)]

    [alone] = run(42)
    assert run(42, None)[0] == alone
    assert run(None, 7, 42)[2] == alone
    assert run(42, 42) == [alone, alone]
    assert run(7) != [alone]
    assert run(42) == [alone]
    assert torch.equal(torch.get_rng_state(), state)
