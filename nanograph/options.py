"""What a caller may ask for, and what is refused: modes, breaks, buckets, sampling parameters.

This module imports nothing heavy, so that a command line can refuse a bad argument before torch is loaded.
Every refusal is a ValueError whose message is one line: what was wrong, and what to do.

Read first: nothing. Read next: scheduler.py.
"""

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from os import PathLike

MODES = ("eager", "breakable", "full")
KERNELS = ("reference", "triton")
DTYPES = ("float32", "float16", "bfloat16")
RANDOM_WEIGHTS = ("nano", "gpt2", "gpt-oss-20b", "gpt-oss-120b")
# The operations of a block, in the order in which it runs them. `moe` is the feed-forward half, of experts or (GPT-2)
# dense.
BREAKS = ("norm", "qkv", "rotary", "attention", "attention_output", "moe")


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are drawn, and when the request ends.

    temperature: divides the logits; 0 is greedy (the largest logit; of equal ones the first).
    top_k: keep the k likeliest tokens; None or 0 keeps all.
    top_p: of those, keep the smallest set whose probability reaches p (renormalized after top_k; Holtzman et al. 2020).
    max_new_tokens: the most tokens to generate. A request also ends where its context is full ("length").
    seed: fixes the drawn numbers. Without one, a seed is drawn and returned with the result.
    stop: strings that end the request; they are not part of its text.
    ignore_eos: go on past the model's end-of-text tokens.

    Raises ValueError, naming the field.
    """

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float = 0.9
    max_new_tokens: int = 200
    seed: int | None = None
    stop: Sequence[str] = ()
    ignore_eos: bool = False

    def __post_init__(self):
        largest = sys.float_info.max
        check_number("temperature", self.temperature, lambda t: 0 <= t <= largest, "a finite number, 0 or more")
        check_number("top_p", self.top_p, lambda p: 0 < p <= 1, "in (0, 1]")
        check_integer("max_new_tokens", self.max_new_tokens, minimum=1)
        if self.top_k is not None:
            check_integer("top_k", self.top_k, minimum=0)
        if self.seed is not None:
            check_integer("seed", self.seed)
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, (list, tuple)) or not all(isinstance(text, str) and text for text in stop):
            raise ValueError(f"stop must be non-empty strings, not {self.stop!r}")
        object.__setattr__(self, "stop", tuple(stop))


def check_number(name, value, in_range, wanted):
    """Raise ValueError unless `value` is a real number of which `in_range` (False of NaN) holds."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not in_range(value):
        raise ValueError(f"{name} must be {wanted}, not {value!r}")


def check_integer(name, value, minimum=None):
    """Raise ValueError unless `value` is an int (bool is none) of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, not {value!r}")
    if minimum is not None and value < minimum:
        raise ValueError(f"{name} must be {minimum} or more, not {value}")


def check_type(name, value, types, wanted):
    """Raise ValueError unless `value` is an instance of `types`."""
    if not isinstance(value, types):
        raise ValueError(f"{name} must be {wanted}, not a {type(value).__name__}")


def check_choice(name, value, choices):
    """Raise ValueError, listing the choices, unless `value` is one of them."""
    if value not in choices:
        raise ValueError(f"unknown {name} {value!r}: choose from {', '.join(choices)}")


def parse_breaks(breaks):
    """Names of the operations that run eagerly between graph segments.

    breaks: "attention", "attention,moe", "all", or a list of names.
    Returns a frozenset of names of BREAKS. Raises ValueError for a name that does not exist, listing those that do.
    """
    names = [name.strip() for name in breaks.split(",")] if isinstance(breaks, str) else breaks
    if not isinstance(names, Collection) or not names:
        raise ValueError(f"breaks must name operations, not {breaks!r}: for a graph without breaks use mode full")
    for name in names:
        check_choice("break", name, (*BREAKS, "all"))
    return frozenset(BREAKS if "all" in names else names)


def bucket_ladder(max_batch_tokens):
    """The default buckets: 1, 2, 3, 4, then four rungs for each doubling, up to `max_batch_tokens`, always the last.

    With rungs a quarter of a power of two apart, fewer than 20 % of a bucket's rows are padding.

    >>> bucket_ladder(20)
    [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20]
    >>> bucket_ladder(9)
    [1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    rungs = [1, 2, 3] + [step * 2**power for power in range(max_batch_tokens.bit_length()) for step in (4, 5, 6, 7)]
    return [rung for rung in rungs if rung < max_batch_tokens] + [max_batch_tokens]


def parse_buckets(buckets, max_batch_tokens):
    """The ascending list of buckets: None for the default ladder, "64,256", or a list of integers.

    Raises ValueError where they are not positive integers in ascending order, or the largest exceeds
    `max_batch_tokens`.
    """
    if buckets is None:
        return bucket_ladder(max_batch_tokens)
    try:
        buckets = list(map(int, buckets.split(","))) if isinstance(buckets, str) else list(buckets)
    except (TypeError, ValueError):
        raise ValueError(f"buckets must be integers separated by commas, not {buckets!r}") from None
    for bucket in buckets:
        check_integer("each bucket", bucket, minimum=1)
    if not buckets or any(a >= b for a, b in pairwise(buckets)):
        raise ValueError(f"buckets must be positive and ascending, not {buckets}")
    if buckets[-1] > max_batch_tokens:
        raise ValueError(f"bucket {buckets[-1]} exceeds max_batch_tokens={max_batch_tokens}: raise that, or drop it")
    return buckets


@dataclass(frozen=True)
class EngineOptions:
    """How an LLM computes. Raises ValueError, naming the option.

    model: "nano" (shipped), a checkpoint folder, a repository of Hugging Face (as openai-community/gpt2; needs
    nanograph[hub]), or a GPT that is already built: then without text (token ids only), and where, in what dtype and
    with which kernels it computes was decided when it was built.
    mode: "eager", "breakable" or "full". device: "auto" (CUDA where there is a GPU), "cpu", "cuda" or "cuda:1".
    dtype: one of DTYPES; None computes in float32 on the CPU and in the checkpoint's own dtype on CUDA. A card without
    bfloat16 computes in float16 instead, which nobody has measured.
    max_batch_tokens: the most tokens of one step. max_requests: the most requests of one step.
    max_context: the most tokens of one request; None for the smaller of the model's and 8,192.
    kv_blocks: KV cache blocks of 16 tokens; None for what max_requests can use, if memory allows.
    buckets: see parse_buckets. breaks: see parse_breaks (mode breakable alone uses them).
    kernels: "reference" or "triton"; None takes the fastest there is. capture: "lazy", on first use, or "ahead".
    pad_to_bucket: pad the steps of mode eager as the other modes do, to compare at equal shapes.
    random_weights: one of RANDOM_WEIGHTS: instead of a checkpoint, a model of that published shape with random weights.
    """

    model: object = "nano"
    mode: str = "breakable"
    device: str = "auto"
    dtype: str | None = None
    max_batch_tokens: int = 2048
    max_requests: int = 64
    max_context: int | None = None
    kv_blocks: int | None = None
    buckets: object = None
    breaks: object = "attention"
    kernels: str | None = None
    capture: str = "lazy"
    pad_to_bucket: bool = False
    random_weights: str | None = None

    def __post_init__(self):
        check_choice("mode", self.mode, MODES)
        check_choice("capture", self.capture, ("lazy", "ahead"))
        if self.dtype is not None:
            check_choice("dtype", self.dtype, DTYPES)
        if self.kernels is not None:
            check_choice("kernels", self.kernels, KERNELS)
        if self.random_weights is not None:
            check_choice("random_weights", self.random_weights, RANDOM_WEIGHTS)
            if isinstance(self.model, (str, PathLike)) and self.model != "nano":
                raise ValueError(f"random_weights {self.random_weights} and model {self.model}: give one of them")
        for name in ("max_batch_tokens", "max_requests", "max_context", "kv_blocks"):
            if getattr(self, name) is not None or name in ("max_batch_tokens", "max_requests"):
                check_integer(name, getattr(self, name), minimum=1)
        object.__setattr__(self, "buckets", parse_buckets(self.buckets, self.max_batch_tokens))
        object.__setattr__(self, "breaks", parse_breaks(self.breaks))
