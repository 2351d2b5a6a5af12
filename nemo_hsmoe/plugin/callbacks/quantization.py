"""Watches a quantised run: what each tensor got, what it costs in accuracy, larger blocks when gradients break."""

import json
import math
from typing import Any, Optional

import lightning.pytorch as pl
import torch
from megatron.core import parallel_state

from nemo_hsmoe.health.plots import plot_quantization
from nemo_hsmoe.model.hybrid_moe import HybridSparseMoEModel
from nemo_hsmoe.plugin.callbacks.metrics import run_folder, set_aside_lines_after
from nemo_hsmoe.quantization.quantize_model import grow_blocks, quantization_report
from nemo_hsmoe.quantization.statistics import StatisticsRecording
from nemo_hsmoe.runtime.errors import require

REPORT_FILE = "quantization.json"
STATISTICS_FILE = "quantization.jsonl"
PLOT_FILE = "quantization.png"


class QuantizationMonitor(pl.Callback):
    """Reports the policy as the model carries it out, records statistics, and grows blocks when gradients break.

    At the start the report is printed and written to `quantization.json`, dropped lines of the policy included. Every
    `record_every_n_steps`-th iteration, and the first, adds a line to `quantization.jsonl`: by tensor class the shares of
    saturated, flushed and non-finite values and the relative error. The end draws `quantization.png`.

    A gradient norm that is not finite or above `exploding_grad_norm` moves all 2-D blocks to the next of 8×8 → 16×8 →
    16×16, not more often than every `growth_cooldown` iterations. How often that happened is part of the checkpoint.

    Args:
        record_every_n_steps: iterations between recordings; 0 for none.
        exploding_grad_norm: largest norm before clipping that is not an explosion.
        growth_cooldown: iterations before blocks may grow again.

    Raises:
        ConfigurationError: for a negative number of iterations or a norm that is not positive.
    """

    def __init__(self, record_every_n_steps: int = 50, exploding_grad_norm: float = 100.0, growth_cooldown: int = 100):
        for name, value in (("record_every_n_steps", record_every_n_steps), ("growth_cooldown", growth_cooldown)):
            require(isinstance(value, int) and value >= 0, name, value, "needs a number of iterations, 0 for none")
        require(exploding_grad_norm > 0, "exploding_grad_norm", exploding_grad_norm, "needs a positive norm")
        self.record_every_n_steps = record_every_n_steps
        self.exploding_grad_norm = exploding_grad_norm
        self.growth_cooldown = growth_cooldown
        self.growths = 0
        self._last_growth: Optional[int] = None
        self._recording: Optional[StatisticsRecording] = None
        self._model: Optional[HybridSparseMoEModel] = None

    def state_dict(self) -> dict[str, Any]:
        """How often blocks grew."""
        return {"growths": self.growths, "last_growth": self._last_growth}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the count; the blocks themselves grow when training starts."""
        self.growths, self._last_growth = state_dict["growths"], state_dict["last_growth"]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Grow blocks as far as the checkpoint says, and report."""
        self._model = next((part for part in pl_module.modules() if isinstance(part, HybridSparseMoEModel)), None)
        if self._model is None or self._model.quantization_policy.name == "none":
            self._model = None
            return
        for _ in range(self.growths):
            grow_blocks(self._model)
        if trainer.is_global_zero:
            set_aside_lines_after(run_folder(trainer) / STATISTICS_FILE, trainer.global_step)
            report = quantization_report(self._model)
            (run_folder(trainer) / REPORT_FILE).write_text(json.dumps(report.as_dict(), indent=1, ensure_ascii=False))
            print(f"{report}\n", flush=True)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        """Start a recording when its iteration has come."""
        every = self.record_every_n_steps
        step = trainer.global_step + 1
        if self._model is not None and every and (step == 1 or step % every == 0):
            self._recording = StatisticsRecording(self._model)
            self._recording.start()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        """Write the recording's line; grow blocks when the gradient broke."""
        if self._model is None:
            return
        if self._recording is not None:
            self._recording.stop()
            group = parallel_state.get_data_parallel_group(with_context_parallel=True)
            by_class = {name: figures.as_dict() for name, figures in self._recording.by_class(group).items()}
            self._recording = None
            self._write(trainer, {"step": trainer.global_step, **by_class})
        self._grow_if_broken(trainer)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Draw the run's statistics."""
        path = run_folder(trainer) / STATISTICS_FILE
        if trainer.is_global_zero and self._model is not None and path.exists():
            plot_quantization([json.loads(line) for line in path.read_text().splitlines()], path.with_name(PLOT_FILE))

    def _write(self, trainer: pl.Trainer, line: dict[str, Any]) -> None:
        if not trainer.is_global_zero:
            return
        with (run_folder(trainer) / STATISTICS_FILE).open("a") as file:
            file.write(json.dumps(line) + "\n")
        numbers = {
            f"quantization/{tensor_class}/{name}": value
            for tensor_class, figures in line.items()
            if tensor_class != "step"
            for name, value in figures.items()
        }
        for logger in trainer.loggers:
            logger.log_metrics(numbers, step=line["step"])

    def _grow_if_broken(self, trainer: pl.Trainer) -> None:
        norm = trainer.callback_metrics.get("grad_norm")
        value = math.inf if norm is None else float(torch.as_tensor(norm))
        if norm is None or (math.isfinite(value) and value <= self.exploding_grad_norm):
            return
        step = trainer.global_step
        if self._last_growth is not None and step - self._last_growth < self.growth_cooldown:
            return
        assert self._model is not None
        grown = grow_blocks(self._model)
        if not grown:
            return
        self.growths += 1
        self._last_growth = step
        if trainer.is_global_zero:
            blocks = ", ".join(f"{name}: {description}" for name, description in grown.items())
            print(f"step {step}: gradient norm {value:.3g}, blocks grow: {blocks}", flush=True)
