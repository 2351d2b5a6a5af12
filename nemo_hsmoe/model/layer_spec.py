"""Layer specifications: which class stands for which part, with and without TransformerEngine."""

from __future__ import annotations

import logging

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from nemo_hsmoe.model.attention import (
    ScaledDotProductCoreAttention,
    SeparateProjectionAttentionSubmodules,
    SeparateProjectionSelfAttention,
)
from nemo_hsmoe.model.config import HybridSparseMoEConfig, transformer_engine_available
from nemo_hsmoe.model.experts import RoutedExperts, SharedExperts
from nemo_hsmoe.model.linear import (
    QuantizableColumnParallelLinear,
    QuantizableRowParallelLinear,
    transformer_engine_linears,
)
from nemo_hsmoe.model.moe_layer import DenseGatedFFN, HybridMoELayer, HybridMoESubmodules
from nemo_hsmoe.model.router import StraightThroughTopKRouter
from nemo_hsmoe.runtime.errors import require


def _is_not_about_mlp_type(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Unknown MLP type")


logging.getLogger("megatron.core.transformer.transformer_layer").addFilter(_is_not_about_mlp_type)


def uses_transformer_engine(config: HybridSparseMoEConfig) -> bool:
    """Resolve `config.use_transformer_engine`.

    Raises:
        ConfigurationError: when it asks for TransformerEngine and this machine has none.
    """
    if config.use_transformer_engine is None:
        return transformer_engine_available()
    require(
        not config.use_transformer_engine or transformer_engine_available(),
        "use_transformer_engine",
        True,
        "needs transformer-engine installed and a CUDA device; None chooses by what is there",
    )
    return config.use_transformer_engine


def decoder_block_spec(config: HybridSparseMoEConfig) -> TransformerBlockSubmodules:
    """Every layer of the decoder and its final norm."""
    if uses_transformer_engine(config):
        from megatron.core.extensions.transformer_engine import TEDotProductAttention, TENorm

        column, row = transformer_engine_linears()
        norm, core = TENorm, TEDotProductAttention
    else:
        column, row, norm = QuantizableColumnParallelLinear, QuantizableRowParallelLinear, WrappedTorchNorm
        core = ScaledDotProductCoreAttention
    query_key = ModuleSpec(module=column, params={"weight_class": "query_key_weight"})
    projection = {"weight_class": "attention_output_weight", "input_class": "attention_head_output"}
    dense = {"weight_class": "dense_ffn_weight"}

    attention = ModuleSpec(
        module=SeparateProjectionSelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SeparateProjectionAttentionSubmodules(
            linear_q=query_key,
            linear_k=query_key,
            linear_v=ModuleSpec(module=column, params={"weight_class": "value_weight"}),
            core_attention=core,
            linear_proj=ModuleSpec(module=row, params=projection),
        ),
    )
    feed_forward = ModuleSpec(
        module=HybridMoELayer,
        submodules=HybridMoESubmodules(
            router=StraightThroughTopKRouter,
            experts=RoutedExperts,
            shared_experts=SharedExperts,
            dense=ModuleSpec(
                module=DenseGatedFFN,
                submodules=MLPSubmodules(
                    linear_fc1=ModuleSpec(module=column, params=dense), linear_fc2=ModuleSpec(module=row, params=dense)
                ),
            ),
        ),
    )
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=feed_forward,
            mlp_bda=get_bias_dropout_add,
        ),
    )
    return TransformerBlockSubmodules(layer_specs=[layer] * config.num_layers, layer_norm=norm)
