"""Quantised training: number formats, block scaling, fake quantisation, and the policy of a model."""

from nemo_hsmoe.quantization.calibration import calibrate, discard_calibration
from nemo_hsmoe.quantization.fake_quantize import fake_quantize
from nemo_hsmoe.quantization.formats import FORMATS, NumberFormat
from nemo_hsmoe.quantization.learning_rate import qat_learning_rate_factor
from nemo_hsmoe.quantization.policy import PRESETS, TENSOR_CLASSES, QuantizationPolicy
from nemo_hsmoe.quantization.quantize_model import (
    QuantizationReport,
    grow_blocks,
    quantization_report,
    quantize_model,
)
from nemo_hsmoe.quantization.spec import QuantizationSpec
from nemo_hsmoe.quantization.statistics import QuantizationStatistics, recorded_statistics
from nemo_hsmoe.quantization.tensor_quantizer import TensorQuantizer, quantizers_of

__all__ = [
    "FORMATS",
    "PRESETS",
    "TENSOR_CLASSES",
    "NumberFormat",
    "QuantizationPolicy",
    "QuantizationReport",
    "QuantizationSpec",
    "QuantizationStatistics",
    "TensorQuantizer",
    "calibrate",
    "discard_calibration",
    "fake_quantize",
    "grow_blocks",
    "qat_learning_rate_factor",
    "quantization_report",
    "quantize_model",
    "quantizers_of",
    "recorded_statistics",
]
