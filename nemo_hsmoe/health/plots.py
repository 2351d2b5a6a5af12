"""Pictures of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

import numpy as np


def plot_run(metrics: Sequence[dict[str, Any]], path: Path, unigram: Optional[float], load_LE: Optional[np.ndarray]) -> None:
    """Draw loss, learning rate and expert load of a run into a PNG file.

    Args:
        metrics: lines of `metrics.jsonl`.
        path: file to write.
        unigram: cross-entropy of the held-out text under the unigram model, nats a token.
        load_LE: tokens each expert of each layer received in the last iteration.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = [line["step"] for line in metrics]
    figure, (loss, rate, load) = pyplot.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    loss.plot(steps, [line["loss"] for line in metrics], color="tab:blue", linewidth=1, label="training")
    validated = [line for line in metrics if "val_loss" in line]
    loss.plot(
        [line["step"] for line in validated], [line["val_loss"] for line in validated], "o-", color="tab:red",
        label="validation",
    )  # fmt: skip
    if unigram is not None:
        loss.axhline(unigram, color="tab:gray", linestyle="--", label=f"held-out unigram {unigram:.2f}")
    loss.set(xlabel="iteration", ylabel="nats per token", title="Next-token loss")
    loss.legend()
    rate.plot(steps, [line["lr"] for line in metrics], color="tab:green")
    rate.set(xlabel="iteration", title="Learning rate")
    if load_LE is not None:
        share_LE = load_LE / np.maximum(load_LE.mean(axis=1, keepdims=True), 1)
        image = load.imshow(share_LE, aspect="auto", cmap="viridis", vmin=0)
        figure.colorbar(image, ax=load, label="tokens ÷ mean")
        load.set(xlabel="routed expert", ylabel="layer", title="Expert load, last iteration")
        load.set_yticks(range(len(share_LE)), [str(layer + 1) for layer in range(len(share_LE))])
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def plot_quantization(lines: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw each tensor class' relative error, and its saturated and flushed shares, into a PNG file.

    Args:
        lines: of `quantization.jsonl`: `step`, and figures by tensor class.
        path: file to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figures = {
        "relative_error": "Relative error ‖q(x) − x‖ / ‖x‖",
        "flushed": "Share of values that became 0",
        "saturated": "Share of saturated values",
    }
    classes = sorted({name for line in lines for name in line if name != "step"})
    figure, axes = pyplot.subplots(1, len(figures), figsize=(15, 4.6), layout="constrained")
    for axis, (name, title) in zip(axes, figures.items()):
        for tensor_class in classes:
            points = [(line["step"], line[tensor_class][name]) for line in lines if tensor_class in line]
            axis.plot(*zip(*points), "o-", markersize=3, label=tensor_class)
        axis.set(xlabel="iteration", title=title)
        axis.set_ylim(bottom=0)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
