"""What quantisation does to the tensors of a live model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Optional

import torch

from nemo_hsmoe.quantization.tensor_quantizer import quantizers_of

_NUMBER_OF_SUMS = 6


@dataclass(frozen=True)
class QuantizationStatistics:
    """Shares over all values of one tensor class.

    Attributes:
        saturated: share of values beyond the largest element by more than half a step.
        flushed: share of values that became 0.
        not_finite: share of NaN and Inf.
        relative_error: ‖q(x) − x‖ / ‖x‖.
    """

    saturated: float
    flushed: float
    not_finite: float
    relative_error: float

    def as_dict(self) -> dict[str, float]:
        """The figures by name."""
        return asdict(self)


class StatisticsRecording:
    """Sums over the forward passes between `start` and `stop`; costs about a second quantisation of each tensor."""

    def __init__(self, model: torch.nn.Module):
        self._quantizers = [quantizer for quantizer in quantizers_of(model).values() if quantizer.spec is not None]
        self._sums: dict[str, torch.Tensor] = {}

    def start(self) -> None:
        """Let the quantizers count."""
        for quantizer in self._quantizers:
            quantizer.statistics = torch.zeros(_NUMBER_OF_SUMS, dtype=torch.float64, device=quantizer.calibrated_amax.device)

    def stop(self) -> None:
        """Take the quantizers' counts and end counting."""
        for quantizer in self._quantizers:
            if quantizer.statistics is not None:
                previous = self._sums.get(quantizer.tensor_class, 0.0)
                self._sums[quantizer.tensor_class] = quantizer.statistics + previous
                quantizer.statistics = None

    def by_class(self, group: Optional[torch.distributed.ProcessGroup] = None) -> dict[str, QuantizationStatistics]:
        """Statistics of every tensor class that was quantised, summed over `group` if there is one."""
        result = {}
        for tensor_class, sums in self._sums.items():
            if group is not None:
                torch.distributed.all_reduce(sums, group=group)
            values, saturated, flushed, not_finite, error, power = sums.tolist()
            if values:
                result[tensor_class] = QuantizationStatistics(
                    saturated / values, flushed / values, not_finite / values, (error / power) ** 0.5 if power else 0.0
                )
        return result


@contextmanager
def recorded_statistics(model: torch.nn.Module) -> Iterator[StatisticsRecording]:
    """Count saturation, flushing and error of the forward passes inside; see `StatisticsRecording`."""
    recording = StatisticsRecording(model)
    recording.start()
    try:
        yield recording
    finally:
        recording.stop()
