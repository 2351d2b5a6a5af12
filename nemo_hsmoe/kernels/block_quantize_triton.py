"""`block_quantize.quantize_dequantize` as one Triton launch that reads each value from memory once.

A program takes a strip of rows, as wide as the matrix, and keeps it in registers between finding its largest magnitude and
rounding it. Where strips share an outer scale, each publishes its largest magnitude and waits for the strips of its matrix.
Programs draw tickets in the order they start and a matrix has at most as many strips as programs run at once, so the strips
waited for have started or will. A strip too wide for registers is read twice, the second time from the caches where it fits
them.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple, Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from nemo_hsmoe.kernels.block_quantize import SMALLEST_OUTER_SCALE, BlockScaling

_IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_SMALLEST_OUTER_SCALE = tl.constexpr(SMALLEST_OUTER_SCALE)
_FLAT_COLUMNS = 4096
_LANES = 32
_TILE_VALUES_PER_WARP = 1024
_BYTES_HELD_PER_LANE = 448
_MOST_WARPS = 8
_WARPS_ALWAYS_RESIDENT = 8


class Tile(NamedTuple):
    """What a program holds at once.

    Attributes:
        blocks_down, blocks_across: blocks of a tile.
        held: tiles of a strip that stay in registers; 0 reads a strip tile by tile, and twice where it must be measured.
    """

    blocks_down: int
    blocks_across: int
    held: int


class Launch(NamedTuple):
    """How a tensor is spread over programs: matrices of strips, strips of bands one tile high, `warps` warps a program."""

    matrices: int
    rows: int
    columns: int
    strips: int
    bands: int
    tile: Tile
    fits: bool
    warps: int


def quantize_dequantize_triton(x: Tensor, scaling: BlockScaling) -> Tensor:
    """`quantize_dequantize` for bfloat16, float16 or float32, block sides that are powers of two, and dynamic ranges."""
    x = x.contiguous()
    out = torch.empty_like(x)
    launch = _launch_for(x.shape, x.element_size(), scaling, _processors(x.device))
    state = x
    if _is_shared(scaling):
        state = torch.zeros(1 + 2 * launch.matrices, dtype=torch.int32, device=x.device)
    _quantize_dequantize_kernel[(launch.matrices * launch.strips,)](
        x,
        out,
        state,
        launch.matrices,
        launch.rows,
        launch.columns,
        launch.strips,
        launch.bands,
        SCALING=scaling,
        TILE=launch.tile,
        FITS=launch.fits,
        num_warps=launch.warps,
        enable_fp_fusion=False,
    )
    return out


def _is_shared(scaling: BlockScaling) -> bool:
    return scaling.outer in ("tensor", "matrix")


@lru_cache(maxsize=8)
def _processors(device: torch.device) -> Optional[int]:
    return None if _IS_INTERPRETED.value else torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache(maxsize=1024)
def _launch_for(shape: torch.Size, element_size: int, scaling: BlockScaling, processors: Optional[int]) -> Launch:
    """Plan a launch; `processors` None is Triton's interpreter, which runs one program after the other."""
    matrices, rows, columns = _as_matrices(shape, scaling)
    tile, warps = _tile_for(rows, columns, element_size, scaling)
    height, width = tile.blocks_down * scaling.block[0], tile.blocks_across * scaling.block[1]
    bands = 1
    if _is_shared(scaling):
        at_once = 1 if processors is None else processors * max(1, _WARPS_ALWAYS_RESIDENT // warps)
        bands = triton.cdiv(rows, height * at_once)
    if bands > 1:
        tile = tile._replace(held=0)
    strips = triton.cdiv(rows, height * bands)
    fits = rows % (height * bands) == 0 and columns % width == 0
    return Launch(matrices, rows, columns, strips, bands, tile, fits, warps)


def _as_matrices(shape: torch.Size, scaling: BlockScaling) -> tuple[int, int, int]:
    """Matrices, rows and columns the kernel may take a tensor for, given what its blocks and outer scales span."""
    values, columns = math.prod(shape), shape[-1]
    rows = shape[-2] if len(shape) > 1 else 1
    within_row = scaling.block[0] == 1
    knows_no_rows = within_row and scaling.outer in ("none", "tensor") and columns % scaling.block[1] == 0
    if knows_no_rows and values % _FLAT_COLUMNS == 0:
        return 1, values // _FLAT_COLUMNS, _FLAT_COLUMNS
    if scaling.outer == "tensor" or (within_row and scaling.outer != "matrix"):
        return 1, values // columns, columns
    return values // (rows * columns), rows, columns


def _tile_for(rows: int, columns: int, element_size: int, scaling: BlockScaling) -> tuple[Tile, int]:
    block_rows, block_columns = scaling.block
    across = triton.cdiv(columns, block_columns)
    held_values = _BYTES_HELD_PER_LANE // element_size * _LANES
    needs_whole_strip = scaling.outer != "none"
    warps = triton.next_power_of_2(triton.cdiv(block_rows * columns, held_values)) if needs_whole_strip else 1
    is_held = warps <= _MOST_WARPS
    warps = min(warps, _MOST_WARPS)
    tile_blocks = max(1, _TILE_VALUES_PER_WARP * warps // (block_rows * block_columns))
    divisor = across & -across
    blocks_across = divisor if divisor * block_columns >= 128 else triton.next_power_of_2(across)
    blocks_across = min(blocks_across, tile_blocks)
    tiles_across = triton.cdiv(across, blocks_across)
    blocks_down = min(tile_blocks // blocks_across, triton.next_power_of_2(triton.cdiv(rows, block_rows)))
    if needs_whole_strip:
        while (
            blocks_down > 1 and blocks_down * blocks_across * block_rows * block_columns * tiles_across > held_values * warps
        ):
            blocks_down //= 2
    return Tile(blocks_down, blocks_across, tiles_across if needs_whole_strip and is_held else 0), warps


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
def _load(pointers, inside, SCALING: tl.constexpr, TILE: tl.constexpr, FITS: tl.constexpr):
    """A tile as `[blocks down, block rows, blocks across, block columns]`."""
    values = tl.load(pointers) if FITS else tl.load(pointers, mask=inside, other=0.0)
    return values.reshape([TILE.blocks_down, SCALING.block[0], TILE.blocks_across, SCALING.block[1]])


@triton.jit
def _store(pointers, blocks, inside, FITS: tl.constexpr):
    if FITS:
        tl.store(pointers, blocks.reshape(pointers.shape))
    else:
        tl.store(pointers, blocks.reshape(pointers.shape), mask=inside)


@triton.jit
def _block_amax(x):
    """Largest magnitude of each block beside NaN."""
    return tl.max(tl.max(tl.abs(x.to(tl.float32)), axis=3), axis=1)[:, None, :, None]


@triton.jit
def _widened_again(x):
    """`x` as float32, hidden from the compiler, which would keep the float32 values of a first widening in registers."""
    if x.dtype == tl.float32 or _IS_INTERPRETED:
        return x.to(tl.float32)
    same = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=True, pack=2)
    return same.to(tl.float32)


@triton.jit
def _largest_of_row(largest):
    return tl.max(largest, axis=2)[:, :, None, :]


@triton.jit
def _largest_of_matrix(largest, state_ptr, matrix, matrices, strips):
    """Largest magnitude in all strips of a matrix; waits for them."""
    amax = tl.max(tl.max(tl.max(tl.max(largest, axis=3), axis=2), axis=1), axis=0)
    amax_ptr = state_ptr.to(tl.pointer_type(tl.float32)) + 1 + matrix
    done_ptr = state_ptr + 1 + matrices + matrix
    tl.atomic_max(amax_ptr, amax)
    tl.atomic_add(done_ptr, 1)
    while tl.load(done_ptr, volatile=True) < strips:
        pass
    tl.atomic_add(done_ptr, 0)
    return tl.full([1, 1, 1, 1], 1.0, tl.float32) * tl.load(amax_ptr, volatile=True)


@triton.jit
def _outer_scale(largest, state_ptr, matrix, matrices, strips, SCALING: tl.constexpr):
    LARGEST: tl.constexpr = SCALING.element.largest
    if SCALING.outer == "row":
        amax = _largest_of_row(largest)
    else:
        amax = _largest_of_matrix(largest, state_ptr, matrix, matrices, strips)
    if SCALING.limits is not None:
        amax = tl.minimum(tl.maximum(amax, SCALING.limits[0] * LARGEST), SCALING.limits[1] * LARGEST)
    return tl.maximum(tl.div_rn(amax, _constant_like(amax, LARGEST * SCALING.scale.largest)), _SMALLEST_OUTER_SCALE)


@triton.jit
def _stored_scale(wanted, SCALING: tl.constexpr):
    wanted = tl.maximum(wanted, SCALING.lowest_scale)
    if SCALING.scale is None:
        return wanted
    GRID: tl.constexpr = SCALING.scale
    wanted = tl.minimum(wanted, GRID.largest)
    if GRID.mantissa_bits == 0:
        return tl.minimum(_next_power_of_two(wanted), GRID.largest)
    stored = _round_to_even(wanted, GRID.lowest_exponent, GRID.mantissa_bits)
    if SCALING.rounds_up:
        step = _power_of_two_step(wanted, GRID.lowest_exponent, GRID.mantissa_bits)
        stored = tl.where(stored < wanted, stored + step, stored)
    return tl.minimum(stored, GRID.largest)


@triton.jit
def _in_its_format(x, block_amax, outer, dtype: tl.constexpr, SCALING: tl.constexpr):
    wanted = tl.div_rn(block_amax, _constant_like(block_amax, SCALING.element.largest))
    if SCALING.limits is not None:
        wanted = tl.minimum(tl.maximum(wanted, SCALING.limits[0]), SCALING.limits[1])
    if SCALING.outer == "none":
        scale = _stored_scale(wanted, SCALING)
        reciprocal = tl.div_rn(_constant_like(scale, 1.0), scale)
    else:
        outer_of_block = tl.broadcast_to(outer, block_amax.shape)
        stored = _stored_scale(tl.div_rn(wanted, outer_of_block), SCALING)
        scale = stored * outer_of_block
        reciprocal = tl.div_rn(tl.div_rn(_constant_like(stored, 1.0), outer_of_block), stored)
    scale = tl.where(block_amax < float("inf"), scale, float("nan"))
    scaled = tl.maximum(x * reciprocal, SCALING.element.smallest, propagate_nan=tl.PropagateNan.ALL)
    scaled = tl.minimum(scaled, SCALING.element.largest, propagate_nan=tl.PropagateNan.ALL)
    rounded = _round_to_even(scaled, SCALING.element.lowest_exponent, SCALING.element.mantissa_bits)
    return (rounded * scale).to(dtype)


@triton.jit
def _quantize_dequantize_kernel(
    x_ptr,
    out_ptr,
    state_ptr,
    matrices,
    rows,
    columns,
    strips,
    bands,
    SCALING: tl.constexpr,
    TILE: tl.constexpr,
    FITS: tl.constexpr,
):
    BLOCK_ROWS: tl.constexpr = SCALING.block[0]
    BLOCK_COLUMNS: tl.constexpr = SCALING.block[1]
    BLOCKS_DOWN: tl.constexpr = TILE.blocks_down
    BLOCKS_ACROSS: tl.constexpr = TILE.blocks_across
    HELD: tl.constexpr = TILE.held
    WIDTH: tl.constexpr = BLOCKS_ACROSS * BLOCK_COLUMNS
    HEIGHT: tl.constexpr = BLOCKS_DOWN * BLOCK_ROWS
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    OUTER: tl.constexpr = SCALING.outer
    SHARED: tl.constexpr = OUTER == "matrix" or OUTER == "tensor"

    turn = tl.atomic_add(state_ptr, 1) if SHARED else tl.program_id(0)
    matrix = turn // strips
    first_row = turn % strips * (bands * HEIGHT)
    down = tl.arange(0, HEIGHT)[:, None]
    across = tl.arange(0, WIDTH)[None, :]
    row = first_row + down
    start = (matrix.to(tl.int64) * rows + first_row) * columns
    place = down * columns + across
    x_ptr += start
    out_ptr += start

    outer = tl.full([1, 1, 1, 1], 1.0, tl.float32)
    largest = tl.zeros([BLOCKS_DOWN, 1, BLOCKS_ACROSS, 1], dtype=tl.float32)
    if HELD:
        tiles = ()
        amaxes = ()
        for index in tl.static_range(HELD):
            inside = (row < rows) & (index * WIDTH + across < columns)
            tiles += (_load(x_ptr + (place + index * WIDTH), inside, SCALING, TILE, FITS),)  # type: ignore[assignment]
        for index in tl.static_range(HELD):
            amaxes += (_block_amax(tiles[index]),)  # type: ignore[assignment]
            largest = tl.maximum(largest, _zero_unless_finite(amaxes[index]))
        if OUTER != "none":
            outer = _outer_scale(largest, state_ptr, matrix, matrices, strips, SCALING)
        for index in tl.static_range(HELD):
            inside = (row < rows) & (index * WIDTH + across < columns)
            quantized = _in_its_format(_widened_again(tiles[index]), amaxes[index], outer, DTYPE, SCALING)
            _store(out_ptr + (place + index * WIDTH), quantized, inside, FITS)
    else:
        if OUTER != "none":
            for band in range(0, bands):
                for left in range(0, columns, WIDTH):
                    inside = (row + band * HEIGHT < rows) & (left + across < columns)
                    x = _load(x_ptr + (place + (band * HEIGHT * columns + left)), inside, SCALING, TILE, FITS)
                    largest = tl.maximum(largest, _zero_unless_finite(_block_amax(x)))
            outer = _outer_scale(largest, state_ptr, matrix, matrices, strips, SCALING)
        for band in range(0, bands):
            for left in range(0, columns, WIDTH):
                inside = (row + band * HEIGHT < rows) & (left + across < columns)
                offset = place + (band * HEIGHT * columns + left)
                x = _load(x_ptr + offset, inside, SCALING, TILE, FITS)
                quantized = _in_its_format(x.to(tl.float32), _block_amax(x), outer, DTYPE, SCALING)
                _store(out_ptr + offset, quantized, inside, FITS)
