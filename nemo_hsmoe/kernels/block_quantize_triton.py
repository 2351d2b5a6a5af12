"""`block_quantize.quantize_dequantize` as one Triton launch that reads each value from memory once.

A program takes a strip of rows. A row's outer scale is found inside its program; a matrix does not fit one, so its launch
has two kinds of program, which measure and which convert. Programs draw tickets in the order they start, matrices are
measured `lag` ahead of those being converted, and a converting program waits for its matrix' count of measured strips: what
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
_FLAT_COLUMNS = 4096
_VALUES_PER_WARP = 1024
_ROWS_PER_STRIP = 64


class _Tile(NamedTuple):
    """Blocks a program holds at once, down and across, the warps that share them, and how many such bands it takes."""

    blocks_down: int
    blocks_across: int
    warps: int
    bands: int = 1


def quantize_dequantize_triton(x: Tensor, scaling: BlockScaling) -> Tensor:
    """`quantize_dequantize` for bfloat16, float16 or float32, block sides that are powers of two, and dynamic ranges."""
    x = x.contiguous()
    out = torch.empty_like(x)
    matrices, rows, columns = _as_matrices(x, scaling)
    block_rows, block_columns = scaling.block
    tile = _tile_for(rows, columns, scaling)
    width, height = tile.blocks_across * block_columns, tile.blocks_down * block_rows * tile.bands
    strips = triton.cdiv(rows, height)
    measures = scaling.outer in ("tensor", "matrix")
    lag = max(1, min(matrices, _BYTES_MEASURED_AHEAD // max(1, rows * columns * x.element_size())))
    state = torch.zeros(1 + 2 * matrices if measures else 1, dtype=torch.int32, device=x.device)
    low, high = scaling.limits or (0.0, 0.0)
    scale = scaling.scale
    _quantize_dequantize_kernel[(matrices * strips * (2 if measures else 1),)](
        x,
        out,
        state,
        matrices,
        rows,
        columns,
        strips,
        lag,
        BLOCK_ROWS=block_rows,
        BLOCK_COLUMNS=block_columns,
        BLOCKS_DOWN=tile.blocks_down,
        BLOCKS_ACROSS=tile.blocks_across,
        BANDS=tile.bands,
        OUTER=_OUTER_CODES[scaling.outer],
        WHOLE_ROW=width >= columns,
        FITS=rows % height == 0 and columns % width == 0,
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
    """Matrices, rows and columns the kernel may take `x` for, given what its blocks and outer scales span."""
    columns = x.shape[-1]
    rows = x.shape[-2] if x.dim() > 1 else 1
    within_row = scaling.block[0] == 1
    knows_no_rows = within_row and scaling.outer in ("none", "tensor") and columns % scaling.block[1] == 0
    if knows_no_rows and x.numel() % _FLAT_COLUMNS == 0:
        return 1, x.numel() // _FLAT_COLUMNS, _FLAT_COLUMNS
    if scaling.outer == "tensor" or (within_row and scaling.outer != "matrix"):
        return 1, x.numel() // columns, columns
    return x.numel() // (rows * columns), rows, columns


def _tile_for(rows: int, columns: int, scaling: BlockScaling) -> _Tile:
    block_rows, block_columns = scaling.block
    across = triton.cdiv(columns, block_columns)
    padded = triton.next_power_of_2(across)
    if scaling.outer == "row" and padded * block_columns <= 2048:
        blocks_across = padded
    else:
        even = across & -across
        blocks_across = even if even * block_columns >= 128 else padded
        blocks_across = max(1, min(blocks_across, _VALUES_PER_WARP // (block_rows * block_columns)))
    blocks_down = max(1, _VALUES_PER_WARP // (block_rows * block_columns * blocks_across))
    blocks_down = min(blocks_down, triton.next_power_of_2(triton.cdiv(rows, block_rows)))
    bands = max(1, _ROWS_PER_STRIP // (block_rows * blocks_down)) if scaling.outer in ("tensor", "matrix") else 1
    return _Tile(blocks_down, blocks_across, 1, bands)


@triton.jit
def _power_of_two_step(x, LOWEST_EXPONENT: tl.constexpr, MANTISSA: tl.constexpr):
    exponent = tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, (LOWEST_EXPONENT + 127) << 23)
    return (exponent - (MANTISSA << 23)).to(tl.float32, bitcast=True)


@triton.jit
def _round_to_even(x, LOWEST_EXPONENT: tl.constexpr, MANTISSA: tl.constexpr):
    exponent = tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, (LOWEST_EXPONENT + 127) << 23)
    anchor = (exponent + (((23 - MANTISSA) << 23) + 0x400000)).to(tl.float32, bitcast=True)
    return (x + anchor) - anchor


@triton.jit
def _next_power_of_two(x):
    return ((x.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def _zero_unless_finite(magnitude):
    return tl.where(magnitude < float("inf"), magnitude, 0.0)


@triton.jit
def _constant_like(x, VALUE: tl.constexpr):
    return tl.full(x.shape, VALUE, tl.float32)


@triton.jit
def _load(pointers, inside, FITS: tl.constexpr):
    values = tl.load(pointers) if FITS else tl.load(pointers, mask=inside, other=0.0)
    return values.to(tl.float32)


@triton.jit
def _finite_amax(start_ptr, count, CHUNK: tl.constexpr, FITS: tl.constexpr):
    place = tl.arange(0, CHUNK)
    largest = tl.zeros([CHUNK], dtype=tl.float32)
    for start in range(0, count, CHUNK):
        x = _load(start_ptr + start + place, start + place < count, FITS)
        largest = tl.maximum(largest, _zero_unless_finite(tl.abs(x)))
    return tl.max(largest, axis=0)


@triton.jit
def _block_amax(x):
    return tl.max(tl.max(tl.abs(x), axis=3), axis=1)[:, None, :, None]


@triton.jit
def _outer_scale(
    outer_amax,
    ELEMENT_LARGEST: tl.constexpr,
    SCALE_LARGEST: tl.constexpr,
    HAS_LIMITS: tl.constexpr,
    LOW_LIMIT: tl.constexpr,
    HIGH_LIMIT: tl.constexpr,
    SMALLEST_OUTER: tl.constexpr,
):
    if HAS_LIMITS:
        outer_amax = tl.minimum(tl.maximum(outer_amax, LOW_LIMIT * ELEMENT_LARGEST), HIGH_LIMIT * ELEMENT_LARGEST)
    return tl.maximum(tl.div_rn(outer_amax, _constant_like(outer_amax, ELEMENT_LARGEST * SCALE_LARGEST)), SMALLEST_OUTER)


@triton.jit
def _in_its_format(
    x,
    block_amax,
    outer,
    OUTER: tl.constexpr,
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
):
    wanted = tl.div_rn(block_amax, _constant_like(block_amax, ELEMENT_LARGEST))
    if HAS_LIMITS:
        wanted = tl.minimum(tl.maximum(wanted, LOW_LIMIT), HIGH_LIMIT)
    outer_of_block = tl.broadcast_to(outer, block_amax.shape)
    if OUTER != _NO_OUTER_SCALE:
        wanted = tl.div_rn(wanted, outer_of_block)
    stored = tl.maximum(wanted, LOWEST_SCALE)
    if not SCALE_IS_FLOAT32:
        wanted = tl.minimum(stored, SCALE_LARGEST)
        if SCALE_MANTISSA == 0:
            stored = _next_power_of_two(wanted)
        else:
            stored = _round_to_even(wanted, SCALE_EXPONENT, SCALE_MANTISSA)
            if SCALE_ROUNDS_UP:
                step = _power_of_two_step(wanted, SCALE_EXPONENT, SCALE_MANTISSA)
                stored = tl.where(stored < wanted, stored + step, stored)
            stored = tl.minimum(stored, SCALE_LARGEST)
    if OUTER == _NO_OUTER_SCALE:
        scale = stored
        reciprocal = tl.div_rn(_constant_like(stored, 1.0), stored)
    else:
        scale = stored * outer_of_block
        reciprocal = tl.div_rn(tl.div_rn(_constant_like(stored, 1.0), outer_of_block), stored)
    scale = tl.where(block_amax < float("inf"), scale, float("nan"))
    scaled = tl.maximum(x * reciprocal, ELEMENT_SMALLEST, propagate_nan=tl.PropagateNan.ALL)
    scaled = tl.minimum(scaled, ELEMENT_LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return _round_to_even(scaled, ELEMENT_EXPONENT, ELEMENT_MANTISSA) * scale


@triton.jit
def _quantize_dequantize_kernel(
    x_ptr,
    out_ptr,
    state_ptr,
    matrices,
    rows,
    columns,
    strips,
    lag,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCKS_DOWN: tl.constexpr,
    BLOCKS_ACROSS: tl.constexpr,
    BANDS: tl.constexpr,
    OUTER: tl.constexpr,
    WHOLE_ROW: tl.constexpr,
    FITS: tl.constexpr,
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
    WIDTH: tl.constexpr = BLOCKS_ACROSS * BLOCK_COLUMNS
    HEIGHT: tl.constexpr = BLOCKS_DOWN * BLOCK_ROWS
    measures = False
    if OUTER == _MATRIX_SCALE:
        ticket = tl.atomic_add(state_ptr, 1)
        turn = ticket // strips
        strip = ticket % strips
        paired = turn - lag
        both = 2 * (matrices - lag)
        measures = (turn < lag) | ((paired < both) & (paired % 2 == 0))
        alternating = paired // 2 + tl.where(paired % 2 == 0, lag, 0)
        matrix = tl.where(turn < lag, turn, tl.where(paired < both, alternating, paired - (matrices - lag)))
    else:
        matrix = tl.program_id(0) // strips
        strip = tl.program_id(0) % strips

    strip_start = (matrix.to(tl.int64) * rows + strip * (BANDS * HEIGHT)) * columns
    amax_ptr = state_ptr.to(tl.pointer_type(tl.float32)) + 1 + matrix
    done_ptr = state_ptr + 1 + matrices + matrix

    if measures:
        count = tl.minimum(BANDS * HEIGHT, rows - strip * (BANDS * HEIGHT)) * columns
        tl.atomic_max(amax_ptr, _finite_amax(x_ptr + strip_start, count, WIDTH * HEIGHT, FITS))
        tl.atomic_add(done_ptr, 1)
    else:
        down = tl.arange(0, BLOCKS_DOWN)[:, None, None, None] * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[None, :, None, None]
        across = tl.arange(0, BLOCKS_ACROSS)[None, None, :, None] * BLOCK_COLUMNS
        across += tl.arange(0, BLOCK_COLUMNS)[None, None, None, :]
        row = strip * (BANDS * HEIGHT) + down
        x_start = x_ptr + strip_start + down * columns + across
        out_start = out_ptr + strip_start + down * columns + across

        outer = tl.full([1, 1, 1, 1], 1.0, tl.float32)
        if OUTER == _MATRIX_SCALE:
            while tl.atomic_add(done_ptr, 0) < strips:
                pass
            outer_amax = tl.full([1, 1, 1, 1], 1.0, tl.float32) * tl.load(amax_ptr, volatile=True)
            outer = _outer_scale(
                outer_amax, ELEMENT_LARGEST, SCALE_LARGEST, HAS_LIMITS, LOW_LIMIT, HIGH_LIMIT, SMALLEST_OUTER
            )
        if OUTER == _ROW_SCALE and not WHOLE_ROW:
            largest = tl.zeros([BLOCKS_DOWN, BLOCK_ROWS, BLOCKS_ACROSS, BLOCK_COLUMNS], dtype=tl.float32)
            for start in range(0, columns, WIDTH):
                x = _load(x_start + start, (row < rows) & (start + across < columns), FITS)
                largest = tl.maximum(largest, _zero_unless_finite(tl.abs(x)))
            outer_amax = tl.max(tl.max(largest, axis=3), axis=2)[:, :, None, None]
            outer = _outer_scale(
                outer_amax, ELEMENT_LARGEST, SCALE_LARGEST, HAS_LIMITS, LOW_LIMIT, HIGH_LIMIT, SMALLEST_OUTER
            )

        loops = tl.cdiv(columns, WIDTH)
        for turn_in_strip in range(0, BANDS * loops):
            band = turn_in_strip // loops
            start = (turn_in_strip % loops) * WIDTH
            offset = band * (HEIGHT * columns) + start
            inside = (row + band * HEIGHT < rows) & (start + across < columns)
            x = _load(x_start + offset, inside, FITS)
            block_amax = _block_amax(x)
            if OUTER == _ROW_SCALE and WHOLE_ROW:
                row_amax = tl.max(_zero_unless_finite(block_amax), axis=2)[:, :, None, :]
                outer_here = _outer_scale(
                    row_amax, ELEMENT_LARGEST, SCALE_LARGEST, HAS_LIMITS, LOW_LIMIT, HIGH_LIMIT, SMALLEST_OUTER
                )
            else:
                outer_here = outer
            quantized = _in_its_format(
                x,
                block_amax,
                outer_here,
                OUTER,
                ELEMENT_MANTISSA,
                ELEMENT_EXPONENT,
                ELEMENT_SMALLEST,
                ELEMENT_LARGEST,
                SCALE_IS_FLOAT32,
                SCALE_MANTISSA,
                SCALE_EXPONENT,
                SCALE_LARGEST,
                SCALE_ROUNDS_UP,
                LOWEST_SCALE,
                HAS_LIMITS,
                LOW_LIMIT,
                HIGH_LIMIT,
            ).to(out_ptr.dtype.element_ty)
            if FITS:
                tl.store(out_start + offset, quantized)
            else:
                tl.store(out_start + offset, quantized, mask=inside)
