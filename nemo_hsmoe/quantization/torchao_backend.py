"""TorchAO's own emulation of NVFP4 and the MX formats, as a selectable back end."""

from __future__ import annotations

import importlib.util
import warnings

import torch
from torch import Tensor

from nemo_hsmoe.quantization.spec import QuantizationSpec
from nemo_hsmoe.runtime.errors import require

_MX_ELEMENTS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e2m1": torch.float4_e2m1fn_x2}


def check_torchao_can(spec: QuantizationSpec) -> None:
    """Refuse what TorchAO has no emulation of.

    Raises:
        ConfigurationError: when TorchAO is missing, or the spec is neither NVFP4 in blocks of 16 nor an MX format in blocks
            along the last dimension.
    """
    require(importlib.util.find_spec("torchao") is not None, "backend", "torchao", "needs the torchao package installed")
    is_nvfp4 = spec.format == "e2m1" and spec.scale == "e4m3" and spec.block == 16
    is_mx = spec.format in _MX_ELEMENTS and spec.scale == "e8m0" and isinstance(spec.block, int)
    plain = not spec.stochastic and not spec.hadamard and spec.scale_limits is None
    require(
        (is_nvfp4 or is_mx) and plain and spec.outer_scale in ("none", "tensor", "matrix", "row"),
        "backend",
        "torchao",
        f"needs NVFP4_16, MXFP4, MXFP8_E4M3 or MXFP8_E5M2 with blocks in a row and no limits, not {spec.description}",
    )


def quantize_dequantize_torchao(x: Tensor, spec: QuantizationSpec) -> Tensor:
    """`quantize_dequantize` through `torchao.prototype.mx_formats`; a partial last block is filled up with zeros.

    Raises:
        ConfigurationError: see `check_torchao_can`, and for a dtype TorchAO does not take.
    """
    check_torchao_can(spec)
    require(x.dtype in (torch.float32, torch.bfloat16), "x", x.dtype, "needs float32 or bfloat16 for torchao")
    columns = x.shape[-1]
    padded = torch.nn.functional.pad(x.detach(), (0, -columns % spec.block_shape[1]))
    rows = padded.reshape(-1, padded.shape[-1]).contiguous()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = _nvfp4(x, rows, spec) if spec.scale == "e4m3" else _mx(rows, spec)
    return quantized.view_as(padded)[..., :columns].contiguous()


def _nvfp4(x: Tensor, rows: Tensor, spec: QuantizationSpec) -> Tensor:
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    if spec.outer_scale in ("matrix", "row"):
        dims = (-2, -1) if spec.outer_scale == "matrix" and x.dim() > 1 else (-1,)
        amax = x.detach().abs().amax(dim=dims, keepdim=True).expand(*x.shape[:-1], 1).reshape(-1, 1)
    else:
        amax = rows.abs().amax()
    outer = None if spec.outer_scale == "none" else per_tensor_amax_to_scale(amax)
    if outer is None or outer.dim() == 0:
        return NVFP4Tensor.to_nvfp4(rows, per_tensor_scale=outer).dequantize(rows.dtype)
    blocks = NVFP4Tensor.to_nvfp4(rows[:, None, :], per_tensor_scale=outer[:, None])
    return blocks.dequantize(rows.dtype)[:, 0]


def _mx(rows: Tensor, spec: QuantizationSpec) -> Tensor:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    return MXTensor.to_mx(
        rows, _MX_ELEMENTS[spec.format], spec.block_shape[1], scaling_mode=ScaleCalculationMode.RCEIL
    ).dequantize(rows.dtype)
