"""Run the same requests in several modes, step by step, and show where they differ: logits, launches, time.

    python -m nanograph.diff --modes eager,breakable,full --at-bucket

All engines compute the same schedules: the tokens of the first drive all of them, so that a difference stays where it
arose. Where logits differ, the run is repeated with taps in the model, which tell the first operation that parts: the
run that is measured has none. Modes may differ in the last bits where their shapes do, eager being unpadded; with
--at-bucket every mode computes the padded shape, and any difference is a fault (exit code 1).

Times are of single runs: bench.py measures. Read first: engine.py, explain.py.
"""

import json
import sys
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import NamedTuple

from nanograph.generate import CommandLine, add_engine_arguments, exit_code, open_llms
from nanograph.options import SamplingParams
from nanograph.scheduler import Request


@dataclass
class Row:
    """One step of one engine, or several alike. Differences are to the first engine of the comparison."""

    steps: str  # "3", or "3-9" where rows have been joined
    kind: str  # "prefill", "decode" or "mixed"
    engine: str
    num_tokens: int
    num_rows: int  # with padding: the bucket
    launched: str  # "eager", "captured" or "replayed"
    max_delta: float  # largest |Δlogit|; 0 where bit-equal, nan where a logit is no number
    agreeing: int  # requests whose likeliest token is the same
    num_requests: int
    kernels: int  # operations that the device runs
    calls: int  # launches by which the CPU asks for them
    host_ms: float  # until the CPU has launched everything; on a CPU, computed it
    device_ms: float | None  # until the GPU has run everything
    parted: str = ""  # the first operation whose results differ

    @property
    def differs(self):
        return self.max_delta != 0  # so is nan


class Outcome(NamedTuple):
    """What one engine made of a step."""

    logits: object  # float32 [num_requests, vocab]
    launched: str
    calls: int
    kernels: int
    host_ms: float
    device_ms: float | None


def compare(llms, prompts, max_new_tokens=16):
    """Run prompts greedily through idle LLMs over the same model, in lockstep.

    prompts: texts or lists of token ids. Returns a list of Rows: for each step one for each LLM. Raises ValueError for
    prompts that are refused and for LLMs whose schedules differ.
    """
    import torch

    token_ids = [llms[0].tokenizer.encode(p) if isinstance(p, str) else llms[0]._check_ids(p) for p in prompts]
    with torch.no_grad():
        steps = list(lockstep(llms, token_ids, max_new_tokens, measure))
        rows = [row for number, step in enumerate(steps, 1) for row in make_rows(llms, number, *step)]
        if any(row.differs for row in rows):
            find_parting(llms, rows, token_ids, max_new_tokens)
    return rows


def lockstep(llms, token_ids, max_new_tokens, run):
    """Compute requests in all LLMs. Yields, after each step, its kind and what `run(llm)` returned for each LLM."""
    from nanograph.engine import step_kind

    params = SamplingParams(temperature=0, max_new_tokens=max_new_tokens, ignore_eos=True)
    try:
        for llm in llms:
            for number, ids in enumerate(token_ids):
                llm.scheduler.add(Request(f"diff {number}", list(ids), params, seed=0))
        while llms[0].scheduler.requests:
            plans = [llm.scheduler.schedule() for llm in llms]
            if len({tuple((request.request_id, count) for request, count in plan) for plan in plans}) > 1:
                raise ValueError("the schedules differ: give all LLMs the same limits and kv_blocks")
            for llm, plan in zip(llms, plans):
                llm.batch.fill(plan, llm.executor.bucket_for(sum(count for _, count in plan)))
            outcomes = [run(llm) for llm in llms]
            yield step_kind(plans[0]), outcomes
            advanced = sum(count == request.num_uncomputed for request, count in plans[0])
            tokens = outcomes[0].logits[:advanced].argmax(-1).tolist()
            for llm, plan in zip(llms, plans):
                llm.scheduler.update(plan, tokens)
    finally:
        for llm in llms:
            for request in llm.scheduler.requests:
                llm.scheduler.cancel(request.request_id)


def measure(llm):
    """Compute the step that the batch holds. What is counted afterwards runs the step again, which changes nothing."""
    import torch

    executor, stats, on_gpu = llm.executor, llm.executor.stats, llm.device.type == "cuda"
    captures, replays = stats.captures, stats.replays
    if on_gpu:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
    started = perf_counter()
    logits = executor.run()
    host_ms = 1e3 * (perf_counter() - started)
    if on_gpu:
        end.record()
        end.synchronize()
    logits = logits.clone()
    launched = "captured" if stats.captures > captures else "replayed" if stats.replays > replays else "eager"
    return Outcome(logits, launched, *count_launches(llm), host_ms, begin.elapsed_time(end) if on_gpu else None)


def count_launches(llm):
    """(calls of the CPU, kernels that they launch) to compute the batch's step: seen by the profiler on CUDA."""
    executor = llm.executor
    if llm.device.type == "cuda":
        lanes = Counter(span.lane for span in cuda_spans(executor))
        return lanes["CPU"], lanes["GPU"]
    calls, graph = executor.count_launches(), getattr(executor, "graphs", {}).get(llm.batch.num_rows)
    return calls, calls + sum(len(segment.operations) - 1 for segment in (graph.segments if graph else []))


def make_rows(llms, step, kind, outcomes):
    wanted = outcomes[0].logits
    for llm, outcome in zip(llms, outcomes):
        logits, *measured = outcome
        agreeing = int((logits.argmax(-1) == wanted.argmax(-1)).sum())
        launched, calls, kernels, host_ms, device_ms = measured
        yield Row(...)


class Taps:
    """Copies of what each operation of a forward has returned, in fixed buffers.

    They are taken by forward hooks, which a capture records like everything else: so that a replay fills the buffers,
    too, they must be on when the graph is captured. The model knows nothing of them.
    """

    def __init__(self, llm):
        self.llm, self.buffers = llm, {}

    def run(self):
        """Compute the step that the LLM's batch holds, with taps. Returns its logits, and keeps what they were made of."""
        model = self.llm.model
        watched = [("embedding", model.embedding), ("positions", model.positions)]
        for layer, block in enumerate(model.blocks):
            watched += [(f"layer {layer} {name}", module) for name, module in block.named_children()]
        hooks = [module.register_forward_hook(partial(self.copy, name)) for name, module in watched if module]
        try:
            return self.llm.executor.run()
        finally:
            for hook in hooks:
                hook.remove()

    def copy(self, name, module, args, result):
        if name not in self.buffers:  # in an eager run or the warm-up of a capture
            self.buffers[name] = result.new_empty(self.llm.options.max_batch_tokens, *result.shape[1:])
        self.buffers[name][: result.shape[0]].copy_(result)

    def part_from(self, other):
