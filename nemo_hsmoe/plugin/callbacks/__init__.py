"""Trainer callbacks."""

from nemo_hsmoe.plugin.callbacks.metrics import RunMetrics
from nemo_hsmoe.plugin.callbacks.quantization import QuantizationMonitor
from nemo_hsmoe.plugin.callbacks.summary import RunSummary

__all__ = ["QuantizationMonitor", "RunMetrics", "RunSummary"]
