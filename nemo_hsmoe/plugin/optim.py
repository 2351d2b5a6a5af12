"""Megatron's optimizers behind NeMo's optimizer module."""

import math
from collections.abc import Iterator
from typing import Any, Optional

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE, DistributedOptimizer
from megatron.core.utils import get_model_config
from nemo.core.optim.lr_scheduler import CosineAnnealing
from nemo.core.optim.mcore_optim import McoreDistributedOptimizer
from nemo.lightning.megatron_parallel import MegatronParallel
from nemo.lightning.pytorch.optim import CosineAnnealingScheduler, MegatronOptimizerModule
from nemo.utils import AppState

from nemo_hsmoe.model.router import collect_expert_load, routers_of, update_balance_bias
from nemo_hsmoe.quantization.learning_rate import QAT_FACTOR, QAT_FRACTION, qat_learning_rate_factor
from nemo_hsmoe.runtime.errors import require


class NeMoMegatronOptimizer(McoreDistributedOptimizer):
    """Megatron optimizer with the checkpoint method NeMo's strategy calls."""

    def sharded_state_dict(
        self, model_sharded_state_dict, optimizer_state_dict=None, is_loading=False, metadata=None, **unused
    ):
        """Megatron's sharded state; see `MegatronOptimizer.sharded_state_dict`."""
        return self.mcore_optimizer.sharded_state_dict(model_sharded_state_dict, is_loading=is_loading, metadata=metadata)


class HybridSparseMoEOptimizerModule(MegatronOptimizerModule):
    """Builds the Megatron optimizer and finishes each iteration's gradients.

    An iteration whose gradient is not finite changes no parameter and no optimizer state. After the gradient reduction,
    tokens per expert are summed over all data-parallel ranks, kept as `expert_load_LE` (float32 `[layers, experts]`) for the
    metrics, and the routers' balancing biases move against them.
    """

    expert_load_LE: torch.Tensor | None = None

    def optimizers(self, model: MegatronParallel) -> list[NeMoMegatronOptimizer]:
        """Build the optimizer over every model chunk."""
        optimizer = get_megatron_optimizer(
            self.config,
            [chunk.module for chunk in model],
            use_gloo_process_groups=AppState().use_gloo_process_groups,
        )
        _skip_steps_whose_gradient_is_not_finite(optimizer)
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


class QATCosineAnnealing(CosineAnnealing):
    """NeMo's linear warm-up and cosine decay, times `factor` for the first `fraction` of the run."""

    def __init__(self, optimizer, *, fraction: float, factor: float, **arguments: Any):
        self.fraction, self.factor = fraction, factor
        super().__init__(optimizer, **arguments)

    def get_lr(self) -> list[float]:
        """Learning rate of every parameter group."""
        factor = qat_learning_rate_factor(self.last_epoch, self.max_steps, self.fraction, self.factor)
        return [factor * rate for rate in super().get_lr()]


class RunLengthCosineScheduler(CosineAnnealingScheduler):
    """NeMo's linear warm-up and cosine decay over `total_steps`, which may be longer than this session's `max_steps`.

    NeMo copies the trainer's `max_steps` into the scheduler, so that a run planned in two sessions would decay twice.
    With `total_steps` set, the plan stays. A quantised model learns at `qat_factor` of the rate for the first
    `qat_fraction` of the plan.
    """

    def __init__(
        self,
        total_steps: Optional[int] = None,
        qat_fraction: float = QAT_FRACTION,
        qat_factor: float = QAT_FACTOR,
        **arguments: Any,
    ):
        super().__init__(**arguments)
        require(0 <= qat_fraction <= 1, "qat_fraction", qat_fraction, "needs a share of the run, from 0 to 1")
        require(qat_factor > 0, "qat_factor", qat_factor, "needs a positive factor")
        self.total_steps = total_steps
        self.qat_fraction = qat_fraction
        self.qat_factor = qat_factor

    def scheduler(self, model, optimizer):
        """Build the learning-rate scheduler."""
        if self.total_steps is not None:
            self.max_steps = self.total_steps
        is_quantized = getattr(get_model_config(model[0]), "quantization", "none") != "none"
        built = super().scheduler(model, optimizer)
        built["lr_scheduler"]["scheduler"] = QATCosineAnnealing(
            optimizer,
            fraction=self.qat_fraction if is_quantized else 0.0,
            factor=self.qat_factor,
            max_steps=self.max_steps,
            warmup_steps=self.warmup_steps,
            constant_steps=self.constant_steps,
            min_lr=self.min_lr,
        )
        return built


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


def _skip_steps_whose_gradient_is_not_finite(optimizer: MegatronOptimizer) -> None:
    """Leave parameters and states as they are when the gradient norm is NaN or infinite."""
    measure, apply_gradients = optimizer.get_grad_norm, optimizer.step_with_ready_grads
    latest_norm = 0.0

    def measured_norm():
        nonlocal latest_norm
        latest_norm = measure()
        return latest_norm

    def apply_finite_gradients() -> bool:
        return math.isfinite(latest_norm) and apply_gradients()

    optimizer.get_grad_norm = measured_norm
    optimizer.step_with_ready_grads = apply_finite_gradients


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
