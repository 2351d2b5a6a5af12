"""Quantise and dequantise in blocks: scale search, rounding and the way back in one pass.

On CUDA a Triton kernel (`block_quantize_triton`) does it in one launch; `quantize_dequantize_reference` is the same
arithmetic in torch, operation by operation, for every other device and as the ground truth of the kernel's tests.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, Optional

import torch
from torch import Tensor

OuterScale = Literal["none", "tensor", "matrix", "row"]

_EXPONENT_MASK = {torch.float32: 0x7F800000, torch.float64: 0x7FF0000000000000}
_INTEGER_OF = {torch.float32: torch.int32, torch.float64: torch.int64}
SMALLEST_OUTER_SCALE = 2.0**-120


class RoundingGrid(NamedTuple):
    """Finite values of a format: multiples of `2^(max(⌊log2|x|⌋, lowest_exponent) − mantissa_bits)` within the limits."""

    mantissa_bits: int
    lowest_exponent: int
    smallest: float
    largest: float


class BlockScaling(NamedTuple):
    """How a tensor is cut into blocks and each block scaled.

    With a the largest magnitude of a block, `s = a / largest element`. Two-level scaling stores
    `round(s / t)` times an outer float32 scale `t = A / (largest element · largest scale)`, A the largest finite
    magnitude of the tensor, matrix or row.

    Attributes:
        element: grid of the elements.
        scale: grid of the scales; None for float32 scales.
        block: rows and columns of a block, over the last two dimensions. A last, partial block is a block.
        outer: what shares an outer scale: `none`, `tensor`, `matrix` (last two dimensions) or `row` (last dimension).
        rounds_up: whether scales round towards +∞, so that a block's largest value does not saturate.
        lowest_scale: smallest scale stored.
        limits: bounds on `s` before it is stored; None for none.
    """

    element: RoundingGrid
    scale: Optional[RoundingGrid]
    block: tuple[int, int]
    outer: OuterScale
    rounds_up: bool
    lowest_scale: float
    limits: Optional[tuple[float, float]]


class Blocks(NamedTuple):
    """A tensor in blocks.

    Attributes:
        elements: rounded elements before scaling back, `x`'s shape.
        scaled: elements before rounding, `x`'s shape.
        scale: scale of each element, outer scale included, `x`'s shape or broadcast to it.
    """

    elements: Tensor
    scaled: Tensor
    scale: Tensor


def round_to_grid(
    x: Tensor, grid: RoundingGrid, stochastic: bool = False, generator: Optional[torch.Generator] = None
) -> Tensor:
    """Round to the values of a grid: to nearest with ties to even, or stochastically; NaN and ±Inf become NaN."""
    wide = x if x.dtype == torch.float64 else x.float()
    step = _power_of_two_below(wide).clamp_min_(2.0**grid.lowest_exponent).mul_(2.0**-grid.mantissa_bits)
    rounded = wide / step
    if stochastic:
        draw = torch.rand(wide.shape, dtype=wide.dtype, device=wide.device, generator=generator)
        rounded = torch.copysign((rounded.abs() + draw).floor_(), wide)
    else:
        rounded = rounded.round_()
    rounded = rounded.mul_(step).clamp_(grid.smallest, grid.largest)
    return rounded.to(x.dtype)


def quantize_dequantize(
    x: Tensor,
    scaling: BlockScaling,
    *,
    amax: Optional[Tensor] = None,
    stochastic: bool = False,
    generator: Optional[torch.Generator] = None,
) -> Tensor:
    """Round every block of `x` to `scaling`'s formats and return the values that stand for it.

    Args:
        x: `[..., rows, columns]`, floating point, at least one dimension.
        scaling: formats and blocks.
        amax: largest magnitude assumed for the outer scale, float32, broadcast over `x` with its last two dimensions kept;
            None measures it.
        stochastic: round elements stochastically; scales always round as `scaling` says.
        generator: source of the draws.

    Returns:
        Tensor of `x`'s shape and dtype. NaN stays NaN where it stands; a block that holds ±Inf is NaN as a whole, for no
        block format holds Inf and a saturated one would hide a fault; other blocks are not touched. A block of zeros is
        zeros.
    """
    if x.numel() == 0:
        return x.clone()
    if _triton_applies(x, scaling, amax, stochastic):
        from nemo_hsmoe.kernels.block_quantize_triton import quantize_dequantize_triton

        return quantize_dequantize_triton(x, scaling)
    return quantize_dequantize_reference(x, scaling, amax=amax, stochastic=stochastic, generator=generator)


def quantize_dequantize_reference(
    x: Tensor,
    scaling: BlockScaling,
    *,
    amax: Optional[Tensor] = None,
    stochastic: bool = False,
    generator: Optional[torch.Generator] = None,
) -> Tensor:
    """`quantize_dequantize` in torch."""
    blocks = quantize_blocks(x, scaling, amax=amax, stochastic=stochastic, generator=generator)
    return (blocks.elements * blocks.scale).to(x.dtype)


def quantize_blocks(
    x: Tensor,
    scaling: BlockScaling,
    *,
    amax: Optional[Tensor] = None,
    stochastic: bool = False,
    generator: Optional[torch.Generator] = None,
) -> Blocks:
    """The parts `quantize_dequantize_reference` multiplies: rounded elements, and the scale of each."""
    wide = x if x.dtype == torch.float64 else x.float()
    tiled = _cut_into_blocks(wide, scaling.block)
    block_amax = _amax_beside_nan(tiled, (-3, -1))
    scale, reciprocal = _scales(block_amax, scaling, _outer_amax(block_amax, scaling.outer, amax))
    scale = scale.where(block_amax.isfinite(), float("nan"))
    scaled = tiled * reciprocal
    elements = round_to_grid(scaled, scaling.element, stochastic, generator)
    shape = wide.shape
    return Blocks(_join_blocks(elements, shape), _join_blocks(scaled, shape), _join_blocks(scale.expand_as(tiled), shape))


def _triton_applies(x: Tensor, scaling: BlockScaling, amax: Optional[Tensor], stochastic: bool) -> bool:
    powers_of_two = all(side & (side - 1) == 0 for side in scaling.block)
    return (
        x.is_cuda
        and x.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and powers_of_two
        and math.prod(scaling.block) <= 4096
        and (scaling.outer != "tensor" or scaling.block[0] == 1 or x.dim() < 3 or x.shape[-2] % scaling.block[0] == 0)
        and amax is None
        and not stochastic
    )


def _power_of_two_below(x: Tensor) -> Tensor:
    integer = _INTEGER_OF[x.dtype]
    return (x.view(integer) & _EXPONENT_MASK[x.dtype]).view(x.dtype)


def _cut_into_blocks(x: Tensor, block: tuple[int, int]) -> Tensor:
    rows, columns = block
    matrix = x if x.dim() > 1 else x[None]
    missing_rows, missing_columns = -matrix.shape[-2] % rows, -matrix.shape[-1] % columns
    if missing_rows or missing_columns:
        matrix = torch.nn.functional.pad(matrix, (0, missing_columns, 0, missing_rows))
    height, width = matrix.shape[-2:]
    return matrix.reshape(*matrix.shape[:-2], height // rows, rows, width // columns, columns)


def _join_blocks(tiled: Tensor, shape: torch.Size) -> Tensor:
    rows, columns = (shape[-2] if len(shape) > 1 else 1), shape[-1]
    height, width = tiled.shape[-4] * tiled.shape[-3], tiled.shape[-2] * tiled.shape[-1]
    return tiled.reshape(*tiled.shape[:-4], height, width)[..., :rows, :columns].reshape(shape)


def _amax_beside_nan(tiled: Tensor, dims: tuple[int, ...]) -> Tensor:
    amax = tiled.abs().amax(dim=dims, keepdim=True)
    if amax.is_cuda or bool(amax.isnan().any()):
        amax = tiled.abs().nan_to_num_(0.0, float("inf")).amax(dim=dims, keepdim=True)
    return amax


def _outer_amax(block_amax: Tensor, outer: OuterScale, given: Optional[Tensor]) -> Optional[Tensor]:
    if outer == "none":
        return None
    if given is not None:
        given = given.to(block_amax.dtype)
        return given if given.dim() < 2 else given[..., :, None, :, None]
    block_amax = block_amax.where(block_amax.isfinite(), 0.0)
    if outer == "tensor":
        return block_amax.amax()
    return block_amax.amax(dim=(-4, -2) if outer == "matrix" else -2, keepdim=True)


def _scales(block_amax: Tensor, scaling: BlockScaling, outer_amax: Optional[Tensor]) -> tuple[Tensor, Tensor]:
    wanted = block_amax / _scalar_like(block_amax, scaling.element.largest)
    if scaling.limits is not None:
        wanted = wanted.clamp(*scaling.limits)
    if scaling.scale is None:
        scale = wanted.clamp_min(scaling.lowest_scale)
        return scale, 1.0 / scale
    if outer_amax is None:
        scale = _stored(wanted, scaling)
        return scale, 1.0 / scale
    largest_product = scaling.element.largest * scaling.scale.largest
    if scaling.limits is not None:
        outer_amax = outer_amax.clamp(*(limit * scaling.element.largest for limit in scaling.limits))
    outer = (outer_amax / _scalar_like(outer_amax, largest_product)).clamp_min(SMALLEST_OUTER_SCALE)
    stored = _stored(wanted / outer, scaling)
    return stored * outer, (1.0 / outer) / stored


def _scalar_like(x: Tensor, value: float) -> Tensor:
    """`value` as a tensor on `x`'s device: torch multiplies by the reciprocal of a Python number there."""
    return torch.full((), value, dtype=x.dtype, device=x.device)


def _stored(wanted: Tensor, scaling: BlockScaling) -> Tensor:
    assert scaling.scale is not None
    wanted = wanted.clamp(scaling.lowest_scale, scaling.scale.largest)
    step = _power_of_two_below(wanted).clamp_min(2.0**scaling.scale.lowest_exponent) * 2.0**-scaling.scale.mantissa_bits
    quotient = wanted / step
    rounded = quotient.ceil() if scaling.rounds_up else quotient.round()
    return (rounded * step).clamp_max(scaling.scale.largest)
