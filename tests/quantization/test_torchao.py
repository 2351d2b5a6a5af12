"""Our emulation against TorchAO's: bit for bit wherever both exist."""

import pytest
import torch

from nemo_hsmoe.quantization import QuantizationSpec
from nemo_hsmoe.quantization.fake_quantize import apply_spec
from nemo_hsmoe.runtime.errors import ConfigurationError

pytest.importorskip("torchao")

OVERLAP = [
    QuantizationSpec.parse("NVFP4_16"),
    QuantizationSpec.parse("NVFP4_16", outer_scale="matrix"),
    QuantizationSpec.parse("NVFP4_16", outer_scale="row"),
    QuantizationSpec.parse("NVFP4_16", outer_scale="none"),
    QuantizationSpec.parse("MXFP4"),
    QuantizationSpec.parse("MXFP8"),
    QuantizationSpec.parse("MXFP8_E5M2"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", OVERLAP, ids=lambda spec: spec.description)
def test_bit_equal(spec, dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 64, 256, generator=generator)
    x = (x * torch.randn(3, 64, 256, generator=generator).exp()).to(dtype)
    theirs = apply_spec(x, spec.replace(backend="torchao"))
    assert torch.equal(apply_spec(x, spec), theirs)


def test_odd_shapes_and_gradients_go_through():
    x = torch.randn(3, 37, requires_grad=True)
    spec = QuantizationSpec.parse("MXFP8", backend="torchao")
    quantized = apply_spec(x, spec)
    assert torch.equal(quantized, apply_spec(x, spec.replace(backend="emulated")))
    quantized.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


@pytest.mark.parametrize("notation", ["NVFP4_8x8", "NVFP4_32", "E1M3_16", "INT8", "NVFP4_16_SR"])
def test_what_torchao_cannot_do_is_named(notation):
    spec = QuantizationSpec.parse(notation, outer_scale="tensor", backend="torchao")
    with pytest.raises(ConfigurationError, match="backend='torchao': needs NVFP4_16, MXFP4"):
        apply_spec(torch.ones(16, 16), spec)
