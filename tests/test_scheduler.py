"""Who runs in the next step, and in which blocks: continuous batching, chunked prefill, preemption, and no block lost.

Bookkeeping alone, without a model, until the last section, which runs one to see that interrupted work comes out right.
"""

import random
import subprocess
import sys

import pytest
from conftest import GPT2, NANO, make_model
from dense import assert_greedy

from nanograph import LLM, SamplingParams
from nanograph.kv_cache import BLOCK_SIZE, BlockAllocator
from nanograph.scheduler import Request, Scheduler

AROUND_BLOCKS = (15, 16, 17, 31, 32, 33)


def make_scheduler(num_blocks=8, budget=32, max_requests=4, max_context=128, eos_ids=()):
    return Scheduler(BlockAllocator(num_blocks), eos_ids, budget, max_requests, max_context)


def submit(scheduler, name, length, max_new_tokens=4, **params):
    request = Request(name, [1] * length, SamplingParams(max_new_tokens=max_new_tokens, **params), 0)
    scheduler.add(request)
    return request


def advance(scheduler, token=7):
    """Take a step in which every request that is complete gets `token`. Returns [(request id, tokens computed)]."""
    scheduled = scheduler.schedule()
    scheduler.check()
    for request, count in scheduled:
        in_flight = request.num_computed + count
        assert len(request.block_table) == BlockAllocator.blocks_for(in_flight), "blocks for what is in flight, no more"
    complete = [request for request, count in scheduled if count == request.num_uncomputed]
    assert complete == [request for request, _ in scheduled[: len(complete)]]
    scheduler.update(scheduled, [token] * len(complete))
    scheduler.check()
    return [(request.request_id, count) for request, count in scheduled]


def finish_all(scheduler):
    while scheduler.requests:
        assert advance(scheduler), "requests wait, and nothing runs"
    assert scheduler.allocator.num_free == scheduler.allocator.num_blocks


# The block allocator


def test_blocks_are_handed_out_once_and_come_back():
    allocator, one, two = BlockAllocator(4), [], []
    assert allocator.grow(one, 33)
    assert allocator.grow(two, 16)
    assert sorted(one + two) == [1, 2, 3, 4]  # block 0 is the trash block
    assert allocator.num_free == 0
    allocator.check([one, two])
    released = list(one)
    allocator.release(one)
    assert (one, allocator.num_free) == ([], 3)
    assert allocator.grow(one, 48)
    assert one == released  # what was freed last may still lie in the GPU's cache


def test_a_table_grows_by_what_is_missing_or_not_at_all():
    allocator, table = BlockAllocator(3), []
    assert allocator.grow(table, 0)
    assert table == []
    for tokens, blocks in ((1, 1), (16, 1), (17, 2), (17, 2), (5, 2)):
        assert allocator.grow(table, tokens)
        assert len(table) == blocks
    before = list(table)
    assert not allocator.grow(table, 49)
    assert (table, allocator.num_free) == (before, 1)


def test_the_check_finds_lost_and_doubled_blocks():
    allocator, table = BlockAllocator(4), []
    allocator.grow(table, 20)
    for broken in ([table[:1]], [table, table[:1]], [[*table, 0]]):
        with pytest.raises(AssertionError, match="are not all blocks"):
            allocator.check(broken)


def test_the_check_finds_a_table_too_short():
    scheduler = make_scheduler()
    request = submit(scheduler, "a", 20)
    advance(scheduler)
    request.num_computed = 33
    with pytest.raises(AssertionError, match="a: 2 blocks for 33 tokens"):
        scheduler.check()


# Who runs


def test_decodes_come_first_and_prompts_are_cut_to_the_budget():
    scheduler = make_scheduler()
    submit(scheduler, "a", 10)
    submit(scheduler, "b", 50)
    submit(scheduler, "c", 3)
    assert advance(scheduler) == [("a", 10), ("b", 22)]
    assert advance(scheduler) == [("a", 1), ("b", 28), ("c", 3)]
    assert advance(scheduler) == [("a", 1), ("b", 1), ("c", 1)]


def test_first_come_first_served_even_where_a_later_one_would_fit():
    scheduler = make_scheduler(num_blocks=4)
    submit(scheduler, "first", 30)
    submit(scheduler, "large", 48)
    submit(scheduler, "small", 2)
    assert advance(scheduler) == [("first", 30)]
    assert advance(scheduler) == [("first", 1)]
    started = [name for _ in range(6) for name, _ in advance(scheduler)]
    assert started.index("large") < started.index("small")


def test_no_more_requests_than_slots():
    scheduler = make_scheduler(max_requests=2)
    for name in "abc":
        submit(scheduler, name, 5)
    assert advance(scheduler) == [("a", 5), ("b", 5)]
    for _ in range(3):
        assert advance(scheduler) == [("a", 1), ("b", 1)]
    assert advance(scheduler) == [("c", 5)]


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_prompt_of_whole_chunks_takes_no_empty_step(chunks):
    """CHK-7."""
    scheduler = make_scheduler(budget=16)
    submit(scheduler, "a", 16 * chunks, max_new_tokens=1)
    assert [advance(scheduler) for _ in range(chunks)] == [[("a", 16)]] * chunks
    assert advance(scheduler) == []


def test_only_a_prompt_that_is_complete_gets_a_token():
    """CHK-5: chunks of 16 over a prompt of 50: three steps without a token, then one with the first."""
    scheduler = make_scheduler(budget=16)
    request = submit(scheduler, "a", 50)
    lengths = []
    for _ in range(5):
        advance(scheduler)
        lengths.append(len(request.output_ids))
    assert lengths == [0, 0, 0, 1, 2]


@pytest.mark.parametrize("length", AROUND_BLOCKS)
def test_blocks_are_taken_when_needed_and_given_back(length):
    """CHK-3, bookkeeping: `advance` compares each table with the tokens in flight. The last token needs no slot."""
    scheduler = make_scheduler(num_blocks=BlockAllocator.blocks_for(length + 31))
    submit(scheduler, "a", length, max_new_tokens=32)
    finish_all(scheduler)
    assert scheduler.num_preemptions == 0


def test_a_step_in_which_there_is_nothing_to_do():
    assert make_scheduler().schedule() == []


# How requests end


def test_end_tokens_and_lengths():
    scheduler = make_scheduler(eos_ids=[7], max_context=32)
    reasons = {}
    for name, length, new, ignore in (("eos", 5, 9, False), ("length", 5, 3, True), ("context", 30, 9, True)):
        request = submit(scheduler, name, length, new, ignore_eos=ignore)
        while request.finish_reason is None:
            advance(scheduler)
        reasons[name] = request.finish_reason, len(request.output_ids)
    assert reasons == {"eos": ("stop", 1), "length": ("length", 3), "context": ("length", 2)}


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_cancelling_frees_the_blocks_of_a_request_in_any_state(steps):
    """Waiting, in its prompt, with its first token, decoding. (While preempted: below.)"""
    scheduler = make_scheduler(budget=16)
    request = submit(scheduler, "a", 20)
    for _ in range(steps):
        advance(scheduler)
    scheduler.cancel("a")
    assert (request.finish_reason, scheduler.requests, scheduler.allocator.num_free) == ("cancelled", [], 8)
    with pytest.raises(ValueError, match="no unfinished request has the id 'a'"):
        scheduler.cancel("a")


# What is refused


def test_what_can_never_fit_is_refused_at_once():
    """SCH-1: a prompt that fits the context, but not the cache, would wait for ever, and block all behind it."""
    scheduler = make_scheduler(num_blocks=4, max_context=1024)
    with pytest.raises(ValueError, match=r"needs 5 KV blocks .*70.*, the cache has 4: shorten it or raise kv_blocks"):
        submit(scheduler, "large", 70, max_new_tokens=1)
    with pytest.raises(ValueError, match=r"needs 5 KV blocks \(prompt 10 \+ max_new_tokens 56\)"):
        submit(scheduler, "long", 10, max_new_tokens=56)
    assert scheduler.requests == []
    submit(scheduler, "fits", 10, max_new_tokens=55)  # 64 slots: the last token needs none
    finish_all(scheduler)


def test_prompts_that_are_empty_or_fill_the_context():
    scheduler = make_scheduler(max_context=32)
    with pytest.raises(ValueError, match="prompt is empty"):
        submit(scheduler, "a", 0)
    with pytest.raises(ValueError, match="prompt has 32 tokens, limit 31"):
        submit(scheduler, "a", 32)
    submit(scheduler, "a", 31)
    finish_all(scheduler)


def test_an_id_in_use_is_refused_and_free_again_afterwards():
    """SCH-5: equal prompts and equal parameters are no duplicates; equal ids are."""
    scheduler = make_scheduler()
    first = submit(scheduler, "a", 5)
    submit(scheduler, "b", 5)
    for _ in range(2):  # waiting, then running
        with pytest.raises(ValueError, match="request id 'a' is in use"):
            submit(scheduler, "a", 9)
        advance(scheduler)
    finish_all(scheduler)
    assert (first.finish_reason, len(first.output_ids)) == ("length", 4)
    submit(scheduler, "a", 9)


# Preemption


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


def test_a_preempted_request_is_older_than_those_that_wait():
    scheduler = make_scheduler(num_blocks=4)
    submit(scheduler, "old", 30, 30)
    submit(scheduler, "young", 15, 30)
    submit(scheduler, "waiting", 40, 9)
    while not scheduler.num_preemptions:
        advance(scheduler)
    assert [request.request_id for request in scheduler.requests] == ["old", "young", "waiting"]
    scheduler.cancel("young")  # while it has no blocks
    finish_all(scheduler)


@pytest.mark.parametrize("budget", [1, 7, 16, 32])
def test_a_thousand_random_steps_lose_no_block(budget):
    """SCH-7: free and owned blocks are all blocks, no step is empty, over budget or out of order; all requests end."""
    rng = random.Random(budget)
    scheduler = make_scheduler(num_blocks=10, budget=budget, max_requests=min(4, budget), eos_ids=[7])
    requests = []
    for _ in range(1000):
        if rng.random() < 0.3 and len(scheduler.requests) < 8:
            ignore_eos = rng.random() < 0.9
            length, new = rng.choice([1, 15, 16, 17, 32, rng.randint(1, 100)]), rng.randint(1, 28)
            requests.append(submit(scheduler, len(requests), length, new, ignore_eos=ignore_eos))
        if rng.random() < 0.05 and scheduler.requests:
            scheduler.cancel(rng.choice(scheduler.requests).request_id)
        some = bool(scheduler.requests)
        taken = advance(scheduler, token=rng.choice([7, 8]))
        assert bool(taken) == some
        assert sum(count for _, count in taken) <= budget
        assert len(taken) <= scheduler.max_requests
        assert all(count > 0 for _, count in taken)
        order = [request.request_id for request in scheduler.requests]
        assert order == sorted(order), "in order of arrival: those that run, then those that wait"
        for request in scheduler.requests:
            assert len(request.block_table) == BlockAllocator.blocks_for(request.num_computed)
    finish_all(scheduler)
    assert all(request.finish_reason for request in requests)
    assert (scheduler.num_preemptions > 0) == (budget > 1)


# With a model: what was interrupted comes out right


@pytest.mark.parametrize("config", [NANO, GPT2])
def test_pages_change_no_token(config):
    """CHK-3: prompts around the block size and twice as many new tokens, against the model without pages."""
    model = make_model(config)
    llm = LLM(model, "eager", kv_blocks=12)
    prompts = [[(7 * length + i) % 64 for i in range(length)] for length in AROUND_BLOCKS]
    results = llm.generate(prompts, SamplingParams(temperature=0, max_new_tokens=2 * BLOCK_SIZE))
    for prompt, result in zip(prompts, results):
        assert len(result.token_ids) == 2 * BLOCK_SIZE
        assert_greedy(model, prompt, result.token_ids)


@pytest.mark.parametrize("generated", [1, 15, 16, 17])
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_preemption_after_so_many_tokens_changes_nothing(generated, temperature):
    """CHK-1. The older request fills its blocks just when the younger has generated so many tokens."""
    model = make_model()
    old, young = [2] * (33 - generated), [3] * 10
    kv_blocks = 2 + BlockAllocator.blocks_for(len(young) + generated - 1)
    params = SamplingParams(temperature=temperature, seed=5, max_new_tokens=24)
    [expected] = LLM(model, "eager").generate([young], params)
    llm = LLM(model, "eager", kv_blocks=kv_blocks)
    older = llm.add(old, SamplingParams(max_new_tokens=generated + 8))
    younger, lengths, lost = llm.add(young, params), [], None
    while younger.finish_reason is None:
        if younger in llm.step():
            lengths.append(len(younger.token_ids))
        if llm.scheduler.num_preemptions and lost is None:
            lost = len(younger.token_ids)
    assert (llm.scheduler.num_preemptions, lost) == (1, generated)
    assert older.finish_reason == "length"
    assert lengths == list(range(1, 25))  # no token twice, and those from before count
    assert younger.token_ids == expected.token_ids


def test_small_requests_behind_one_that_is_refused_finish():
    """SCH-1, with an engine."""
    llm, params = LLM(make_model(), kv_blocks=4), SamplingParams(temperature=0, max_new_tokens=8)
    one = llm.add([1] * 10, params)
    with pytest.raises(ValueError, match=r"needs 5 KV blocks .* the cache has 4"):
        llm.add([1] * 70, params)
    two = llm.add([2] * 10, params)
    while one.finish_reason is None or two.finish_reason is None:
        assert llm.step()
    assert len(one.token_ids) == len(two.token_ids) == 8


def test_the_executor_does_not_run_where_there_is_nothing_to_do():
    llm = LLM(make_model())
    llm.executor.run = lambda: pytest.fail("ran")
    assert llm.step() == []
    assert llm.stats.steps == 0


# Bookkeeping needs no torch


@pytest.mark.parametrize("module", ["scheduler", "options", "generate"])
def test_light_modules_do_not_load_torch(module):
    code = f"import sys, nanograph.{module}; assert 'torch' not in sys.modules"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
