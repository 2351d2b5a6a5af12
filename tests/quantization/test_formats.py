"""Number formats against ml_dtypes' tables and against their definition."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_hsmoe.quantization import FORMATS
from nemo_hsmoe.runtime.errors import ConfigurationError

SAME_IN_ML_DTYPES = {
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e8m0": ml_dtypes.float8_e8m0fnu,
}
SIGNED = sorted(name for name, number_format in FORMATS.items() if number_format.signed)
ALL = sorted(FORMATS)


def their_table(name: str) -> torch.Tensor:
    codes = np.arange(2 ** FORMATS[name].bits, dtype=np.uint8).view(SAME_IN_ML_DTYPES[name])
    return torch.from_numpy(codes.astype(np.float64))


@pytest.mark.parametrize("name", SAME_IN_ML_DTYPES)
def test_code_table_is_ml_dtypes(name):
    assert torch.equal(FORMATS[name].table.nan_to_num(123.0), their_table(name).nan_to_num(123.0))
    assert torch.equal(
        FORMATS[name].table.signbit() | FORMATS[name].table.isnan(), their_table(name).signbit() | their_table(name).isnan()
    )


@pytest.mark.parametrize("name", ["e2m1", "e4m3", "e5m2"])
def test_rounding_is_ml_dtypes(name):
    values = torch.randn(20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).exp().float()
    magnitudes = FORMATS[name].magnitudes
    ties = ((magnitudes[1:] + magnitudes[:-1]) / 2).float()
    values = torch.cat([values[values < FORMATS[name].largest], ties, magnitudes.float()])
    values = torch.cat([values, -values])
    theirs = values.numpy().astype(SAME_IN_ML_DTYPES[name]).astype(np.float32)
    assert torch.equal(FORMATS[name].round(values), torch.from_numpy(theirs))


def test_formats_ml_dtypes_has_not():
    assert FORMATS["e1m2"].magnitudes.tolist() == [code / 2 for code in range(8)]
    assert FORMATS["e1m3"].magnitudes.tolist() == [code / 4 for code in range(16)]
    assert FORMATS["int8"].magnitudes.tolist() == list(range(128))
    assert FORMATS["int8"].table[128].item() == -128
    ue5m3, e5m3 = FORMATS["ue5m3"], FORMATS["e5m3"]
    assert (ue5m3.bits, e5m3.bits) == (8, 9)
    assert ue5m3.largest == e5m3.largest == 1.75 * 2.0**16
    assert ue5m3.magnitudes[1].item() == 2.0**-17
    assert len(ue5m3.magnitudes) == 255


@pytest.mark.parametrize("name", ALL)
def test_codes_and_values_are_one_to_one(name):
    number_format = FORMATS[name]
    values = number_format.table[number_format.table.isfinite()].float()
    values = values[values >= number_format.grid.smallest]
    codes = number_format.encode(values)
    assert torch.equal(number_format.decode(codes), values)
    assert torch.equal(number_format.decode(codes).signbit(), values.signbit())
    with pytest.raises(ConfigurationError, match=f"needs values of {name}"):
        number_format.encode(torch.tensor([number_format.largest * 1.01]))


@pytest.mark.parametrize("name", ALL)
def test_values_of_the_format_stay(name):
    magnitudes = FORMATS[name].magnitudes
    assert torch.equal(FORMATS[name].round(magnitudes), magnitudes)


@pytest.mark.parametrize("name", ALL)
def test_saturation_signed_zero_nan_and_infinity(name):
    number_format = FORMATS[name]
    finite = torch.tensor([3.4e38, -3.4e38, 0.0, -0.0])
    smallest = number_format.grid.smallest
    expected = torch.tensor([number_format.largest, smallest, max(0.0, smallest), max(0.0, smallest)])
    assert torch.equal(number_format.round(finite), expected.float())
    if number_format.signed:
        assert number_format.round(finite).signbit().tolist() == [False, True, False, True]
    assert number_format.round(torch.tensor([float("nan"), float("inf"), -float("inf")])).isnan().all()


finite_floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@pytest.mark.parametrize("name", SIGNED)
@given(value=finite_floats)
def test_sign_symmetry(name, value):
    x = torch.tensor([value])
    assert torch.equal(FORMATS[name].round(-x), -FORMATS[name].round(x))


@pytest.mark.parametrize("name", ALL)
@given(first=finite_floats, second=finite_floats)
def test_monotonicity(name, first, second):
    low, high = FORMATS[name].round(torch.tensor([min(first, second), max(first, second)])).tolist()
    assert low <= high


@pytest.mark.parametrize("name", ALL)
@given(value=finite_floats)
def test_nothing_is_nearer_and_ties_go_to_even(name, value):
    number_format = FORMATS[name]
    lowest = max(number_format.grid.smallest, -number_format.largest)
    inside = min(max(value, lowest), number_format.largest)
    rounded = float(number_format.round(torch.tensor([inside], dtype=torch.float64)))
    finite = number_format.table[number_format.table.isfinite() & (number_format.table >= number_format.grid.smallest)]
    distances = (finite - inside).abs()
    assert abs(rounded - inside) == float(distances.min())
    nearest = {abs(candidate) for candidate in finite[distances == distances.min()].tolist()}
    if len(nearest) == 2 and number_format.mantissa_bits:
        code = int((number_format.magnitudes == abs(rounded)).nonzero())
        assert code % 2 == 0


@pytest.mark.parametrize("name", ["e2m1", "e1m3", "e4m3", "int8"])
def test_stochastic_rounding_is_unbiased_between_neighbours(name):
    number_format = FORMATS[name]
    draws = 20_000
    generator = torch.Generator().manual_seed(0)
    for value in (0.3, 1.1, 2.6, -1.9):
        rounded = number_format.round(torch.full((draws,), value), stochastic=True, generator=generator)
        finite = number_format.table[number_format.table.isfinite()]
        below, above = finite[finite <= value].max(), finite[finite >= value].min()
        assert set(rounded.tolist()) <= {float(below), float(above)}
        spread = float(above - below) / 2 / draws**0.5
        assert float(rounded.double().mean()) == pytest.approx(value, abs=5 * spread)
