"""Top-k router: FP32 softmax gates, straight-through selection, auxiliary-loss-free balancing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Optional

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from nemo_hsmoe.model.config import HybridSparseMoEConfig, parameter_device
from nemo_hsmoe.quantization.tensor_quantizer import TensorQuantizer
from nemo_hsmoe.runtime.precision import keep_in_float32


class _StraightThrough(torch.autograd.Function):
    """Forward: the discrete gates. Backward: their gradient handed unchanged to the full softmax."""

    @staticmethod
    def forward(ctx, scores_TE, gates_TE):
        return gates_TE.clone()

    @staticmethod
    def backward(ctx, gates_grad_TE):
        return gates_grad_TE, None


def straight_through_gates(scores_TE: Tensor, chosen_TE: Tensor) -> Tensor:
    """Gates of the chosen experts, renormalised to sum 1 a token; 0 elsewhere.

    The gradient passes straight through selection and renormalisation to `scores`, so that with
    `scores = softmax(logits)` every logit, chosen or not, receives `∂L/∂z_j = p_j (g_j − Σ_e p_e g_e)`, `g` the gradient
    of the gates (Bengio et al. 2013, arXiv:1308.3432, on the whole softmax Jacobian).

    Args:
        scores_TE: softmax over all experts, float32.
        chosen_TE: bool; a row of False (a padding token) gets zero gates and passes no gradient on.
    """
    with torch.no_grad():
        kept_TE = scores_TE * chosen_TE
        gates_TE = kept_TE / kept_TE.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(kept_TE.dtype).tiny)
    return _StraightThrough.apply(scores_TE, gates_TE)


class StraightThroughTopKRouter(MegatronModule):
    """Chooses `moe_router_topk` experts for each token, in float32 whatever the precision around it.

    Buffers, both float32 `[experts]`: `balance_bias`, added to the logits for selection only, saved in checkpoints;
    `expert_load`, tokens each expert received since the last `update_balance_bias`, counted in training only.
    """

    def __init__(self, config: HybridSparseMoEConfig, pg_collection: Optional[ProcessGroupCollection] = None):
        super().__init__(config)
        experts = config.num_moe_experts
        device = parameter_device(config)
        self.logit_scale = config.effective_router_logit_scale
        self.top_k = config.moe_router_topk
        self.weight = torch.nn.Parameter(torch.empty(experts, config.hidden_size, dtype=torch.float32, device=device))
        self.bias = torch.nn.Parameter(torch.empty(experts, dtype=torch.float32, device=device))
        self.register_buffer("balance_bias", torch.zeros(experts, dtype=torch.float32, device=device))
        self.register_buffer("expert_load", torch.zeros(experts, dtype=torch.float32, device=device), persistent=False)
        for tensor in (self.weight, self.bias, self.balance_bias, self.expert_load):
            keep_in_float32(tensor)
        self.logits_quantizer = TensorQuantizer("router_logits", device)
        self.scores_TE: Optional[Tensor] = None
        self.chosen_TE: Optional[Tensor] = None
        self.records_routing = False
        self.layer_number: Optional[int] = None

    def set_layer_number(self, layer_number: int) -> None:
        """Remember the 1-based layer this router serves."""
        self.layer_number = layer_number

    def forward(self, hidden_SBD: Tensor, padding_mask_SB: Optional[Tensor] = None) -> tuple[Tensor, Tensor]:
        """Route tokens.

        Args:
            hidden_SBD: normalised hidden states.
            padding_mask_SB: bool, True at padding positions, which go to no expert.

        Returns:
            gates `[S·B, E]` float32 and the routing map `[S·B, E]` bool.
        """
        hidden_TD = hidden_SBD.reshape(-1, hidden_SBD.shape[-1]).float()
        with torch.autocast(hidden_TD.device.type, enabled=False):
            logits_TE = torch.nn.functional.linear(hidden_TD, self.weight, self.bias) * self.logit_scale
        logits_TE = self.logits_quantizer(logits_TE)
        scores_TE = torch.softmax(logits_TE, dim=-1)
        chosen_TE = self._choose(logits_TE)
        if padding_mask_SB is not None:
            chosen_TE = chosen_TE & ~padding_mask_SB.reshape(-1, 1)
        if self.training and torch.is_grad_enabled():
            with torch.no_grad():
                self.expert_load += chosen_TE.sum(dim=0)
        if self.records_routing:
            self.scores_TE, self.chosen_TE = scores_TE, chosen_TE
        return straight_through_gates(scores_TE, chosen_TE), chosen_TE

    @torch.no_grad()
    def _choose(self, logits_TE: Tensor) -> Tensor:
        indices_TK = (logits_TE + self.balance_bias).topk(self.top_k, dim=-1).indices
        return torch.zeros_like(logits_TE, dtype=torch.bool).scatter_(1, indices_TK, True)


def routers_of(model: torch.nn.Module) -> list[StraightThroughTopKRouter]:
    """The routers of a (wrapped) model in layer order."""
    return [module for module in model.modules() if isinstance(module, StraightThroughTopKRouter)]


@torch.no_grad()
def collect_expert_load(
    routers: Iterable[StraightThroughTopKRouter], group: Optional[torch.distributed.ProcessGroup] = None
) -> Tensor:
    """Tokens each expert received since the last reset, summed over `group`.

    Returns:
        float32 Tensor `[layers, experts]`.
    """
    load_LE = torch.stack([router.expert_load for router in routers])
    if group is not None and group.size() > 1:
        torch.distributed.all_reduce(load_LE, group=group)
    return load_LE


@torch.no_grad()
def update_balance_bias(routers: Iterable[StraightThroughTopKRouter], load_LE: Tensor, rate: float) -> None:
    """Move every selection bias against its expert's load error and clear the counters.

    `b_e += rate · (1 − load_e / mean load)`, the proportional form of Wang et al. 2024 (arXiv:2408.15664): it keeps the
    sum of the biases and comes to rest at balance. A layer that saw no token keeps its bias.

    Args:
        load_LE: global token counts of one iteration, from `collect_expert_load`.
        rate: step size; 0 only clears the counters.
    """
    mean_L1 = load_LE.mean(dim=-1, keepdim=True)
    error_LE = torch.where(mean_L1 > 0, 1.0 - load_LE / mean_L1.clamp_min(1e-9), 0.0)
    for router, error_E in zip(routers, error_LE):
        router.balance_bias += rate * error_E
        router.expert_load.zero_()
