"""The three modes on a published shape with random weights: `python tutorials/measure_models.py gpt-oss-20b --out
FILE`.

Needs CUDA. For each step of a few requests the logits of the modes are compared bit for bit; then prompts of several
lengths and the decoding of one request are timed: wall time of a step, median of rounds that take the modes in turn.
"""

import argparse
import datetime
import json
import statistics
from pathlib import Path
from time import perf_counter

import torch
from train_nano import machine

from nanograph import LLM, SamplingParams
from nanograph.options import MODES, RANDOM_WEIGHTS

SIZES = (1, 16, 64, 512, 2048)
ROUNDS, DECODED, CONTEXT = 5, 24, 512


def prompt(length, offset=0):
    return [(7 * token + offset) % 50000 for token in range(length)]


def greedy(max_new_tokens):
    return SamplingParams(temperature=0, max_new_tokens=max_new_tokens, ignore_eos=True)


def record(llm):
    """Keep a copy of every step's logits; returns the list and a function that stops."""
    run, logits = llm.executor.run, []
    llm.executor.run = lambda: logits.append(run().clone()) or logits[-1]
    return logits, lambda: setattr(llm.executor, "run", run)


def equal_steps(llms):
    """(steps, steps in which all modes have the same bits) of prompts and decodes, alone and mixed."""
    recordings = [record(llm) for llm in llms]
    for llm in llms:
        for length in (5, 60, 130):
            llm.add(prompt(length, length), greedy(6))
            llm.step()
        while llm.step():
            pass
    for _, stop in recordings:
        stop()
    steps = list(zip(*(logits for logits, _ in recordings)))
    return len(steps), sum(all(torch.equal(step[0], other) for other in step[1:]) for step in steps)


def step_seconds(llm):
    torch.cuda.synchronize()
    began = perf_counter()
    llm.step()
    torch.cuda.synchronize()
    return perf_counter() - began


def prefill(llm, length):
    """Seconds of the step that computes a prompt."""
    result = llm.add(prompt(length), greedy(1))
    seconds = step_seconds(llm)
    assert result.finish_reason == "length"
    return seconds


def decode(llm):
    """Median seconds of a step that adds a token to one request."""
    result = llm.add(prompt(CONTEXT), greedy(DECODED))
    llm.step()
    times = []
    while result.finish_reason is None:
        times.append(step_seconds(llm))
    return statistics.median(times)


def medians(llms, measure):
    """{mode: milliseconds}: the modes in turn, after one round that captures."""
    rounds = [[measure(llm) for llm in llms] for _ in range(ROUNDS + 1)][1:]
    return {mode: round(1e3 * statistics.median(times), 2) for mode, times in zip(MODES, zip(*rounds))}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=RANDOM_WEIGHTS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    options = {"buckets": [16, 64, 512, 2048], "pad_to_bucket": True, "kv_blocks": 1024, "max_context": 4096}
    options |= (
        {"buckets": [1, *options["buckets"]]} if args.shape != "gpt2" else {"max_context": 1024, "buckets": [1, 64]}
    )
    sizes = [size for size in SIZES if size in options["buckets"]]
    began = perf_counter()
    first = LLM(mode="eager", random_weights=args.shape, **options)
    torch.cuda.synchronize()
    result = {"shape": args.shape, "seconds to draw the weights": round(perf_counter() - began, 1)}
    result["weights, GB"] = round(sum(parameter.nbytes for parameter in first.model.parameters()) / 1e9, 2)
    llms = [first, *(LLM(first.model, mode, **options) for mode in MODES[1:])]
    result["steps, bit-equal"] = equal_steps(llms)
    result["decode one request, ms"] = medians(llms, decode)
    result["prefill, ms"] = {size: medians(llms, lambda llm, size=size: prefill(llm, size)) for size in sizes}
    result["peak memory, GB"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
    result["graphs, GB"] = {mode: round(llm.stats.graph_bytes / 1e9, 2) for mode, llm in zip(MODES, llms)}
    head = {"command": f"python tutorials/measure_models.py {args.shape}", "date": datetime.date.today().isoformat()}
    head |= {"torch": torch.__version__, **machine(first.device)}
    for key, value in result.items():
        print(f"{key}: {value}", flush=True)
    if args.out:
        args.out.write_text(json.dumps(head | result, indent=1) + "\n")


if __name__ == "__main__":
    main()
