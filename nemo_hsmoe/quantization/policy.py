"""Which tensor gets what: one table, its presets, and the report of what a model really got."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Optional

import torch

from nemo_hsmoe.quantization.spec import ACTIVATION_SCALE_LIMITS, QuantizationSpec
from nemo_hsmoe.runtime.errors import require

Table = Mapping[str, Optional[QuantizationSpec]]

WEIGHT_CLASSES = (
    "routed_expert_weight",
    "shared_expert_weight",
    "dense_ffn_weight",
    "attention_output_weight",
    "query_key_weight",
    "value_weight",
)
ACTIVATION_CLASSES = (
    "query_key_output",
    "value_output",
    "attention_softmax",
    "attention_head_output",
    "expert_output",
    "gate_preactivation",
    "router_logits",
)
GRADIENT_CLASS = "gradient"
TENSOR_CLASSES = (*WEIGHT_CLASSES, *ACTIVATION_CLASSES, GRADIENT_CLASS)
NEVER_QUANTIZED = ("router_weight", "embedding")
UNQUANTIZED = "none"

BLACKWELL, HOPPER = (10, 0), (9, 0)


@dataclass(frozen=True)
class QuantizationPolicy:
    """The table of a model: tensor class → `QuantizationSpec`, None for the model's own precision.

    Router weights and embeddings have no row: they are float32 always.

    Attributes:
        table: one spec a tensor class; classes left out are not quantised.
        name: preset it came from.
        first_layers, last_layers: layers at either end that stay in the model's own precision.

    Raises:
        ConfigurationError: for an unknown tensor class or a negative number of layers.
    """

    table: Table = field(default_factory=dict)
    name: str = "custom"
    first_layers: int = 0
    last_layers: int = 0

    def __post_init__(self) -> None:
        for tensor_class in self.table:
            require(
                tensor_class in TENSOR_CLASSES,
                "tensor class",
                tensor_class,
                f"needs one of {', '.join(TENSOR_CLASSES)}; {' and '.join(NEVER_QUANTIZED)} stay float32",
            )
        for name in ("first_layers", "last_layers"):
            value = getattr(self, name)
            require(isinstance(value, int) and value >= 0, name, value, "needs a number of layers, 0 for none")
        complete = {tensor_class: self.table.get(tensor_class) for tensor_class in TENSOR_CLASSES}
        object.__setattr__(self, "table", MappingProxyType(complete))

    def __reduce__(self):
        return type(self), (dict(self.table), self.name, self.first_layers, self.last_layers)

    @classmethod
    def preset(cls, name: str, **layers: int) -> QuantizationPolicy:
        """A preset by name; `auto` chooses by the GPU of this machine.

        Raises:
            ConfigurationError: for an unknown name, or `native` where no GPU has it.
        """
        require(name in PRESETS, "quantization", name, f"needs one of {', '.join(PRESETS)}")
        if name == "auto":
            name = "native" if _native_is_what_the_policy_asks_for() else "emulated"
        table = _native_table() if name == "native" else _TABLES[name]()
        return cls(table, name, **layers)

    @classmethod
    def from_formats(
        cls,
        weight_format: str = "NVFP4_8x8",
        activation_format: str = "NVFP4",
        attention_format: str = "MXFP8",
    ) -> QuantizationPolicy:
        """The emulated preset with other formats, in the notation of `QuantizationSpec.parse`; `none` for none.

        Args:
            weight_format: experts, dense branch and attention output projection.
            activation_format: value and expert outputs and gate pre-activations, in blocks of 32, 16 and 16 unless it names
                a block.
            attention_format: query, key and value weights, query and key, softmax (unsigned E5M3) and head outputs.
        """
        weights = _weight(weight_format)
        attention_weight = _weight(attention_format)
        attention = _activation(attention_format)
        softmax = None if attention is None else attention.replace(format="ue5m3", scale_limits=None)
        return cls(
            {
                "routed_expert_weight": weights,
                "shared_expert_weight": weights,
                "dense_ffn_weight": weights,
                "attention_output_weight": weights,
                "query_key_weight": attention_weight,
                "value_weight": attention_weight,
                "query_key_output": attention,
                "value_output": _activation(activation_format, default_block=32),
                "attention_softmax": softmax,
                "attention_head_output": attention,
                "expert_output": _activation(activation_format),
                "gate_preactivation": _activation(activation_format),
            },
            "formats",
        )

    def with_rows(self, rows: Mapping[str, str]) -> QuantizationPolicy:
        """This policy with some rows replaced, each in the notation of `QuantizationSpec.parse` or `none`."""
        changed = dict(self.table)
        for tensor_class, notation in rows.items():
            is_weight = tensor_class in WEIGHT_CLASSES or tensor_class == GRADIENT_CLASS
            changed[tensor_class] = _weight(notation) if is_weight else _activation(notation)
        return replace(self, table=changed)

    @property
    def is_native(self) -> bool:
        """Whether matrix products run in low precision."""
        return any(spec is not None and spec.backend == "native" for spec in self.table.values())

    def spec_for(self, tensor_class: str, layer_number: Optional[int], num_layers: int) -> Optional[QuantizationSpec]:
        """The spec of a tensor in layer `layer_number`, counted from 1."""
        if layer_number is not None and not self.first_layers < layer_number <= num_layers - self.last_layers:
            return None
        return self.table[tensor_class]


def _weight(notation: str) -> Optional[QuantizationSpec]:
    if notation == UNQUANTIZED:
        return None
    return QuantizationSpec.parse(notation, outer_scale="matrix")


def _activation(notation: str, default_block: Optional[int] = None) -> Optional[QuantizationSpec]:
    if notation == UNQUANTIZED:
        return None
    spec = QuantizationSpec.parse(notation, scale_limits=ACTIVATION_SCALE_LIMITS)
    spec = spec.replace(outer_scale="row" if spec.block_shape[0] == 1 else "matrix")
    if default_block is not None and not any(part.isdigit() for part in notation.split("_")):
        spec = spec.replace(block=default_block)
    return spec


def _emulated_table() -> dict[str, Optional[QuantizationSpec]]:
    return dict(QuantizationPolicy.from_formats().table)


def _literal_table() -> dict[str, Optional[QuantizationSpec]]:
    literal_weight = _weight("E1M3_8x8")
    softmax = _activation("MXFP8_UE5M3")
    assert softmax is not None
    return {
        "routed_expert_weight": literal_weight,
        "shared_expert_weight": literal_weight,
        "dense_ffn_weight": literal_weight,
        "attention_output_weight": literal_weight,
        "query_key_weight": _weight("MXFP8"),
        "query_key_output": _activation("MXFP8"),
        "value_output": _activation("E1M3_32"),
        "attention_softmax": softmax.replace(scale_limits=None),
        "attention_head_output": _activation("MXFP8_E5M3"),
        "expert_output": _activation("E1M3_16"),
        "gate_preactivation": _activation("E1M3_16"),
        "router_logits": _activation("E1M3_16"),
    }


def _torchao_table() -> dict[str, Optional[QuantizationSpec]]:
    fp4 = QuantizationSpec.parse("NVFP4_16", backend="torchao")
    mx = QuantizationSpec.parse("MXFP8", backend="torchao")
    weight = fp4.replace(outer_scale="matrix")
    return {
        "routed_expert_weight": weight,
        "shared_expert_weight": weight,
        "dense_ffn_weight": weight,
        "attention_output_weight": weight,
        "query_key_weight": mx,
        "value_weight": mx,
        "query_key_output": mx,
        "value_output": fp4.replace(outer_scale="row"),
        "attention_softmax": mx,
        "attention_head_output": mx,
        "expert_output": fp4.replace(outer_scale="row"),
        "gate_preactivation": fp4.replace(outer_scale="row"),
    }


_TABLES = {
    "none": dict,
    "emulated": _emulated_table,
    "seed_literal": _literal_table,
    "torchao": _torchao_table,
}
PRESETS = ("none", "emulated", "native", "auto", "seed_literal", "torchao")


def _capability() -> Optional[tuple[int, int]]:
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def _native_is_what_the_policy_asks_for() -> bool:
    from nemo_hsmoe.quantization.native import transformer_engine_is_installed

    capability = _capability()
    return capability is not None and capability >= BLACKWELL and transformer_engine_is_installed()


def _native_table() -> dict[str, Optional[QuantizationSpec]]:
    from nemo_hsmoe.quantization.native import transformer_engine_is_installed

    capability = _capability()
    reason = (
        "needs TransformerEngine and a Blackwell GPU (NVFP4, MXFP8) or a Hopper GPU (FP8 in blocks); here: "
        f"{'no GPU' if capability is None else 'compute capability ' + '.'.join(map(str, capability))}, TransformerEngine "
        f"{'installed' if transformer_engine_is_installed() else 'missing'}; 'emulated' runs everywhere"
    )
    require(
        capability is not None and capability >= HOPPER and transformer_engine_is_installed(),
        "quantization",
        "native",
        reason,
    )
    assert capability is not None
    if capability >= BLACKWELL:
        wide = QuantizationSpec.parse("NVFP4_16x16", outer_scale="matrix", backend="native")
        attention = QuantizationSpec.parse("MXFP8", backend="native")
    else:
        wide = attention = QuantizationSpec.parse("FP8_128x128", backend="native")
    return {
        "routed_expert_weight": wide,
        "shared_expert_weight": wide,
        "dense_ffn_weight": wide,
        "attention_output_weight": wide,
        "query_key_weight": attention,
        "value_weight": attention,
    }
