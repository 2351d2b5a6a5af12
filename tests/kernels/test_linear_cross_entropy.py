import pytest
import torch

from nemo_hsmoe.kernels import linear_cross_entropy as module
from nemo_hsmoe.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference


def gradients(function, hidden, weight, labels, weights, scale):
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = function(hidden, weight, labels, weights)
    (loss * scale).backward()
    return loss.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("rows_per_chunk", [1, 7, 64])
def test_equals_full_logits_in_double_precision(monkeypatch, rows_per_chunk):
    torch.manual_seed(rows_per_chunk)
    monkeypatch.setitem(module._LOGIT_ELEMENTS_PER_CHUNK, "cpu", rows_per_chunk * 50)
    hidden, weight = torch.randn(30, 8), torch.randn(50, 8)
    labels, weights = torch.randint(0, 50, (30,)), torch.rand(30)
    labels[3], weights[3] = -100, 0.0
    ours = gradients(linear_cross_entropy, hidden, weight, labels, weights, 0.37)
    reference = gradients(linear_cross_entropy_reference, hidden.double(), weight.double(), labels, weights, 0.37)
    for own, exact in zip(ours, reference):
        assert float((own.double() - exact).norm() / exact.norm()) < 1e-6


def test_a_batch_without_a_valid_token_has_zero_loss_and_gradients():
    hidden, weight = torch.randn(4, 8), torch.randn(50, 8)
    loss, *grads = gradients(linear_cross_entropy, hidden, weight, torch.full((4,), -100), torch.zeros(4), 1.0)
    assert float(loss) == 0.0
    assert not any(grad.any() for grad in grads)


def test_extreme_logits_stay_finite():
    hidden, weight = torch.full((2, 1), 1e4), torch.tensor([[1.0], [-1.0]])
    loss, hidden_grad, weight_grad = gradients(
        linear_cross_entropy, hidden, weight, torch.tensor([0, 1]), torch.ones(2), 1.0
    )
    assert float(loss) == pytest.approx(2e4)
    assert hidden_grad.isfinite().all()
    assert weight_grad.isfinite().all()


def test_evaluation_forms_no_gradient():
    weight = torch.randn(50, 8, requires_grad=True)
    with torch.no_grad():
        loss = linear_cross_entropy(torch.randn(4, 8), weight, torch.arange(4), torch.ones(4))
    assert not loss.requires_grad
