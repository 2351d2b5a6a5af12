"""Matrix products of many experts in one call."""

from __future__ import annotations

import torch
from torch import Tensor

_GROUPED_MM_DTYPES = (torch.bfloat16,)


def grouped_linear(x_TK: Tensor, weight_ENK: Tensor, tokens_per_expert_E: Tensor) -> Tensor:
    """Multiply consecutive groups of rows by the weight of their expert.

    Args:
        x_TK: rows sorted by expert.
        weight_ENK: one weight an expert, in `torch.nn.Linear` layout.
        tokens_per_expert_E: rows of each expert, summing to T; an expert may have none.

    Returns:
        Tensor `[T, N]`; row t is `weight[e(t)] @ x[t]`. An expert without rows gets an exactly zero gradient.
    """
    if _grouped_mm_applies(x_TK, weight_ENK):
        offsets_E = tokens_per_expert_E.to(device=x_TK.device).cumsum(0).to(torch.int32)
        return torch._grouped_mm(x_TK, weight_ENK.transpose(-2, -1), offs=offsets_E)
    return grouped_linear_reference(x_TK, weight_ENK, tokens_per_expert_E)


def grouped_linear_reference(x_TK: Tensor, weight_ENK: Tensor, tokens_per_expert_E: Tensor) -> Tensor:
    """`grouped_linear` as one product an expert: every device and dtype, and the ground truth of its tests."""
    groups = x_TK.split(tokens_per_expert_E.tolist())
    return torch.cat([rows @ weight.T for rows, weight in zip(groups, weight_ENK.unbind(0))])


def expert_one_hot(tokens_per_expert_E: Tensor, num_rows: int, dtype: torch.dtype) -> Tensor:
    """Membership of sorted rows in experts, `[num_rows, E]`, made without waiting for the device.

    `one_hot @ bias_EN` hands each row its expert's bias exactly; the gradient of that product is one matrix product, where
    indexing `bias[expert]` would scatter row by row (46 % of an H200 training step, docs/LOG.md).
    """
    ends_E = tokens_per_expert_E.cumsum(0)
    rows_T1 = torch.arange(num_rows, device=ends_E.device)[:, None]
    return ((rows_T1 < ends_E) & (rows_T1 >= ends_E - tokens_per_expert_E)).to(dtype)


def _grouped_mm_applies(x_TK: Tensor, weight_ENK: Tensor) -> bool:
    aligned = weight_ENK.shape[1] % 8 == 0 and weight_ENK.shape[2] % 8 == 0
    return x_TK.is_cuda and x_TK.dtype in _GROUPED_MM_DTYPES and aligned and x_TK.shape[0] > 0
