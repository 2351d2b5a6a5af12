"""Static ranges for inference."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Optional

import torch

from nemo_hsmoe.quantization.policy import ACTIVATION_CLASSES
from nemo_hsmoe.quantization.tensor_quantizer import TensorQuantizer, quantizers_of


@torch.no_grad()
def calibrate(
    model: torch.nn.Module,
    batches: Iterable[Any],
    forward: Optional[Callable[[torch.nn.Module, Any], Any]] = None,
    group: Optional[torch.distributed.ProcessGroup] = None,
) -> dict[str, float]:
    """Measure the range of every activation over `batches` and keep it for inference.

    Ranges live in the quantizers' `calibrated_amax` buffers and so in every checkpoint. In `eval()` they replace measured
    ranges as the outer scale of two-level formats (NVFP4); formats without one (MXFP8) keep finding their power-of-two
    scales block by block. Training ignores them. Calibrate again after more training.

    Args:
        model: `HybridSparseMoEModel`, wrapped or not.
        batches: inputs.
        forward: called with model and batch; None calls the model with the batch.
        group: processes whose largest range counts; None takes all of them.

    Returns:
        Range of each activation by module path.
    """
    quantizers = {
        name: quantizer for name, quantizer in quantizers_of(model).items() if quantizer.tensor_class in ACTIVATION_CLASSES
    }
    was_training = model.training
    model.eval()
    for quantizer in quantizers.values():
        quantizer.calibrated_amax.zero_()
        quantizer.is_calibrating = True
    try:
        for batch in batches:
            if forward is None:
                model(batch)
            else:
                forward(model, batch)
    finally:
        for quantizer in quantizers.values():
            quantizer.is_calibrating = False
        model.train(was_training)
    if torch.distributed.is_initialized():
        for quantizer in quantizers.values():
            torch.distributed.all_reduce(quantizer.calibrated_amax, torch.distributed.ReduceOp.MAX, group=group)
    return {name: float(quantizer.calibrated_amax) for name, quantizer in quantizers.items()}


def discard_calibration(model: torch.nn.Module) -> None:
    """Return to measured ranges."""
    for quantizer in quantizers_of(model).values():
        _reset(quantizer)


def _reset(quantizer: TensorQuantizer) -> None:
    with torch.no_grad():
        quantizer.calibrated_amax.zero_()
