"""Put a policy on a model, and say what each of its tensors got."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Optional, TypeVar

import torch

from nemo_hsmoe.quantization.native import MODULES_OF_CLASS, apply_quant_recipe, quant_recipe_of
from nemo_hsmoe.quantization.policy import (
    GRADIENT_CLASS,
    NEVER_QUANTIZED,
    TENSOR_CLASSES,
    WEIGHT_CLASSES,
    QuantizationPolicy,
)
from nemo_hsmoe.quantization.spec import QuantizationSpec
from nemo_hsmoe.quantization.tensor_quantizer import TensorQuantizer, quantizers_of
from nemo_hsmoe.quantization.torchao_backend import check_torchao_can
from nemo_hsmoe.runtime.errors import require

ModuleT = TypeVar("ModuleT", bound=torch.nn.Module)

_WHY_DROPPED = {
    "attention_softmax": "the fused attention never writes its softmax; use_transformer_engine=False takes the eager one",
}


@dataclass(frozen=True)
class ReportRow:
    """What one tensor class of a model got.

    Attributes:
        tensor_class: row of the policy.
        quantized, high_precision: places with and without quantisation, such as one a layer.
        format: element, block and scale; `none` when nothing is quantised.
        backend: what does it.
        bits_per_value: storage with the share of the block scale; the model's own width when not quantised.
        note: what a reader must know, such as that the line was dropped.
    """

    tensor_class: str
    quantized: int
    high_precision: int
    format: str
    backend: str
    bits_per_value: Optional[float]
    note: str = ""


@dataclass(frozen=True)
class QuantizationReport:
    """The policy as a model carries it out."""

    policy: str
    rows: tuple[ReportRow, ...]

    @property
    def dropped(self) -> tuple[ReportRow, ...]:
        """Lines of the policy that this model cannot carry out."""
        return tuple(row for row in self.rows if row.note.startswith("dropped"))

    def as_dict(self) -> dict:
        """Policy name, and rows as dictionaries."""
        return {"policy": self.policy, "rows": [asdict(row) for row in self.rows]}

    def __str__(self) -> str:
        header = f"{'tensor':<25}{'places':>7}  {'bits':>6}  {'format / block / scale':<42}{'back end':<10}"
        lines = [f"quantization: {self.policy}", header]
        for row in self.rows:
            places = f"{row.quantized}/{row.quantized + row.high_precision}"
            bits = "" if row.bits_per_value is None else f"{row.bits_per_value:.4g}"
            line = f"{row.tensor_class:<25}{places:>7}  {bits:>6}  {row.format:<42}{row.backend:<10}{row.note}"
            lines.append(line.rstrip())
        return "\n".join(lines)


def quantize_model(
    model: ModuleT,
    weight_format: str = "NVFP4_8x8",
    activation_format: str = "NVFP4",
    attention_format: str = "MXFP8",
    *,
    policy: Optional[QuantizationPolicy] = None,
) -> ModuleT:
    """Quantise a model from here on: right after initialisation, and in training as in inference.

    Parameters keep their precision as masters; every forward pass uses them as their format can hold them, and gradients
    pass straight through. Formats are written as `QuantizationSpec.parse` reads them.

    Args:
        model: `HybridSparseMoEModel`, wrapped or not; changed in place.
        weight_format: experts, dense branch, attention output projection.
        activation_format: value and expert outputs, gate pre-activations.
        attention_format: query, key and value weights, query and key, softmax and head outputs.
        policy: the whole table instead; excludes the formats.

    Returns:
        The model.

    Raises:
        ConfigurationError: for an unknown format, a model without quantizers, or a back end this machine lacks.
    """
    if policy is None:
        policy = QuantizationPolicy.from_formats(weight_format, activation_format, attention_format)
    else:
        defaults = ("NVFP4_8x8", "NVFP4", "MXFP8")
        require(
            (weight_format, activation_format, attention_format) == defaults,
            "policy",
            policy.name,
            "excludes weight_format, activation_format and attention_format: put them in the policy",
        )
    quantizers = quantizers_of(model)
    require(bool(quantizers), "model", type(model).__name__, "needs a HybridSparseMoEModel")
    num_layers = _core_config(model).num_layers
    require(
        policy.first_layers + policy.last_layers <= num_layers,
        "first_layers + last_layers",
        policy.first_layers + policy.last_layers,
        f"needs at most the model's {num_layers} layers",
    )
    for name, quantizer in quantizers.items():
        spec = policy.spec_for(quantizer.tensor_class, _layer_number(name), num_layers)
        if spec is not None and spec.backend == "torchao":
            check_torchao_can(spec)
        quantizer.spec = None if spec is None or spec.backend == "native" else spec
        is_activation = quantizer.tensor_class not in WEIGHT_CLASSES
        quantizer.gradient_spec = policy.table[GRADIENT_CLASS] if is_activation and quantizer.spec else None
    recipe = quant_recipe_of(policy, num_layers) if policy.is_native else None
    if recipe is not None:
        _require_native_modules(model, policy)
    _core_config(model).quant_recipe = recipe
    apply_quant_recipe(model, recipe)
    _core(model).quantization_policy = policy
    return model


def quantization_report(model: torch.nn.Module) -> QuantizationReport:
    """What every tensor class of `model` got, with bits per value, and which lines of the policy were dropped."""
    policy: QuantizationPolicy = getattr(_core(model), "quantization_policy", QuantizationPolicy(name="none"))
    quantizers = quantizers_of(model)
    num_layers = _core_config(model).num_layers
    own_bits = torch.finfo(_core_config(model).params_dtype).bits
    rows = []
    for tensor_class in TENSOR_CLASSES:
        asked = policy.table[tensor_class]
        places = [(name, quantizer) for name, quantizer in quantizers.items() if quantizer.tensor_class == tensor_class]
        if tensor_class == GRADIENT_CLASS:
            places = [(name, quantizer) for name, quantizer in quantizers.items() if quantizer.gradient_spec is not None]
        got = Counter(_spec_in_force(policy, name, quantizer, num_layers) is not None for name, quantizer in places)
        rows.append(_row(tensor_class, asked, _current(asked, places), got, own_bits))
    never = [ReportRow(name, 0, 1, "none", "", 32.0, "float32, never quantised") for name in NEVER_QUANTIZED]
    return QuantizationReport(policy.name, (*rows, *never))


def grow_blocks(model: torch.nn.Module) -> dict[str, str]:
    """Move every 2-D block to the next of 8×8 → 16×8 → 16×16, the answer to NaN or exploding gradients.

    Returns:
        New description by tensor class, empty when no block can grow.
    """
    grown = {}
    for quantizer in quantizers_of(model).values():
        larger = quantizer.spec.with_larger_block() if quantizer.spec else None
        if larger is not None:
            quantizer.spec = larger
            grown[quantizer.tensor_class] = larger.description
    return grown


def _row(
    tensor_class: str,
    asked: Optional[QuantizationSpec],
    current: Optional[QuantizationSpec],
    got: Counter,
    own_bits: float,
) -> ReportRow:
    if asked is None:
        return ReportRow(tensor_class, 0, got[False], "none", "", own_bits if sum(got.values()) else None)
    if not sum(got.values()):
        note = f"dropped: {_WHY_DROPPED.get(tensor_class, 'this model has no such tensor')}"
        return ReportRow(tensor_class, 0, 0, asked.description, "", None, note)
    assert current is not None
    note = f"{got[False]} in the model's own precision" if got[False] else ""
    return ReportRow(tensor_class, got[True], got[False], current.description, current.backend, current.bits_per_value, note)


def _current(asked: Optional[QuantizationSpec], places: list[tuple[str, TensorQuantizer]]) -> Optional[QuantizationSpec]:
    return next((quantizer.spec for _, quantizer in places if quantizer.spec is not None), asked)


def _spec_in_force(
    policy: QuantizationPolicy, name: str, quantizer: TensorQuantizer, num_layers: int
) -> Optional[QuantizationSpec]:
    if quantizer.spec is not None:
        return quantizer.spec
    spec = policy.spec_for(quantizer.tensor_class, _layer_number(name), num_layers)
    return spec if spec is not None and spec.backend == "native" else None


def _require_native_modules(model: torch.nn.Module, policy: QuantizationPolicy) -> None:
    native = [name for name, spec in policy.table.items() if spec is not None and spec.backend == "native"]
    suffixes = tuple(f".{module}" for tensor_class in native for module in MODULES_OF_CLASS[tensor_class])
    for name, module in model.named_modules():
        require(
            not name.endswith(suffixes) or hasattr(module, "finish_init"),
            "quantization",
            policy.name,
            f"needs TransformerEngine layers, {name} is {type(module).__name__}: set use_transformer_engine=None or True",
        )


def _layer_number(module_name: str) -> Optional[int]:
    match = re.search(r"layers\.(\d+)\.", module_name)
    return None if match is None else int(match[1]) + 1


def _core(model: torch.nn.Module) -> torch.nn.Module:
    return next(module for module in model.modules() if hasattr(module, "decoder") and hasattr(module, "config"))


def _core_config(model: torch.nn.Module):
    return _core(model).config
