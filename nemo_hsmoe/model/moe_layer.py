"""The feed-forward half of a layer: routed experts, shared experts and the dense gated branch, added."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Optional, Union

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from torch import Tensor

from nemo_hsmoe.model.config import HybridSparseMoEConfig, parameter_device
from nemo_hsmoe.model.dispatcher import PaddingAwareAlltoAllDispatcher
from nemo_hsmoe.quantization.tensor_quantizer import TensorQuantizer


@dataclass
class HybridMoESubmodules(MoESubmodules):
    """Megatron's MoE parts and the dense gated branch."""

    dense: Union[ModuleSpec, type, None] = None


class DenseGatedFFN(MLP):
    """SwiGLU network every token uses: `fc2(silu(gate) ⊙ up)`, without biases (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(
        self,
        config: HybridSparseMoEConfig,
        submodules: MLPSubmodules,
        tp_group: Optional[torch.distributed.ProcessGroup] = None,
    ):
        gated = copy.copy(config)
        gated.ffn_hidden_size = config.dense_ffn_hidden_size
        gated.gated_linear_unit = True
        gated.activation_func = F.silu
        gated.bias_activation_fusion = False
        super().__init__(gated, submodules, ffn_hidden_size=config.dense_ffn_hidden_size, tp_group=tp_group)
        self.gate_quantizer = TensorQuantizer("gate_preactivation", parameter_device(config))
        self.config.activation_func = self.activation_func = self._gate

    def _gate(self, preactivation: Tensor) -> Tensor:
        return F.silu(self.gate_quantizer(preactivation))


class HybridMoELayer(MoELayer):
    """`routed(x) + shared(x) + dense(x)` through Megatron's route → dispatch → compute → combine sequence."""

    def __init__(
        self,
        config: HybridSparseMoEConfig,
        submodules: HybridMoESubmodules,
        layer_number: Optional[int] = None,
        pg_collection: Optional[ProcessGroupCollection] = None,
    ):
        groups = pg_collection or get_default_pg_collection()
        super().__init__(config, submodules, layer_number, groups)
        self.token_dispatcher = PaddingAwareAlltoAllDispatcher(
            self.num_local_experts, self.local_expert_indices, config=config, pg_collection=groups
        )
        self.dense = (
            build_module(submodules.dense, config=config, tp_group=groups.tp) if config.dense_ffn_hidden_size else None
        )

    def forward(self, hidden_states: Tensor, intermediate_tensors=None, padding_mask: Optional[Tensor] = None):
        """Feed-forward output for `[S, B, D]`; `padding_mask [B, S]` is True where a token goes to no routed expert."""
        self.token_dispatcher.has_padding = padding_mask is not None
        return super().forward(hidden_states, intermediate_tensors, padding_mask)

    def shared_experts_compute(self, hidden_states: Tensor) -> Optional[Tensor]:
        """Everything that does not depend on routing: shared experts and the dense branch."""
        outputs = []
        if self.use_shared_expert:
            outputs.append(self.shared_experts(hidden_states))
        if self.dense is not None:
            outputs.append(self.dense(hidden_states)[0])
        return sum(outputs[1:], outputs[0]) if outputs else None
