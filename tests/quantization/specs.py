"""Specs and tensors the tests of this folder share."""

import hypothesis.extra.numpy
import numpy as np
import torch
from hypothesis import strategies as st

from nemo_hsmoe.quantization import QuantizationSpec

SPECS = [
    QuantizationSpec.parse("NVFP4_16"),
    QuantizationSpec.parse("NVFP4_16", outer_scale="row"),
    QuantizationSpec.parse("NVFP4_16", outer_scale="none"),
    QuantizationSpec.parse("NVFP4_32", outer_scale="row"),
    QuantizationSpec.parse("NVFP4_8x8", outer_scale="matrix"),
    QuantizationSpec.parse("NVFP4_16x8", outer_scale="matrix"),
    QuantizationSpec.parse("NVFP4_16x16"),
    QuantizationSpec.parse("NVFP4_16x1", outer_scale="matrix"),
    QuantizationSpec.parse("E1M2_16"),
    QuantizationSpec.parse("E1M3_8x8", outer_scale="matrix"),
    QuantizationSpec.parse("MXFP4"),
    QuantizationSpec.parse("MXFP8"),
    QuantizationSpec.parse("MXFP8_E5M2"),
    QuantizationSpec.parse("MXFP8_E5M3"),
    QuantizationSpec.parse("FP8_128x128"),
    QuantizationSpec.parse("INT8_7"),
]


def name_of(spec: QuantizationSpec) -> str:
    return spec.description.replace(" ", "")


def tensors(lowest_exponent: int = -20, highest_exponent: int = 20):
    """Float32 matrices of any shape whose magnitudes are 0 or from 2^lowest to 2^highest."""
    positive = st.floats(2.0**lowest_exponent, 2.0**highest_exponent, width=32)
    elements = st.one_of(st.just(0.0), positive, positive.map(lambda value: -value))
    shapes = hypothesis.extra.numpy.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=19)
    return hypothesis.extra.numpy.arrays(np.float32, shapes, elements=elements).map(torch.from_numpy)
