"""`block_quantize.quantize_dequantize` as one Triton launch that reads each value from memory once.

A program takes a band of rows. A row's outer scale is found inside its program; a matrix does not fit one, so there a launch
has two kinds of program, which measure and which convert. Programs draw tickets in the order they start, matrices are
measured `lag` ahead of those being converted, and a converting program waits for its matrix' count of measured bands: what
it waits for has started before it and waits for nobody. The second read of a matrix comes from the L2 cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nemo_hsmoe.kernels.block_quantize import SMALLEST_OUTER_SCALE, BlockScaling

_OUTER_CODES = {"none": 0, "row": 1, "tensor": 2, "matrix": 2}
_NO_OUTER_SCALE, _ROW_SCALE, _MATRIX_SCALE = (tl.constexpr(code) for code in (0, 1, 2))
_BYTES_MEASURED_AHEAD = 16 << 20


class _Tile(NamedTuple):
    """Blocks a program holds at once, down and across, and the warps that share them."""

    blocks_down: int
    blocks_across: int
    warps: int


def quantize_dequantize_triton(x: Tensor, scaling: BlockScaling) -> Tensor:
    """`quantize_dequantize` for bfloat16, float16 or float32, block sides that are powers of two, and dynamic ranges."""
    x = x.contiguous()
    out = torch.empty_like(x)
    matrices, rows, columns = _as_matrices(x, scaling)
    block_rows, block_columns = scaling.block
    tile = _tile_for(rows, columns, scaling)
    bands = triton.cdiv(rows, block_rows * tile.blocks_down)
    measures = scaling.outer in ("tensor", "matrix")
    lag = max(1, min(matrices, _BYTES_MEASURED_AHEAD // max(1, rows * columns * x.element_size())))
    state = torch.zeros(1 + 2 * matrices if measures else 1, dtype=torch.int32, device=x.device)
    low, high = scaling.limits or (0.0, 0.0)
    scale = scaling.scale
    _quantize_dequantize_kernel[(matrices * bands * (2 if measures else 1),)](
        x,
        out,
        state,
        matrices,
        rows,
        columns,
        bands,
        lag,
        BLOCK_ROWS=block_rows,
        BLOCK_COLUMNS=block_columns,
        BLOCKS_DOWN=tile.blocks_down,
        BLOCKS_ACROSS=tile.blocks_across,
        OUTER=_OUTER_CODES[scaling.outer],
        WHOLE_ROW=tile.blocks_across * block_columns >= columns,
        ELEMENT_MANTISSA=scaling.element.mantissa_bits,
        ELEMENT_EXPONENT=scaling.element.lowest_exponent,
        ELEMENT_SMALLEST=scaling.element.smallest,
        ELEMENT_LARGEST=scaling.element.largest,
        SCALE_IS_FLOAT32=scale is None,
        SCALE_MANTISSA=scale.mantissa_bits if scale else 0,
        SCALE_EXPONENT=scale.lowest_exponent if scale else 0,
        SCALE_LARGEST=scale.largest if scale else 1.0,
        SCALE_ROUNDS_UP=scaling.rounds_up,
        LOWEST_SCALE=scaling.lowest_scale,
        HAS_LIMITS=scaling.limits is not None,
        LOW_LIMIT=low,
        HIGH_LIMIT=high,
        SMALLEST_OUTER=SMALLEST_OUTER_SCALE,
        num_warps=tile.warps,
        enable_fp_fusion=False,
    )
    return out


def _as_matrices(x: Tensor, scaling: BlockScaling) -> tuple[int, int, int]:
    columns = x.shape[-1]
    if scaling.block[0] == 1 and scaling.outer != "matrix":
        return 1, x.numel() // columns, columns
    rows = x.shape[-2] if x.dim() > 1 else 1
    if scaling.outer == "tensor" and rows % scaling.block[0] == 0:
        return 1, x.numel() // columns, columns
    return x.numel() // (rows * columns), rows, columns


def _tile_for(rows: int, columns: int, scaling: BlockScaling) -> _Tile:
    block_rows, block_columns = scaling.block
    across = triton.cdiv(columns, block_columns)
    values_across = triton.next_power_of_2(across) * block_columns
    if values_across <= 2048 and values_across * 2 <= columns * 3:
        blocks_across = triton.next_power_of_2(across)
    else:
        blocks_across = max(1, min(triton.next_power_of_2(across), 512 // block_columns))
    blocks_down = max(1, min(triton.next_power_of_2(rows), 4096 // (block_rows * block_columns * blocks_across)))
    return _Tile(blocks_down, blocks_across, 4)


@triton.jit
def _power_of_two_step(x, LOWEST_EXPONENT: tl.constexpr, MANTISSA: tl.constexpr):
    exponent = tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, (LOWEST_EXPONENT + 127) << 23)
    return (exponent - (MANTISSA << 23)).to(tl.float32, bitcast=True)


@triton.jit
def _round_to_even(x, step):
    anchor = step * 12582912.0
    return (x + anchor) - anchor


@triton.jit
def _next_power_of_two(x):
    return ((x.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def _finite_magnitude(x):
    magnitude = tl.abs(x)
    return tl.where(magnitude < float("inf"), magnitude, 0.0)


@triton.jit
def _quantize_dequantize_kernel(
    x_ptr,
    out_ptr,
    state_ptr,
    matrices,
    rows,
    columns,
    bands,
    lag,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCKS_DOWN: tl.constexpr,
    BLOCKS_ACROSS: tl.constexpr,
    OUTER: tl.constexpr,
    WHOLE_ROW: tl.constexpr,
    ELEMENT_MANTISSA: tl.constexpr,
    ELEMENT_EXPONENT: tl.constexpr,
    ELEMENT_SMALLEST: tl.constexpr,
    ELEMENT_LARGEST: tl.constexpr,
    SCALE_IS_FLOAT32: tl.constexpr,
    SCALE_MANTISSA: tl.constexpr,
    SCALE_EXPONENT: tl.constexpr,
    SCALE_LARGEST: tl.constexpr,
    SCALE_ROUNDS_UP: tl.constexpr,
    LOWEST_SCALE: tl.constexpr,
    HAS_LIMITS: tl.constexpr,
    LOW_LIMIT: tl.constexpr,
    HIGH_LIMIT: tl.constexpr,
    SMALLEST_OUTER: tl.constexpr,
):
    if OUTER == _MATRIX_SCALE:
        ticket = tl.atomic_add(state_ptr, 1)
        turn = ticket // bands
        paired = turn - lag
        measures = (turn < lag) | ((paired % 2 == 0) & (paired < 2 * (matrices - lag)))
        matrix = tl.where(
            turn < lag,
            turn,
            tl.where(
                paired < 2 * (matrices - lag),
                paired // 2 + tl.where(paired % 2 == 0, lag, 0),
                paired - (matrices - lag),
            ),
        )
        band = ticket % bands
    else:
        measures = False
        matrix = tl.program_id(0) // bands
        band = tl.program_id(0) % bands

    down = tl.arange(0, BLOCKS_DOWN)[:, None, None, None] * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[None, :, None, None]
    across = (
        tl.arange(0, BLOCKS_ACROSS)[None, None, :, None] * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, None, None, :]
    )
    row = band * (BLOCKS_DOWN * BLOCK_ROWS) + down
    first = matrix.to(tl.int64) * rows * columns
    row_start = row.to(tl.int64) * columns
    step: tl.constexpr = BLOCKS_ACROSS * BLOCK_COLUMNS

    if OUTER == _MATRIX_SCALE:
        amax_ptr = state_ptr.to(tl.pointer_type(tl.float32)) + 1 + matrix
        done_ptr = state_ptr + 1 + matrices + matrix
        if measures:
            largest = tl.zeros([BLOCKS_DOWN, BLOCK_ROWS, BLOCKS_ACROSS, BLOCK_COLUMNS], dtype=tl.float32)
            for start in range(0, columns, step):
                inside = (row < rows) & (start + across < columns)
                x = tl.load(x_ptr + first + row_start + start + across, mask=inside, other=0.0).to(tl.float32)
                largest = tl.maximum(largest, _finite_magnitude(x))
            tl.atomic_max(amax_ptr, tl.max(tl.reshape(largest, [BLOCKS_DOWN * BLOCK_ROWS * step]), axis=0))
            tl.atomic_add(done_ptr, 1)
        else:
            while tl.atomic_add(done_ptr, 0) < bands:
                pass
            outer_amax = tl.load(amax_ptr, volatile=True)

    if not measures:
        if OUTER == _ROW_SCALE:
            largest = tl.zeros([BLOCKS_DOWN, BLOCK_ROWS, BLOCKS_ACROSS, BLOCK_COLUMNS], dtype=tl.float32)
            for start in range(0, columns, step):
                inside = (row < rows) & (start + across < columns)
                x = tl.load(x_ptr + first + row_start + start + across, mask=inside, other=0.0).to(tl.float32)
                largest = tl.maximum(largest, _finite_magnitude(x))
            outer_amax = tl.max(tl.max(largest, axis=3), axis=2)[:, :, None, None]

        if OUTER != _NO_OUTER_SCALE:
            if HAS_LIMITS:
                outer_amax = tl.minimum(tl.maximum(outer_amax, LOW_LIMIT * ELEMENT_LARGEST), HIGH_LIMIT * ELEMENT_LARGEST)
            outer = tl.maximum(tl.div_rn(outer_amax, outer_amax * 0.0 + ELEMENT_LARGEST * SCALE_LARGEST), SMALLEST_OUTER)

        for start in range(0, columns, step):
            inside = (row < rows) & (start + across < columns)
            x = tl.load(x_ptr + first + row_start + start + across, mask=inside, other=0.0).to(tl.float32)
            block_amax = tl.max(tl.max(_finite_magnitude(x), axis=3), axis=1)[:, None, :, None]
            wanted = tl.div_rn(block_amax, block_amax * 0.0 + ELEMENT_LARGEST)
            if HAS_LIMITS:
                wanted = tl.minimum(tl.maximum(wanted, LOW_LIMIT), HIGH_LIMIT)
            if OUTER != _NO_OUTER_SCALE:
                wanted = tl.div_rn(wanted, outer + wanted * 0.0)
            wanted = tl.maximum(wanted, LOWEST_SCALE)
            if SCALE_IS_FLOAT32:
                stored = wanted
            elif SCALE_MANTISSA == 0:
                stored = _next_power_of_two(wanted)
            else:
                wanted = tl.minimum(wanted, SCALE_LARGEST)
                scale_step = _power_of_two_step(wanted, SCALE_EXPONENT, SCALE_MANTISSA)
                stored = _round_to_even(wanted, scale_step)
                if SCALE_ROUNDS_UP:
                    stored = tl.where(stored < wanted, stored + scale_step, stored)
                stored = tl.minimum(stored, SCALE_LARGEST)
            if OUTER != _NO_OUTER_SCALE:
                scale = stored * outer
                reciprocal = tl.div_rn(tl.div_rn(stored * 0.0 + 1.0, outer + stored * 0.0), stored)
            else:
                scale = stored
                reciprocal = tl.div_rn(stored * 0.0 + 1.0, stored)
            scaled = tl.minimum(tl.maximum(x * reciprocal, ELEMENT_SMALLEST), ELEMENT_LARGEST)
            element = _round_to_even(scaled, _power_of_two_step(scaled, ELEMENT_EXPONENT, ELEMENT_MANTISSA))
            element += x * 0.0
            tl.store(
                out_ptr + first + row_start + start + across, (element * scale).to(out_ptr.dtype.element_ty), mask=inside
            )
