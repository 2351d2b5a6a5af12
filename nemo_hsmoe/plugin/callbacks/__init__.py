"""Trainer callbacks."""

from nemo_hsmoe.plugin.callbacks.metrics import RunMetrics
from nemo_hsmoe.plugin.callbacks.summary import RunSummary

__all__ = ["RunMetrics", "RunSummary"]
