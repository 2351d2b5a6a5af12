"""Megatron Core 0.16 on a machine without CUDA.

Megatron Core writes `device="cuda"`, asks for streams and keeps a CUDA random-number tracker. `install()` answers those
calls with their CPU meaning. It does nothing where CUDA is present. docs/architecture.md lists every touched name.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_OPTIMIZER_MODULES = ("megatron.core.optimizer", "megatron.core.distributed")
_CUDA_TYPE_NAMES = {
    "torch.FloatTensor": "torch.cuda.FloatTensor",
    "torch.HalfTensor": "torch.cuda.HalfTensor",
    "torch.BFloat16Tensor": "torch.cuda.BFloat16Tensor",
}
_mode: TorchFunctionMode | None = None


class CompletedEvent:
    """An event of a device that runs every call to its end before returning."""

    def __init__(self, *args, **kwargs):
        pass

    def record(self, *args):
        return self

    def wait(self, *args):
        pass

    def synchronize(self):
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other) -> float:
        return 0.0


class ProgramOrderStream:
    """The one stream of a device that executes in program order."""

    _instance: ProgramOrderStream | None = None

    def __new__(cls, *args, **kwargs):
        if cls._instance is None:
            cls._instance = super().__new__(cls)
        return cls._instance

    def wait_stream(self, stream):
        pass

    def wait_event(self, event):
        pass

    def record_event(self, event=None):
        return event or CompletedEvent()

    def synchronize(self):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        return False


class _DefaultGenerators:
    def __getitem__(self, index):
        return torch.default_generator


class CudaSpelledAsCpu(TorchFunctionMode):
    """Read `device="cuda"`, `pin_memory=True` and CUDA type names as their CPU equivalents."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs = {**kwargs, "device": _CPU}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.to and len(args) > 1 and str(args[1]).startswith("cuda"):
            args = (args[0], _CPU, *args[2:])
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and len(args) == 1 and not kwargs and _called_from_megatron_optimizer():
            return _CUDA_TYPE_NAMES.get(result, result)
        return result


def _called_from_megatron_optimizer() -> bool:
    return sys._getframe(2).f_globals.get("__name__", "").startswith(_OPTIMIZER_MODULES)


def _answering(answer: Callable) -> Callable:
    """A new function object around `answer`: torch.compile keeps one rule a function and refuses shared ones."""

    def replacement(*args, **kwargs):
        return answer(*args, **kwargs)

    return replacement


def _nothing(*args, **kwargs) -> None:
    return None


def _zero(*args, **kwargs) -> int:
    return 0


def _itself(self, *args, **kwargs):
    return self


def _get_rng_state(device=None) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state, device=None) -> None:
    torch.set_rng_state(state)


def _call_now(callback, **kwargs) -> None:
    callback()


def _l2_norm(chunk_size, noop_flag, tensor_lists, per_tensor, *args) -> tuple[torch.Tensor, None]:
    """Norm of all gradients accumulated in float64: torch's float32 norm of millions of elements is off by 1e-4 on CPU."""
    squares = [torch.linalg.vector_norm(tensor, dtype=torch.float64) ** 2 for tensor in tensor_lists[0]]
    return torch.stack(squares).sum().sqrt().float().reshape(1), None


def is_installed() -> bool:
    """Tell whether `install()` has taken effect in this process."""
    return _mode is not None


def install() -> bool:
    """Make Megatron Core run on the CPU of this process; return whether it took effect.

    Idempotent, and a no-operation returning False where CUDA is available.
    """
    global _mode
    if torch.cuda.is_available():
        return False
    if _mode is not None:
        return True

    import megatron.core.optimizer.clip_grads as clip_grads
    import megatron.core.tensor_parallel.random as megatron_random
    import torch.cuda.random as cuda_random

    cuda = torch.cuda
    cuda.Stream = ProgramOrderStream
    cuda.Event = CompletedEvent
    cuda.default_generators = _DefaultGenerators()
    megatron_random._lazy_call = _call_now
    clip_grads.l2_norm_impl = _l2_norm
    for name, answer in {
        "current_device": lambda: _CPU,
        "current_stream": ProgramOrderStream,
        "default_stream": ProgramOrderStream,
        "stream": lambda stream: contextlib.nullcontext(),
        "is_current_stream_capturing": lambda: False,
        "synchronize": _nothing,
        "set_device": _nothing,
        "empty_cache": _nothing,
        "manual_seed": torch.manual_seed,
        "get_rng_state": _get_rng_state,
        "set_rng_state": _set_rng_state,
        "memory_allocated": _zero,
        "max_memory_allocated": _zero,
        "memory_reserved": _zero,
        "max_memory_reserved": _zero,
    }.items():
        setattr(cuda, name, _answering(answer))
    cuda_random.get_rng_state = _answering(_get_rng_state)
    cuda.nvtx.range_push = _answering(_nothing)
    cuda.nvtx.range_pop = _answering(_nothing)
    torch.Tensor.cuda = _answering(_itself)
    torch.Tensor.record_stream = _answering(_nothing)
    torch.nn.Module.cuda = _answering(_itself)

    _mode = CudaSpelledAsCpu()
    _mode.__enter__()
    return True
