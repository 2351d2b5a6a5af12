"""Self-attention with separate query, key and value projections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional, Union

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_hsmoe.model.config import parameter_device
from nemo_hsmoe.quantization.tensor_quantizer import TensorQuantizer


@dataclass
class SeparateProjectionAttentionSubmodules:
    """Parts of `SeparateProjectionSelfAttention`; the field names are Megatron's."""

    linear_q: Union[ModuleSpec, type]
    linear_k: Union[ModuleSpec, type]
    linear_v: Union[ModuleSpec, type]
    core_attention: Union[ModuleSpec, type]
    linear_proj: Union[ModuleSpec, type]


class SeparateProjectionSelfAttention(Attention):
    """Megatron attention whose query, key and value come from three `[hidden, hidden]` projections.

    Rotary positions, the key-value cache and the output projection are Megatron's.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SeparateProjectionAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        cp_comm_type: Optional[str] = None,
        pg_collection: Optional[ProcessGroupCollection] = None,
    ):
        super().__init__(
            config=config,
            submodules=submodules,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            attention_type="self",
            cp_comm_type=cp_comm_type,
            pg_collection=pg_collection,
        )
        self.linear_q = self._build_projection(submodules.linear_q, self.query_projection_size)
        self.linear_k = self._build_projection(submodules.linear_k, self.kv_projection_size)
        self.linear_v = self._build_projection(submodules.linear_v, self.kv_projection_size)
        self.q_layernorm = self.k_layernorm = None
        device = parameter_device(config)
        self.query_quantizer = TensorQuantizer("query_key_output", device)
        self.key_quantizer = TensorQuantizer("query_key_output", device)
        self.value_quantizer = TensorQuantizer("value_output", device)

    def _build_projection(self, spec: Union[ModuleSpec, type], output_size: int) -> torch.nn.Module:
        return build_module(
            spec,
            self.config.hidden_size,
            output_size,
            config=self.config,
            init_method=self.config.init_method,
            gather_output=False,
            bias=self.config.add_bias_linear,
            skip_bias_add=False,
            is_expert=False,
            tp_group=self.pg_collection.tp,
        )

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Optional[Tensor] = None,
        output_gate: bool = False,
        split_qkv: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project `[S, B, D]` to query, key and value of shape `[S, B, heads, head dim]`."""
        head_shape = (*hidden_states.shape[:2], -1, self.hidden_size_per_attention_head)
        query = self.query_quantizer(self.linear_q(hidden_states)[0])
        key = self.key_quantizer(self.linear_k(hidden_states)[0])
        value = self.value_quantizer(self.linear_v(hidden_states)[0])
        return query.view(head_shape), key.view(head_shape), value.view(head_shape)


class ScaledDotProductCoreAttention(MegatronModule):
    """Causal attention through `torch.nn.functional.scaled_dot_product_attention`, on any device.

    With fewer queries than keys, as in decoding from a cache, the queries are the last positions. Where the policy quantises
    the softmax, scores and softmax are formed in full: `[B, heads, queries, keys]`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: Optional[float] = None,
        softmax_scale: Optional[float] = None,
        cp_comm_type: Optional[str] = None,
        pg_collection: Optional[ProcessGroupCollection] = None,
    ):
        super().__init__(config)
        self.softmax_scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.softmax_quantizer = TensorQuantizer("attention_softmax", parameter_device(config))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Optional[Tensor] = None,
        attn_mask_type: Optional[AttnMaskType] = None,
        attention_bias: Optional[Tensor] = None,
        packed_seq_params=None,
    ) -> Tensor:
        """Attend.

        Args:
            query, key, value: `[S, B, heads, head dim]`.
            attention_mask: bool, broadcast to `[B, heads, queries, keys]`, True where attention is forbidden, in
                addition to the causal mask; None for the causal mask alone.

        Returns:
            Tensor `[S, B, heads · head dim]`.
        """
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        queries, keys = query.shape[2], key.shape[2]
        allowed = None
        if attention_mask is not None or (1 < queries < keys):
            allowed = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
            if attention_mask is not None:
                allowed = allowed & ~attention_mask
        dropout = self.dropout if self.training else 0.0
        is_causal = allowed is None and queries > 1
        if self.softmax_quantizer.is_active:
            output = self._eager_attention(query, key, value, allowed, is_causal, dropout)
        else:
            output = F.scaled_dot_product_attention(
                query, key, value, attn_mask=allowed, dropout_p=dropout, is_causal=is_causal, scale=self.softmax_scale
            )
        return output.permute(2, 0, 1, 3).flatten(2)

    def _eager_attention(
        self,
        query_BHQD: Tensor,
        key_BHKD: Tensor,
        value_BHKD: Tensor,
        allowed: Optional[Tensor],
        is_causal: bool,
        dropout: float,
    ) -> Tensor:
        scale = query_BHQD.shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale
        scores_BHQK = (query_BHQD * scale) @ key_BHKD.transpose(-2, -1)
        if is_causal:
            allowed = torch.ones(scores_BHQK.shape[-2:], dtype=torch.bool, device=scores_BHQK.device).tril()
        if allowed is not None:
            scores_BHQK = scores_BHQK.masked_fill(~allowed, float("-inf"))
        softmax_BHQK = torch.softmax(scores_BHQK, dim=-1, dtype=torch.float32).to(value_BHKD.dtype)
        return F.dropout(self.softmax_quantizer(softmax_BHQK), dropout) @ value_BHKD
