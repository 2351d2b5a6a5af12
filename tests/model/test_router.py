import pytest
import torch

from nemo_hsmoe.model.config import HybridSparseMoEConfig
from nemo_hsmoe.model.router import (
    StraightThroughTopKRouter,
    collect_expert_load,
    straight_through_gates,
    update_balance_bias,
)

pytestmark = pytest.mark.usefixtures("model_parallel")


@pytest.fixture
def router() -> StraightThroughTopKRouter:
    torch.manual_seed(0)
    config = HybridSparseMoEConfig(num_layers=1, hidden_size=32, num_attention_heads=2, moe_ffn_hidden_size=8)
    router = StraightThroughTopKRouter(config)
    torch.nn.init.normal_(router.weight)
    torch.nn.init.zeros_(router.bias)
    return router


def test_gates_are_the_softmax_of_the_chosen_renormalised(router):
    hidden = torch.randn(5, 2, 32)
    gates, chosen = router(hidden)
    logits = (hidden.reshape(10, 32) @ router.weight.T) / 32**0.5
    top = logits.topk(4, dim=-1)
    assert gates.dtype == torch.float32
    assert (chosen.sum(dim=-1) == 4).all()
    torch.testing.assert_close(gates.gather(1, top.indices), torch.softmax(top.values, dim=-1))
    torch.testing.assert_close(gates.sum(dim=-1), torch.ones(10))


def test_backward_is_the_full_softmax_jacobian():
    torch.manual_seed(1)
    logits = torch.randn(3, 64, dtype=torch.float64, requires_grad=True)
    scores = torch.softmax(logits, dim=-1)
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, scores.topk(4, dim=-1).indices, True)
    upstream = torch.randn(3, 64, dtype=torch.float64) * chosen
    straight_through_gates(scores, chosen).backward(upstream)
    p = scores.detach()
    expected = p * (upstream - (p * upstream).sum(dim=-1, keepdim=True))
    torch.testing.assert_close(logits.grad, expected)
    assert (logits.grad[~chosen] != 0).all()


def test_padding_goes_nowhere_and_counts_for_nothing(router):
    router.train()
    hidden = torch.randn(4, 1, 32, requires_grad=True)
    padding = torch.tensor([[False], [False], [True], [True]])
    gates, chosen = router(hidden, padding)
    assert not chosen[2:].any()
    assert not gates[2:].any()
    assert float(router.expert_load.sum()) == 8
    gates.sum().backward()
    gates, _ = router(hidden, torch.ones(4, 1, dtype=torch.bool))
    assert gates.isfinite().all()


def test_load_is_counted_in_training_only(router):
    router.eval()
    router(torch.randn(4, 1, 32))
    assert not router.expert_load.any()
    router.train()
    with torch.no_grad():
        router(torch.randn(4, 1, 32))
    assert not router.expert_load.any()


def test_balancing_bias_evens_out_a_skewed_load_and_leaves_gates_alone(router):
    router.train()
    torch.manual_seed(2)
    hidden = torch.randn(512, 1, 32) + 1.5 * router.weight[0].detach()
    before = float((load := collect_expert_load_of(router, hidden)).max() / load.mean())
    for _ in range(200):
        update_balance_bias([router], collect_expert_load_of(router, hidden)[None], 0.05)
    after = float((load := collect_expert_load_of(router, hidden)).max() / load.mean())
    assert before > 8
    assert after < 2
    assert router.balance_bias.dtype == torch.float32
    assert float(router.balance_bias.sum()) == pytest.approx(0, abs=1e-2)
    gates, _ = router(hidden)
    torch.testing.assert_close(gates.sum(dim=-1), torch.ones(512))


def collect_expert_load_of(router, hidden):
    router.expert_load.zero_()
    router(hidden)
    return collect_expert_load([router])[0].clone()


def test_a_layer_without_tokens_keeps_its_bias(router):
    update_balance_bias([router], torch.zeros(1, 64), 0.1)
    assert not router.balance_bias.any()
