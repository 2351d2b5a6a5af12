"""Parameters that stay float32 when a model is cast to a narrower type."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

TensorT = TypeVar("TensorT", bound=Tensor)
_MARK = "keep_in_float32"


def keep_in_float32(tensor: TensorT) -> TensorT:
    """Mark a parameter or buffer that `cast_floating_point` leaves alone; returns it."""
    setattr(tensor, _MARK, True)
    return tensor


def is_kept_in_float32(tensor: Tensor) -> bool:
    """Tell whether `keep_in_float32` marked this tensor."""
    return getattr(tensor, _MARK, False)


def cast_floating_point(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast every unmarked floating-point parameter and buffer of `module` to `dtype`, in place."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point() and not is_kept_in_float32(tensor):
            tensor.data = tensor.data.to(dtype)
