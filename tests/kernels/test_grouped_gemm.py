import torch

from nemo_hsmoe.kernels.grouped_gemm import expert_one_hot, grouped_linear


def test_every_row_meets_its_expert_and_idle_experts_get_exact_zero_gradients():
    torch.manual_seed(0)
    counts = torch.tensor([3, 0, 5])
    rows = torch.randn(8, 4, requires_grad=True)
    weight = torch.randn(3, 6, 4, requires_grad=True)
    output = grouped_linear(rows, weight, counts)
    expected = torch.stack([weight[expert] @ row for row, expert in zip(rows, [0, 0, 0, 2, 2, 2, 2, 2])])
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


def test_membership_of_rows():
    member = expert_one_hot(torch.tensor([2, 0, 1]), 3, torch.float32)
    assert member.tolist() == [[1, 0, 0], [1, 0, 0], [0, 0, 1]]
    assert expert_one_hot(torch.tensor([0, 0]), 0, torch.float32).shape == (0, 2)
