"""What is done to one tensor: element format, block, scale, back end."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, Optional, Union

from nemo_hsmoe.kernels.block_quantize import BlockScaling, OuterScale
from nemo_hsmoe.quantization.formats import format_named
from nemo_hsmoe.runtime.errors import require

Backend = Literal["emulated", "native", "torchao"]
Block = Union[int, tuple[int, int]]

SCALE_FORMATS = ("e4m3", "ue5m3", "e8m0", "fp32")
OUTER_SCALES = ("none", "tensor", "matrix", "row")
BACKENDS = ("emulated", "native", "torchao")
LARGEST_BLOCK_SIDE = 128
LARGEST_BLOCK_LENGTH = 4096
ACTIVATION_SCALE_LIMITS = (1e-6, 1e1)
NEXT_LARGER_BLOCK = {(8, 8): (16, 8), (16, 8): (16, 16)}
SMALLEST_FLOAT32_SCALE = 2.0**-126

_FAMILIES: dict[str, tuple[str, Block, str, OuterScale]] = {
    "NVFP4": ("e2m1", 16, "e4m3", "tensor"),
    "MXFP4": ("e2m1", 32, "e8m0", "none"),
    "MXFP8": ("e4m3", 32, "e8m0", "none"),
    "FP8": ("e4m3", 128, "fp32", "none"),
    "INT8": ("int8", 128, "fp32", "none"),
    "E1M2": ("e1m2", 16, "e4m3", "tensor"),
    "E1M3": ("e1m3", 16, "e4m3", "tensor"),
}
_NOTATION = re.compile(
    r"(?P<family>[A-Z0-9]+?)(_(?P<element>E\dM\d|UE\dM\d))?(_(?P<block>\d+(X\d+)?))?(?P<flags>(_(SR|RHT))*)"
)


@dataclass(frozen=True)
class QuantizationSpec:
    """How one class of tensors is quantised.

    Attributes:
        format: element format, a key of `FORMATS`.
        block: values along the last dimension that share a scale, or `(rows, columns)` over the last two.
        scale: format of the scale of a block, one of `SCALE_FORMATS`.
        outer_scale: what shares a float32 scale besides: the `tensor`, each `matrix` (last two dimensions), each `row`
            (last dimension), or `none`. Matrix and row scales do not depend on how a batch is split over processes.
        scale_limits: bounds on a block's scale before it is stored; None for none.
        stochastic: round elements stochastically.
        hadamard: rotate groups of 16 values by a random Hadamard matrix around the quantisation.
        backend: `emulated` here, `torchao` by TorchAO's own emulation, or `native` matrix products.

    Raises:
        ConfigurationError: for an unknown format or back end, or a block that cannot be.
    """

    format: str
    block: Block
    scale: str = "e4m3"
    outer_scale: OuterScale = "tensor"
    scale_limits: Optional[tuple[float, float]] = None
    stochastic: bool = False
    hadamard: bool = False
    backend: Backend = "emulated"

    def __post_init__(self) -> None:
        element = format_named(self.format)
        require(element.has_subnormals, "format", self.format, "needs an element format: e8m0 is for scales")
        _check_block(self.block)
        require(self.scale in SCALE_FORMATS, "scale", self.scale, f"needs one of {', '.join(SCALE_FORMATS)}")
        require(self.outer_scale in OUTER_SCALES, "outer_scale", self.outer_scale, f"needs one of {', '.join(OUTER_SCALES)}")
        require(
            self.outer_scale == "none" or self.scale in ("e4m3", "ue5m3"),
            "outer_scale",
            self.outer_scale,
            f"needs 'none' with {self.scale} scales, whose range needs no second level",
        )
        require(
            self.outer_scale != "row" or self.block_shape[0] == 1,
            "outer_scale",
            self.outer_scale,
            "needs blocks within a row",
        )
        require(self.backend in BACKENDS, "backend", self.backend, f"needs one of {', '.join(BACKENDS)}")
        if self.scale_limits is not None:
            low, high = self.scale_limits
            require(0 < low <= high, "scale_limits", self.scale_limits, "needs two positive numbers, the smaller first")

    @classmethod
    def parse(cls, notation: str, **changes) -> QuantizationSpec:
        """Read `FAMILY[_ELEMENT][_BLOCK][_SR][_RHT]`, such as `NVFP4_8x8`, `MXFP8_UE5M3_32` or `NVFP4_16_SR_RHT`.

        Families: NVFP4 (E2M1, 16, E4M3 and an outer scale), MXFP8 (E4M3, 32, E8M0), MXFP4 (E2M1, 32, E8M0), FP8 (E4M3,
        128, float32), INT8 (128, float32), E1M2 and E1M3 (as NVFP4). SR rounds stochastically, RHT rotates.

        Raises:
            ConfigurationError: when the notation is none of these.
        """
        families = ", ".join(_FAMILIES)
        expected = f"needs FAMILY[_ELEMENT][_BLOCK] such as NVFP4_8x8 or MXFP8_E4M3_32; families are {families}"
        match = _NOTATION.fullmatch(notation.upper()) if isinstance(notation, str) else None
        require(match is not None and match["family"] in _FAMILIES, "format", notation, expected)
        assert match is not None
        element, block, scale, outer = _FAMILIES[match["family"]]
        if match["block"]:
            sides = [int(side) for side in match["block"].split("X")]
            block = sides[0] if len(sides) == 1 else (sides[0], sides[1])
        flags = match["flags"].split("_")
        spec = cls(
            match["element"].lower() if match["element"] else element,
            block,
            scale,
            outer,
            stochastic="SR" in flags,
            hadamard="RHT" in flags,
        )
        return spec.replace(**changes)

    def replace(self, **changes) -> QuantizationSpec:
        """This spec with other fields; an outer scale is only set where there is one."""
        if self.outer_scale == "none":
            changes.pop("outer_scale", None)
        return replace(self, **changes)

    @property
    def block_shape(self) -> tuple[int, int]:
        """Rows and columns of a block."""
        return (1, self.block) if isinstance(self.block, int) else self.block

    @property
    def bits_per_value(self) -> float:
        """Storage of a value with its share of the block's scale; the outer scale is left out."""
        rows, columns = self.block_shape
        scale_bits = 32 if self.scale == "fp32" else 8
        return format_named(self.format).bits + scale_bits / (rows * columns)

    @property
    def description(self) -> str:
        """Element, block and scale in one line."""
        rows, columns = self.block_shape
        block = f"{columns}" if isinstance(self.block, int) else f"{rows}×{columns}"
        outer = "" if self.outer_scale == "none" else f" × fp32 per {self.outer_scale}"
        extras = (", stochastic" if self.stochastic else "") + (", Hadamard" if self.hadamard else "")
        return f"{self.format.upper()} / {block} / {self.scale.upper()}{outer}{extras}"

    @cached_property
    def scaling(self) -> BlockScaling:
        """The numbers the kernel works with.

        A power-of-two scale rounds up, or a block's largest value would saturate. An FP8 scale rounds to nearest, as the
        hardware does, where the at most 1/16 by which it then comes short is within half a step of the largest element
        (E2M1, E1M2), and up elsewhere.
        """
        element = format_named(self.format)
        scale = None if self.scale == "fp32" else format_named(self.scale)
        top_step = float(element.magnitudes[-1] - element.magnitudes[-2])
        comes_short = element.largest / 16 > top_step / 2
        return BlockScaling(
            element=element.grid,
            scale=None if scale is None else scale.grid,
            block=self.block_shape,
            outer=self.outer_scale,
            rounds_up=self.scale == "e8m0" or comes_short,
            lowest_scale=SMALLEST_FLOAT32_SCALE if scale is None or self.scale == "e8m0" else scale.smallest_normal,
            limits=self.scale_limits,
        )

    def with_larger_block(self) -> Optional[QuantizationSpec]:
        """The next block of 8×8 → 16×8 → 16×16; None when there is none."""
        larger = NEXT_LARGER_BLOCK.get(self.block_shape)
        return None if larger is None else replace(self, block=larger)


def _check_block(block: Block) -> None:
    expected = f"needs a length from 1 to {LARGEST_BLOCK_LENGTH} or (rows, columns) from 1 to {LARGEST_BLOCK_SIDE} each"
    if isinstance(block, tuple):
        fits = len(block) == 2 and all(_is_count(side) and side <= LARGEST_BLOCK_SIDE for side in block)
    else:
        fits = _is_count(block) and block <= LARGEST_BLOCK_LENGTH
    require(fits, "block", block, expected)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
