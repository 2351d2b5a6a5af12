"""Quantisation on a CUDA device: the Triton kernel against its torch reference, and the native back end."""

import pytest
import torch

from nemo_hsmoe.kernels.block_quantize import quantize_dequantize, quantize_dequantize_reference
from nemo_hsmoe.quantization.spec import QuantizationSpec

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SPECS = [
    QuantizationSpec.parse("NVFP4_8x8", outer_scale="matrix"),
    QuantizationSpec.parse("NVFP4_16x8", outer_scale="matrix"),
    QuantizationSpec.parse("NVFP4_16x16", outer_scale="tensor"),
    QuantizationSpec.parse("NVFP4_16x1", outer_scale="matrix"),
    QuantizationSpec.parse("NVFP4_16"),
    QuantizationSpec.parse("NVFP4_16", outer_scale="row", scale_limits=(1e-6, 10.0)),
    QuantizationSpec.parse("NVFP4_32", outer_scale="row"),
    QuantizationSpec.parse("MXFP8"),
    QuantizationSpec.parse("MXFP8_UE5M3"),
    QuantizationSpec.parse("MXFP4", scale_limits=(1e-6, 10.0)),
    QuantizationSpec.parse("E1M3_8x8", outer_scale="matrix"),
    QuantizationSpec.parse("INT8_128"),
]


SHAPES = {
    (5, 48, 96): torch.float32,
    (3, 37, 70): torch.bfloat16,
    (2000, 896): torch.bfloat16,
    (300, 1536): torch.float16,
    (7,): torch.float32,
    (4, 130, 4100): torch.bfloat16,
}


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.description)
def test_triton_equals_the_torch_reference_bit_for_bit(spec):
    for shape, dtype in SHAPES.items():
        x = torch.randn(shape, device="cuda") * torch.exp(torch.randn(shape, device="cuda"))
        x.view(-1)[:3] = torch.tensor([float("nan"), -0.0, 1e-30], device="cuda")
        x.view(-1)[-1] = float("inf")
        x = x.to(dtype)
        quantized, reference = quantize_dequantize(x, spec.scaling), quantize_dequantize_reference(x, spec.scaling)
        torch.testing.assert_close(quantized, reference, rtol=0, atol=0, equal_nan=True)


def test_many_launches_find_every_matrix_range():
    spec = QuantizationSpec.parse("NVFP4_8x8", outer_scale="matrix")
    x = torch.randn(64, 1536, 896, device="cuda", dtype=torch.bfloat16)
    x *= torch.logspace(-3, 3, 64, device="cuda", dtype=torch.bfloat16)[:, None, None]
    reference = quantize_dequantize_reference(x, spec.scaling)
    for _ in range(50):
        assert torch.equal(quantize_dequantize(x, spec.scaling), reference)


@pytest.mark.parametrize("preset", ["none", "emulated", "native"])
def test_every_preset_trains_in_bfloat16(preset):
    pytest.importorskip("transformer_engine.pytorch")
    from nemo_hsmoe.model.config import HybridSparseMoEConfig
    from nemo_hsmoe.model.hybrid_moe import HybridSparseMoEModel
    from nemo_hsmoe.quantization import quantization_report

    torch.manual_seed(0)
    shape = dict(num_layers=2, hidden_size=256, num_attention_heads=2, moe_ffn_hidden_size=128,
                 shared_expert_ffn_hidden_size=64, dense_ffn_hidden_size=128, vocab_size=1024, seq_length=128)  # fmt: skip
    config = HybridSparseMoEConfig(**shape, quantization=preset, params_dtype=torch.bfloat16, bf16=True)
    model = HybridSparseMoEModel(config).cuda()
    report = quantization_report(model)
    if preset == "emulated":
        assert [row.tensor_class for row in report.dropped] == ["attention_softmax"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ids = torch.randint(0, 1024, (4, 128), device="cuda")
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = model(ids, labels=ids.roll(-1, 1)) / ids.numel()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < losses[0] - 0.5, losses
    assert model.eval()(ids[:1, :3])[0].isfinite().all(), "a few rows, as in sampling"
    assert all(parameter.grad is not None and torch.isfinite(parameter.grad).all() for parameter in model.parameters())
