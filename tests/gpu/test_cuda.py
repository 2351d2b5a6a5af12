"""What only a CUDA device can show. Skipped without one; docs/LOG.md records the runs."""

import pytest
import torch

from nemo_hsmoe.kernels.grouped_gemm import grouped_linear, grouped_linear_reference
from nemo_hsmoe.kernels.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    return float((value.double() - reference.double()).norm() / reference.double().norm())


def test_grouped_gemm_equals_one_product_an_expert():
    torch.manual_seed(0)
    counts = torch.tensor([300, 0, 1, 723], device="cuda")
    rows = torch.randn(1024, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(4, 128, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.randn(1024, 128, device="cuda", dtype=torch.bfloat16)
    grouped_linear(rows, weight, counts).backward(upstream)
    rows_64, weight_64 = (tensor.detach().double().requires_grad_() for tensor in (rows, weight))
    reference = grouped_linear_reference(rows_64, weight_64, counts)
    reference.backward(upstream.double())
    assert relative_error(grouped_linear(rows, weight, counts), reference) < 1e-2
    assert relative_error(rows.grad, rows_64.grad) < 1e-2
    assert relative_error(weight.grad, weight_64.grad) < 1e-2
    assert not weight.grad[1].any()


def test_linear_cross_entropy_in_bfloat16():
    torch.manual_seed(0)
    hidden = torch.randn(5000, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(128_256, 256, device="cuda") * 0.05).requires_grad_()
    labels = torch.randint(0, 128_256, (5000,), device="cuda")
    weights = (torch.rand(5000, device="cuda") > 0.1).float()
    loss = linear_cross_entropy(hidden, weight, labels, weights)
    loss.backward()
    hidden_32 = hidden.detach().float().requires_grad_()
    weight_32 = weight.detach().clone().requires_grad_()
    reference = linear_cross_entropy_reference(hidden_32, weight_32, labels, weights)
    reference.backward()
    assert abs(float(loss / reference) - 1) < 1e-3
    assert relative_error(hidden.grad, hidden_32.grad) < 1e-2
    assert relative_error(weight.grad, weight_32.grad) < 1e-2


@pytest.mark.parametrize(
    ("dtype", "bound"),
    [
        pytest.param(torch.float32, 3e-3, id="float32-TE-multiplies-in-tf32"),
        pytest.param(torch.bfloat16, 2e-2, id="bfloat16"),
    ],
)
def test_transformer_engine_and_torch_layers_agree(dtype, bound):
    pytest.importorskip("transformer_engine.pytorch")
    from nemo_hsmoe.model.config import HybridSparseMoEConfig
    from nemo_hsmoe.model.hybrid_moe import HybridSparseMoEModel

    shape = dict(num_layers=2, hidden_size=256, num_attention_heads=4, moe_ffn_hidden_size=128,
                 shared_expert_ffn_hidden_size=64, dense_ffn_hidden_size=128, vocab_size=1024, seq_length=128)  # fmt: skip
    shape.update(params_dtype=dtype, bf16=dtype == torch.bfloat16)
    models = [
        HybridSparseMoEModel(HybridSparseMoEConfig(**shape, use_transformer_engine=choice)).cuda()
        for choice in (True, False)
    ]
    names = [{name for name, _ in model.named_parameters()} for model in models]
    assert names[0] == names[1]
    for (name, own), (_, other) in zip(models[0].named_parameters(), models[1].named_parameters()):
        torch.testing.assert_close(own, other, rtol=0, atol=0, msg=name)
    ids = torch.randint(0, 1024, (2, 128), device="cuda")
    logits = [model.eval()(ids)[0] for model in models]
    assert relative_error(logits[0], logits[1]) < bound
    for model in models:
        model.train()(ids, labels=ids.roll(-1, 1)).backward()
    gradients = [torch.cat([parameter.grad.flatten() for parameter in model.parameters()]) for model in models]
    assert relative_error(*gradients) < 5 * bound


def test_router_and_embedding_stay_float32_beside_bfloat16():
    from nemo_hsmoe.model.hybrid_moe import HybridSparseMoEModel
    from nemo_hsmoe.model.sizes import config_for

    model = HybridSparseMoEModel(config_for("hsmoe_tiny")).cuda().bfloat16()
    kept = {name for name, parameter in model.named_parameters() if parameter.dtype == torch.float32}
    assert kept == {name for name, _ in model.named_parameters() if "router" in name or "word_embeddings" in name}
