"""The three modes. Read eager.py, full.py and breakable.py in this order, best as diffs of one to the next.

Each executor has the same face: `bucket_for(num_tokens)` says how many rows the next batch is padded to (None: not
padded), `run()` computes the logits of the step that the batch holds, `count_launches()` says what that takes,
`graphs` are those captured so far, by bucket, `graph_bytes()` what they hold, and `capture_ahead()` captures every
bucket before the first step.
"""

import sys
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from time import perf_counter

from torch.utils._python_dispatch import TorchDispatchMode

from nanograph.capture import CudaPool
from nanograph.tape import TapePool


@dataclass
class Stats:
    """What the executor and the engine have done so far."""

    steps: int = 0
    eager_steps: int = 0  # launched kernel by kernel: all of them in mode eager; elsewhere too large, or not capturable
    captures: int = 0
    replays: int = 0
    breaks_run: int = 0
    padded_rows: int = 0
    graph_bytes: int = 0
    steps_by_kind: Counter = field(default_factory=Counter)  # "prefill", "decode", "mixed"
    tokens_by_kind: Counter = field(default_factory=Counter)  # tokens computed in steps of that kind
    seconds_by_kind: Counter = field(default_factory=Counter)

    def count_step(self, kind, num_tokens, num_rows, seconds):
        self.steps += 1
        self.padded_rows += num_rows - num_tokens
        self.steps_by_kind[kind] += 1
        self.tokens_by_kind[kind] += num_tokens
        self.seconds_by_kind[kind] += seconds


def make_pool(device):
    """Memory for graphs: of CUDA graphs on a GPU, of tapes elsewhere."""
    return CudaPool(device) if device.type == "cuda" else TapePool()


def smallest_bucket(buckets, num_tokens):
    """The smallest bucket that holds `num_tokens`, or None."""
    return next((bucket for bucket in buckets if bucket >= num_tokens), None)


class OperationTimer(TorchDispatchMode):
    """Notes the operations that compute, each at least one kernel launch on a GPU: [(name, began, ended)], seconds."""

    def __init__(self):
        super().__init__()
        self.times = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        began = perf_counter()
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.times.append((str(func), began, perf_counter()))
        return result


def count_operations(function):
    """Operations that `function()` launches one by one: torch's, and Triton's kernels, which torch does not see."""
    launches, triton = [], sys.modules.get("triton")
    hook = triton.knobs.runtime.launch_enter_hook if triton else None
    with OperationTimer() as timer, ExitStack() as stack:
        if hook:
            hook.add(launches.append)
            stack.callback(hook.remove, launches.append)
        function()
    return len(timer.times) + len(launches)
