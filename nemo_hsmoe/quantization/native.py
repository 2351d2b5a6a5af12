"""Low-precision matrix products through TransformerEngine, chosen module by module with Megatron Core's `quant_recipe`."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any, Optional

import torch
from torch import Tensor

from nemo_hsmoe.quantization.spec import QuantizationSpec
from nemo_hsmoe.runtime.errors import require

if TYPE_CHECKING:
    from nemo_hsmoe.quantization.policy import QuantizationPolicy

MODULES_OF_CLASS = {
    "routed_expert_weight": ("mlp.experts",),
    "shared_expert_weight": ("mlp.shared_experts",),
    "dense_ffn_weight": ("mlp.dense.linear_fc1", "mlp.dense.linear_fc2"),
    "attention_output_weight": ("self_attention.linear_proj",),
    "query_key_weight": ("self_attention.linear_q", "self_attention.linear_k"),
    "value_weight": ("self_attention.linear_v",),
}
ROWS_MULTIPLE = 32


def transformer_engine_is_installed() -> bool:
    """Whether `transformer_engine` can be imported."""
    return importlib.util.find_spec("transformer_engine") is not None


def recipe_of(spec: QuantizationSpec) -> dict[str, Any]:
    """Megatron's `TEQuantizationRecipe` fields that run a spec natively.

    Raises:
        ConfigurationError: when TransformerEngine has no recipe for it.
    """
    fields = {
        ("e2m1", "e4m3"): {"fp4_quantization_recipe": "nvfp4"},
        ("e4m3", "e8m0"): {"fp8_quantization_recipe": "mxfp8"},
        ("e4m3", "fp32"): {"fp8_quantization_recipe": "blockwise"},
    }
    key = (spec.format, spec.scale)
    require(key in fields, "backend", "native", f"needs NVFP4, MXFP8 or FP8, not {spec.description}")
    return {**fields[key], "fp8_format": "e4m3", "override_nonquantized_autocast": True}


def quant_recipe_of(policy: QuantizationPolicy, num_layers: int):
    """The policy as a `megatron.core.quantization.quant_config.RecipeConfig`: one glob a layer and module."""
    from megatron.core.quantization.quant_config import RecipeConfig

    configs: dict[str, dict] = {}
    matchers: dict[str, dict] = {}
    for tensor_class, modules in MODULES_OF_CLASS.items():
        spec = policy.table[tensor_class]
        if spec is None or spec.backend != "native":
            continue
        configs[tensor_class] = {
            "transformer_engine_config_type": "TEQuantizationParams",
            "training_recipe": recipe_of(spec),
        }
        for layer in range(num_layers):
            if policy.spec_for(tensor_class, layer + 1, num_layers) is None:
                continue
            for module in modules:
                matchers[f"{layer}.{module}"] = {
                    "config": tensor_class,
                    "type": "glob",
                    "pattern": f"*layers.{layer}.{module}",
                    "enabled": True,
                }
    return RecipeConfig.from_config_dict({"configs": configs, "matchers": matchers})


def apply_quant_recipe(model: torch.nn.Module, recipe) -> None:
    """Hand every module that takes one its part of a Megatron quantisation recipe, as `GPTModel` does when it is built."""
    from megatron.core.quantization.utils import get_quant_config_or_none

    for name, module in model.named_modules():
        if hasattr(module, "finish_init"):
            module.finish_init(get_quant_config_or_none(name, recipe))


class NativeExpertProducts:
    """Matrix products of stacked experts in the number format of a recipe.

    TransformerEngine's modules hold no weights here: they are handed views of the stacked parameters at each call, and
    gradients flow back into those.
    """

    def __init__(self, quantization_config):
        from megatron.core.extensions.transformer_engine import TEQuantizationParams

        self._parameters = TEQuantizationParams.parse_from_config(quantization_config)
        self._modules: dict[tuple, torch.nn.Module] = {}

    def grouped(self, x_TK: Tensor, weight_ENK: Tensor, tokens_per_expert_E: Tensor, training: bool) -> Tensor:
        """`grouped_linear` in the recipe's format; rows of an expert are padded to a multiple of 32 for the products."""
        import transformer_engine.pytorch as te

        experts, out_features, in_features = weight_ENK.shape
        module = self._module(te.GroupedLinear, experts, in_features, out_features)
        splits = tokens_per_expert_E.tolist()
        padding = self._modules.setdefault(("pad", experts), te.Fp8Padding(experts, ROWS_MULTIPLE))
        unpadding = self._modules.setdefault(("unpad", experts), te.Fp8Unpadding(experts, ROWS_MULTIPLE))
        padded_x, padded_splits = padding(x_TK, splits)
        weights = {f"weight{index}": weight for index, weight in enumerate(weight_ENK.unbind(0))}
        with self._precision(training):
            output = torch.func.functional_call(module, weights, (padded_x, padded_splits))
        return unpadding(output, splits)

    def linear(self, x_TK: Tensor, weight_NK: Tensor, training: bool) -> Tensor:
        """`torch.nn.functional.linear` in the recipe's format."""
        import transformer_engine.pytorch as te

        rows = x_TK.shape[0]
        padded_x = torch.nn.functional.pad(x_TK, (0, 0, 0, -rows % ROWS_MULTIPLE))
        module = self._module(te.Linear, *weight_NK.shape[::-1])
        with self._precision(training):
            output = torch.func.functional_call(module, {"weight": weight_NK}, (padded_x,))
        return output[:rows]

    def _module(self, kind, *sizes: int) -> torch.nn.Module:
        key = (kind.__name__, *sizes)
        if key not in self._modules:
            self._modules[key] = kind(*sizes, bias=False, params_dtype=torch.bfloat16, device="meta")
        return self._modules[key]

    def _precision(self, training: bool):
        from megatron.core.extensions.transformer_engine import _get_fp8_autocast_for_quant_params

        return _get_fp8_autocast_for_quant_params(self._parameters, training)


def native_products(quantization_config) -> Optional[NativeExpertProducts]:
    """Products for a module's part of a recipe; None when it has none."""
    return None if quantization_config is None else NativeExpertProducts(quantization_config)
