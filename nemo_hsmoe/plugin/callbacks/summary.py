"""What a finished run shows: held-out loss beside the unigram model's, a plot, a sample of text."""

import json
from pathlib import Path
from typing import Optional

import lightning.pytorch as pl
import torch

from nemo_hsmoe.data.unigram import unigram_negative_log_likelihood
from nemo_hsmoe.health.plots import plot_run
from nemo_hsmoe.model.hybrid_moe import HybridSparseMoEModel
from nemo_hsmoe.model.sampling import sample_continuation
from nemo_hsmoe.plugin.callbacks.metrics import METRICS_FILE, read_metrics, run_folder

SUMMARY_FILE = "summary.json"
PLOT_FILE = "run.png"


class RunSummary(pl.Callback):
    """Prints and stores the outcome of a run: `summary.json` and `run.png` in the run folder.

    Args:
        prompt: text the sample continues.
        sample_tokens: length of the sample; 0 for none.
    """

    def __init__(self, prompt: str = "import os\n\ndef ", sample_tokens: int = 48):
        self.prompt = prompt
        self.sample_tokens = sample_tokens
        self._sampled: Optional[str] = None
        self._trained = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note that there was something left to train."""
        self._trained = True

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Sample, on every rank, while the model is still on its device."""
        self._sampled = self._sample(trainer, pl_module)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Report on the first rank, after the last checkpoint."""
        if not trainer.is_global_zero:
            return
        folder = run_folder(trainer)
        if not self._trained:
            print(f"\nNothing to train: {folder} is at step {trainer.global_step} and max_steps is {trainer.max_steps}.")
            return
        metrics = read_metrics(folder)
        validated = [line["val_loss"] for line in metrics if "val_loss" in line]
        summary = {
            "step": metrics[-1]["step"],
            "loss": metrics[-1]["loss"],
            "val_loss": validated[-1] if validated else None,
            "unigram_cross_entropy": _held_out_unigram(trainer.datamodule),
            "sample": self._sampled,
            "run_folder": str(folder),
        }
        (folder / SUMMARY_FILE).write_text(json.dumps(summary, indent=1, ensure_ascii=False))
        load_LE = pl_module.optim.expert_load_LE
        plot_run(
            metrics,
            folder / PLOT_FILE,
            summary["unigram_cross_entropy"],
            None if load_LE is None else load_LE.float().cpu().numpy(),
        )
        _print(summary, folder)

    def _sample(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> Optional[str]:
        model = _unwrapped(pl_module)
        if not self.sample_tokens or model is None:
            return None
        tokenizer = trainer.datamodule.tokenizer
        prompt = torch.tensor([tokenizer.bos_id, *tokenizer.encode(self.prompt)]).cuda()
        return tokenizer.decode(sample_continuation(model, prompt, self.sample_tokens)[1:].tolist())


def _unwrapped(module: torch.nn.Module) -> Optional[HybridSparseMoEModel]:
    return next((part for part in module.modules() if isinstance(part, HybridSparseMoEModel)), None)


def _held_out_unigram(data) -> Optional[float]:
    if data.built_corpus is None or not data.validation_sequences:
        return None
    nll_V = unigram_negative_log_likelihood(data.built_corpus.train.prefix)
    total = tokens = 0.0
    for item in data.validation_items():
        total += float((nll_V[item["labels"]] * item["loss_mask"]).sum())
        tokens += float(item["loss_mask"].sum())
    return total / tokens


def _print(summary: dict, folder: Path) -> None:
    print(f"\nRun finished at step {summary['step']}.")
    if summary["val_loss"] is not None and summary["unigram_cross_entropy"] is not None:
        better = "below" if summary["val_loss"] < summary["unigram_cross_entropy"] else "not below"
        print(
            f"  held-out text, nats per token: model {summary['val_loss']:.3f}  |  "
            f"unigram with add-one smoothing {summary['unigram_cross_entropy']:.3f}  ({better})"
        )
    if summary["sample"]:
        print("  sample:\n" + "\n".join(f"    {line}" for line in summary["sample"].splitlines()))
    for name, what in {
        METRICS_FILE: "one line an iteration",
        PLOT_FILE: "loss, learning rate, expert load",
        SUMMARY_FILE: "these figures",
        "checkpoints": "to resume: the same command",
    }.items():
        print(f"  {folder / name}  ({what})")
    print(flush=True)
