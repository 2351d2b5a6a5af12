"""`HybridSparseMoEModel`: the whole transformer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Optional

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from nemo_hsmoe.kernels.linear_cross_entropy import linear_cross_entropy
from nemo_hsmoe.model.config import HybridSparseMoEConfig
from nemo_hsmoe.model.initialization import initialize_parameters
from nemo_hsmoe.model.layer_spec import decoder_block_spec
from nemo_hsmoe.model.router import routers_of
from nemo_hsmoe.quantization.quantize_model import quantize_model
from nemo_hsmoe.runtime.errors import require
from nemo_hsmoe.runtime.precision import cast_floating_point, keep_in_float32
from nemo_hsmoe.runtime.process_groups import ensure_model_parallel

IGNORED_LABEL = -100


@dataclass(frozen=True)
class RoutingInfo:
    """What the routers of one forward pass decided, layers first.

    Attributes:
        scores_LBSE: softmax over all experts, float32, with its graph when gradients are on.
        chosen_LBSE: bool, the experts each token went to.
    """

    scores_LBSE: Tensor
    chosen_LBSE: Tensor

    @property
    def tokens_per_expert_LE(self) -> Tensor:
        """Tokens each expert of each layer received, int64."""
        return self.chosen_LBSE.sum(dim=(1, 2))


class HybridSparseMoEModel(GPTModel):
    """Decoder-only transformer with routed, shared and dense feed-forward branches, on Megatron Core.

    Build it from a configuration, `HybridSparseMoEModel(config)`, or from the shape alone,
    `HybridSparseMoEModel(num_layers=…, hidden_dim=…, …)`; the latter derives inner widths in the proportions of the 5B
    model (7/12, 7/24 and 1/3 of `hidden_dim`, to multiples of 8) and any `HybridSparseMoEConfig` field may be added as a
    keyword. Without initialised process groups it makes a world of one process for itself.

    Args:
        config: complete configuration; excludes the shape arguments.
        num_layers, hidden_dim, num_attention_heads: trunk shape.
        num_routed_experts, num_shared_experts, expert_router_k: experts, and routed experts a token uses.
        vocab_size, max_seq_len: tokens known and longest context.
        dropout: probability on hidden states and attention weights.
        pg_collection: Megatron process groups; None takes the global ones.
        config_fields: further `HybridSparseMoEConfig` fields.

    Raises:
        ConfigurationError: for a shape that cannot work, or both ways of construction at once.
    """

    def __init__(
        self,
        config: Optional[HybridSparseMoEConfig] = None,
        *,
        num_layers: Optional[int] = None,
        hidden_dim: Optional[int] = None,
        num_attention_heads: Optional[int] = None,
        num_routed_experts: Optional[int] = None,
        num_shared_experts: Optional[int] = None,
        expert_router_k: Optional[int] = None,
        vocab_size: Optional[int] = None,
        max_seq_len: Optional[int] = None,
        dropout: Optional[float] = None,
        pg_collection: Optional[ProcessGroupCollection] = None,
        vp_stage: Optional[int] = None,
        **config_fields,
    ):
        shape = {
            "num_layers": num_layers,
            "hidden_size": hidden_dim,
            "num_attention_heads": num_attention_heads,
            "num_moe_experts": num_routed_experts,
            "num_shared_experts": num_shared_experts,
            "moe_router_topk": expert_router_k,
            "vocab_size": vocab_size,
            "seq_length": max_seq_len,
            "hidden_dropout": dropout,
            "attention_dropout": dropout,
        }
        given = {**{name: value for name, value in shape.items() if value is not None}, **config_fields}
        if config is None:
            config = _config_from_shape(given)
        else:
            require(not given, "config", config, f"excludes {', '.join(given)}: set them in the configuration")
        ensure_model_parallel(config.expert_model_parallel_size)
        ranks = parallel_state.get_expert_model_parallel_world_size()
        require(
            pg_collection is not None or config.expert_model_parallel_size == ranks,
            "expert_model_parallel_size",
            config.expert_model_parallel_size,
            f"needs {ranks}, the size of the expert-parallel groups of this process",
        )
        super().__init__(
            config=config,
            transformer_layer_spec=decoder_block_spec(config),
            vocab_size=config.vocab_size,
            max_sequence_length=config.seq_length,
            share_embeddings_and_output_weights=True,
            position_embedding_type="rope",
            rotary_base=config.rotary_base,
            pg_collection=pg_collection,
            vp_stage=vp_stage,
        )
        embedding = self.embedding.word_embeddings.weight
        embedding.data = embedding.data.float()
        keep_in_float32(embedding)
        cast_floating_point(self, config.params_dtype)
        initialize_parameters(self, config)
        quantize_model(self, policy=config.quantization_policy())

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Optional[Tensor] = None,
        attention_mask: Optional[Tensor] = None,
        decoder_input: Optional[Tensor] = None,
        labels: Optional[Tensor] = None,
        *,
        loss_mask: Optional[Tensor] = None,
        padding_mask: Optional[Tensor] = None,
        **megatron_arguments,
    ) -> tuple[Tensor, RoutingInfo] | Tensor:
        """Run the model on `[B, S]` token ids.

        Args:
            input_ids: token ids.
            position_ids: unused beyond Megatron's interface: positions are rotary and follow the sequence.
            attention_mask: bool `[B, 1, S, S]`, True where attention is forbidden besides the causal mask.
            labels: next token of each position; asks for the loss.
            loss_mask: `[B, S]`, weight of each position's loss; None counts every position once. Positions labelled −100 and
                padding weigh nothing either way.
            padding_mask: bool `[B, S]`, True at padding, which is neither routed, counted nor trained on.
            megatron_arguments: further arguments of `megatron.core.models.gpt.GPTModel.forward`.

        Returns:
            With `labels`, the scalar float32 sum of the weighted next-token losses. Without, `(logits [B, S, V],
            RoutingInfo)` when called with `input_ids` alone, otherwise Megatron's output.

        Raises:
            ConfigurationError: when the sequence is longer than `config.seq_length`.
        """
        if input_ids is not None:
            self._check_ids(input_ids, labels)
            length = input_ids.shape[1]
            require(length <= self.config.seq_length, "input_ids", tuple(input_ids.shape),
                    f"needs at most seq_length = {self.config.seq_length} positions")  # fmt: skip
            if position_ids is None:
                position_ids = torch.arange(length, device=input_ids.device).expand_as(input_ids)
        if labels is not None:
            loss_mask = _weights_of_positions(labels, loss_mask, padding_mask)
        forward = super().forward
        arguments = (input_ids, position_ids, attention_mask, decoder_input, labels)
        keywords = dict(loss_mask=loss_mask, padding_mask=padding_mask, **megatron_arguments)
        if labels is not None or decoder_input is not None or megatron_arguments:
            return forward(*arguments, **keywords)
        with self.recorded_routing() as routing:
            logits = forward(*arguments, **keywords)
        return logits, routing(input_ids.shape)

    def _preprocess(self, *args, **kwargs):
        decoder_input, *rest = super()._preprocess(*args, **kwargs)
        if isinstance(decoder_input, Tensor):
            decoder_input = decoder_input.to(self.trunk_dtype)
        return decoder_input, *rest

    def _postprocess(self, hidden_states, input_ids, position_ids, labels, *args, loss_mask=None, **kwargs):
        if labels is None:
            return self._logits(hidden_states, **kwargs)
        return linear_cross_entropy(
            hidden_states.transpose(0, 1).reshape(-1, hidden_states.shape[-1]),
            self.shared_embedding_or_output_weight(),
            labels.reshape(-1),
            loss_mask.reshape(-1),
        )

    def _check_ids(self, input_ids: Tensor, labels: Optional[Tensor]) -> None:
        shape = tuple(input_ids.shape)
        require(
            input_ids.dim() == 2 and input_ids.numel() > 0, "input_ids", shape, "needs shape [batch, sequence], not empty"
        )
        if labels is not None:
            require(labels.shape == input_ids.shape, "labels", tuple(labels.shape), f"needs the shape of input_ids, {shape}")
        if input_ids.device.type == "cpu":
            lowest, highest = int(input_ids.min()), int(input_ids.max())
            inside = lowest >= 0 and highest < self.config.vocab_size
            require(inside, "input_ids", (lowest, highest), f"needs ids from 0 to {self.config.vocab_size - 1}")

    def _logits(self, hidden_states: Tensor, inference_context=None, **kwargs) -> Tensor:
        if inference_context is not None and inference_context.materialize_only_last_token_logits:
            hidden_states = hidden_states[-1:]
        weight = self.shared_embedding_or_output_weight().to(hidden_states.dtype)
        return (hidden_states @ weight.T).transpose(0, 1).contiguous()

    @property
    def trunk_dtype(self) -> torch.dtype:
        """Type of the decoder's activations."""
        return self.decoder.final_layernorm.weight.dtype

    @contextmanager
    def recorded_routing(self) -> Iterator:
        """Keep each router's scores and choices of the forward passes inside; yields a function of the `[B, S]` shape
        that returns the last pass as `RoutingInfo`."""
        routers = routers_of(self)

        def recorded(batch_shape: torch.Size) -> RoutingInfo:
            batch, length = batch_shape

            def stacked(tensors):
                return torch.stack([tensor.view(length, batch, -1).transpose(0, 1) for tensor in tensors])

            return RoutingInfo(
                stacked([router.scores_TE for router in routers]), stacked([router.chosen_TE for router in routers])
            )

        for router in routers:
            router.records_routing = True
        try:
            yield recorded
        finally:
            for router in routers:
                router.records_routing = False

    def bfloat16(self) -> HybridSparseMoEModel:
        """Cast to bfloat16 all but the router and the embedding."""
        cast_floating_point(self, torch.bfloat16)
        return self

    def half(self) -> HybridSparseMoEModel:
        """Cast to float16 all but the router and the embedding."""
        cast_floating_point(self, torch.float16)
        return self


def _weights_of_positions(labels: Tensor, loss_mask: Optional[Tensor], padding_mask: Optional[Tensor]) -> Tensor:
    weights = torch.ones_like(labels, dtype=torch.float32) if loss_mask is None else loss_mask.float()
    require(
        weights.shape == labels.shape, "loss_mask", tuple(weights.shape), f"needs the shape of labels, {tuple(labels.shape)}"
    )
    ignored = labels == IGNORED_LABEL
    if padding_mask is not None:
        ignored = ignored | padding_mask.bool()
    return weights.masked_fill(ignored, 0.0)


def _config_from_shape(fields: dict) -> HybridSparseMoEConfig:
    hidden = fields.get("hidden_size", HybridSparseMoEConfig.hidden_size)
    require(isinstance(hidden, int) and hidden > 0, "hidden_dim", hidden, "needs a positive whole number")
    widths = {
        "moe_ffn_hidden_size": _multiple_of_8(hidden * 7 / 12),
        "shared_expert_ffn_hidden_size": _multiple_of_8(hidden * 7 / 24),
        "dense_ffn_hidden_size": _multiple_of_8(hidden / 3),
    }
    return HybridSparseMoEConfig(**{**widths, **fields})


def _multiple_of_8(width: float) -> int:
    return max(8, 8 * round(width / 8))
