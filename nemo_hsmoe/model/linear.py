"""Megatron's linear layers, with their weight and input quantised where the policy says so."""

from __future__ import annotations

from typing import Optional

import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor
from torch.nn import Parameter

from nemo_hsmoe.quantization.native import ROWS_MULTIPLE
from nemo_hsmoe.quantization.tensor_quantizer import TensorQuantizer


class QuantizableLinear:
    """Mixin over a Megatron or TransformerEngine linear layer without tensor parallelism.

    Without a spec on its weight the layer's own product runs, TransformerEngine's low-precision one included; with one it is
    torch's on the weight as the format can hold it.

    Args:
        weight_class: row of the policy for the weight.
        input_class: row of the policy for the input; None leaves the input alone.
    """

    def __init__(self, *args, weight_class: str, input_class: Optional[str] = None, **arguments):
        super().__init__(*args, **arguments)
        self.weight: Parameter
        device = self.weight.device
        self.weight_quantizer = TensorQuantizer(weight_class, device)
        self.input_quantizer = None if input_class is None else TensorQuantizer(input_class, device)

    def forward(self, x: Tensor, *args, **arguments) -> tuple[Tensor, Optional[Tensor]]:
        """`x @ weight.T` and None for Megatron's bias slot."""
        if self.input_quantizer is not None:
            x = self.input_quantizer(x)
        if self.weight_quantizer.spec is None:
            return super().forward(x, *args, **arguments)  # type: ignore[misc]
        return F.linear(x, self.weight_quantizer(self.weight)), None


class QuantizableColumnParallelLinear(QuantizableLinear, ColumnParallelLinear):
    """Megatron's `ColumnParallelLinear`."""


class QuantizableRowParallelLinear(QuantizableLinear, RowParallelLinear):
    """Megatron's `RowParallelLinear`."""


class PaddedRows:
    """Mixin over a TransformerEngine linear layer: rows are filled up with zeros where a low-precision product needs it."""

    def forward(self, x: Tensor) -> tuple[Tensor, Optional[Tensor]]:
        """`x @ weight.T` and None for Megatron's bias slot."""
        rows = x.shape[:-1].numel()
        missing = -rows % ROWS_MULTIPLE
        if not missing or not self.will_execute_quantized(False):  # type: ignore[attr-defined]
            return super().forward(x)  # type: ignore[misc]
        padded, bias = super().forward(F.pad(x.reshape(rows, -1), (0, 0, 0, missing)))  # type: ignore[misc]
        return padded[:rows].view(*x.shape[:-1], -1), bias


def transformer_engine_linears() -> tuple[type, type]:
    """The same over TransformerEngine's column- and row-parallel layers; needs TransformerEngine."""
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TERowParallelLinear

    class QuantizableTEColumnParallelLinear(QuantizableLinear, PaddedRows, TEColumnParallelLinear):
        """Megatron's `TEColumnParallelLinear`."""

    class QuantizableTERowParallelLinear(QuantizableLinear, PaddedRows, TERowParallelLinear):
        """Megatron's `TERowParallelLinear`."""

    return QuantizableTEColumnParallelLinear, QuantizableTERowParallelLinear
