"""Routed and shared experts: `Linear → GELU → Linear` with biases, many experts in one tensor."""

from __future__ import annotations

from typing import Optional

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from torch import Tensor

from nemo_hsmoe.kernels.grouped_gemm import expert_one_hot, grouped_linear
from nemo_hsmoe.model.config import HybridSparseMoEConfig, parameter_device
from nemo_hsmoe.quantization.native import NativeExpertProducts, native_products
from nemo_hsmoe.quantization.tensor_quantizer import TensorQuantizer


class ExpertWeights(MegatronModule):
    """The parameters of this rank's experts, stacked along the first axis in logical order.

    `fc1_weight [E, F, D]`, `fc1_bias [E, F]`, `fc2_weight [E, D, F]`, `fc2_bias [E, D]`. Rank r of an expert-parallel
    group of size n holds experts `r·E … (r+1)·E − 1`; checkpoints hold the whole stack, so that any n can load it.
    """

    def __init__(
        self,
        num_local_experts: int,
        ffn_hidden_size: int,
        config: HybridSparseMoEConfig,
        ep_group: torch.distributed.ProcessGroup,
        expert_dp_group: torch.distributed.ProcessGroup,
        is_expert_parallel: bool,
        weight_class: str,
    ):
        super().__init__(config)
        self.num_local_experts = num_local_experts
        self.is_expert_parallel = is_expert_parallel
        self.ep_group = ep_group
        self.expert_dp_group = expert_dp_group
        experts, inner, hidden = num_local_experts, ffn_hidden_size, config.hidden_size
        device = parameter_device(config)
        for name, shape in {
            "fc1_weight": (experts, inner, hidden),
            "fc1_bias": (experts, inner),
            "fc2_weight": (experts, hidden, inner),
            "fc2_bias": (experts, hidden),
        }.items():
            parameter = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))
            parameter.allreduce = not is_expert_parallel
            self.register_parameter(name, parameter)
        self.weight_quantizer = TensorQuantizer(weight_class, device)
        self.output_quantizer = TensorQuantizer("expert_output", device)
        self.native_products: Optional[NativeExpertProducts] = None

    def finish_init(self, quantization_config) -> None:
        """Take this module's part of Megatron's quantisation recipe; None for the parameters' own precision."""
        self.native_products = native_products(quantization_config)

    @property
    def first_local_expert(self) -> int:
        """Logical index of the first expert held here."""
        return self.ep_group.rank() * self.num_local_experts if self.is_expert_parallel else 0

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: Optional[dict] = None
    ) -> dict[str, ShardedTensor]:
        """Checkpoint entries keyed by logical experts: the expert axis is sharded over the expert-parallel ranks."""
        entries = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        if not self.is_expert_parallel:
            return entries
        expert_axis = len(sharded_offsets)
        expert_offset = (expert_axis, self.ep_group.rank(), self.ep_group.size())
        sharded = {
            f"{prefix}{name}": ShardedTensor.from_rank_offsets(
                f"{prefix}{name}",
                parameter,
                *sharded_offsets,
                expert_offset,
                replica_id=(0, 0, self.expert_dp_group.rank()),
                prepend_axis_num=len(sharded_offsets),
            )
            for name, parameter in self.named_parameters(recurse=False)
        }
        return {**entries, **sharded}


class RoutedExperts(ExpertWeights):
    """This rank's routed experts, applied to rows sorted by expert."""

    def __init__(
        self,
        num_local_experts: int,
        config: HybridSparseMoEConfig,
        pg_collection: Optional[ProcessGroupCollection] = None,
    ):
        groups = pg_collection or get_default_pg_collection()
        super().__init__(
            num_local_experts,
            config.moe_ffn_hidden_size,
            config,
            groups.ep,
            groups.expt_dp,
            is_expert_parallel=True,
            weight_class="routed_expert_weight",
        )

    def forward(self, rows_TD: Tensor, tokens_per_expert_E: Tensor, gates_T: Tensor) -> tuple[Tensor, None]:
        """Apply each expert to its rows and weight the result.

        Args:
            rows_TD: rows sorted by local expert.
            tokens_per_expert_E: rows of each local expert.
            gates_T: gate of each row, float32.

        Returns:
            `gate · (fc2 · GELU(fc1 · x + b1) + b2)` as `[T, D]`, and None for Megatron's bias slot.
        """
        tokens_per_expert_E = tokens_per_expert_E.to(rows_TD.device)
        member_TE = expert_one_hot(tokens_per_expert_E, rows_TD.shape[0], rows_TD.dtype)
        inner_TF = self._product(rows_TD, self.fc1_weight, tokens_per_expert_E)
        inner_TF = F.gelu(torch.addmm(inner_TF, member_TE, self.fc1_bias))
        output_TD = self._product(inner_TF, self.fc2_weight, tokens_per_expert_E)
        output_TD = self.output_quantizer(torch.addmm(output_TD, member_TE, self.fc2_bias))
        return output_TD * gates_T.unsqueeze(-1).to(output_TD.dtype), None

    def _product(self, x_TK: Tensor, weight_ENK: Tensor, tokens_per_expert_E: Tensor) -> Tensor:
        if self.native_products is not None:
            return self.native_products.grouped(x_TK, weight_ENK, tokens_per_expert_E, self.training)
        return grouped_linear(x_TK, self.weight_quantizer(weight_ENK), tokens_per_expert_E)


class SharedExperts(ExpertWeights):
    """The experts every token uses, each with weight 1, computed as one wide network.

    Replicated, every rank holds all of them. Sharded, each expert-parallel rank holds its part: tokens are gathered over
    the group, and outputs summed and scattered back.
    """

    def __init__(
        self,
        config: HybridSparseMoEConfig,
        pg_collection: Optional[ProcessGroupCollection] = None,
        gate: bool = False,
    ):
        groups = pg_collection or get_default_pg_collection()
        sharded = config.shared_expert_placement == "sharded"
        super().__init__(
            config.num_shared_experts // (groups.ep.size() if sharded else 1),
            config.shared_expert_ffn_hidden_size,
            config,
            groups.ep,
            groups.expt_dp,
            is_expert_parallel=sharded,
            weight_class="shared_expert_weight",
        )

    def forward(self, hidden_SBD: Tensor) -> Tensor:
        """Sum of all shared experts' outputs, `[S, B, D]`."""
        rows_TD = hidden_SBD.reshape(-1, hidden_SBD.shape[-1])
        if not self.is_expert_parallel or self.ep_group.size() == 1:
            return self._sum_of_experts(rows_TD).view_as(hidden_SBD)
        gathered_GD = gather_from_sequence_parallel_region(rows_TD, group=self.ep_group)
        return reduce_scatter_to_sequence_parallel_region(self._sum_of_experts(gathered_GD), group=self.ep_group).view_as(
            hidden_SBD
        )

    def _sum_of_experts(self, rows_TD: Tensor) -> Tensor:
        fc1_weight_EFD, fc2_weight_EDF = self.weight_quantizer(self.fc1_weight), self.weight_quantizer(self.fc2_weight)
        inner_TI = F.gelu(self._product(rows_TD, fc1_weight_EFD.flatten(0, 1)) + self.fc1_bias.flatten())
        output_TD = self._product(inner_TI, fc2_weight_EDF.transpose(0, 1).flatten(1)) + self.fc2_bias.sum(dim=0)
        return self.output_quantizer(output_TD)

    def _product(self, x_TK: Tensor, weight_NK: Tensor) -> Tensor:
        if self.native_products is not None:
            return self.native_products.linear(x_TK, weight_NK, self.training)
        return F.linear(x_TK, weight_NK)
