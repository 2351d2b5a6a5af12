"""Megatron's all-to-all dispatcher, told how many rows there really are."""

from __future__ import annotations

import torch
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor


class PaddingAwareAlltoAllDispatcher(MoEAlltoAllTokenDispatcher):
    """All-to-all dispatch in which a token may go to no expert at all.

    Megatron's dropless dispatcher takes the number of dispatched rows to be tokens × k. Padding tokens are routed nowhere,
    so with `has_padding` the count is read from the routing map. Counts per local expert stay on the device, and without
    expert parallelism nothing is copied to the host.
    """

    has_padding = False

    def preprocess(self, routing_map: Tensor) -> Tensor:
        """Count rows; see Megatron's method of the same name."""
        tokens_per_expert_E = super().preprocess(routing_map)
        if self.has_padding:
            self.num_out_tokens = int(routing_map.sum())
        self._device_tokens_per_expert_E = tokens_per_expert_E
        return tokens_per_expert_E

    def dispatch_postprocess(self, global_input_tokens: Tensor, global_probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sort received rows by local expert; the counts returned are the device's own."""
        rows, _, gates = super().dispatch_postprocess(global_input_tokens, global_probs)
        return rows, self._device_tokens_per_expert_E, gates

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Tensor | None = None) -> Tensor | None:
        if self.ep_size == 1 and self.tp_size == 1:
            return tokens_per_expert
        if torch.cuda.is_available():
            return super()._maybe_dtoh_and_synchronize(point, tokens_per_expert)
        if point == self.cuda_dtoh_point:
            self.input_splits = self.input_splits.tolist()
            self.output_splits = self.output_splits.tolist()
        return tokens_per_expert
