"""Where tokens went."""

from __future__ import annotations

from typing import Any, Optional

from torch import Tensor


def log_routing_histogram(routing_info: Any, step: int, writer: Optional[Any] = None) -> Tensor:
    """Count tokens per expert and write the histogram.

    Args:
        routing_info: a `RoutingInfo`, or counts `[layers, experts]`.
        step: iteration the counts belong to.
        writer: `torch.utils.tensorboard.SummaryWriter`; None only counts.

    Returns:
        Tensor `[layers, experts]`.
    """
    counts_LE = routing_info if isinstance(routing_info, Tensor) else routing_info.tokens_per_expert_LE
    if writer is not None:
        for layer, counts_E in enumerate(counts_LE.float(), 1):
            mean = counts_E.mean().clamp_min(1.0)
            writer.add_scalar(f"routing/layer_{layer}/max_over_mean", float(counts_E.max() / mean), step)
            writer.add_histogram(f"routing/layer_{layer}/tokens_per_expert", counts_E, step)
    return counts_LE
