"""The Triton kernel in Triton's interpreter against its torch reference; on CUDA see tests/gpu."""

import pytest
import torch

from nemo_hsmoe.kernels.block_quantize import quantize_dequantize_reference
from nemo_hsmoe.quantization import QuantizationSpec

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="compiled kernels are tested in tests/gpu")

SPECS = [
    QuantizationSpec.parse("NVFP4_8x8", outer_scale="matrix"),
    QuantizationSpec.parse("NVFP4_16x1", outer_scale="matrix"),
    QuantizationSpec.parse("NVFP4_16"),
    QuantizationSpec.parse("NVFP4_16", outer_scale="row", scale_limits=(1e-6, 10.0)),
    QuantizationSpec.parse("NVFP4_8x8", outer_scale="none"),
    QuantizationSpec.parse("E1M3_8x8", outer_scale="matrix"),
    QuantizationSpec.parse("MXFP8"),
    QuantizationSpec.parse("MXFP8_UE5M3"),
    QuantizationSpec.parse("MXFP4", scale_limits=(1e-6, 10.0)),
    QuantizationSpec.parse("INT8_128"),
]
ONE_STRIP, SEVERAL_BANDS, PARTIAL_BLOCKS, WIDE, ONE_ROW = (3, 8, 40), (5, 48, 96), (3, 37, 70), (2, 18, 4100), (7,)
SHAPES = [ONE_STRIP, SEVERAL_BANDS, PARTIAL_BLOCKS, WIDE, ONE_ROW]


def awkward(shape) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()
    x.view(-1)[:3] = torch.tensor([float("nan"), -0.0, 1e-30])
    x.view(-1)[-1] = float("inf")
    return x


def truncated_to_bfloat16(x: torch.Tensor) -> torch.Tensor:
    """The interpreter casts float32 to bfloat16 by cutting bits off; compiled code rounds."""
    return (x.float().view(torch.int32) & -65536).view(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.description)
def test_interpreted_kernel_is_bit_equal_to_the_reference(spec, dtype):
    from nemo_hsmoe.kernels.block_quantize_triton import quantize_dequantize_triton

    for shape in SHAPES:
        x = awkward(shape).to(dtype)
        quantized = quantize_dequantize_triton(x, spec.scaling)
        reference = quantize_dequantize_reference(x.float(), spec.scaling)
        expected = truncated_to_bfloat16(reference) if dtype == torch.bfloat16 else reference.to(dtype).float()
        torch.testing.assert_close(quantized.float(), expected, rtol=0, atol=0, equal_nan=True, msg=f"{shape}")
        assert quantized.dtype == dtype


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.description)
@pytest.mark.parametrize("shape", [*SHAPES, (64, 1536, 896), (65_536, 896), (1, 128_256, 1536), (8, 32_768)])
def test_launches_cover_every_value_and_strips_that_wait_fit_the_device(shape, spec):
    from nemo_hsmoe.kernels import block_quantize_triton as kernel

    processors = 132
    for element_size in (2, 4):
        launch = kernel._launch_for(torch.Size(shape), element_size, spec.scaling, processors)
        height = launch.tile.blocks_down * spec.scaling.block[0] * launch.bands
        width = launch.tile.blocks_across * spec.scaling.block[1]
        assert launch.matrices * launch.rows * launch.columns == torch.Size(shape).numel()
        assert (launch.strips - 1) * height < launch.rows <= launch.strips * height
        assert launch.tile.held == 0 or (launch.tile.held - 1) * width < launch.columns <= launch.tile.held * width
        assert launch.fits == (launch.rows % height == 0 and launch.columns % width == 0)
        if spec.scaling.outer in ("tensor", "matrix"):
            assert launch.strips <= processors * 8 // launch.warps
