"""Random Hadamard transform of groups of 16 values, which spreads outliers over their group.

Used on gradients, as in NVIDIA's NVFP4 pre-training recipe (arXiv:2509.25149): `y = H₁₆ · diag(±1) · x / 4`, orthogonal.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

GROUP = 16
_SIGNS_SEED = 0x5EED


def rotate(x: Tensor) -> Tensor:
    """Rotate groups of 16 along the last dimension, which is padded with zeros to a multiple of 16."""
    columns = x.shape[-1]
    padded = torch.nn.functional.pad(x, (0, -columns % GROUP))
    return (padded.unflatten(-1, (-1, GROUP)) @ _rotation(x.dtype, x.device)).flatten(-2)


def rotate_back(y: Tensor, columns: int) -> Tensor:
    """Undo `rotate` and drop the padding beyond `columns`."""
    return (y.unflatten(-1, (-1, GROUP)) @ _rotation(y.dtype, y.device).T).flatten(-2)[..., :columns]


@lru_cache(maxsize=16)
def _rotation(dtype: torch.dtype, device: torch.device) -> Tensor:
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while len(hadamard) < GROUP:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    signs = torch.randint(0, 2, (GROUP, 1), generator=torch.Generator().manual_seed(_SIGNS_SEED)) * 2 - 1
    return (signs * hadamard / GROUP**0.5).to(dtype=dtype, device=device)
