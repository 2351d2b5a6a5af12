"""Megatron's linear layers, with their weight and input quantised where the policy says so."""

from __future__ import annotations

from typing import Optional

import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor
from torch.nn import Parameter

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


def transformer_engine_linears() -> tuple[type, type]:
    """The same over TransformerEngine's column- and row-parallel layers; needs TransformerEngine."""
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TERowParallelLinear

    class QuantizableTEColumnParallelLinear(QuantizableLinear, TEColumnParallelLinear):
        """Megatron's `TEColumnParallelLinear`."""

    class QuantizableTERowParallelLinear(QuantizableLinear, TERowParallelLinear):
        """Megatron's `TERowParallelLinear`."""

    return QuantizableTEColumnParallelLinear, QuantizableTERowParallelLinear
