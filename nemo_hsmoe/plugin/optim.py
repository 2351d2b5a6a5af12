"""Megatron's optimizers behind NeMo's optimizer module."""

from collections.abc import Iterator
from typing import Any, Optional

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE, DistributedOptimizer
from megatron.core.utils import get_model_config
from nemo.core.optim.mcore_optim import McoreDistributedOptimizer
from nemo.lightning.megatron_parallel import MegatronParallel
from nemo.lightning.pytorch.optim import CosineAnnealingScheduler, MegatronOptimizerModule
from nemo.utils import AppState

from nemo_hsmoe.model.router import collect_expert_load, routers_of, update_balance_bias


class NeMoMegatronOptimizer(McoreDistributedOptimizer):
    """Megatron optimizer with the checkpoint method NeMo's strategy calls."""

    def sharded_state_dict(
        self, model_sharded_state_dict, optimizer_state_dict=None, is_loading=False, metadata=None, **unused
    ):
        """Megatron's sharded state; see `MegatronOptimizer.sharded_state_dict`."""
        return self.mcore_optimizer.sharded_state_dict(model_sharded_state_dict, is_loading=is_loading, metadata=metadata)


class HybridSparseMoEOptimizerModule(MegatronOptimizerModule):
    """Builds the Megatron optimizer and finishes each iteration's gradients.

    After the gradient reduction, tokens per expert are summed over all data-parallel ranks, kept as `expert_load_LE`
    (float32 `[layers, experts]`) for the metrics, and the routers' balancing biases move against them.
    """

    expert_load_LE: torch.Tensor | None = None

    def optimizers(self, model: MegatronParallel) -> list[NeMoMegatronOptimizer]:
        """Build the optimizer over every model chunk."""
        optimizer = get_megatron_optimizer(
            self.config,
            [chunk.module for chunk in model],
            use_gloo_process_groups=AppState().use_gloo_process_groups,
        )
        for group in optimizer.param_groups:
            _apply_multipliers_once(group)
        if not HAVE_APEX_OR_TE:
            for distributed in distributed_optimizers(optimizer):
                _restore_step_counts_from_groups(distributed)
        return [NeMoMegatronOptimizer(optimizer)]

    def finalize_model_grads(self, model: list[torch.nn.Module], *args: Any, **kwargs: Any) -> None:
        """Reduce gradients, then count expert load and move the balancing biases."""
        finalize_model_grads(model, *args, **kwargs)
        routers = [router for chunk in model for router in routers_of(chunk)]
        self.expert_load_LE = collect_expert_load(
            routers, parallel_state.get_data_parallel_group(with_context_parallel=True)
        )
        update_balance_bias(routers, self.expert_load_LE, get_model_config(model[0]).balance_bias_update_rate)


class RunLengthCosineScheduler(CosineAnnealingScheduler):
    """NeMo's linear warm-up and cosine decay over `total_steps`, which may be longer than this session's `max_steps`.

    NeMo copies the trainer's `max_steps` into the scheduler, so that a run planned in two sessions would decay twice.
    With `total_steps` set, the plan stays.
    """

    def __init__(self, total_steps: Optional[int] = None, **arguments: Any):
        super().__init__(**arguments)
        self.total_steps = total_steps

    def scheduler(self, model, optimizer):
        """Build the learning-rate scheduler."""
        if self.total_steps is not None:
            self.max_steps = self.total_steps
        return super().scheduler(model, optimizer)


def distributed_optimizers(optimizer: MegatronOptimizer) -> Iterator[DistributedOptimizer]:
    """The `DistributedOptimizer`s inside a Megatron optimizer."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part, DistributedOptimizer):
            yield part


def allocate_adam_states(optimizer: MegatronOptimizer) -> None:
    """Give torch's Adam the zero states it makes on its first step, so that a checkpoint can be loaded into them."""
    for distributed in distributed_optimizers(optimizer):
        inner = distributed.optimizer
        for parameter in (parameter for group in inner.param_groups for parameter in group["params"]):
            if parameter not in inner.state:
                inner.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def _apply_multipliers_once(group: dict[str, Any]) -> None:
    if "pre_lr_mult" in group or "pre_mult_wd" in group:
        return
    group["pre_mult_lr"], group["pre_mult_wd"] = group["lr"], group["weight_decay"]
    group["lr"] *= group.get("lr_mult", 1.0)
    group["weight_decay"] *= group.get("wd_mult", 1.0)
    for name in ("lr_mult", "wd_mult"):
        if name in group:
            group[f"pre_{name}"] = group.pop(name)


def _restore_step_counts_from_groups(optimizer: DistributedOptimizer) -> None:
    """Load torch Adam's per-parameter step from its group, one tensor a parameter.

    Megatron 0.16.1 saves the step in the parameter group only, and on load hands one shared tensor to every parameter.
    """
    set_states = optimizer._set_main_param_and_optimizer_states

    def set_states_with_step(model_param, tensors):
        group_index, order = optimizer.model_param_group_index_map[model_param]
        group = optimizer.optimizer.param_groups[group_index]
        state = optimizer.optimizer.state[group["params"][order]]
        if "step" in state:
            state["step"] = torch.tensor(float(group.get("step", 0.0)))
            tensors = {**tensors, "step": state["step"]}
        return set_states(model_param, tensors)

    optimizer._set_main_param_and_optimizer_states = set_states_with_step
