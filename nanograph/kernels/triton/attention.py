"""Paged attention in Triton: ragged queries, grouped heads, sinks, sliding windows, and splits for long decodes.

The idea (FlashAttention, Dao et al. 2022): a program holds a few queries, walks over the keys that they see, a tile at
a time, and keeps a running maximum, a running sum and a running mix of values, so that no score leaves the chip. The
query heads that share a key head are rows of the same matrix products: each key is read once for all of them.

The grid is one program per (key head, tile of queries, split of keys):

- Where requests bring many rows (T > R), a tile is some successive rows of one request, and there is one split. Which
  rows are whose is known on the device alone, so there are as many tiles as R requests of T rows can need.
- Where every row may be a request of its own (T = R), a tile is one row, too few to fill a GPU when contexts are long:
  the keys are split among programs (Flash-Decoding, Dao et al. 2023), and a second kernel combines what they found.

Frozen in a graph: the grid, the size of a tile and of a split: functions of the bucket alone, because they decide how
sums are rounded. Live, read from tensors: whose rows these are, how long each sequence is, where its keys lie. A
program whose tile or split is beyond them exits at once; `max_seq_len` says only how many splits are launched.

Read first: kernels/reference.py, the same in plain torch. All tensors are contiguous, as the model makes them.
"""

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

LOG2_E = tl.constexpr(math.log2(math.e))  # softmax in powers of two: the GPU computes exp2
LIVE = ["split", "num_rows", "num_slots"]  # no machine code of their own for 1, or for multiples of 16


class Tiles(NamedTuple):
    """How the work is cut."""

    queries: int  # rows of one request in a tile
    rows: int  # rows of the matrix products: for each query, one per head of the group, and padding
    keys: int  # keys in a tile
    split: int  # keys in a split; 0: not split
    num_warps: int
    num_stages: int  # tiles of keys on their way while one is computed with


@functools.cache
def tiles(num_rows, num_slots, num_heads, num_kv_heads, head_dim, dtype):
    """The cut for a bucket of `num_rows` rows and `num_slots` request slots. It depends on shapes alone."""
    pack = triton.next_power_of_2(num_heads // num_kv_heads)
    if num_rows == num_slots:  # the fewer rows, the shorter the splits, to fill the GPU all the same
        split = min(max(2 * triton.next_power_of_2(num_rows * num_kv_heads), 128), 1024)
        return Tiles(1, max(pack, 16), keys=64, split=split, num_warps=4, num_stages=3)
    if dtype == torch.float32:  # no matrix units: the operands must fit into registers
        rows, keys, num_warps = 32, 16, 4
    else:
        rows, keys, num_warps = 128, 64, 4 if head_dim <= 64 else 8
    rows = max(rows, pack)
    return Tiles(rows // pack, rows, keys, split=0, num_warps=num_warps, num_stages=3)


@triton.jit
def find_rows(cu_seqlens_q, seq_lens, tile, num_rows, num_slots, TILE_QUERIES: tl.constexpr):
    """Whose rows a tile holds: (request slot, first row, end of the request's rows, position of the first row).

    Request r begins at tile cu_seqlens_q[r] // TILE_QUERIES + r, which leaves each enough tiles, or, with tiles of one
    row, at its first row. Padding is one more request, without keys.
    """
    slot = -1
    for first in range(0, num_slots + 1, 128):
        slots = first + tl.arange(0, 128)
        starts = tl.load(cu_seqlens_q + slots, mask=slots <= num_slots, other=2**30)
        begins = starts if TILE_QUERIES == 1 else starts // TILE_QUERIES + slots
        slot += tl.sum((begins <= tile).to(tl.int32))
    start = tl.load(cu_seqlens_q + slot)
    end = tl.load(cu_seqlens_q + slot + 1, mask=slot < num_slots, other=num_rows)
    length = tl.load(seq_lens + slot, mask=slot < num_slots, other=0)
    row = tile if TILE_QUERIES == 1 else start + (tile - start // TILE_QUERIES - slot) * TILE_QUERIES
    return slot, row, end, length - end + row


@triton.jit
def attend(
    peak, total, mixed, queries, positions, begin, end, k_cache, v_cache, block_table, scale,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    TILE_KEYS: tl.constexpr, TILE_DIM: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Take in the keys from `begin` to `end`. MASKED: some queries do not see some of them.

    peak, total [rows]: largest score so far (in powers of two), sum of the weights relative to it; mixed [rows, dim].
    In the place of keys beyond the end the last one is read again, and not seen: what lies there is never touched.
    """
    dims = tl.arange(0, TILE_DIM)[None, :]
    for first in range(begin, end, TILE_KEYS):
        keys = first + tl.arange(0, TILE_KEYS)
        existing = tl.minimum(keys, end - 1)
        blocks = tl.load(block_table + existing // BLOCK_SIZE).to(tl.int64)
        cells = (blocks * BLOCK_SIZE + existing % BLOCK_SIZE)[:, None] * (KV_HEADS * HEAD_DIM) + dims
        k = tl.load(k_cache + cells, mask=dims < HEAD_DIM, other=0.0)
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee")
        if MASKED:
            seen = keys[None, :] <= positions[:, None]
            if WINDOW:
                seen = seen & (keys[None, :] > positions[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - new_peak[:, None])
        shrink = tl.exp2(peak - new_peak)
        v = tl.load(v_cache + cells, mask=dims < HEAD_DIM, other=0.0)
        total = total * shrink + tl.sum(weights, 1)
        mixed = tl.dot(weights.to(v.dtype), v, mixed * shrink[:, None], input_precision="ieee")
        peak = new_peak
    return peak, total, mixed


@triton.jit(do_not_specialize=LIVE)
def attention_kernel(
    q, k_cache, v_cache, cu_seqlens_q, seq_lens, block_tables, sinks, out, log_totals, scale, split, num_rows,
    num_slots, table_width, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, TILE_QUERIES: tl.constexpr, TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr, TILE_DIM: tl.constexpr,
):  # fmt: skip
    """One tile of queries, one key head, one split of keys. log_totals: None where keys are not split.

    out [splits, T, H, D]: the mix of values, divided by its total; log_totals float32 [splits, T, H]: log2 of that.
    """
    kv_head, part = tl.program_id(0), tl.program_id(2)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # a prompt's last rows see the most keys: they start first
    slot, row, end_row, position = find_rows(cu_seqlens_q, seq_lens, tile, num_rows, num_slots, TILE_QUERIES)
    if row >= end_row:
        return
    begin = tl.maximum(position - WINDOW + 1, 0) if WINDOW else 0
    end = position + tl.minimum(TILE_QUERIES, end_row - row)  # the tile's last query sees the keys before this one
    if log_totals is not None:
        begin += part * split
        end = tl.minimum(end, begin + split)
        if begin >= end:
            return

    PACK: tl.constexpr = TILE_ROWS // TILE_QUERIES
    lanes, dims = tl.arange(0, TILE_ROWS), tl.arange(0, TILE_DIM)
    rows, heads, positions = row + lanes // PACK, kv_head * GROUP + lanes % PACK, position + lanes // PACK
    live = (rows < end_row) & (lanes % PACK < GROUP)
    mask = live[:, None] & (dims < HEAD_DIM)[None, :]
    heads_before = rows.to(tl.int64) * (KV_HEADS * GROUP) + heads
    cells = heads_before[:, None] * HEAD_DIM + dims[None, :]
    queries = tl.load(q + cells, mask=mask, other=0.0)

    peak, total = tl.full([TILE_ROWS], -1e30, tl.float32), tl.zeros([TILE_ROWS], tl.float32)
    if sinks is not None:  # a key of the first split, whose value is zero
        sink = tl.load(sinks + heads, mask=live, other=0.0).to(tl.float32) * LOG2_E
        peak, total = tl.where(part == 0, sink, peak), tl.where(part == 0, 1.0, total)
    mixed = tl.zeros([TILE_ROWS, TILE_DIM], tl.float32)
    k_cache += kv_head * HEAD_DIM
    v_cache += kv_head * HEAD_DIM
    block_table = block_tables + slot.to(tl.int64) * table_width
    whole = begin  # up to here, all queries see all keys
    if not WINDOW:
        whole += tl.maximum(tl.minimum(end, position + 1) - begin, 0) // TILE_KEYS * TILE_KEYS
        peak, total, mixed = attend(
            peak, total, mixed, queries, positions, begin, whole, k_cache, v_cache, block_table, scale,
            KV_HEADS, HEAD_DIM, BLOCK_SIZE, WINDOW, TILE_KEYS, TILE_DIM, MASKED=False,
        )  # fmt: skip
    peak, total, mixed = attend(
        peak, total, mixed, queries, positions, whole, end, k_cache, v_cache, block_table, scale,
        KV_HEADS, HEAD_DIM, BLOCK_SIZE, WINDOW, TILE_KEYS, TILE_DIM, MASKED=True,
    )  # fmt: skip

    total = tl.where(total > 0, total, 1.0)  # rows of no request have no keys: 0 / 1
    rows_before = part.to(tl.int64) * num_rows * (KV_HEADS * GROUP)
    tl.store(out + rows_before * HEAD_DIM + cells, (mixed / total[:, None]).to(out.dtype.element_ty), mask=mask)
    if log_totals is not None:
        tl.store(log_totals + rows_before + heads_before, peak + tl.log2(total), mask=live)


@triton.jit(do_not_specialize=LIVE)
def combine_kernel(
    mixes, log_totals, cu_seqlens_q, seq_lens, out, split, num_rows, num_slots,
    HEAD_DIM: tl.constexpr, WINDOW: tl.constexpr, TILE_SPLITS: tl.constexpr, TILE_DIM: tl.constexpr,
):  # fmt: skip
    """One head of one row: the mixes of its splits, weighted by their totals, in a fixed order. Zero for padding."""
    head, row, num_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    _, _, _, position = find_rows(cu_seqlens_q, seq_lens, row, num_rows, num_slots, 1)
    num_keys = tl.minimum(position + 1, WINDOW) if WINDOW else position + 1
    num_splits = (tl.maximum(num_keys, 0) + split - 1) // split
    dims = tl.arange(0, TILE_DIM)
    peak, total, mixed = -1e30, 0.0, tl.zeros([TILE_DIM], tl.float32)
    for first in range(0, num_splits, TILE_SPLITS):
        splits = first + tl.arange(0, TILE_SPLITS)
        heads_before = (splits.to(tl.int64) * num_rows + row) * num_heads + head
        log_total = tl.load(log_totals + heads_before, mask=splits < num_splits, other=float("-inf"))
        mask = (splits < num_splits)[:, None] & (dims < HEAD_DIM)[None, :]
        mix = tl.load(mixes + heads_before[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
        new_peak = tl.maximum(peak, tl.max(log_total, 0))
        weights, shrink = tl.exp2(log_total - new_peak), tl.exp2(peak - new_peak)
        total = total * shrink + tl.sum(weights, 0)
        mixed = mixed * shrink + tl.sum(weights[:, None] * mix, 0)
        peak = new_peak
    mixed = mixed / tl.where(total > 0, total, 1.0)
    cells = (row.to(tl.int64) * num_heads + head) * HEAD_DIM + dims
    tl.store(out + cells, mixed.to(out.dtype.element_ty), mask=dims < HEAD_DIM)


def paged_attention(q, k_cache, v_cache, cu_seqlens_q, seq_lens, block_tables, sinks, window, scale, max_seq_len):
    """See kernels/reference.py."""
    (num_rows, num_heads, head_dim), num_slots = q.shape, seq_lens.shape[0]
    block_size, num_kv_heads = k_cache.shape[1:3]
    cut = tiles(num_rows, num_slots, num_heads, num_kv_heads, head_dim, q.dtype)
    tile_dim = max(16, triton.next_power_of_2(head_dim))
    num_tiles = num_rows if cut.queries == 1 else num_rows // cut.queries + num_slots + 1
    split = 0 if 0 < window <= cut.split else cut.split
    num_splits, mixes, log_totals = 1, (out := torch.empty_like(q)), None
    if split:
        num_splits = max(1, triton.cdiv(min(max_seq_len, window or max_seq_len), split))
        mixes = torch.empty(num_splits, *q.shape, dtype=torch.float32, device=q.device)
        log_totals = torch.empty(num_splits, num_rows, num_heads, dtype=torch.float32, device=q.device)
    attention_kernel[num_kv_heads, num_tiles, num_splits](
        q, k_cache, v_cache, cu_seqlens_q, seq_lens, block_tables, sinks, mixes, log_totals, scale * LOG2_E.value,
        split, num_rows, num_slots, block_tables.shape[1], num_kv_heads, num_heads // num_kv_heads, head_dim,
        block_size, window, cut.queries, cut.rows, cut.keys, tile_dim,
        num_warps=cut.num_warps, num_stages=cut.num_stages,
    )  # fmt: skip
    if split:
        combine_kernel[num_heads, num_rows](
            mixes, log_totals, cu_seqlens_q, seq_lens, out, split, num_rows, num_slots,
            head_dim, window, TILE_SPLITS=32, TILE_DIM=tile_dim,
        )  # fmt: skip
    return out
