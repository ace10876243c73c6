"""The model: GPT-2 and gpt-oss in one file. nano, the model that ships with nanograph, is a small gpt-oss.

A step is T tokens of R requests, laid end to end: every tensor is [T, ...], without a batch dimension. All that the
model knows of requests, caches and buckets it reads from `batch` (batch.py). All that it knows of CUDA graphs is the
marker `@graph_break`: the places where a breakable graph may be cut.

Each operation of a block is a module, so that a forward hook can watch it. Parts come first, the model last; to read
from the top down, begin at `GPT`. What the parts call is in kernels/reference.py.

Read first: batch.py. Read next: kernels/reference.py, then capture.py.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from nanograph.capture import graph_break
from nanograph.kernels.reference import Mxfp4


@dataclass(frozen=True)
class Rope:
    """Rotary positions, stretched by YaRN (Peng et al. 2023) where `factor` > 1."""

    theta: float
    factor: float = 1.0
    original_max_positions: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None  # None: 0.1 ln(factor) + 1


@dataclass(frozen=True)
class Config:
    """Shape and constants of a model. The defaults are gpt-oss's; `gpt2` shows what differs there."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_positions: int
    norm: str = "rms"  # or "layer" (GPT-2)
    norm_eps: float = 1e-5
    rope: Rope | None = None  # None: learned positions (GPT-2)
    windows: tuple[int, ...] = ()  # per layer: keys that a query sees, itself included; 0 for all
    sinks: bool = True
    num_experts: int = 0  # 0: a dense feed-forward layer (GPT-2)
    experts_per_token: int = 0
    mxfp4: bool = False  # the experts' weights are packed, four bits each
    swiglu_limit: float = 7.0
    tie_embeddings: bool = False
    eos_ids: tuple[int, ...] = ()


def rotary_table(rope, head_dim, max_context, device):
    """Cosines and sines of every position: float32 [2, max_context, head_dim / 2].

    YaRN: dimensions that turn more than `beta_fast` times within the original context keep their frequency, those that
    turn less than `beta_slow` times are slowed by `factor`, and a ramp lies between. Attention is sharpened by
    `attention_factor`.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    periods = rope.theta**exponents
    frequencies = 1.0 / periods
    if rope.factor > 1.0:
        low, high = (
            head_dim * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
            for turns in (rope.beta_fast, rope.beta_slow)
        )
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        ramp = ((torch.arange(head_dim // 2, device=device) - low) / (high - low or 1e-3)).clamp(0, 1)
        frequencies = 1.0 / (rope.factor * periods) * ramp + frequencies * (1 - ramp)
    attention_factor = 0.1 * math.log(rope.factor) + 1.0 if rope.attention_factor is None else rope.attention_factor
    angles = torch.outer(torch.arange(max_context, dtype=torch.float32, device=device), frequencies)
    return torch.stack([angles.cos(), angles.sin()]) * attention_factor


class RMSNorm(nn.Module):
    def __init__(self, config, ops):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.hidden_size))
        self.eps, self.ops = config.norm_eps, ops

    @graph_break("norm")
    def forward(self, x):
        return self.ops.rms_norm(x, self.weight, self.eps)


class LayerNorm(nn.LayerNorm):
    def __init__(self, config, ops):
        super().__init__(config.hidden_size, eps=config.norm_eps)

    forward = graph_break("norm")(nn.LayerNorm.forward)


class QKV(nn.Linear):
    """Queries, keys and values in one product: [T, hidden] -> [T, (H + 2 Hkv) * D]."""

    def __init__(self, config):
        super().__init__(config.hidden_size, (config.num_heads + 2 * config.num_kv_heads) * config.head_dim)

    forward = graph_break("qkv")(nn.Linear.forward)


class Rotary(nn.Module):
    """Turn queries and keys by their positions and write keys and values into the paged cache: qkv -> queries [T, H,
    D]."""

    def __init__(self, layer, table, ops):
        super().__init__()
        self.layer, self.ops = layer, ops
        self.table = table  # no parameter or buffer: it stays float32 whatever the model's dtype

    @graph_break("rotary")
    def forward(self, qkv, batch):
        k_cache, v_cache = batch.kv_cache.layer(self.layer)
        return self.ops.rotate_and_cache(qkv, self.table, batch.positions, k_cache, v_cache, batch.slot_mapping)


class Attention(nn.Module):
    """Ragged queries over the paged cache. The one operation whose work depends on every request's length."""

    def __init__(self, config, layer, ops):
        super().__init__()
        self.layer, self.ops = layer, ops
        self.window = config.windows[layer] if config.windows else 0
        self.scale = config.head_dim**-0.5
        self.sinks = nn.Parameter(torch.zeros(config.num_heads)) if config.sinks else None

    @graph_break("attention")
    def forward(self, q, batch):
        who = (batch.cu_seqlens_q, batch.seq_lens, batch.block_tables)
        how = (self.sinks, self.window, self.scale, batch.max_seq_len)
        return self.ops.paged_attention(q, *batch.kv_cache.layer(self.layer), *who, *how).flatten(1)


class AttentionOutput(nn.Linear):
    """[T, H * D] -> [T, hidden]."""

    def __init__(self, config):
        super().__init__(config.num_heads * config.head_dim, config.hidden_size)

    forward = graph_break("attention_output")(nn.Linear.forward)


class MLP(nn.Module):
    """GPT-2's dense feed-forward layer."""

    def __init__(self, config, ops):
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size)

    @graph_break("moe")
    def forward(self, x, batch):
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class MoE(nn.Module):
    """gpt-oss's mixture of experts: each token goes through the k experts that its router scores highest."""

    def __init__(self, config, ops):
        super().__init__()
        experts, hidden, inner = config.num_experts, config.hidden_size, config.intermediate_size
        self.ops, self.experts_per_token, self.limit = ops, config.experts_per_token, config.swiglu_limit
        self.router = nn.Linear(hidden, experts)
        self.add_weight("gate_up", experts, 2 * inner, hidden)
        self.gate_up_bias = nn.Parameter(torch.zeros(experts, 2 * inner))
        self.add_weight("down", experts, hidden, inner)
        self.down_bias = nn.Parameter(torch.zeros(experts, hidden))

    def add_weight(self, name, *shape):
        setattr(self, name, nn.Parameter(torch.empty(shape)))

    @graph_break("moe")
    def forward(self, x, batch):
        routing = self.ops.route(self.router(x), self.experts_per_token, batch.cu_seqlens_q[-1:])
        hidden = self.ops.expert_gate_up(x, self.gate_up, self.gate_up_bias, routing, self.limit)
        return self.ops.expert_down(hidden, self.down, self.down_bias, routing)


class PackedMoE(MoE):
    """The same over MXFP4 weights: what was a parameter is two, its blocks and its scales, read as one Mxfp4."""

    def add_weight(self, name, experts, rows, columns):
        for part, width in (("blocks", [columns // 32, 16]), ("scales", [columns // 32])):
            packed = torch.empty(experts, rows, *width, dtype=torch.uint8)
            setattr(self, f"{name}_{part}", nn.Parameter(packed, requires_grad=False))

    gate_up = property(lambda self: Mxfp4(self.gate_up_blocks.flatten(-2), self.gate_up_scales))
    down = property(lambda self: Mxfp4(self.down_blocks.flatten(-2), self.down_scales))


class Block(nn.Module):
    def __init__(self, config, layer, table, ops):
        super().__init__()
        Norm = RMSNorm if config.norm == "rms" else LayerNorm
        self.attention_norm = Norm(config, ops)
        self.qkv = QKV(config)
        self.rotary = Rotary(layer, table, ops)
        self.attention = Attention(config, layer, ops)
        self.attention_output = AttentionOutput(config)
        self.mlp_norm = Norm(config, ops)
        Experts = PackedMoE if config.mxfp4 else MoE
        self.mlp = Experts(config, ops) if config.num_experts else MLP(config, ops)

    def forward(self, x, batch):
        q = self.rotary(self.qkv(self.attention_norm(x)), batch)
        x = x + self.attention_output(self.attention(q, batch))
        return x + self.mlp(self.mlp_norm(x), batch)


def unfilled_embedding(rows, columns):
    """nn.Embedding draws normal numbers, for which the meta device would first import half of torch: 1.5 seconds."""
    return nn.Embedding.from_pretrained(torch.empty(rows, columns), freeze=False)


class GPT(nn.Module):
    """config: the shape; ops: a set of kernels (kernels/reference.py or kernels/triton); max_context: positions to
    serve.

    device: where the rotary table lies; parameters are made on torch's current default device.
    """

    def __init__(self, config, ops, max_context, device):
        super().__init__()
        self.config, self.max_context = config, max_context
        table = rotary_table(config.rope, config.head_dim, max_context, device) if config.rope else None
        self.embedding = unfilled_embedding(config.vocab_size, config.hidden_size)
        self.positions = None if config.rope else unfilled_embedding(config.max_positions, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config, layer, table, ops) for layer in range(config.num_layers))
        self.norm = (RMSNorm if config.norm == "rms" else LayerNorm)(config, ops)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight

    def hidden_states(self, batch):
        """The last block's output, [T, hidden]."""
        x = self.embedding(batch.input_ids)
        if self.positions is not None:
            x = x + self.positions(batch.positions)
        for block in self.blocks:
            x = block(x, batch)
        return x

    def forward(self, batch):
        """Logits of the rows that `batch.logits_indices` names, [R, vocab]: one row a request, not one a token."""
        return self.head(self.norm(self.hidden_states(batch)[batch.logits_indices]))
