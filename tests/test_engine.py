"""The engine through its API: requests of all kinds, alone and together, and everything that is refused."""

import random
from types import SimpleNamespace

import pytest
import tiktoken
import torch
from conftest import GPT2, NANO, make_model

from nanograph import LLM, SamplingParams
from nanograph.engine import RequestsRefused
from nanograph.kv_cache import BlockAllocator
from nanograph.scheduler import Request, Scheduler
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


# The scheduler


def make_scheduler(num_blocks=8, budget=32, max_requests=4, max_context=128, eos_ids=()):
    return Scheduler(BlockAllocator(num_blocks), eos_ids, budget, max_requests, max_context)


def submit(scheduler, name, length, max_new_tokens=4):
    request = Request(name, list(range(length)), SamplingParams(max_new_tokens=max_new_tokens), 0)
    scheduler.add(request)
    return request


def advance(scheduler):
    scheduled = scheduler.schedule()
    complete = [request for request, count in scheduled if count == request.num_uncomputed]
    scheduler.update(scheduled, [7] * len(complete))
    scheduler.check()
    return [(request.request_id, count) for request, count in scheduled]


def test_decodes_come_first_and_prompts_are_cut_to_the_budget():
    scheduler = make_scheduler()
    submit(scheduler, "a", 10)
    submit(scheduler, "b", 50)
    submit(scheduler, "c", 3)
    assert advance(scheduler) == [("a", 10), ("b", 22)]
    assert advance(scheduler) == [("a", 1), ("b", 28), ("c", 3)]
    assert advance(scheduler) == [("a", 1), ("b", 1), ("c", 1)]


def test_a_prompt_of_whole_chunks_takes_no_empty_step():
    for chunks in (1, 2):
        scheduler = make_scheduler(budget=16)
        submit(scheduler, "a", 16 * chunks, max_new_tokens=1)
        assert [advance(scheduler) for _ in range(chunks)] == [[("a", 16)]] * chunks
        assert advance(scheduler) == []


def test_the_youngest_gives_way_and_computes_all_its_tokens_again():
    scheduler = make_scheduler(num_blocks=4)
    old, young = submit(scheduler, "old", 30, 30), submit(scheduler, "young", 15, 30)
    while not scheduler.num_preemptions:
        advance(scheduler)
    assert (young.num_computed, young.block_table, young.finish_reason) == (0, [], None)
    generated = len(young.output_ids)
    assert generated > 0
    while old.finish_reason is None:
        advance(scheduler)
    assert advance(scheduler) == [("young", 15 + generated)]
    assert len(young.output_ids) == generated + 1


def test_blocks_are_taken_when_needed_and_given_back():
    for length in (15, 16, 17, 31, 32, 33):
        scheduler = make_scheduler()
        request = submit(scheduler, "a", length, 32)
        while request.finish_reason is None:
            held = request.num_computed, len(request.block_table)
            assert held[1] == -(-held[0] // 16)
            advance(scheduler)
        assert scheduler.allocator.num_free == 8


def test_what_can_never_fit_is_refused_at_once_and_its_neighbours_finish(model):
    llm = LLM(model, kv_blocks=4)
    one = llm.add([1] * 10, GREEDY)
    with pytest.raises(ValueError, match=r"needs 5 KV blocks .* the cache has 4"):
        llm.add([1] * 70, GREEDY)
    two = llm.add([2] * 10, GREEDY)
    while one.finish_reason is None or two.finish_reason is None:
        llm.step()
    assert len(one.token_ids) == len(two.token_ids) == 8


@pytest.mark.parametrize("seed", range(3))
def test_a_thousand_random_steps_lose_no_block(seed):
    rng, names = random.Random(seed), iter(range(10**6))
    scheduler = make_scheduler(num_blocks=10, budget=rng.choice([1, 7, 32]), eos_ids=())
    scheduler.max_requests = min(4, scheduler.max_batch_tokens)
    for _ in range(1000):
        if rng.random() < 0.3 and len(scheduler.requests) < 8:
            submit(scheduler, str(next(names)), rng.randint(1, 100), rng.randint(1, 28))
        if rng.random() < 0.05 and scheduler.requests:
            scheduler.cancel(rng.choice(scheduler.requests).request_id)
        steps = advance(scheduler)
        assert sum(count for _, count in steps) <= scheduler.max_batch_tokens
        assert all(count > 0 for _, count in steps)
    while scheduler.requests:
        assert advance(scheduler)
    assert scheduler.allocator.num_free == 10


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
    while again.finish_reason is None:
        llm.step()
    assert again.token_ids == second.token_ids
    assert again.finish_reason == "length"
    assert llm.step() == []
    assert llm.scheduler.allocator.num_free == llm.scheduler.allocator.num_blocks


def test_a_stream_left_early_frees_everything(model):
    llm = LLM(model)
    for result in llm.stream([[1, 2], [3]], GREEDY):
        if len(result.token_ids) == 2:
            break
    assert llm.scheduler.requests == []
    assert llm.scheduler.allocator.num_free == llm.scheduler.allocator.num_blocks
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
    ],
)
def test_options_that_do_not_exist(options, message):
    with pytest.raises(ValueError, match=message):
        LLM("nano", **options)


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
    import dataclasses

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


def test_text_needs_a_vocabulary_and_ids_do_not(model):
    llm = LLM(model)
    [result] = llm.generate([[1, 2]], GREEDY)
    for use in (lambda: result.text, lambda: llm.add("text"), lambda: llm.add([1], SamplingParams(stop="x"))):
        with pytest.raises(ValueError, match="no vocabulary: use token ids"):
            use()


def test_only_what_completes_is_sampled(model, monkeypatch):
    from nanograph import engine

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
    while result.finish_reason is None:
        llm.step()
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
    import nanograph

    assert sorted(nanograph.__all__) == ["LLM", "SamplingParams", "__version__"]
    with pytest.raises(AttributeError):
        _ = nanograph.nothing
    assert SimpleNamespace(LLM=nanograph.LLM).LLM is LLM
