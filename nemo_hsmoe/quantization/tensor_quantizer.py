"""The place in a module where one tensor is quantised."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from nemo_hsmoe.kernels.block_quantize import quantize_blocks
from nemo_hsmoe.quantization.fake_quantize import apply_spec
from nemo_hsmoe.quantization.spec import QuantizationSpec
from nemo_hsmoe.runtime.precision import keep_in_float32


class TensorQuantizer(torch.nn.Module):
    """Quantises every tensor of one class that passes here; without a spec it is the identity.

    A model has its quantizers whatever its policy, so checkpoints of quantised and unquantised models have the same keys.

    Attributes:
        tensor_class: row of the policy this place belongs to, one of `TENSOR_CLASSES`.
        spec: what is done, None for nothing.
        gradient_spec: what is done to the gradient on its way back.
        calibrated_amax: buffer `[1]`, float32: largest magnitude seen in calibration, 0 before. Outside training it takes
            the place of the measured range in two-level formats.
        statistics: sums of this recording, None when none is on; see `quantization.statistics`.
        is_calibrating: whether ranges are being measured.
    """

    calibrated_amax: Tensor

    def __init__(self, tensor_class: str, device: Optional[torch.device] = None):
        super().__init__()
        self.tensor_class = tensor_class
        self.spec: Optional[QuantizationSpec] = None
        self.gradient_spec: Optional[QuantizationSpec] = None
        self.statistics: Optional[Tensor] = None
        self.is_calibrating = False
        self.register_buffer("calibrated_amax", torch.zeros(1, dtype=torch.float32, device=device))
        keep_in_float32(self.calibrated_amax)

    def forward(self, x: Tensor) -> Tensor:
        """`x` as the format can hold it, `x` itself without a spec."""
        if self.is_calibrating:
            torch.maximum(self.calibrated_amax, _finite_amax(x), out=self.calibrated_amax)
        if self.spec is None:
            return x
        amax = None if self.training or self.is_calibrating else self._static_amax(x)
        quantized = apply_spec(x, self.spec, amax=amax, gradient_spec=self.gradient_spec)
        if self.statistics is not None:
            self.statistics += _sums(x.detach(), quantized.detach(), self.spec)
        return quantized

    @property
    def is_active(self) -> bool:
        """Whether this place does anything to its tensor or looks at it."""
        return self.spec is not None or self.is_calibrating

    def _static_amax(self, x: Tensor) -> Optional[Tensor]:
        if self.spec is None or self.spec.outer_scale == "none" or self.spec.backend != "emulated":
            return None
        if not bool(self.calibrated_amax > 0):
            return None
        return self.calibrated_amax.reshape(())

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: Optional[dict] = None
    ) -> dict[str, Any]:
        """Entries of a Megatron checkpoint: the range, the same on every rank."""
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, sharded_offsets=sharded_offsets
        )

    def extra_repr(self) -> str:
        """Class and spec, for `print(model)`."""
        return f"{self.tensor_class}: {self.spec.description if self.spec else 'not quantised'}"


def quantizers_of(model: torch.nn.Module) -> dict[str, TensorQuantizer]:
    """The quantizers of a (wrapped) model by module path."""
    return {name: module for name, module in model.named_modules() if isinstance(module, TensorQuantizer)}


def _finite_amax(x: Tensor) -> Tensor:
    return x.detach().abs().nan_to_num(0.0, 0.0, 0.0).amax().float().reshape(1)


def _sums(x: Tensor, quantized: Tensor, spec: QuantizationSpec) -> Tensor:
    scaling = spec.scaling
    blocks = quantize_blocks(x, scaling)
    top_step = 2.0 ** (_exponent_of(scaling.element.largest) - scaling.element.mantissa_bits)
    saturated = blocks.scaled.abs() > scaling.element.largest + top_step / 2
    flushed = (quantized == 0) & (x != 0)
    error = torch.nan_to_num(quantized.double() - x.double()).square().sum()
    power = torch.nan_to_num(x.double(), 0.0, 0.0, 0.0).square().sum()
    not_finite = ~torch.isfinite(x)
    values = torch.full((), x.numel(), dtype=torch.float64, device=x.device)
    return torch.stack([values, saturated.double().sum(), flushed.double().sum(), not_finite.double().sum(), error, power])


def _exponent_of(value: float) -> int:
    return int(torch.tensor(value).log2().floor())
