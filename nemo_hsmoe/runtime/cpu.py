"""Megatron Core 0.16 on a machine without CUDA.

Megatron Core writes `device="cuda"`, asks for streams and keeps a CUDA random-number tracker. `install()` answers those
calls with their CPU meaning. It does nothing where CUDA is present. docs/architecture.md lists every touched name.
"""

from __future__ import annotations

import contextlib
import sys

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


def _return_self(self, *args, **kwargs):
    return self


def _do_nothing(*args, **kwargs) -> None:
    return None


def _get_rng_state(device=None) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state, device=None) -> None:
    torch.set_rng_state(state)


def _call_now(callback, **kwargs) -> None:
    callback()


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

    import megatron.core.tensor_parallel.random as megatron_random
    import torch.cuda.random as cuda_random

    cuda = torch.cuda
    cuda.Stream = ProgramOrderStream
    cuda.Event = CompletedEvent
    cuda.current_device = lambda: _CPU
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: ProgramOrderStream()
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.is_current_stream_capturing = lambda: False
    cuda.synchronize = cuda.set_device = cuda.empty_cache = _do_nothing
    cuda.manual_seed = torch.manual_seed
    cuda.get_rng_state = cuda_random.get_rng_state = _get_rng_state
    cuda.set_rng_state = _set_rng_state
    cuda.default_generators = _DefaultGenerators()
    for name in ("max_memory_allocated", "memory_allocated", "max_memory_reserved", "memory_reserved"):
        setattr(cuda, name, lambda *args, **kwargs: 0)
    cuda.nvtx.range_push = cuda.nvtx.range_pop = _do_nothing
    torch.Tensor.cuda = torch.nn.Module.cuda = _return_self
    torch.Tensor.record_stream = _do_nothing
    megatron_random._lazy_call = _call_now

    _mode = CudaSpelledAsCpu()
    _mode.__enter__()
    return True
