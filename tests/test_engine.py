"""The engine through its API: requests of all kinds, alone and together, and everything that is refused."""

import dataclasses
import random

import pytest
import tiktoken
import torch
from conftest import GPT2, NANO, make_model

import nanograph
from nanograph import LLM, SamplingParams, engine
from nanograph.engine import RequestsRefused
from nanograph.tokenizer import Tokenizer

GREEDY = SamplingParams(temperature=0, max_new_tokens=8)
MODES = ("eager", "breakable", "full")


@pytest.fixture(scope="module")
def model():
    return make_model()


def rig(llm, tokens):
    """Make `llm` produce these tokens, whatever its model says: the i-th generated token of a request is tokens[i]."""
    run = llm.executor.run

    def rigged():
        logits = run().clone().fill_(0)
        for row, (request, _) in enumerate(llm.last_schedule):
            logits[row, tokens[(len(request.token_ids) - request.num_prompt) % len(tokens)]] = 100
        return logits

    schedule = llm.scheduler.schedule

    def remember():
        llm.last_schedule = schedule()
        return llm.last_schedule

    llm.executor.run, llm.scheduler.schedule = rigged, remember


def finish(llm, *results):
    while any(result.finish_reason is None for result in results):
        assert llm.step()


def assert_nothing_left(llm):
    assert llm.scheduler.requests == []
    assert llm.scheduler.allocator.num_free == llm.scheduler.allocator.num_blocks


# Requests, alone and together


@pytest.mark.parametrize("config", [NANO, GPT2])
def test_the_same_tokens_alone_in_a_batch_in_every_mode_and_chunk(config):
    model, rng = make_model(config), random.Random(1)
    prompts = [[rng.randrange(64) for _ in range(length)] for length in (1, 15, 16, 17, 40, 90)]
    params = [SamplingParams(temperature=index % 2, seed=index, max_new_tokens=12) for index in range(6)]
    alone = LLM(model, "eager")
    expected = [alone.generate([prompt], one)[0].token_ids for prompt, one in zip(prompts, params)]
    for mode in MODES:
        for chunk in (7, 16, 64):
            llm = LLM(model, mode, max_batch_tokens=chunk, kv_blocks=16)
            assert [result.token_ids for result in llm.generate(prompts, params)] == expected
    assert llm.scheduler.num_preemptions > 0


def test_requests_that_come_and_go(model):
    llm = LLM(model)
    first = llm.add([1, 2, 3], SamplingParams(max_new_tokens=50, seed=1), request_id="first")
    llm.step()
    second = llm.add([1, 2, 3], SamplingParams(max_new_tokens=3, seed=1))
    with pytest.raises(ValueError, match="request id 'first' is in use"):
        llm.add([4], request_id="first")
    assert [result.request_id for result in llm.step()] == ["first", second.request_id]
    llm.cancel("first")
    assert (first.finish_reason, len(first.token_ids)) == ("cancelled", 2)
    with pytest.raises(ValueError, match="no unfinished request has the id 'first'"):
        llm.cancel("first")
    again = llm.add([1, 2, 3], SamplingParams(max_new_tokens=3, seed=1), request_id="first")
    finish(llm, again)
    assert again.token_ids == second.token_ids
    assert again.finish_reason == "length"
    assert llm.step() == []
    assert_nothing_left(llm)


def test_ids_that_are_made_up_avoid_those_in_use(model):
    llm = LLM(model)
    results = [llm.add([1], GREEDY, request_id=name) for name in ("1", None, None, "x", None)]
    assert [result.request_id for result in results] == ["1", "0", "2", "x", "3"]
    assert results[3] in llm.step()


def test_results_come_in_the_order_of_their_prompts_and_grow_token_by_token(model):
    llm, lengths = LLM(model), {}
    params = [SamplingParams(max_new_tokens=count, seed=count) for count in (7, 2, 5)]
    for result in llm.stream([[1], [2], [3]], params):
        lengths.setdefault(result.request_id, []).append(len(result.token_ids))
    assert list(lengths.values()) == [list(range(1, count + 1)) for count in (7, 2, 5)]
    results = llm.generate([[1], [2], [3]], params)
    assert [(result.seed, len(result.token_ids), result.finish_reason) for result in results] == [
        (7, 7, "length"),
        (2, 2, "length"),
        (5, 5, "length"),
    ]


def test_two_streams_over_one_engine_lose_nothing(model):
    """Each takes steps that also advance the other's requests."""
    llm = LLM(model)
    long, short = SamplingParams(seed=1, max_new_tokens=9), SamplingParams(seed=2, max_new_tokens=3)
    outer, inner, last = llm.stream([[1]], long), llm.stream([[2]], short), {}
    next(inner)
    for result in outer:  # finishes what `inner` submitted
        last["outer"] = len(result.token_ids)
    for result in inner:
        last["inner"] = len(result.token_ids)
    assert last == {"outer": 9, "inner": 3}
    for result in llm.stream([[1]], long):
        llm.generate([[2]], short)
        last["outer"] = len(result.token_ids)
    assert last["outer"] == 9
    assert_nothing_left(llm)


def test_a_step_that_fails_leaves_the_engine_usable(model):
    llm = LLM(model)
    [expected] = llm.generate([[1, 2]], GREEDY)
    run = llm.executor.run

    def fail():
        raise RuntimeError("out of memory")

    llm.executor.run = fail
    with pytest.raises(RuntimeError, match="out of memory"):
        llm.generate([[1, 2], [3]], GREEDY)
    assert_nothing_left(llm)
    llm.executor.run = run
    assert llm.generate([[1, 2]], GREEDY)[0].token_ids == expected.token_ids


def test_a_broken_model_harms_no_neighbour():
    """Its logits are NaN for one request: that one gets some tokens, the other the right ones."""
    llm = LLM(make_model(), "eager")
    params = SamplingParams(seed=3, max_new_tokens=6)
    [expected] = llm.generate([[5, 6]], params)
    run = llm.executor.run

    def broken():
        logits = run().clone()
        logits[0] = torch.nan
        return logits

    llm.executor.run = broken
    bad, good = llm.generate([[1], [5, 6]], params)
    assert good.token_ids == expected.token_ids
    assert len(bad.token_ids) == 6


def test_a_stream_left_early_frees_everything(model):
    llm = LLM(model)
    for result in llm.stream([[1, 2], [3]], GREEDY):
        if len(result.token_ids) == 2:
            break
    assert_nothing_left(llm)
    assert len(llm.generate([[1, 2]], GREEDY)[0].token_ids) == 8


def test_a_seed_is_drawn_and_reproduces(model):
    llm = LLM(model)
    drawn = llm.generate([[1, 2]], SamplingParams(max_new_tokens=20))[0]
    assert llm.generate([[1, 2]], SamplingParams(max_new_tokens=20, seed=drawn.seed))[0].token_ids == drawn.token_ids
    assert llm.generate([[1, 2]], SamplingParams(max_new_tokens=20))[0].seed != drawn.seed


def test_bad_prompts_are_refused_and_the_others_complete(model):
    llm = LLM(model)
    with pytest.raises(RequestsRefused, match="prompt 2: prompt is empty") as caught:
        llm.generate([[1], [], [2]], GREEDY)
    one, none, two = caught.value.results
    assert none is None
    assert len(one.token_ids) == len(two.token_ids) == 8
    streamed = []
    with pytest.raises(RequestsRefused, match=r"prompt 1: prompt is empty.*; prompt 3: token id 99 is outside"):
        streamed.extend(llm.stream([[], [1], [99]], GREEDY))
    assert len(streamed) == 8
    assert_nothing_left(llm)


PROMPTS_THAT_ARE_NONE = {
    "nothing": [],
    "empty": "",
    "bytes": b"abc",
    "None": None,
    "a number": 5,
    "a tensor": torch.tensor([1, 2]),
    "nested": [[1, 2]],
    "a set": {1, 2},
}


@pytest.mark.parametrize("prompt", PROMPTS_THAT_ARE_NONE.values(), ids=PROMPTS_THAT_ARE_NONE)
def test_a_prompt_that_is_none_harms_no_neighbour(prompt):
    """SCH-3, by `add` and by `generate`."""
    llm = with_bytes("abc")
    one = llm.add("x", GREEDY)
    with pytest.raises(ValueError) as caught:
        llm.add(prompt, GREEDY)
    assert "\n" not in str(caught.value)
    two = llm.add([1], GREEDY)
    finish(llm, one, two)
    with pytest.raises(RequestsRefused, match="prompt 2: ") as caught:
        llm.generate(["x", prompt, "y"], GREEDY)
    for result in (one, two, caught.value.results[0], caught.value.results[2]):
        assert result.text == "abcabcab"
    assert_nothing_left(llm)


def test_what_else_is_of_the_wrong_kind(model):
    llm = LLM(model)
    for params in ({"temperature": 1}, "greedy", 5):
        with pytest.raises(ValueError, match="params must be a SamplingParams, not a"):
            llm.add([1], params)
    for request_id in (5, ["a"], b"a"):
        with pytest.raises(ValueError, match="request_id must be a string, not a"):
            llm.add([1], GREEDY, request_id)
    with pytest.raises(RequestsRefused, match="prompt 1: prompt must be a text or a list of token ids, not a int"):
        llm.generate([1, 2, 3], GREEDY)  # a list of prompts was asked for
    assert_nothing_left(llm)


@pytest.mark.parametrize("token", [-1, 64, True, 1.0, "a"])
def test_token_ids_outside_the_vocabulary(model, token):
    with pytest.raises(ValueError, match="outside the vocabulary: integers from 0 to 63"):
        LLM(model).add([1, token])


def test_params_are_one_for_all_or_one_each(model):
    llm = LLM(model)
    with pytest.raises(ValueError, match="2 params for 1 prompts"):
        llm.generate([[1]], [GREEDY, GREEDY])
    lengths = [SamplingParams(max_new_tokens=count) for count in (2, 5)]
    assert [len(result.token_ids) for result in llm.generate([[1], [1]], lengths)] == [2, 5]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "fast"}, "unknown mode 'fast': choose from eager, breakable, full"),
        ({"device": "tpu"}, "unknown device 'tpu'"),
        ({"dtype": "int8"}, "unknown dtype"),
        ({"kernels": "cutlass"}, "unknown kernels"),
        ({"capture": "never"}, "unknown capture"),
        ({"breaks": ["head"]}, "unknown break 'head'"),
        ({"buckets": [8, 4]}, "ascending"),
        ({"kv_blocks": 0}, "kv_blocks must be 1 or more"),
        ({"max_requests": 1.5}, "max_requests must be an integer"),
        ({"device": None}, "unknown device None: choose from auto, cpu, cuda"),
        ({"device": "cuda:99"}, "device cuda:99 asked for, but torch sees"),
        ({"model": "nanno"}, "unknown model 'nanno'"),
        ({"max_context": 10**6}, "max_context 1000000 exceeds the model's 1024 positions"),
        ({"device": "cpu", "max_batch_tokens": 10**14}, "no memory for the buffers: lower max_batch_tokens"),
        ({"device": "cpu", "kv_blocks": 10**14}, "no memory for the buffers"),
    ],
)
def test_options_that_do_not_exist(options, message):
    with pytest.raises(ValueError, match=message):
        LLM(**{"model": "nano", **options})


def test_a_model_that_is_already_built_serves_a_shorter_context(model):
    llm = LLM(model, max_context=20)
    [result] = llm.generate([[1] * 10], SamplingParams(max_new_tokens=50))
    assert (len(result.token_ids), result.finish_reason) == (10, "length")
    with pytest.raises(ValueError, match="max_context 257 exceeds the model's 256 positions"):
        LLM(model, max_context=257)


@pytest.mark.parametrize("max_new_tokens", [0, -1, 1.5, True])
def test_max_new_tokens(max_new_tokens):
    with pytest.raises(ValueError, match="max_new_tokens must be"):
        SamplingParams(max_new_tokens=max_new_tokens)


# How a request ends


def with_eos(model, eos_ids):
    llm = LLM(model)
    llm.scheduler.eos_ids = frozenset(eos_ids)
    return llm


def test_any_end_token_ends_unless_ignored(model):
    tokens = LLM(model).generate([[1, 2, 3]], GREEDY)[0].token_ids
    for eos in (tokens[0], tokens[3]):
        result = with_eos(model, [eos, 63]).generate([[1, 2, 3]], GREEDY)[0]
        assert (result.token_ids, result.finish_reason) == (tokens[: tokens.index(eos) + 1], "stop")
    ignoring = SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)
    assert with_eos(model, tokens).generate([[1, 2, 3]], ignoring)[0].token_ids == tokens


@pytest.mark.parametrize("config", [NANO, GPT2])
def test_the_context_ends_a_request(config):
    llm = LLM(make_model(config), "full", max_batch_tokens=64)
    limit = config.max_positions
    long = SamplingParams(temperature=0, max_new_tokens=100)
    [result] = llm.generate([[1] * (limit - 4)], long)
    assert (len(result.token_ids), result.finish_reason) == (4, "length")
    assert len(llm.generate([[1] * (limit - 1)], long)[0].token_ids) == 1
    with pytest.raises(ValueError, match=f"prompt has {limit} tokens, limit {limit - 1}"):
        llm.add([1] * limit)


def bytes_tokenizer():
    ranks = {bytes([byte]): byte for byte in range(256)}
    return Tokenizer(tiktoken.Encoding("bytes", pat_str=r"(?s).", mergeable_ranks=ranks, special_tokens={}))


def with_bytes(text, mode="eager"):
    """An LLM over bytes whose every request generates `text` again and again."""
    llm = LLM(make_model(dataclasses.replace(NANO, vocab_size=256)), mode)
    llm.tokenizer = bytes_tokenizer()
    rig(llm, list(text.encode()))
    return llm


def test_streams_are_whole_characters_and_stop_strings_are_held_back():
    llm = with_bytes("é😀 ab abc!")
    pieces = [result.new_text() for result in llm.stream(["x"], SamplingParams(max_new_tokens=40, stop=["abc"]))]
    assert "".join(pieces) == "é😀 ab "
    assert "\ufffd" not in "".join(pieces)
    assert pieces[:6] == ["", "é", "", "", "", "😀"]
    assert pieces[7:9] == ["", ""]  # "ab" may begin the stop string
    [result] = llm.generate(["x"], SamplingParams(max_new_tokens=40, stop=["abc"]))
    assert (result.text, result.finish_reason) == ("é😀 ab ", "stop")
    [result] = llm.generate(["x"], SamplingParams(max_new_tokens=3))
    assert (result.text, result.finish_reason) == ("é\ufffd", "length")


def test_a_stop_string_ends_a_request_also_in_its_last_token():
    llm = with_bytes("abcabc")
    for most, text, reason in ((2, "ab", "length"), (3, "ab", "stop"), (4, "ab", "stop")):
        for result in (
            llm.generate(["x"], SamplingParams(temperature=0, max_new_tokens=most, stop="c"))[0],
            list(llm.stream(["x"], SamplingParams(temperature=0, max_new_tokens=most, stop=["zz", "c"])))[-1],
        ):
            assert (result.text, result.new_text(), result.finish_reason) == (text, text, reason)
    assert_nothing_left(llm)


@pytest.mark.parametrize("mode", MODES)
def test_stop_strings_and_lengths_belong_to_a_request(mode):
    llm = with_bytes("to be or not", mode)
    stops = ["be", (), "not", [" ", "o"], "never"]
    params = [SamplingParams(temperature=0, max_new_tokens=12, stop=stop) for stop in stops]
    texts = [result.text for result in llm.generate(["x"] * 5, params)]
    assert texts == ["to ", "to be or not", "to be or ", "t", "to be or not"]


def test_text_needs_a_vocabulary_and_ids_do_not(model):
    llm = LLM(model)
    [result] = llm.generate([[1, 2]], GREEDY)
    for use in (lambda: result.text, lambda: llm.add("text"), lambda: llm.add([1], SamplingParams(stop="x"))):
        with pytest.raises(ValueError, match="no vocabulary: use token ids"):
            use()


def test_only_what_completes_is_sampled(model, monkeypatch):
    """CHK-5: unfinished prompts are not."""
    rows = []
    monkeypatch.setattr(engine, "sample", lambda logits, *rest: rows.append(len(logits)) or logits.argmax(-1))
    llm = LLM(model, max_batch_tokens=16)
    params = SamplingParams(temperature=1, max_new_tokens=3)
    result = llm.add([1] * 50, params)
    steps = 0
    while not result.token_ids:
        llm.step()
        steps += 1
    assert steps == 4
    finish(llm, result)
    assert rows == [1, 1, 1]


def test_stats_count_steps(model):
    llm = LLM(model, "full", buckets=[16], max_batch_tokens=32)
    llm.generate([[1] * 5, [2] * 20], SamplingParams(temperature=0, max_new_tokens=9))
    stats = llm.stats
    assert (stats.steps, stats.captures, stats.replays, stats.eager_steps) == (9, 1, 7, 1)  # 25 tokens fit no bucket
    assert stats.steps_by_kind == {"prefill": 1, "decode": 8}
    assert stats.padded_rows == 8 * 14
    assert llm.count_launches() == 1


def test_a_prompt_longer_than_the_largest_bucket(model):
    expected = LLM(model, "eager").generate([[5] * 50], GREEDY)[0].token_ids
    for mode in MODES:
        llm = LLM(model, mode, buckets=[16], max_batch_tokens=64)
        assert llm.generate([[5] * 50], GREEDY)[0].token_ids == expected
        assert llm.stats.eager_steps == (8 if mode == "eager" else 1)


def test_results_outlive_the_buffers(model):
    llm = LLM(model, "full", max_batch_tokens=32)
    first = llm.generate([[1] * 9], GREEDY)[0]
    tokens = list(first.token_ids)
    llm.generate([[2] * 9, [3] * 20], GREEDY)
    assert first.token_ids == tokens


def test_a_pool_of_the_fewest_blocks_works_as_a_large_one():
    model = make_model()
    params = SamplingParams(temperature=0, max_new_tokens=50)
    expected = LLM(model, "eager").generate([[1] * 5], params)[0].token_ids
    for mode in MODES:
        llm = LLM(model, mode, kv_blocks=4, buckets=[8])
        result = llm.add([1] * 5, params)
        while result.finish_reason is None:
            llm.kv_cache.data[:, :, 0] = torch.nan
            llm.step()
        assert result.token_ids == expected


def test_namespace_is_small():
    assert sorted(nanograph.__all__) == ["LLM", "SamplingParams", "__version__"]
    with pytest.raises(AttributeError):
        _ = nanograph.nothing
    assert nanograph.LLM is LLM
