"""What an iteration cost and achieved: progress lines, `metrics.jsonl` and the loggers."""

import json
import os
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from nemo.lightning.megatron_parallel import CallbackMethods
from nemo.utils import AppState

METRICS_FILE = "metrics.jsonl"


def run_folder(trainer: pl.Trainer) -> Path:
    """Folder of the present run."""
    return Path(AppState().log_dir or trainer.default_root_dir)


class RunMetrics(pl.Callback, CallbackMethods):
    """Writes one line an iteration to `metrics.jsonl` and the loggers, and prints every `log_every_n_steps`-th.

    A line holds `step` (1 for the first), `loss` (mean over the valid tokens of the global batch, nats), `lr` (the one
    this iteration used), `tokens_per_second` (all processes), `tokens_per_second_per_device`, `seconds`, `grad_norm`
    (before clipping), `expert_load` (tokens of the busiest expert ÷ mean, worst layer), `peak_memory_gib` (CUDA, 0 without)
    and `consumed_samples`; the line
    of an iteration that validated also holds `val_loss`. Lines of iterations that a resumed run repeats move to
    `metrics.superseded.jsonl`.
    """

    def __init__(self, log_every_n_steps: int = 10):
        self.log_every_n_steps = log_every_n_steps
        self._lr = 0.0
        self._start = 0.0
        self._line: dict[str, Any] = {}
        self._line_offset = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Set aside lines beyond the iteration this run starts from."""
        self._begin = time.monotonic()
        self._first_step = trainer.global_step
        if trainer.is_global_zero:
            set_aside_lines_after(run_folder(trainer) / METRICS_FILE, trainer.global_step)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        """Start the iteration's clock."""
        self._start = time.monotonic()

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        """Note the learning rate in force."""
        self._lr = optimizer.param_groups[0]["lr"]

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        """Write the iteration's line, before any checkpoint of it."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.monotonic() - self._start
        data = trainer.datamodule
        tokens = data.global_batch_size * data.seq_length
        logged = trainer.callback_metrics
        load_LE = pl_module.optim.expert_load_LE
        self._line = {
            "step": trainer.global_step,
            "loss": float(logged["reduced_train_loss"]),
            "lr": float(self._lr),
            "tokens_per_second": tokens / seconds,
            "tokens_per_second_per_device": tokens / seconds / trainer.world_size,
            "seconds": seconds,
            "grad_norm": float(logged["grad_norm"]) if "grad_norm" in logged else None,
            "expert_load": float((load_LE.amax(dim=1) / load_LE.mean(dim=1).clamp_min(1.0)).max()),
            "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30,
            "consumed_samples": trainer.global_step * data.global_batch_size,
        }
        if trainer.is_global_zero:
            self._write_line(trainer)
            if self._line["step"] % self.log_every_n_steps == 0 or self._line["step"] == trainer.max_steps:
                self._print(self._line, trainer.max_steps)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Validate after the last iteration, unless that has happened: a resumed run's last batch may go unnoticed."""
        if self._line and "val_loss" not in self._line and trainer.limit_val_batches:
            trainer.validating = True
            trainer.fit_loop.epoch_loop.val_loop.run()
            trainer.training = True

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the iteration's line again, with the validation loss."""
        if not self._line or "val_loss" not in trainer.callback_metrics:
            return
        self._line["val_loss"] = float(trainer.callback_metrics["val_loss"])
        if trainer.is_global_zero:
            self._write_line(trainer, replace=True)
            self._print(self._line, trainer.max_steps)

    def _write_line(self, trainer: pl.Trainer, replace: bool = False) -> None:
        path = run_folder(trainer) / METRICS_FILE
        with path.open("r+" if path.exists() else "w") as file:
            self._line_offset = file.seek(self._line_offset) if replace else file.seek(0, os.SEEK_END)
            file.write(json.dumps(self._line) + "\n")
            file.truncate()
        numbers = {name: value for name, value in self._line.items() if name != "step" and value is not None}
        for logger in trainer.loggers:
            logger.log_metrics({"val_loss": numbers["val_loss"]} if replace else numbers, step=self._line["step"])

    def _print(self, line: dict[str, Any], max_steps: int) -> None:
        done = line["step"] - self._first_step
        remaining = (time.monotonic() - self._begin) / done * (max_steps - line["step"])
        validation = f"  val {line['val_loss']:.3f}" if "val_loss" in line else ""
        print(
            f"step {line['step']:>5}/{max_steps}  loss {line['loss']:.3f}  lr {line['lr']:.2e}  "
            f"{line['tokens_per_second']:,.0f} tok/s  expert load ×{line['expert_load']:.2f}  "
            f"{remaining:,.0f} s left{validation}",
            flush=True,
        )


def set_aside_lines_after(path: Path, step: int) -> None:
    """Move lines of iterations after `step` from a JSON-lines file to `NAME.superseded.jsonl` beside it."""
    if not path.exists():
        return
    kept: list[str] = []
    superseded: list[str] = []
    for line in path.read_text().splitlines(keepends=True):
        (kept if _step_of(line) <= step else superseded).append(line)
    if superseded:
        with path.with_name(f"{path.stem}.superseded.jsonl").open("a") as file:
            file.writelines(superseded)
        rewritten = path.with_suffix(".rewriting")
        rewritten.write_text("".join(kept))
        rewritten.replace(path)


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except ValueError:
        return float("inf")


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's `metrics.jsonl`, oldest first."""
    return [json.loads(line) for line in (Path(folder) / METRICS_FILE).read_text().splitlines()]
