"""Fake quantisation with a straight-through backward."""

from __future__ import annotations

from typing import Any, Optional, Union

import torch
from torch import Tensor

from nemo_hsmoe.kernels.block_quantize import OuterScale, quantize_dequantize
from nemo_hsmoe.quantization.hadamard import rotate, rotate_back
from nemo_hsmoe.quantization.spec import Block, QuantizationSpec
from nemo_hsmoe.runtime.errors import require


def fake_quantize(
    x: Tensor,
    format: str = "e2m1",
    block: Block = 16,
    scale: str = "e4m3",
    tensor_scale: Union[bool, OuterScale] = True,
    *,
    scale_limits: Optional[tuple[float, float]] = None,
    stochastic: bool = False,
    hadamard: bool = False,
    amax: Optional[Tensor] = None,
    generator: Optional[torch.Generator] = None,
) -> Tensor:
    """Round `x` to a block format and return the values that stand for it; the gradient passes straight through.

    The defaults are NVFP4: E2M1 in blocks of 16, an E4M3 scale each, and a float32 scale for the tensor.

    Args:
        x: `[..., rows, columns]`, floating point.
        format: element format, a key of `FORMATS`.
        block: values along the last dimension that share a scale, or `(rows, columns)` over the last two. Partial blocks at
            the edges are blocks.
        scale: `e4m3`, `ue5m3`, `e8m0` or `fp32`.
        tensor_scale: True for one float32 scale over the tensor, `matrix` or `row` for one each, False for none; ignored
            with `e8m0` and `fp32` scales.
        scale_limits: bounds on a block's scale.
        stochastic: round elements stochastically (unbiased).
        hadamard: rotate groups of 16 values around the quantisation.
        amax: largest magnitude assumed for the outer scale, such as a calibrated one; None measures it.
        generator: source of the draws.

    Returns:
        Tensor of `x`'s shape and dtype. NaN stays NaN where it stands, a block that holds ±Inf is NaN as a whole, other
        blocks are not touched; a block of zeros is zeros. Stored scales are normal numbers, so that blocks much smaller than
        their tensor (below `2^-6 / 448` of it for E4M3) round towards zero rather than lose their scale. Without an outer
        scale, blocks beyond the largest element times the largest scale (2688 for E2M1 and E4M3) saturate.

    Raises:
        ConfigurationError: for an unknown format or scale, a block that cannot be, or a tensor that is not floating point.
    """
    outer = _outer_scale(tensor_scale) if scale in ("e4m3", "ue5m3") else "none"
    spec = QuantizationSpec(format, block, scale, outer, scale_limits, stochastic, hadamard)
    return apply_spec(x, spec, amax=amax, generator=generator)


def _outer_scale(tensor_scale: Union[bool, OuterScale]) -> OuterScale:
    if isinstance(tensor_scale, bool):
        return "tensor" if tensor_scale else "none"
    return tensor_scale


def apply_spec(
    x: Tensor,
    spec: QuantizationSpec,
    *,
    amax: Optional[Tensor] = None,
    gradient_spec: Optional[QuantizationSpec] = None,
    generator: Optional[torch.Generator] = None,
) -> Tensor:
    """Fake-quantise `x` as `spec` says; `gradient_spec` quantises the gradient on its way back."""
    require(
        isinstance(x, Tensor) and x.is_floating_point(),
        "x",
        x.dtype if isinstance(x, Tensor) else type(x).__name__,
        "needs a floating-point tensor",
    )
    require(x.dim() > 0, "x", tuple(x.shape), "needs at least one dimension")
    return _FakeQuantize.apply(x, spec, amax, gradient_spec, generator)


class _FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, spec, amax, gradient_spec, generator):
        ctx.gradient_spec = gradient_spec
        return _quantized(x, spec, amax, generator)

    @staticmethod
    def backward(ctx: Any, gradient):
        if ctx.gradient_spec is not None:
            gradient = _quantized(gradient, ctx.gradient_spec, None, None)
        return gradient, None, None, None, None


def _quantized(x: Tensor, spec: QuantizationSpec, amax: Optional[Tensor], generator: Optional[torch.Generator]) -> Tensor:
    if spec.backend == "torchao":
        from nemo_hsmoe.quantization.torchao_backend import quantize_dequantize_torchao

        return quantize_dequantize_torchao(x, spec)
    source = rotate(x) if spec.hadamard else x
    result = quantize_dequantize(source, spec.scaling, amax=amax, stochastic=spec.stochastic, generator=generator)
    return rotate_back(result, x.shape[-1]) if spec.hadamard else result
