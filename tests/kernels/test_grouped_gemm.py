import torch

from nemo_hsmoe.kernels.grouped_gemm import expert_of_row, grouped_linear


def test_every_row_meets_its_expert_and_idle_experts_get_exact_zero_gradients():
    torch.manual_seed(0)
    counts = torch.tensor([3, 0, 5])
    rows = torch.randn(8, 4, requires_grad=True)
    weight = torch.randn(3, 6, 4, requires_grad=True)
    output = grouped_linear(rows, weight, counts)
    expected = torch.stack([weight[expert] @ row for row, expert in zip(rows, expert_of_row(counts, 8))])
    torch.testing.assert_close(output, expected)
    output.square().sum().backward()
    assert weight.grad[0].any()
    assert not weight.grad[1].any()


def test_no_rows_at_all():
    weight = torch.randn(2, 6, 4, requires_grad=True)
    output = grouped_linear(torch.randn(0, 4), weight, torch.tensor([0, 0]))
    output.sum().backward()
    assert output.shape == (0, 6)
    assert weight.grad is not None
    assert not weight.grad.any()
