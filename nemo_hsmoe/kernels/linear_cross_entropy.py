"""Output projection and cross-entropy without the full logits."""

from __future__ import annotations

import torch
from torch import Tensor

_LOGIT_ELEMENTS_PER_CHUNK = {"cpu": 1 << 25, "cuda": 1 << 29}


def linear_cross_entropy(hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, token_weight_T: Tensor) -> Tensor:
    """Weighted sum over tokens of `-log softmax(weight @ hidden)[label]`.

    Logits exist one chunk of rows at a time. Gradients are formed in the same pass, so backward multiplies by a scalar
    and repeats no product. Products run in `hidden`'s dtype, the softmax and the weight gradient in float32.

    Args:
        hidden_TD: hidden states.
        weight_VD: output matrix, any floating dtype; cast to `hidden`'s for the products.
        labels_T: class of each token, int64; any value, such as −100, where the weight is 0.
        token_weight_T: weight of each token's loss, float32; 0 removes it from the loss and from every gradient.

    Returns:
        Scalar float32 Tensor.
    """
    labels_T = labels_T.where(token_weight_T != 0, 0)
    return _LinearCrossEntropy.apply(hidden_TD, weight_VD, labels_T, token_weight_T)


def linear_cross_entropy_reference(hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, token_weight_T: Tensor) -> Tensor:
    """`linear_cross_entropy` with the logits in full."""
    logits_TV = hidden_TD @ weight_VD.to(hidden_TD.dtype).T
    labels_T = labels_T.where(token_weight_T != 0, 0)
    loss_T = torch.nn.functional.cross_entropy(logits_TV.float(), labels_T, reduction="none")
    return (loss_T * token_weight_T).sum()


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_TD, weight_VD, labels_T, token_weight_T):
        needs_grad = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        product_weight_VD = weight_VD.to(hidden_TD.dtype)
        rows = max(1, _LOGIT_ELEMENTS_PER_CHUNK[hidden_TD.device.type] // weight_VD.shape[0])
        loss = torch.zeros((), dtype=torch.float32, device=hidden_TD.device)
        hidden_grad_TD = torch.empty_like(hidden_TD if needs_grad else hidden_TD[:0])
        weight_grad_VD = torch.zeros_like(weight_VD if needs_grad else weight_VD[:0], dtype=torch.float32)
        for start in range(0, hidden_TD.shape[0], rows):
            chunk = slice(start, start + rows)
            hidden_CD, labels_C, token_weight_C1 = hidden_TD[chunk], labels_T[chunk], token_weight_T[chunk, None]
            logits_CV = (hidden_CD @ product_weight_VD.T).float()
            label_logit_C1 = logits_CV.gather(1, labels_C[:, None])
            largest_logit_C1 = logits_CV.amax(dim=-1, keepdim=True)
            probabilities_CV = torch.softmax(logits_CV, dim=-1)
            log_normalizer_C1 = largest_logit_C1 - probabilities_CV.amax(dim=-1, keepdim=True).log()
            loss += _weighted_sum(log_normalizer_C1 - label_logit_C1, token_weight_C1)
            if needs_grad:
                probabilities_CV = probabilities_CV.to(hidden_TD.dtype)
                weighted_hidden_CD = hidden_CD * token_weight_C1.to(hidden_TD.dtype)
                expected_weight_CD = probabilities_CV @ product_weight_VD
                expected_weight_CD -= product_weight_VD[labels_C]
                torch.mul(expected_weight_CD, token_weight_C1.to(hidden_TD.dtype), out=hidden_grad_TD[chunk])
                _accumulate_product(weight_grad_VD, probabilities_CV.T, weighted_hidden_CD)
                weight_grad_VD.index_add_(0, labels_C, weighted_hidden_CD.float(), alpha=-1)
        if needs_grad:
            ctx.save_for_backward(hidden_grad_TD, weight_grad_VD)
            ctx.weight_dtype = weight_VD.dtype
        return loss

    @staticmethod
    def backward(ctx, loss_grad):
        hidden_grad_TD, weight_grad_VD = ctx.saved_tensors
        hidden_grad_TD = hidden_grad_TD * loss_grad.to(hidden_grad_TD.dtype)
        weight_grad_VD = (weight_grad_VD * loss_grad).to(ctx.weight_dtype)
        return hidden_grad_TD, weight_grad_VD, None, None


def _accumulate_product(accumulator: Tensor, left: Tensor, right: Tensor) -> None:
    if left.dtype == accumulator.dtype:
        accumulator.addmm_(left, right)
    else:
        accumulator.add_(left @ right)


def _weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    return torch.where(weights != 0, values * weights, 0.0).sum()
