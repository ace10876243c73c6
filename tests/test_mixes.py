"""Long prompts, late arrivals and a cache too small for them all: every request's tokens are those of the request
alone.

The fuzz test draws many small mixes; these are few and large: prompts of up to 900 tokens, cut into chunks, preempted
and computed again. `-m slow` runs fifty.
"""

import dataclasses
import random

import pytest
from conftest import GPU, NANO, make_model

from nanograph import LLM, SamplingParams

LONG = dataclasses.replace(NANO, max_positions=1024)


def draw_mix(rng, longest):
    """[(arrival step, prompt, params)], between 4 and 8 of them."""
    requests = []
    for index in range(rng.randint(4, 8)):
        prompt = [
            rng.randrange(LONG.vocab_size) for _ in range(rng.choice([1, 15, 16, 17, 130, rng.randint(1, longest)]))
        ]
        params = SamplingParams(
            temperature=rng.choice([0.0, 1.0]),
            seed=index,
            max_new_tokens=rng.randint(1, 100),
            top_p=rng.choice([1.0, 0.9]),
        )
        requests.append((rng.randint(0, 20), prompt, params))
    return requests


def run_mix(llm, requests):
    """Tokens of each request, added in the step of its arrival."""
    results, step = {}, 0
    while len(results) < len(requests) or any(result.finish_reason is None for result in results.values()):
        for index, (arrival, prompt, params) in enumerate(requests):
            if arrival == step:
                results[index] = llm.add(prompt, params)
        llm.step()
        llm.scheduler.check()
        step += 1
    assert llm.scheduler.allocator.num_free == llm.scheduler.allocator.num_blocks
    return [results[index].token_ids for index in range(len(requests))]


def check_mixes(num_mixes, longest, kv_blocks, device):
    model, rng, preemptions = make_model(LONG, device), random.Random(0), 0
    alone = LLM(model, mode="eager", max_batch_tokens=1024)
    engines = [
        LLM(model, mode=mode, max_batch_tokens=128, kv_blocks=kv_blocks) for mode in ("eager", "breakable", "full")
    ]
    for _ in range(num_mixes):
        requests = draw_mix(rng, longest)
        expected = [alone.generate([prompt], params)[0].token_ids for _, prompt, params in requests]
        for llm in engines:
            assert run_mix(llm, requests) == expected, llm.options.mode
    preemptions = [llm.scheduler.num_preemptions for llm in engines]
    print(f"{num_mixes} mixes, preemptions by mode: {preemptions}")
    assert min(preemptions) > 0


def test_mixes():
    check_mixes(3, 60, 15, "cpu")


@pytest.mark.slow
def test_fifty_mixes():
    check_mixes(50, 900, 62, GPU or "cpu")
