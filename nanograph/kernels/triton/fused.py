"""The small operations of a block, each as one kernel: RMSNorm, rotary positions with the write to the cache, SwiGLU.

The idea: in plain torch each of them is five to twenty kernels that read and write the same few rows, and every kernel
costs the CPU its launch and the GPU a trip to memory. Here a program loads its piece of a row once, computes in float32
and stores it once.

The grid is one program per row (rms_norm), per row and some heads (rotate_and_cache), per piece of the flat result
(swiglu). Frozen in a graph: the grid and the constants. Live: what the tensors hold; where a row's key and value go is
read from `slot_mapping`. Rows are independent, so padding can reach nothing.

Read first: kernels/reference.py, the same in plain torch. All tensors are contiguous, as the model makes them.
"""

import torch
import triton
import triton.language as tl

NAN = tl.constexpr(tl.PropagateNan.ALL)  # as in torch, the smaller of a number and NaN is NaN


@triton.jit
def rms_norm_kernel(x, weight, out, eps, WIDTH: tl.constexpr, TILE: tl.constexpr):
    columns = tl.arange(0, TILE)
    cells = tl.program_id(0).to(tl.int64) * WIDTH + columns
    row = tl.load(x + cells, mask=columns < WIDTH, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(row * row, 0) / WIDTH + eps)
    row = row * scale * tl.load(weight + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    tl.store(out + cells, row.to(out.dtype.element_ty), mask=columns < WIDTH)


def rms_norm(x, weight, eps):
    """See kernels/reference.py."""
    out = torch.empty_like(x)
    num_rows, width = x.shape
    tile = triton.next_power_of_2(width)
    rms_norm_kernel[num_rows,](x, weight, out, eps, width, tile, num_warps=min(max(tile // 512, 1), 8))
    return out


@triton.jit
def store_halves(target, cells, first, second, mask, HALF: tl.constexpr):
    tl.store(target + cells, first.to(target.dtype.element_ty), mask=mask)
    tl.store(target + cells + HALF, second.to(target.dtype.element_ty), mask=mask)


@triton.jit
def rotate_and_cache_kernel(
    qkv, rotary_table, positions, q_out, k_cache, v_cache, slot_mapping, sines,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, TILE_HEADS: tl.constexpr, TILE_HALF: tl.constexpr,
):  # fmt: skip
    """Some heads of one row, each as its two halves: query heads first, then those of keys, then those of values."""
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)[:, None]
    dims = tl.arange(0, TILE_HALF)[None, :]
    in_head = dims < HALF
    cells = (row * (HEADS + 2 * KV_HEADS) + heads) * (2 * HALF) + dims
    exists = in_head & (heads < HEADS + 2 * KV_HEADS)
    first = tl.load(qkv + cells, mask=exists, other=0.0).to(tl.float32)
    second = tl.load(qkv + cells + HALF, mask=exists, other=0.0).to(tl.float32)
    if rotary_table is not None:
        angles = rotary_table + tl.load(positions + row) * HALF + dims
        cos, sin = tl.load(angles, mask=in_head, other=0.0), tl.load(angles + sines, mask=in_head, other=0.0)
        turned_first, turned_second = first * cos - second * sin, second * cos + first * sin
        turns = heads < HEADS + KV_HEADS
        first, second = tl.where(turns, turned_first, first), tl.where(turns, turned_second, second)
    cells = (row * HEADS + heads) * (2 * HALF) + dims
    store_halves(q_out, cells, first, second, in_head & (heads < HEADS), HALF)
    slot, kv_head = tl.load(slot_mapping + row).to(tl.int64), heads - HEADS
    cells = (slot * KV_HEADS + kv_head) * (2 * HALF) + dims
    store_halves(k_cache, cells, first, second, in_head & (kv_head >= 0) & (kv_head < KV_HEADS), HALF)
    cells -= KV_HEADS * 2 * HALF
    store_halves(v_cache, cells, first, second, exists & (kv_head >= KV_HEADS), HALF)


def rotate_and_cache(qkv, rotary_table, positions, k_cache, v_cache, slot_mapping):
    """See kernels/reference.py."""
    num_rows, (num_kv_heads, head_dim) = qkv.shape[0], k_cache.shape[2:]
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    q = torch.empty(num_rows, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    sines = 0 if rotary_table is None else rotary_table.stride(0)  # from a position's cosines to its sines
    rotate_and_cache_kernel[num_rows, triton.cdiv(num_heads + 2 * num_kv_heads, 16)](
        qkv, rotary_table, positions, q, k_cache, v_cache, slot_mapping, sines,
        num_heads, num_kv_heads, head_dim // 2, TILE_HEADS=16, TILE_HALF=triton.next_power_of_2(head_dim // 2),
        num_warps=2,
    )  # fmt: skip
    return q


@triton.jit
def swiglu_kernel(gate_up, out, limit, alpha, size, TILE: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * TILE
    pairs = 2 * start + tl.arange(0, 2 * TILE)  # gates and ups alternate
    both = tl.load(gate_up + pairs, mask=pairs < 2 * size, other=0.0).to(tl.float32)
    gate, up = tl.split(tl.reshape(both, (TILE, 2)))
    gate, up = tl.minimum(gate, limit, propagate_nan=NAN), tl.clamp(up, -limit, limit, propagate_nan=NAN)
    cells = start + tl.arange(0, TILE)
    activated = gate * tl.sigmoid(alpha * gate) * (up + 1)
    tl.store(out + cells, activated.to(out.dtype.element_ty), mask=cells < size)


def swiglu(gate_up, limit, alpha=1.702):
    """See kernels/reference.py."""
    num_rows, width = gate_up.shape
    out = torch.empty(num_rows, width // 2, dtype=gate_up.dtype, device=gate_up.device)
    swiglu_kernel[triton.cdiv(out.numel(), 1024),](gate_up, out, float(limit), alpha, out.numel(), TILE=1024)
    return out
