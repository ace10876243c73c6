"""The experts in Triton: a grouped matrix product that reads on the device which rows are whose, bf16 or MXFP4.

The idea: rows are sorted by expert (route), so an expert's rows lie together. A program computes one tile: some rows of
one expert times some of its outputs. Which expert a tile belongs to follows from the offsets, in the program:
cumulated, the experts' numbers of tiles say where each begins. The first product gathers its rows from the tokens and
ends with SwiGLU; the second is followed by the weighted sum of each token's slots, in slot order, so that runs repeat
bit for bit.

MXFP4 weights stay packed in memory and are decoded in registers. A byte holds two neighbours of the summed dimension:
the low halves meet the even columns of x, the high halves the odd ones, in two matrix products.

Frozen in a graph: the grid, for as many tiles as the bucket's rows can need, and the tile sizes, functions of the
bucket. Live: the offsets. A program beyond the last tile exits at once.

Read first: kernels/reference.py, the same in plain torch. Routing itself is that of the reference.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nanograph.kernels.reference import Mxfp4


class Tiles(NamedTuple):
    """How a product is cut."""

    rows: int
    outputs: int
    inputs: int  # summed in one step
    num_warps: int
    num_stages: int


def tiles(num_rows, num_experts, dtype):
    """The cut for a bucket. With few rows for each expert, reading weights takes the time: narrow tiles, many
    programs."""
    if dtype == torch.float32:  # computed without matrix units: the operands must fit into registers
        return Tiles(16, 32, 32, num_warps=4, num_stages=2)
    if num_rows <= 16 * num_experts:
        return Tiles(16, 32, 256, num_warps=4, num_stages=3)
    if num_rows <= 64 * num_experts:
        return Tiles(64, 64, 128, num_warps=4, num_stages=3)
    return Tiles(128, 128, 64, num_warps=8, num_stages=3)


@triton.jit
def decode_halves(codes, scales, dtype: tl.constexpr):
    """4-bit floats (sign, two bits of exponent, one of mantissa) times powers of two.

    The three bits, moved to where bfloat16 has its exponent and mantissa, are the number times 2**-126, zero and the
    subnormal 0.5 included.
    """
    bits = ((codes & 8) << 28) | ((codes & 7) << 22)
    return (bits.to(tl.float32, bitcast=True) * 2.0**126 * scales).to(dtype)


@triton.jit
def accumulate(
    total, x, x_rows, row_mask, weight, scales, outputs, output_mask, IN: tl.constexpr, MXFP4: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_OUT: tl.constexpr, TILE_IN: tl.constexpr,
):  # fmt: skip
    """total [rows, outputs] + x @ weight.T: x at `x_rows` [rows, 1], weight (or its blocks and scales) at row
    `outputs`."""
    if MXFP4:
        HALF: tl.constexpr = TILE_IN // 2
        BLOCKS: tl.constexpr = TILE_IN // 32  # 32 values, 16 bytes, share a scale
        for first in range(0, IN, TILE_IN):
            halves = first // 2 + tl.arange(0, HALF)
            codes = tl.load(
                weight + outputs[:, None] * (IN // 2) + halves[None, :],
                output_mask[:, None] & (halves < IN // 2)[None, :], other=0,
            ).to(tl.int32)  # fmt: skip
            blocks = first // 32 + tl.arange(0, BLOCKS)
            exponents = tl.load(
                scales + outputs[:, None] * (IN // 32) + blocks[None, :],
                output_mask[:, None] & (blocks < IN // 32)[None, :], other=0,
            ).to(tl.int32)  # fmt: skip
            factors = tl.where(exponents == 0, 1 << 22, exponents << 23).to(tl.float32, bitcast=True)
            factors = tl.broadcast_to(factors[:, :, None], (TILE_OUT, BLOCKS, 16)).reshape(TILE_OUT, HALF)
            columns = first + tl.arange(0, TILE_IN)
            values = tl.load(x + x_rows + columns[None, :], row_mask[:, None] & (columns < IN)[None, :], other=0.0)
            even, odd = tl.split(values.reshape(TILE_ROWS, HALF, 2))
            low, high = decode_halves(codes & 15, factors, even.dtype), decode_halves(codes >> 4, factors, even.dtype)
            total = tl.dot(even, tl.trans(low), total, input_precision="ieee")
            total = tl.dot(odd, tl.trans(high), total, input_precision="ieee")
    else:
        for first in range(0, IN, TILE_IN):
            columns = first + tl.arange(0, TILE_IN)
            inside = columns < IN
            values = tl.load(x + x_rows + columns[None, :], row_mask[:, None] & inside[None, :], other=0.0)
            w = tl.load(
                weight + outputs[:, None] * IN + columns[None, :], output_mask[:, None] & inside[None, :], other=0.0
            )
            total = tl.dot(values, tl.trans(w), total, input_precision="ieee")
    return total


@triton.jit
def grouped_kernel(
    x, weight, scales, bias, offsets, token_of_row, out, limit, OUT: tl.constexpr, IN: tl.constexpr,
    EXPERTS: tl.constexpr, EXPERTS_POW2: tl.constexpr, MXFP4: tl.constexpr, GATED: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_OUT: tl.constexpr, TILE_IN: tl.constexpr,
):  # fmt: skip
    """One tile of rows of one expert, one tile of outputs. GATED: outputs are pairs of a gate and an up, joined by
    SwiGLU.

    token_of_row: where row r of the sorted rows lies in x, or None for at r. OUT: outputs in `out`.
    """
    experts = tl.arange(0, EXPERTS_POW2)
    begins = tl.load(offsets + experts, experts < EXPERTS, other=0)
    counts = tl.load(offsets + experts + 1, experts < EXPERTS, other=0) - begins
    num_tiles = tl.where(experts < EXPERTS, (counts + TILE_ROWS - 1) // TILE_ROWS, 0)
    tile_ends = tl.cumsum(num_tiles, 0)
    tile = tl.program_id(1)
    expert = tl.sum((tile_ends <= tile).to(tl.int32) * (experts < EXPERTS).to(tl.int32), 0)
    if expert >= EXPERTS:
        return
    here = experts == expert
    first_tile = tl.sum(tl.where(here, tile_ends - num_tiles, 0), 0)
    begin, end = tl.load(offsets + expert), tl.load(offsets + expert + 1)
    rows = begin + (tile - first_tile) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    row_mask = rows < end
    sources = tl.load(token_of_row + rows, row_mask, other=0) if token_of_row is not None else rows
    x_rows = sources.to(tl.int64)[:, None] * IN
    outputs = tl.program_id(0) * TILE_OUT + tl.arange(0, TILE_OUT)
    output_mask = outputs < OUT

    PER_OUTPUT: tl.constexpr = 2 if GATED else 1
    before = expert.to(tl.int64) * (PER_OUTPUT * OUT)  # outputs of the experts before
    weight += before * (IN // 2 if MXFP4 else IN)
    bias += before
    if MXFP4:
        scales += before * (IN // 32)
    total = tl.zeros([TILE_ROWS, TILE_OUT], tl.float32)
    first = accumulate(
        total,
        x,
        x_rows,
        row_mask,
        weight,
        scales,
        PER_OUTPUT * outputs,
        output_mask,
        IN,
        MXFP4,
        TILE_ROWS,
        TILE_OUT,
        TILE_IN,
    )
    first += tl.load(bias + PER_OUTPUT * outputs, output_mask, other=0.0).to(tl.float32)[None, :]
    if GATED:
        ups = 2 * outputs + 1
        up = accumulate(
            total, x, x_rows, row_mask, weight, scales, ups, output_mask, IN, MXFP4, TILE_ROWS, TILE_OUT, TILE_IN
        )
        up += tl.load(bias + ups, output_mask, other=0.0).to(tl.float32)[None, :]
        gate, up = tl.minimum(first, limit), tl.minimum(tl.maximum(up, -limit), limit)
        first = gate * tl.sigmoid(1.702 * gate) * (up + 1)
    cells = out + rows.to(tl.int64)[:, None] * OUT + outputs[None, :]
    tl.store(cells, first.to(out.dtype.element_ty), row_mask[:, None] & output_mask[None, :])


def launch(x, weight, bias, routing, token_of_row, limit):
    """out [T * k, outputs]: the rows of no expert are not written."""
    gated, num_rows = limit is not None, routing.token_of_row.shape[0]
    num_experts, num_outputs, num_inputs = weight.shape
    num_outputs //= 1 + gated
    packed = isinstance(weight, Mxfp4)
    blocks, scales = weight if packed else (weight, weight)
    out = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=x.device)
    cut = tiles(num_rows, num_experts, x.dtype)
    num_tiles = min(num_rows, num_rows // cut.rows + num_experts)
    grouped_kernel[triton.cdiv(num_outputs, cut.outputs), num_tiles](
        x, blocks, scales, bias, routing.offsets, token_of_row, out, limit or 0.0, num_outputs, num_inputs, num_experts,
        triton.next_power_of_2(num_experts), packed, gated, cut.rows, cut.outputs, cut.inputs,
        num_warps=cut.num_warps, num_stages=cut.num_stages,
    )  # fmt: skip
    return out


def grouped_linear(x, weight, bias, routing):
    """See kernels/reference.py."""
    return launch(x, weight, bias, routing, None, None)


def expert_gate_up(x, weight, bias, routing, limit):
    """See kernels/reference.py."""
    return launch(x, weight, bias, routing, routing.token_of_row, limit)


@triton.jit
def combine_kernel(rows, row_of_slot, weights, live, out, SLOTS: tl.constexpr, OUT: tl.constexpr, TILE: tl.constexpr):
    """One token, some outputs: its slots' rows, weighted, added in slot order. Zero for padding."""
    token, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    total, width = tl.zeros([TILE], tl.float32), tl.load(live + token).to(tl.int32) * OUT  # 0 for padding
    for slot in range(SLOTS):
        row = tl.load(row_of_slot + token * SLOTS + slot)
        values = tl.load(rows + row * OUT + columns, columns < width, other=0.0).to(tl.float32)
        total += tl.load(weights + token * SLOTS + slot) * values
    total = tl.where(columns < width, total, 0.0)
    tl.store(out + token * OUT + columns, total.to(out.dtype.element_ty), columns < OUT)


def expert_down(hidden, weight, bias, routing):
    """See kernels/reference.py."""
    rows = grouped_linear(hidden, weight, bias, routing)
    (num_tokens, num_slots), num_outputs = routing.weights.shape, rows.shape[1]
    out = torch.empty(num_tokens, num_outputs, dtype=hidden.dtype, device=hidden.device)
    combine_kernel[num_tokens, triton.cdiv(num_outputs, 1024)](
        rows, routing.row_of_slot, routing.weights, routing.live, out, num_slots, num_outputs, TILE=1024
    )
    return out
