"""The models once more, naively, for tests to compare with: one sequence in float64, no cache, no pages, no batch.

Attention is one softmax over the whole sequence, the mixture of experts a loop over tokens. Nothing is shared with the
package but the weights.
"""

import math

import torch


def attend(q, k, v, window=0, sinks=None, scale=None):
    """Causal attention of one sequence. q [queries, H, D], its last tokens; k, v [keys, Hkv, D]. -> [queries, H, D]."""
    heads, keys = q.shape[1], k.shape[0]
    out = torch.zeros_like(q)
    for row, position in enumerate(range(keys - q.shape[0], keys)):
        first = max(0, position - window + 1) if window else 0
        for head in range(heads):
            shared = head // (heads // k.shape[1])
            scores = k[first : position + 1, shared] @ q[row, head] * (scale or q.shape[2] ** -0.5)
            if sinks is not None:
                scores = torch.cat([scores, sinks[head : head + 1].to(scores)])
            weights = scores.softmax(0)[: position + 1 - first]
            out[row, head] = weights @ v[first : position + 1, shared]
    return out


def rotate(x, theta):
    """Turn each pair (i, i + D/2) of a head by position * theta ** (-2 i / D). x [tokens, heads, D]."""
    half = x.shape[2] // 2
    out = x.clone()
    for i in range(half):
        angles = torch.arange(x.shape[0], dtype=x.dtype)[:, None] * theta ** (-i / half)
        first, second = x[:, :, i], x[:, :, half + i]
        out[:, :, i] = first * angles.cos() - second * angles.sin()
        out[:, :, half + i] = second * angles.cos() + first * angles.sin()
    return out


def swiglu(gate_up, limit):
    gate, up = gate_up[::2].clamp(max=limit), gate_up[1::2].clamp(min=-limit, max=limit)
    return (up + 1) * gate / (1 + torch.exp(-1.702 * gate))


def experts(x, mlp):
    """Each token through its experts, one after the other. x [tokens, hidden]."""
    out = torch.zeros_like(x)
    for token, row in enumerate(x):
        scores = linear(row, mlp.router)
        chosen = scores.argsort(descending=True)[: mlp.experts_per_token]
        shares = (scores[chosen] - scores.max()).exp()
        shares = shares / shares.sum()
        for share, expert in zip(shares, chosen):
            hidden = swiglu(mlp.gate_up[expert].double() @ row + mlp.gate_up_bias[expert].double(), mlp.limit)
            out[token] += share * (mlp.down[expert].double() @ hidden + mlp.down_bias[expert].double())
    return out


def linear(x, layer):
    out = x @ layer.weight.double().T
    return out if layer.bias is None else out + layer.bias.double()


def normalize(x, norm, config):
    if config.norm == "layer":
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + config.norm_eps).sqrt() * norm.weight.double()
    return x + norm.bias.double() if config.norm == "layer" else x


@torch.no_grad()
def dense_logits(model, token_ids):
    """Logits at every position of a sequence: float64 [tokens, vocab]."""
    config = model.config
    x = model.embedding.weight[token_ids].double()
    if config.rope is None:
        x = x + model.positions.weight[: len(token_ids)].double()
    for layer, block in enumerate(model.blocks):
        qkv = linear(normalize(x, block.attention_norm, config), block.qkv).unflatten(1, (-1, config.head_dim))
        q, k, v = qkv.split([config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        if config.rope:
            q, k = rotate(q, config.rope.theta), rotate(k, config.rope.theta)
        mixed = attend(q, k, v, config.windows[layer] if config.windows else 0, block.attention.sinks)
        x = x + linear(mixed.flatten(1), block.attention_output)
        normed = normalize(x, block.mlp_norm, config)
        x = x + (experts(normed, block.mlp) if config.num_experts else dense_mlp(normed, block.mlp))
    return linear(normalize(x, model.norm, config), model.head)


def dense_mlp(x, mlp):
    x = linear(x, mlp.up)
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return linear(x / 2 * (1 + inner.tanh()), mlp.down)


def assert_close(actual, expected, bound=1e-4):
    """The bound for float32 against another implementation: largest difference below 1e-4 of the largest value."""
    difference, scale = (actual - expected).abs().max().item(), expected.abs().max().item()
    assert actual.shape == expected.shape
    assert difference < bound * scale, f"largest difference {difference:.2e}, largest value {scale:.2e}"


def assert_greedy(model, prompt, token_ids):
    """`token_ids` are the likeliest tokens after `prompt`, one after the other."""
    logits = dense_logits(model, [*prompt, *token_ids[:-1]])[len(prompt) - 1 :]
    assert logits.argmax(-1).tolist() == list(token_ids)
