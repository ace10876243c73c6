"""What may be asked for, and how everything else is refused: one line that names it and says what to do."""

import dataclasses
from itertools import pairwise

import pytest

from nanograph.options import (
    BREAKS,
    MODES,
    EngineOptions,
    SamplingParams,
    bucket_ladder,
    parse_breaks,
    parse_buckets,
)

NAN, INFINITY = float("nan"), float("inf")
BUCKETS = {
    "0": "each bucket must be 1 or more, not 0",
    "-4": "each bucket must be 1 or more, not -4",
    "abc": "buckets must be integers separated by commas, not 'abc'",
    "": "buckets must be integers separated by commas, not ''",
    "8,,16": "buckets must be integers separated by commas, not '8,,16'",
    "8;16": "buckets must be integers separated by commas, not '8;16'",
    "8,16.0": "buckets must be integers separated by commas, not '8,16.0'",
    "8,8": "buckets must be positive and ascending, not [8, 8]",
    "16,8": "buckets must be positive and ascending, not [16, 8]",
    "8,4096": "bucket 4096 exceeds max_batch_tokens=2048: raise that, or drop it",
}
MORE_BUCKETS = [
    (5, "buckets must be integers separated by commas, not 5"),
    ([], "buckets must be positive and ascending, not []"),
    ([True], "each bucket must be an integer, not True"),
    ([8.0], "each bucket must be an integer, not 8.0"),
    (["8"], "each bucket must be an integer, not '8'"),
    ([None], "each bucket must be an integer, not None"),
]


def refusal(function, *args, **kwargs):
    """The message of a ValueError, which must be one line."""
    with pytest.raises(ValueError) as caught:
        function(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    return message


# Buckets


@pytest.mark.parametrize(("buckets", "message"), [*BUCKETS.items(), *MORE_BUCKETS])
def test_buckets_that_are_none(buckets, message):
    """DIS-3."""
    assert refusal(parse_buckets, buckets, 2048) == message
    assert refusal(EngineOptions, buckets=buckets) == message


@pytest.mark.parametrize("buckets", ["64,256", "64, 256", [64, 256], (64, 256), range(64, 257, 192)])
def test_buckets(buckets):
    assert parse_buckets(buckets, 256) == [64, 256]
    assert EngineOptions(buckets=buckets).buckets == [64, 256]


@pytest.mark.parametrize("largest", [*range(1, 70), 100, 1000, 1023, 1025, 2048, 4095, 8192])
def test_the_ladder_wastes_less_than_a_fifth_and_ends_at_the_largest_step(largest):
    ladder = bucket_ladder(largest)
    assert ladder == sorted(set(ladder))
    assert (ladder[0], ladder[-1]) == (1, largest)
    for lower, bucket in pairwise(ladder):
        padding = bucket - (lower + 1)  # at worst: one token too many for the rung below
        assert padding / bucket < 0.2


def test_the_ladder_is_short_and_its_rungs_do_not_depend_on_its_end():
    assert bucket_ladder(40) == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40]
    assert len(bucket_ladder(2048)) == 40
    assert bucket_ladder(2048)[:-1] == bucket_ladder(4096)[:39]
    assert EngineOptions(max_batch_tokens=40).buckets == bucket_ladder(40)


# Breaks


def test_breaks():
    assert parse_breaks("attention") == {"attention"}
    assert parse_breaks("attention, moe") == parse_breaks(["moe", "attention"]) == {"attention", "moe"}
    assert parse_breaks("all") == parse_breaks(["moe", "all"]) == set(BREAKS)
    assert EngineOptions().breaks == {"attention"}


@pytest.mark.parametrize(
    ("breaks", "message"),
    [
        ("router", "unknown break 'router': choose from norm, qkv, rotary, attention, attention_output, moe, all"),
        ("attention,", "unknown break ''"),
        ("", "unknown break ''"),
        ("Attention", "unknown break 'Attention'"),
        (["attention", 5], "unknown break 5"),
        ([], "breaks must name operations, not []: for a graph without breaks use mode full"),
        (None, "breaks must name operations, not None"),
        (5, "breaks must name operations, not 5"),
    ],
)
def test_breaks_that_are_none(breaks, message):
    assert refusal(parse_breaks, breaks).startswith(message)
    assert refusal(EngineOptions, breaks=breaks).startswith(message)


# Sampling


@pytest.mark.parametrize(
    ("field", "values", "message"),
    [
        ("temperature", [-1, -1e-9, NAN, INFINITY, 10**400, "1", None, True], "a finite number, 0 or more"),
        ("top_p", [0, -0.1, 1.0001, NAN, "0.9", None, True], "in (0, 1]"),
        ("top_k", [-1], "0 or more"),
        ("top_k", [2.5, "3", True, INFINITY], "an integer"),
        ("max_new_tokens", [0, -1], "1 or more"),
        ("max_new_tokens", [1.5, "9", None, True, INFINITY], "an integer"),
        ("seed", [1.0, "1", True], "an integer"),
        ("stop", ["", [""], ["a", ""], [1], 5, None, b"x", {"a": 1}], "non-empty strings"),
    ],
)
def test_sampling_parameters_that_are_none(field, values, message):
    """SMP-1, SMP-3, END-1: the field, what it must be, and what it is."""
    for value in values:
        assert refusal(SamplingParams, **{field: value}) == f"{field} must be {message}, not {value!r}"


def test_sampling_parameters_at_their_edges():
    params = SamplingParams(temperature=0, top_k=None, top_p=1, max_new_tokens=1, seed=-(2**70), stop=["a", "b"])
    assert params.stop == ("a", "b")
    assert SamplingParams(top_k=0, temperature=1e-300).top_k == 0
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams() == SamplingParams()
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 1


# The engine


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "fast"}, "unknown mode 'fast': choose from eager, breakable, full"),
        ({"mode": None}, "unknown mode None"),
        ({"mode": ["full"]}, "unknown mode ['full']"),
        ({"capture": "never"}, "unknown capture 'never': choose from lazy, ahead"),
        ({"dtype": "int8"}, "unknown dtype 'int8': choose from float32, float16, bfloat16"),
        ({"kernels": "cutlass"}, "unknown kernels 'cutlass': choose from reference, triton"),
        ({"max_batch_tokens": 0}, "max_batch_tokens must be 1 or more, not 0"),
        ({"max_batch_tokens": None}, "max_batch_tokens must be an integer, not None"),
        ({"max_requests": 1.5}, "max_requests must be an integer, not 1.5"),
        ({"max_requests": True}, "max_requests must be an integer, not True"),
        ({"max_context": -1}, "max_context must be 1 or more, not -1"),
        ({"kv_blocks": 0}, "kv_blocks must be 1 or more, not 0"),
        ({"random_weights": "gpt3"}, "unknown random_weights 'gpt3': choose from nano, gpt2, "),
    ],
)
def test_engine_options_that_are_none(options, message):
    assert refusal(EngineOptions, **options).startswith(message)


def test_an_option_that_does_not_exist_is_named():
    with pytest.raises(TypeError, match="max_tokens"):
        EngineOptions(max_tokens=5)


@pytest.mark.parametrize("mode", MODES)
def test_options_can_be_derived_from_options(mode):
    """The command lines open several engines that differ in one option."""
    options = dataclasses.replace(EngineOptions(buckets="4,8", breaks="moe,attention"), mode=mode)
    assert (options.mode, options.buckets, options.breaks) == (mode, [4, 8], {"moe", "attention"})
