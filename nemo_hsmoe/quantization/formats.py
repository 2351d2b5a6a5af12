"""Narrow number formats as data: code tables, rounding, packing arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Optional

import torch
from torch import Tensor

from nemo_hsmoe.kernels.block_quantize import RoundingGrid, round_to_grid
from nemo_hsmoe.runtime.errors import require


@dataclass(frozen=True)
class NumberFormat:
    """One element or scale format.

    A code is `sign | exponent | mantissa`. With exponent field e > 0 its value is `(1 + m/2^M) · 2^(e − bias)`, with e = 0
    `(m/2^M) · 2^(1 − bias)`. Without exponent bits the codes are integers in two's complement, of which the most negative is
    a value of the table but never a result of rounding.

    Attributes:
        name: key in `FORMATS`.
        exponent_bits, mantissa_bits: field widths.
        bias: exponent bias.
        signed: whether a sign bit comes first.
        special_codes: how many of the highest magnitudes are no finite numbers.
        infinity_code: magnitude code of infinity, None when the format has none.
        has_subnormals: whether exponent field 0 means a subnormal number.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    signed: bool = True
    special_codes: int = 0
    infinity_code: Optional[int] = None
    has_subnormals: bool = True

    @property
    def bits(self) -> int:
        """Storage of one value, sign included."""
        return self.exponent_bits + self.mantissa_bits + int(self.signed)

    @cached_property
    def magnitudes(self) -> Tensor:
        """Value of every finite magnitude code, ascending, float64."""
        codes = torch.arange(2 ** (self.exponent_bits + self.mantissa_bits) - self.special_codes, dtype=torch.int64)
        exponent = codes >> self.mantissa_bits
        mantissa = (codes & (2**self.mantissa_bits - 1)).double() / 2**self.mantissa_bits
        subnormal = (exponent == 0) & self.has_subnormals
        return torch.where(subnormal, mantissa, 1 + mantissa) * torch.where(
            subnormal, 2.0 ** (1 - self.bias), torch.exp2((exponent - self.bias).double())
        )

    @cached_property
    def table(self) -> Tensor:
        """Value of every code, float64 `[2 ** bits]`; NaN where a code is no number."""
        if not self.exponent_bits:
            return torch.arange(2**self.bits).to(torch.uint8).view(torch.int8).double()
        magnitudes = torch.full((2 ** (self.exponent_bits + self.mantissa_bits),), float("nan"), dtype=torch.float64)
        magnitudes[: len(self.magnitudes)] = self.magnitudes
        if self.infinity_code is not None:
            magnitudes[self.infinity_code] = float("inf")
        return torch.cat([magnitudes, -magnitudes]) if self.signed else magnitudes

    @property
    def largest(self) -> float:
        """Largest finite value."""
        return float(self.magnitudes[-1])

    @property
    def smallest_normal(self) -> float:
        """Smallest positive value with a full mantissa."""
        return 2.0 ** (1 - self.bias if self.has_subnormals else -self.bias)

    @cached_property
    def grid(self) -> RoundingGrid:
        """The finite values as a rounding grid."""
        lowest_exponent = 1 - self.bias if self.has_subnormals else -self.bias
        smallest = -self.largest if self.signed else float(self.magnitudes[0])
        return RoundingGrid(self.mantissa_bits, lowest_exponent, smallest, self.largest)

    def round(self, x: Tensor, stochastic: bool = False, generator: Optional[torch.Generator] = None) -> Tensor:
        """Round to this format's finite values.

        Args:
            x: floating-point values; float64 is rounded as float64, everything else as float32.
            stochastic: round up with a probability equal to the distance from the value below, instead of to the nearest
                with ties to the even code.
            generator: source of the random draws.

        Returns:
            Tensor of `x`'s shape and dtype. Values beyond the largest saturate, signed zero keeps its sign, an unsigned
            format takes negative numbers to 0, NaN and ±Inf become NaN: a saturated Inf would hide a fault.
        """
        return round_to_grid(x, self.grid, stochastic, generator)

    def decode(self, codes: Tensor) -> Tensor:
        """Values of integer codes, float32."""
        return self.table.to(codes.device)[codes.long()].float()

    def encode(self, values: Tensor) -> Tensor:
        """Codes of values that this format holds exactly, uint8 (int16 beyond 8 bits).

        Raises:
            ConfigurationError: when a value is not one of the format's finite values.
        """
        magnitudes = self.magnitudes.to(values.device)
        codes = torch.searchsorted(magnitudes, values.double().abs()).clamp_max(len(magnitudes) - 1)
        exact = magnitudes[codes] == values.double().abs()
        require(
            bool(exact.all()), "values", values[~exact][:1].tolist(), f"needs values of {self.name}: round them with round()"
        )
        if not self.exponent_bits:
            return values.to(torch.int8).view(torch.uint8)
        sign = torch.signbit(values).long() << (self.exponent_bits + self.mantissa_bits) if self.signed else 0
        return (codes | sign).to(torch.uint8 if self.bits <= 8 else torch.int16)


FORMATS: dict[str, NumberFormat] = {
    number_format.name: number_format
    for number_format in (
        NumberFormat("e2m1", 2, 1, bias=1),
        NumberFormat("e1m2", 1, 2, bias=0),
        NumberFormat("e1m3", 1, 3, bias=0),
        NumberFormat("e4m3", 4, 3, bias=7, special_codes=1),
        NumberFormat("e5m2", 5, 2, bias=15, special_codes=4, infinity_code=0b1111100),
        NumberFormat("e5m3", 5, 3, bias=15, special_codes=1),
        NumberFormat("ue5m3", 5, 3, bias=15, signed=False, special_codes=1),
        NumberFormat("e8m0", 8, 0, bias=127, signed=False, special_codes=1, has_subnormals=False),
        NumberFormat("int8", 0, 7, bias=-6),
    )
}


def format_named(name: str) -> NumberFormat:
    """Look a format up.

    Raises:
        ConfigurationError: when `name` is not one of `FORMATS`.
    """
    require(name in FORMATS, "format", name, f"needs one of {', '.join(FORMATS)}")
    return FORMATS[name]
