"""One-file checkpoints for scripts: every expert, in logical order, whatever the expert parallelism."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

import torch
from megatron.core import parallel_state
from torch import Tensor

from nemo_hsmoe.model.experts import ExpertWeights
from nemo_hsmoe.model.hybrid_moe import HybridSparseMoEModel
from nemo_hsmoe.runtime.errors import ConfigurationError, require


def save_checkpoint(
    model: torch.nn.Module,
    optimizer: Optional[Any],
    scheduler: Optional[Any],
    step: int,
    directory: str | os.PathLike = ".",
) -> Path:
    """Write `checkpoint_{step}.pt` with the keys `model`, `optimizer`, `scheduler` and `step`.

    Every rank calls this; experts and their optimizer states are gathered over the expert-parallel group and rank 0
    writes. The file appears complete or not at all.

    Args:
        model: `HybridSparseMoEModel`, wrapped or not.
        optimizer: torch optimizer over the model's parameters, or a Megatron optimizer of torch optimizers; None leaves
            it out. States are stored by parameter name.
        scheduler: anything with `state_dict`; None leaves it out.
        step: iteration, part of the file's name.

    Returns:
        Path of the file.

    Raises:
        ConfigurationError: for a `DistributedOptimizer`, whose states are shards: save through NeMo instead.
    """
    core = _core(model)
    sharded = _sharded_parameters(core)
    content = {
        "model": {name: _whole(tensor, name in sharded) for name, tensor in core.state_dict().items() if _is_data(tensor)},
        "optimizer": None if optimizer is None else _optimizer_state(core, optimizer, sharded),
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "step": step,
    }
    path = Path(directory) / f"checkpoint_{step}.pt"
    if torch.distributed.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        torch.save(content, unfinished)
        unfinished.replace(path)
    torch.distributed.barrier()
    return path


def load_checkpoint(
    path: str | os.PathLike,
    model: torch.nn.Module,
    optimizer: Optional[Any] = None,
    scheduler: Optional[Any] = None,
) -> int:
    """Load what `save_checkpoint` wrote, at any expert parallelism; returns the step. A refused file changes nothing.

    Raises:
        ConfigurationError: when the file is missing, incomplete or of another architecture.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigurationError("path", str(path), f"needs a complete checkpoint file: {reason}") from None
    complete = isinstance(content, dict) and {"model", "optimizer", "scheduler", "step"} <= content.keys()
    require(complete, "path", str(path), "needs a file written by save_checkpoint")
    core = _core(model)
    sharded = _sharded_parameters(core)
    own = {name: tensor for name, tensor in core.state_dict(keep_vars=True).items() if _is_data(tensor)}
    saved = content["model"]
    different = sorted(own.keys() ^ saved.keys())
    require(not different, "path", str(path), f"needs a checkpoint of this architecture: {different[:1]} differs")
    ranks = parallel_state.get_expert_model_parallel_world_size()
    for name, tensor in own.items():
        whole = (tensor.shape[0] * (ranks if name in sharded else 1), *tensor.shape[1:]) if tensor.dim() else ()
        there = tuple(saved[name].shape)
        reason = f"needs a checkpoint of this architecture: {name} is {there} there, {whole} here"
        require(there == whole, "path", str(path), reason)
    if optimizer is not None:
        require(content["optimizer"] is not None, "optimizer", "given", f"needs optimizer states, {path} has none")
    if scheduler is not None:
        require(content["scheduler"] is not None, "scheduler", "given", f"needs a scheduler state, {path} has none")
    for name, tensor in own.items():
        tensor.data.copy_(_part(saved[name], tensor, name in sharded))
    if optimizer is not None:
        _load_optimizer_state(core, optimizer, content["optimizer"], sharded)
    if scheduler is not None:
        scheduler.load_state_dict(content["scheduler"])
    return content["step"]


def _core(model: torch.nn.Module) -> HybridSparseMoEModel:
    return next(module for module in model.modules() if isinstance(module, HybridSparseMoEModel))


def _is_data(tensor: Any) -> bool:
    return isinstance(tensor, Tensor)


def _sharded_parameters(core: HybridSparseMoEModel) -> set[str]:
    return {
        f"{prefix}.{name}"
        for prefix, module in core.named_modules()
        if isinstance(module, ExpertWeights) and module.is_expert_parallel
        for name, _ in module.named_parameters(recurse=False)
    }


def _whole(tensor: Tensor, is_sharded: bool) -> Tensor:
    group = parallel_state.get_expert_model_parallel_group()
    if not is_sharded or group.size() == 1:
        return tensor.detach().cpu()
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    torch.distributed.all_gather(parts, tensor.detach().contiguous(), group=group)
    return torch.cat(parts).cpu()


def _part(whole: Tensor, like: Tensor, is_sharded: bool) -> Tensor:
    if not is_sharded or whole.dim() != like.dim() or not like.dim():
        return whole
    rank = parallel_state.get_expert_model_parallel_group().rank()
    return whole[rank * like.shape[0] : (rank + 1) * like.shape[0]]


def _torch_optimizers(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        require(
            type(part).__name__ != "DistributedOptimizer",
            "optimizer",
            "DistributedOptimizer",
            "holds shards of states: save through NeMo's checkpoints, or use a torch optimizer",
        )
        yield part if isinstance(part, torch.optim.Optimizer) else part.optimizer


def _named_parameters_of(core: HybridSparseMoEModel, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor, dict]]:
    names = {}
    for name, parameter in core.named_parameters():
        names[id(parameter)] = name
        if getattr(parameter, "main_param", None) is not None:
            names[id(parameter.main_param)] = name
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield names[id(parameter)], parameter, group


def _optimizer_state(core: HybridSparseMoEModel, optimizer: Any, sharded: set[str]) -> dict[str, dict[str, Any]]:
    states = {}
    for torch_optimizer in _torch_optimizers(optimizer):
        for name, parameter, group in _named_parameters_of(core, torch_optimizer):
            state = {
                key: _whole(value, name in sharded and value.dim() > 0) if _is_data(value) else value
                for key, value in torch_optimizer.state.get(parameter, {}).items()
            }
            options = {key: value for key, value in group.items() if key != "params"}
            main = None if _is_model_parameter(core, parameter) else _whole(parameter, name in sharded)
            states[name] = {"state": state, "group": options, "main_param": main}
    return states


def _load_optimizer_state(
    core: HybridSparseMoEModel, optimizer: Any, states: dict[str, dict[str, Any]], sharded: set[str]
) -> None:
    for torch_optimizer in _torch_optimizers(optimizer):
        for name, parameter, group in _named_parameters_of(core, torch_optimizer):
            require(name in states, "optimizer", name, "needs states of this parameter, the checkpoint has none")
            saved = states[name]
            group.update(saved["group"])
            if saved["state"]:
                torch_optimizer.state[parameter] = {
                    key: _part(value, parameter, name in sharded).to(parameter.device if value.dim() else "cpu").clone()
                    if _is_data(value)
                    else value
                    for key, value in saved["state"].items()
                }
            if saved["main_param"] is not None and not _is_model_parameter(core, parameter):
                parameter.data.copy_(_part(saved["main_param"], parameter, name in sharded))


def _is_model_parameter(core: HybridSparseMoEModel, parameter: Tensor) -> bool:
    return any(parameter is own for own in core.parameters())
