"""What holds for every block format, on tensors of every shape."""

import pytest
import torch
from hypothesis import given, settings

from nemo_hsmoe.kernels.block_quantize import quantize_blocks
from nemo_hsmoe.quantization import QuantizationSpec, fake_quantize
from nemo_hsmoe.quantization.fake_quantize import apply_spec
from nemo_hsmoe.quantization.hadamard import rotate, rotate_back
from nemo_hsmoe.runtime.errors import ConfigurationError
from tests.quantization.specs import SPECS, name_of, tensors

every_spec = pytest.mark.parametrize("spec", SPECS, ids=name_of)
SMALLEST_NORMAL_E4M3 = 2.0**-6


def has_normal_scales(blocks, spec) -> bool:
    """Whether no stored block scale was lifted to its smallest normal number."""
    if spec.scale in ("e8m0", "fp32"):
        return True
    outer = blocks.scale.max() / 448
    return bool((blocks.scale[blocks.elements != 0] > outer * SMALLEST_NORMAL_E4M3 * 1.07).all())


def within_range(x, spec):
    """`x` where a scale without an outer one can follow it: at most 448 · 6."""
    return x.clamp(-2688, 2688) if spec.scale == "e4m3" and spec.outer_scale == "none" else x


@every_spec
@settings(max_examples=25, deadline=None)
@given(x=tensors())
def test_sign_symmetry(spec, x):
    x = within_range(x, spec)
    assert torch.equal(apply_spec(-x, spec), -apply_spec(x, spec))


@every_spec
@settings(max_examples=25, deadline=None)
@given(x=tensors())
def test_order_within_a_block_stays(spec, x):
    x = within_range(x, spec)
    quantized, blocks = apply_spec(x, spec), quantize_blocks(x, spec.scaling)
    for scale in blocks.scale.unique():
        inside = blocks.scale == scale
        values, order = x[inside].sort()
        ordered = quantized[inside][order]
        assert (ordered[1:] >= ordered[:-1]).all(), (values, ordered)


@every_spec
@settings(max_examples=25, deadline=None)
@given(x=tensors())
def test_error_is_at_most_half_a_step_and_nothing_saturates_by_more(spec, x):
    x = within_range(x, spec)
    blocks = quantize_blocks(x, spec.scaling)
    element = spec.scaling.element
    relative = (x.double() / blocks.scale.double()).abs()
    exponent = relative.clamp_max(element.largest).clamp_min(2.0**element.lowest_exponent).log2().floor()
    half_step = blocks.scale.double() * torch.exp2(exponent - element.mantissa_bits) / 2
    error = (apply_spec(x, spec).double() - x.double()).abs()
    assert (error <= half_step * (1 + 1e-5)).all()


@every_spec
@settings(max_examples=25, deadline=None)
@given(x=tensors())
def test_results_are_representable_and_rounding_them_again_changes_an_ulp_at_most(spec, x):
    x = within_range(x, spec)
    blocks = quantize_blocks(x, spec.scaling)
    once = apply_spec(x, spec)
    grid_value = blocks.elements.double()
    assert (once.double() - grid_value * blocks.scale.double()).abs().max() <= once.abs().max() * 2.0**-23
    if has_normal_scales(blocks, spec):
        twice = apply_spec(once, spec)
        if spec.scale == "e8m0":
            assert torch.equal(twice, once)
        else:
            scale_ulp = blocks.scale.double() * 2.0**-3
            assert ((twice - once).double().abs() <= scale_ulp * grid_value.abs().clamp_min(1)).all()


@every_spec
def test_zero_blocks_are_zero_and_tiny_ones_finite(spec):
    assert not apply_spec(torch.zeros(3, 33), spec).any()
    x = torch.randn(64, 160, generator=torch.Generator().manual_seed(0))
    x[:16, :32] = 0
    x[16:32] *= 1e-38
    x[32:48] *= 1e-42
    x[48:] *= 1e30
    x = within_range(x, spec)
    quantized = apply_spec(x, spec)
    assert quantized.isfinite().all()
    assert not quantized[:16, :32].any()
    assert (quantized[48:] - x[48:]).double().norm() / x[48:].double().norm() < 0.2
    for factor in (1e-38, 1e-42):
        alone = torch.randn(16, 32, generator=torch.Generator().manual_seed(1)) * factor
        assert apply_spec(alone, spec).isfinite().all()
        assert apply_spec(alone, spec).abs().max() <= 1.25 * alone.abs().max() + 2.0**-126


@every_spec
def test_nan_stays_where_it_is_and_infinity_takes_its_block(spec):
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    clean = apply_spec(x.clone(), spec)
    with_nan = x.clone()
    with_nan[0, 3] = float("nan")
    quantized = apply_spec(with_nan, spec)
    assert quantized.isnan().nonzero().tolist() == [[0, 3]]
    with_infinity = x.clone()
    with_infinity[0, 0] = -float("inf")
    rows, columns = spec.block_shape
    broken = apply_spec(with_infinity, spec).isnan()
    assert broken[:rows, :columns].all()
    assert int(broken.sum()) == rows * columns
    far = apply_spec(with_infinity, spec)[128:, 128:]
    assert torch.equal(far, clean[128:, 128:])


def test_e8m0_scales_never_saturate_the_largest_value():
    for exponent in range(-100, 100, 7):
        x = torch.linspace(1, 2, 32) * 2.0**exponent
        for notation in ("MXFP4", "MXFP8", "MXFP8_E5M2"):
            spec = QuantizationSpec.parse(notation)
            blocks = quantize_blocks(x, spec.scaling)
            assert float(blocks.scaled.abs().max()) <= spec.scaling.element.largest


def test_scale_limits_bound_the_scale():
    spec = QuantizationSpec.parse("NVFP4_16", outer_scale="row", scale_limits=(1e-6, 10.0))
    assert not fake_quantize(torch.full((1, 16), 1e-9), scale_limits=(1e-6, 10.0)).any()
    large = quantize_blocks(torch.full((1, 16), 1e6), spec.scaling)
    assert float(large.scale.max()) == pytest.approx(10.0, rel=0.07)
    assert float(apply_spec(torch.full((1, 16), 1e6), spec).max()) == pytest.approx(60.0, rel=0.07)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_dtype_and_shape_stay(dtype):
    for shape in ((5,), (3, 17), (2, 3, 1, 9), (0, 16), (4, 0)):
        quantized = fake_quantize(torch.ones(shape, dtype=dtype), block=(8, 8))
        assert (quantized.shape, quantized.dtype) == (shape, dtype)


def test_strides_do_not_matter():
    x = torch.randn(32, 48)
    assert torch.equal(fake_quantize(x.T), fake_quantize(x.T.contiguous()))


def test_gradient_passes_straight_through():
    x = torch.randn(4, 32, requires_grad=True)
    gradient = torch.randn(4, 32)
    fake_quantize(x).backward(gradient)
    assert torch.equal(x.grad, gradient)


def test_gradient_is_quantised_where_asked():
    x = torch.randn(4, 32, requires_grad=True)
    gradient = torch.randn(4, 32)
    gradient_spec = QuantizationSpec.parse("NVFP4_16_SR_RHT")
    apply_spec(x, SPECS[0], gradient_spec=gradient_spec).backward(gradient)
    assert not torch.equal(x.grad, gradient)
    assert (x.grad - gradient).norm() / gradient.norm() < 0.3


def test_stochastic_quantisation_is_unbiased():
    x = torch.randn(1, 16, generator=torch.Generator().manual_seed(3)).repeat(20_000, 1)
    generator = torch.Generator().manual_seed(0)
    mean = fake_quantize(x, tensor_scale="row", stochastic=True, generator=generator).double().mean(dim=0)
    nearest = fake_quantize(x[:1], tensor_scale="row").double()[0]
    inside = x[0].abs() < 0.9 * x[0].abs().max()
    assert ((mean - x[0]).abs()[inside] < 0.01).all()
    assert ((nearest - x[0]).abs()[inside] > 0.01).any()


def test_hadamard_rotation_is_orthogonal_and_helps_with_outliers():
    x = torch.randn(8, 50, dtype=torch.float64)
    torch.testing.assert_close(rotate_back(rotate(x), 50), x)
    torch.testing.assert_close(rotate(x).norm(), x.norm())
    outlier = torch.zeros(1, 16) + 0.01
    outlier[0, 5] = 1.0
    plain, rotated = fake_quantize(outlier), fake_quantize(outlier, hadamard=True)
    others = torch.arange(16) != 5
    assert (plain[0, others] == 0).all()
    assert (rotated[0] - outlier[0]).norm() < 0.3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"format": "e3m0"}, "format='e3m0': needs one of e2m1, e1m2, e1m3, e4m3, e5m2, e5m3, ue5m3, e8m0, int8"),
        ({"format": "e8m0"}, "format='e8m0': needs an element format"),
        ({"block": 0}, "block=0: needs a length from 1 to 4096"),
        ({"block": -16}, "block=-16"),
        ({"block": 4097}, "block=4097"),
        ({"block": (8, 129)}, "block=(8, 129)"),
        ({"block": (8, 0)}, "block=(8, 0)"),
        ({"block": (8, 8, 8)}, "block=(8, 8, 8)"),
        ({"block": 16.0}, "block=16.0"),
        ({"block": True}, "block=True"),
        ({"scale": "e2m1"}, "scale='e2m1': needs one of e4m3, ue5m3, e8m0, fp32"),
        ({"tensor_scale": "column"}, "outer_scale='column': needs one of none, tensor, matrix, row"),
        ({"tensor_scale": "row", "block": (8, 8)}, "outer_scale='row': needs blocks within a row"),
        ({"scale_limits": (1.0, 0.5)}, "scale_limits=(1.0, 0.5)"),
    ],
)
def test_bad_arguments_are_named_in_one_line(arguments, message):
    with pytest.raises(ConfigurationError) as error:
        fake_quantize(torch.ones(4, 4), **arguments)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.ones(4, dtype=torch.int32), "x=torch.int32: needs a floating-point tensor"),
        (torch.ones(4, dtype=torch.complex64), "x=torch.complex64: needs a floating-point tensor"),
        ([1.0], "x='list': needs a floating-point tensor"),
        (torch.tensor(1.0), "x=(): needs at least one dimension"),
    ],
)
def test_tensors_that_cannot_be_quantised(x, message):
    with pytest.raises(ConfigurationError) as error:
        fake_quantize(x)
    assert message in str(error.value)
