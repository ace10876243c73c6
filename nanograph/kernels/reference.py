"""Every operation that the model needs beyond plain layers, in plain torch: the slow, readable truth.

The rules for all of them, because they run inside captured graphs (see capture.py):

- shapes depend on the bucket alone, never on a value: what varies from step to step is read from tensors;
- nothing asks the CPU: no `.item()`, no boolean index, no branch on a tensor;
- padding is inert: a row past `num_tokens` reaches no other row, whatever it holds. 0 x NaN is NaN, so what does not
  belong to a sequence is selected away with `torch.where`, never multiplied by zero.

Letters in shapes: T tokens (the bucket's rows), R request slots, H query heads, Hkv key/value heads, D head size,
E experts, k experts per token, B slots in a KV block.

Read first: model.py, which calls these. kernels/triton/ holds the same names again, fused and fast.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

TILE_Q = 16  # query rows that share a tile of keys, where a request may bring more than one row


def rms_norm(x, weight, eps):
    """Divide each row by its root mean square (Zhang & Sennrich 2019), in float32. x [T, hidden] -> [T, hidden]."""
    x32 = x.float()
    x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (weight.float() * x32).to(x.dtype)


def rotate(x, cos, sin):
    """Rotary position embedding (Su et al. 2021) over the two halves of each head, as gpt-oss pairs them.

    x [T, heads, D]; cos, sin float32 [T, 1, D/2]. Returns [T, heads, D] in x's dtype.
    """
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def rotate_and_cache(qkv, rotary_table, positions, k_cache, v_cache, slot_mapping):
    """Rotate queries and keys by their positions; write keys and values into the paged cache.

    qkv [T, (H + 2 Hkv) * D]; rotary_table float32 [2, max_context, D/2] (cos, sin) or None for a model with learned
    positions; positions, slot_mapping int32 [T]; k_cache, v_cache [blocks, B, Hkv, D], written at flat slot `block * B
    + offset`. Returns the queries [T, H, D]. Padded rows carry a slot of the trash block, which nobody reads.
    """
    num_kv_heads, head_dim = k_cache.shape[2:]
    qkv = qkv.view(qkv.shape[0], -1, head_dim)
    q, k, v = qkv.split([qkv.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], dim=1)
    if rotary_table is not None:
        cos, sin = rotary_table[:, positions].unsqueeze(2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    k_cache.view(-1, num_kv_heads, head_dim)[slot_mapping] = k
    v_cache.view(-1, num_kv_heads, head_dim)[slot_mapping] = v
    return q


class QueryTiles(NamedTuple):
    """Which rows each tile of queries holds. N tiles of `tile_q` rows, each of one request."""

    rows: torch.Tensor  # int64 [N, tile_q]: row of the batch
    live: torch.Tensor  # bool [N, tile_q]: False for the unused rows of a tile
    positions: torch.Tensor  # int64 [N, tile_q]: position of the row in its sequence
    requests: torch.Tensor  # int64 [N]: the tile's request slot


def query_tiles(num_rows, cu_seqlens_q, seq_lens):
    """Cut the ragged rows of the batch into tiles that each belong to one request.

    The number of tiles must not depend on values, so it is the most that R requests of T rows can need. A step where
    every row may be a request of its own (T = R) gets tiles of one row.
    """
    num_slots, device = seq_lens.shape[0], seq_lens.device
    tile_q = 1 if num_rows == num_slots else TILE_Q
    num_tiles = num_rows // tile_q + (num_slots if tile_q > 1 else 0)
    starts, query_lens = cu_seqlens_q[:-1].long(), cu_seqlens_q.diff().long()
    tiles_each = (query_lens + tile_q - 1) // tile_q
    tile_ends = tiles_each.cumsum(0)
    tiles = torch.arange(num_tiles, device=device)
    requests = torch.searchsorted(tile_ends, tiles, right=True)
    used = requests < num_slots
    requests = requests.clamp(max=num_slots - 1)
    within = (tiles - (tile_ends - tiles_each)[requests]) * tile_q
    offsets = within[:, None] + torch.arange(tile_q, device=device)  # row's place among its request's rows of this step
    live = used[:, None] & (offsets < query_lens[requests, None])
    rows = (starts[requests, None] + offsets).clamp(0, num_rows - 1)
    positions = offsets + (seq_lens.long() - query_lens)[requests, None]
    return QueryTiles(rows, live, positions, requests)


def key_tile_size(num_query_tiles):
    """Keys taken at a time: the more query tiles, the fewer, so that memory does not grow with context times bucket."""
    return min(256, max(16, 2**16 // num_query_tiles))


def paged_attention(q, k_cache, v_cache, cu_seqlens_q, seq_lens, block_tables, sinks, window, scale, max_seq_len):
    """Causal attention of ragged queries over paged keys and values, with an online softmax (Milakov & Gimelshein
    2018).

    q [T, H, D]; k_cache, v_cache [blocks, B, Hkv, D]; cu_seqlens_q int32 [R + 1]: rows of request r are
    cu_seqlens_q[r] to cu_seqlens_q[r + 1]; seq_lens int32 [R]: its length with those rows, 0 for an unused slot;
    block_tables int32 [R, blocks per request]. sinks [H] or None: a logit per head that takes part in the softmax's
    denominator alone (gpt-oss model card). window: keys that a query sees, itself included; 0 for all.
    max_seq_len: a host bound on seq_lens. A larger bound adds steps that change no bit.
    Returns [T, H, D]; rows of no request are zero.
    """
    num_rows, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    tiles = query_tiles(num_rows, cu_seqlens_q, seq_lens)
    num_tiles, tile_q = tiles.rows.shape
    lengths, tables = seq_lens.long()[tiles.requests, None], block_tables.long()[tiles.requests]
    first_key = torch.zeros_like(tiles.positions[:, :1])
    if window:  # the tile's first query sees `window` keys, its last one tile_q - 1 more
        first_key = (tiles.positions[:, :1] - window + 1).clamp(min=0)
        max_seq_len = min(max_seq_len, window - 1 + tile_q)
    grouped = (num_tiles, tile_q, num_kv_heads, num_heads // num_kv_heads, head_dim)
    queries = (
        (q[tiles.rows].float() * scale).view(grouped).permute(0, 2, 3, 1, 4).flatten(2, 3)
    )  # [N, Hkv, G*tile_q, D]

    # Without sinks the running maximum starts at a finite number: -inf - -inf would be NaN.
    peak = torch.full((*queries.shape[:3], 1), -1e30, device=q.device)
    total, mixed = torch.zeros_like(peak), torch.zeros_like(queries)
    if sinks is not None:
        peak = sinks.float().view(1, num_kv_heads, -1, 1).expand(num_tiles, -1, -1, tile_q).flatten(2)[..., None]
        total = torch.ones_like(peak)
    tile_k = key_tile_size(num_tiles)
    for offset in range(0, max_seq_len, tile_k):
        key_positions = first_key + offset + torch.arange(tile_k, device=q.device)  # [N, tile_k]
        exists = key_positions < lengths
        blocks = tables.gather(1, (key_positions // block_size).clamp(max=tables.shape[1] - 1))
        slots = torch.where(exists, blocks * block_size + key_positions % block_size, 0)
        keys = k_cache.view(-1, num_kv_heads, head_dim)[slots].float().transpose(1, 2)  # [N, Hkv, tile_k, D]
        values = v_cache.view(-1, num_kv_heads, head_dim)[slots].float()
        values = torch.where(exists[..., None, None], values, 0).transpose(1, 2)
        seen = exists[:, None] & (key_positions[:, None] <= tiles.positions[..., None])  # [N, tile_q, tile_k]
        if window:
            seen &= key_positions[:, None] > tiles.positions[..., None] - window
        scores = (queries @ keys.transpose(-1, -2)).unflatten(2, (-1, tile_q))
        scores = torch.where(seen[:, None, None], scores, -torch.inf).flatten(2, 3)
        new_peak = torch.maximum(peak, scores.amax(-1, keepdim=True))
        shrink, weights = torch.exp(peak - new_peak), torch.exp(scores - new_peak)
        total = total * shrink + weights.sum(-1, keepdim=True)
        mixed = mixed * shrink + weights @ values
        peak = new_peak
    mixed = (mixed / total).unflatten(2, (-1, tile_q)).permute(0, 3, 1, 2, 4).reshape(-1, num_heads, head_dim)
    out = q.new_zeros(num_rows + 1, num_heads, head_dim)  # the spare last row takes what belongs to no request
    out[torch.where(tiles.live, tiles.rows, num_rows).flatten()] = mixed.to(q.dtype)
    return out[:num_rows]


class Routing(NamedTuple):
    """Which expert computes which token. The T * k (token, slot) pairs are sorted by expert: sorted rows."""

    weights: torch.Tensor  # float32 [T, k]: share of each slot in its token's output
    token_of_row: torch.Tensor  # int64 [T * k]: sorted row -> token
    row_of_slot: torch.Tensor  # int64 [T, k]: the token's slot -> sorted row
    expert_of_row: torch.Tensor  # int64 [T * k]: E for rows of no expert, which sort last
    offsets: torch.Tensor  # int32 [E + 1]: expert e computes sorted rows offsets[e] to offsets[e + 1]
    live: torch.Tensor  # bool [T]: False for padding


def route(router_logits, experts_per_token, num_tokens):
    """Choose each token's experts without asking the CPU.

    router_logits [T, E]; num_tokens int32 [1]: rows from there on are padding and go to no expert.
    The softmax runs over the chosen logits alone (gpt-oss), not over all experts.
    """
    num_rows, num_experts = router_logits.shape
    chosen, experts = router_logits.float().topk(experts_per_token, dim=-1)
    live = torch.arange(num_rows, device=router_logits.device) < num_tokens
    experts = torch.where(live[:, None], experts, num_experts).flatten()
    expert_of_row, order = experts.sort(stable=True)
    row_of_slot = torch.empty_like(order)
    row_of_slot[order] = torch.arange(order.shape[0], device=order.device)
    counts = (experts[:, None] == torch.arange(num_experts, device=experts.device)).sum(0)
    offsets = F.pad(counts.cumsum(0), (1, 0)).int()
    return Routing(
        weights=chosen.softmax(dim=-1),
        token_of_row=order // experts_per_token,
        row_of_slot=row_of_slot.view(num_rows, experts_per_token),
        expert_of_row=expert_of_row,
        offsets=offsets,
        live=live,
    )


class Mxfp4(NamedTuple):
    """Expert weights as gpt-oss publishes them: 4-bit floats (e2m1), 32 of which share a power of two (OCP MX v1.0)."""

    blocks: torch.Tensor  # uint8 [E, out, in / 2]: two values a byte, the low half first
    scales: torch.Tensor  # uint8 [E, out, in / 32]: exponent + 127 (e8m0)

    @property
    def shape(self):
        return (*self.blocks.shape[:-1], 2 * self.blocks.shape[-1])


def decode_mxfp4(weight, dtype):
    """The values of Mxfp4 weights (or of some of their experts): [..., out, in] in `dtype`.

    A code is a sign and one of 0, .5, 1, 1.5, 2, 3, 4, 6: its steps grow from 1/2 to 1 at 2, and to 2 at 4. Computed
    (in halves, as integers), not looked up: a table made from Python values could not be part of a graph.
    """
    codes = torch.stack([weight.blocks & 15, weight.blocks >> 4], dim=-1).flatten(-2)
    steps = (codes & 7).to(torch.int8)
    halves = torch.maximum(torch.maximum(steps, 2 * steps - 4), 4 * steps - 16)
    halves = (halves * (1 - 2 * (codes >> 3).to(torch.int8))).unflatten(-1, (-1, 32))
    scales = weight.scales.int()
    powers = torch.where(scales > 0, scales << 23, 1 << 22).view(torch.float32)  # the bits of 2 ** (scale - 127)
    return (halves * (powers / 2)[..., None]).flatten(-2).to(dtype)


def take_experts(weight, index, dtype):
    """Some experts' weights as plain numbers, whether they are packed or not."""
    if isinstance(weight, Mxfp4):
        return decode_mxfp4(Mxfp4(weight.blocks[index], weight.scales[index]), dtype)
    return weight[index]


def grouped_linear(x, weight, bias, routing):
    """Each sorted row through its expert: x [T * k, in], weight [E, out, in], a tensor or Mxfp4, bias [E, out] ->
    [T * k, out].

    Rows of no expert are undefined. Three ways, none of which reads the offsets on the host: `F.grouped_mm` on recent
    CUDA cards in bf16 (its fallback elsewhere does read them); a gather of each row's weights where rows are few; else
    every expert over all rows, of which each row keeps its own.
    """
    num_experts = weight.shape[0]
    row_bias = F.embedding(routing.expert_of_row.clamp(max=num_experts - 1), bias)
    if x.is_cuda and x.dtype == torch.bfloat16 and torch.cuda.get_device_capability(x.device) >= (9, 0):
        plain = take_experts(weight, slice(None), x.dtype)
        return F.grouped_mm(x, plain.transpose(1, 2), offs=routing.offsets[1:]) + row_bias
    if x.shape[0] <= num_experts:
        row_weight = take_experts(weight, routing.expert_of_row.clamp(max=num_experts - 1), x.dtype)
        return torch.einsum("ri,roi->ro", x, row_weight) + row_bias
    out = row_bias
    for expert in range(num_experts):
        mine = (routing.expert_of_row == expert)[:, None]
        out = torch.where(mine, x @ take_experts(weight, expert, x.dtype).T + bias[expert], out)
    return out


def swiglu(gate_up, limit, alpha=1.702):
    """gpt-oss's clamped SwiGLU over interleaved gates and ups: [rows, 2 * I] -> [rows, I]."""
    gate, up = gate_up[..., ::2].clamp(max=limit), gate_up[..., 1::2].clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


def expert_gate_up(x, weight, bias, routing, limit):
    """First half of the experts. x [T, hidden], weight [E, 2 * I, hidden] -> [T * k, I] in sorted rows."""
    return swiglu(grouped_linear(x[routing.token_of_row], weight, bias, routing), limit)


def expert_down(hidden, weight, bias, routing):
    """Second half, and the weighted sum of each token's slots, in slot order: no atomics, so runs repeat bit for bit.

    hidden [T * k, I], weight [E, hidden, I] -> [T, hidden]; zero for padding.
    """
    rows = grouped_linear(hidden, weight, bias, routing)
    mixed = (rows[routing.row_of_slot].float() * routing.weights[..., None]).sum(1)
    return torch.where(routing.live[:, None], mixed, 0).to(hidden.dtype)
