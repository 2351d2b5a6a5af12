"""A quantised run whose gradient breaks, its continuation, and the recipe's ways to choose a policy."""

import json
import math
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from tests.processes import run_in_processes

BROKEN_STEP = 3


class GradientBreaker(pl.Callback):
    """Turns one expert gradient of one iteration into NaN and remembers what that iteration changed."""

    def __init__(self, report: str):
        self.report = report

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step + 1 == BROKEN_STEP:
            self._before = self._state(trainer, pl_module)
            experts = next(parameter for name, parameter in pl_module.named_parameters() if "experts.fc1_weight" in name)
            self._hook = experts.register_hook(lambda gradient: gradient * float("nan"))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == BROKEN_STEP:
            self._hook.remove()
            after = self._state(trainer, pl_module)
            unchanged = [torch.equal(first, second) for first, second in zip(self._before, after)]
            Path(self.report).write_text(json.dumps({"tensors": len(after), "unchanged": sum(unchanged)}))

    @staticmethod
    def _state(trainer, pl_module):
        from nemo_hsmoe.plugin.optim import distributed_optimizers

        optimizer = trainer.optimizers[0].mcore_optimizer
        states = [
            tensor
            for part in distributed_optimizers(optimizer)
            for state in part.optimizer.state.values()
            for name, tensor in sorted(state.items())
            if name.startswith("exp_avg")
        ]
        return [tensor.detach().clone() for tensor in (*pl_module.parameters(), *states)]


def train_with_a_broken_gradient(folder: str, cache_dir: str, max_steps: int) -> list[dict]:
    import fiddle as fdl
    import nemo_run as run

    from nemo_hsmoe import recipes
    from nemo_hsmoe.plugin.callbacks.metrics import read_metrics

    recipe = recipes.hsmoe_tiny(dir=folder, name="run", max_steps=max_steps)
    recipe.data.seq_length = recipe.model.config.seq_length = 64
    recipe.data.cache_dir = cache_dir
    recipe.trainer.limit_val_batches = 0
    recipe.trainer.callbacks[1].sample_tokens = 2
    recipe.trainer.callbacks[2].record_every_n_steps = 2
    recipe.trainer.callbacks.append(run.Config(GradientBreaker, report=f"{folder}/broken.json"))
    recipe.optim.lr_scheduler.total_steps = 20
    fdl.build(recipe)()
    return read_metrics(Path(folder) / "run")


def formats_in_force(folder: Path) -> dict[str, str]:
    rows = json.loads((folder / "run" / "quantization.json").read_text())["rows"]
    return {row["tensor_class"]: row["format"] for row in rows}


def test_a_broken_gradient_changes_nothing_grows_blocks_and_a_resumed_run_keeps_them(tmp_path, cache_dir):
    metrics = run_in_processes(train_with_a_broken_gradient, 1, str(tmp_path), cache_dir, 5)[0]
    broken = json.loads((tmp_path / "broken.json").read_text())
    assert broken["unchanged"] == broken["tensors"] > 50
    assert [math.isfinite(line["grad_norm"]) for line in metrics] == [True, True, False, True, True]
    assert all(math.isfinite(line["loss"]) for line in metrics)
    assert metrics[4]["loss"] < metrics[0]["loss"]
    assert formats_in_force(tmp_path)["routed_expert_weight"].startswith("E2M1 / 8×8")
    metrics = run_in_processes(train_with_a_broken_gradient, 1, str(tmp_path), cache_dir, 7)[0]
    assert [line["step"] for line in metrics] == list(range(1, 8))
    assert formats_in_force(tmp_path)["routed_expert_weight"].startswith("E2M1 / 16×8")
    statistics = [json.loads(line) for line in (tmp_path / "run" / "quantization.jsonl").read_text().splitlines()]
    assert [line["step"] for line in statistics] == [1, 2, 4, 6]
    assert (tmp_path / "run" / "quantization.png").read_bytes()[:4] == b"\x89PNG"


def test_learning_rate_is_halved_at_first_only():
    from nemo_hsmoe.plugin.optim import QATCosineAnnealing

    def rates(fraction):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        arguments = dict(max_steps=40, warmup_steps=2, constant_steps=0, min_lr=0.1)
        scheduler = QATCosineAnnealing(optimizer, fraction=fraction, factor=0.5, **arguments)
        found = []
        for _ in range(40):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        return found

    ratios = [quantized / plain for quantized, plain in zip(rates(0.1), rates(0.0))]
    assert ratios == pytest.approx([0.5] * 4 + [1.0] * 36)


@pytest.mark.parametrize("recipe", ["hsmoe_5b", "hsmoe_33b", "hsmoe_1b", "hsmoe_tiny"])
def test_recipes_quantise_by_default_and_on_request(recipe):
    from nemo_hsmoe import recipes

    default = "emulated" if recipe == "hsmoe_tiny" else "auto"
    assert getattr(recipes, recipe)().model.config.quantization == default
    assert getattr(recipes, recipe)(quantization="seed_literal").model.config.quantization == "seed_literal"


def test_monitor_arguments_that_cannot_work_are_named():
    from nemo_hsmoe.plugin.callbacks import QuantizationMonitor
    from nemo_hsmoe.runtime.errors import ConfigurationError

    for arguments, message in (
        ({"record_every_n_steps": -1}, "record_every_n_steps=-1"),
        ({"exploding_grad_norm": 0.0}, "exploding_grad_norm=0.0"),
        ({"growth_cooldown": -5}, "growth_cooldown=-5"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            QuantizationMonitor(**arguments)
