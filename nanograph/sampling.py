"""From logits to tokens: temperature, top-k, top-p, and one drawn number a request and step.

Random numbers do not come from a generator: a captured graph would freeze its state, and one request's draws would
depend on its neighbours'. Each is a hash of the request's seed and of how many tokens it has generated, in plain
integers; it travels to the device with the batch. The token is where that number falls in the cumulative distribution.

Read first: batch.py. SamplingParams itself is in options.py, which does not need torch.
"""

import torch

from nanograph.options import SamplingParams  # noqa: F401 (where people look for it)

_MASK = 2**64 - 1


def uniform(seed, step):
    """A number in [0, 1) for a request's step-th token: the top 24 bits of SplitMix64 (Steele et al. 2014) of both.

    24 bits are exact in float32 and stay below 1.

    >>> uniform(0, 0) == uniform(0, 0) != uniform(0, 1)
    True
    """
    return (_mix(_mix(seed & _MASK) + step) >> 40) / 2**24


def _mix(x):
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def sample(logits, temperature, top_k, top_p, uniform):
    """Draw one token a row.

    logits [R, vocab] of any float dtype; temperature float32 [R], 0 for greedy; top_k int32 [R], 0 for off; top_p
    float32 [R]; uniform float32 [R] in [0, 1). Returns int64 [R]. A row's token depends on that row alone.

    top_k comes first, then top_p over what it left, renormalized. The cumulative sum runs in the order of the
    vocabulary and in float64: a bf16 or float32 sum over a large vocabulary saturates. Logits that are NaN or all
    infinite mean nothing, but yield a token of the vocabulary all the same: any other would break the next step, for
    every request in it.
    """
    logits = logits.float()
    greedy = logits.argmax(-1)
    # The largest logit becomes 0 before the division, so that a tiny temperature overflows to -inf, never to inf.
    scaled = (logits - logits.amax(-1, keepdim=True)) / torch.where(temperature > 0, temperature, 1.0)[:, None]
    ordered, order = scaled.double().sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(logits.shape[-1], device=logits.device)
    ordered = torch.where((top_k[:, None] == 0) | (ranks < top_k[:, None]), ordered, -torch.inf)
    probs = ordered.softmax(-1)
    before = probs.cumsum(-1) - probs  # probability of all likelier tokens: the likeliest is always kept
    probs = torch.where((before < top_p[:, None]) | (ranks == 0), probs, 0)
    cumulative = torch.zeros_like(probs).scatter(-1, order, probs).cumsum(-1)
    drawn = torch.searchsorted(cumulative, uniform.double()[:, None] * cumulative[:, -1:], right=True).squeeze(-1)
    return torch.where(temperature > 0, drawn.clamp(max=logits.shape[-1] - 1), greedy)
