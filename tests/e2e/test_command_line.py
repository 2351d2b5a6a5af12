"""The doors a user comes through: `nemo llm pretrain`, executors, `hsmoe`. Every test is a real process."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes import run_in_processes

BIN = Path(sys.executable).parent
SHORT = ["data.seq_length=64", "model.config.seq_length=64", "trainer.limit_val_batches=1"]


def environment() -> dict[str, str]:
    return {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "200"}


def command(*arguments, cwd=None):
    return subprocess.run(list(map(str, arguments)), capture_output=True, text=True, env=environment(), timeout=400, cwd=cwd)


def pretrain(recipe, folder, cache_dir, *overrides):
    places = [f"log.log_dir={folder}", "log.name=run", f"data.cache_dir={cache_dir}"]
    return command("nemo", "llm", "pretrain", "--factory", recipe, "--yes", *places, *SHORT, *overrides, cwd=folder)


def metrics_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def test_overrides_take_effect_and_the_run_folder_tells_the_story(tmp_path, cache_dir):
    result = pretrain("hsmoe_tiny", tmp_path, cache_dir, "trainer.max_steps=3", "optim.config.lr=1e-4")
    assert result.returncode == 0, result.stderr[-3000:]
    metrics = metrics_of(tmp_path)
    assert [line["step"] for line in metrics] == [1, 2, 3]
    assert max(line["lr"] for line in metrics) <= 1e-4
    assert {"loss", "lr", "tokens_per_second", "grad_norm", "expert_load", "consumed_samples"} <= set(metrics[0])
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["val_loss"] == metrics[-1]["val_loss"]
    assert 6 < summary["unigram_cross_entropy"] < 8
    assert summary["sample"].startswith("import os")
    assert (tmp_path / "run" / "run.png").read_bytes()[:4] == b"\x89PNG"
    assert list((tmp_path / "run" / "tensorboard").glob("events.*"))
    assert "unigram with add-one smoothing" in result.stdout
    assert "quantization: emulated" in result.stdout


def test_dry_run_of_the_5b_recipe():
    result = command("nemo", "llm", "pretrain", "--factory", "hsmoe_5b", "--dryrun")
    assert result.returncode == 0, result.stderr[-3000:]
    assert "expert_model_parallel_size=4" in result.stdout


def nemo_command_in_this_process(arguments: list[str], folder: str) -> tuple[int, str]:
    """What the `nemo` script does; returns its exit code and what it wrote to standard error."""
    from nemo_run.cli.api import create_cli

    os.chdir(folder)
    sys.argv = ["nemo", *arguments]
    log = Path(folder) / "stderr.txt"
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 2)
    try:
        create_cli()()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    else:
        code = 0
    sys.stderr.flush()
    return code, log.read_text()


@pytest.mark.parametrize(
    ("recipe", "override", "message"),
    [
        ("hsmoe_tiny(corpus=/nowhere)", "trainer.max_steps=2", "corpus='/nowhere': needs an existing file or folder"),
        ("hsmoe_tiny(num_gpus_per_node=3)", "trainer.max_steps=2", "expert_parallelism=3: needs a divisor of the 64"),
        ("hsmoe_tiny(colour=red)", "trainer.max_steps=2", "colour"),
        ("hsmoe_tiny(quantization=fp4)", "trainer.max_steps=2", "quantization='fp4': needs one of none, emulated"),
        ("hsmoe_tiny", "model.config.quantization=native", "quantization='native': needs TransformerEngine and a Blackwell"),
        ("hsmoe_tiny", "model.config.quantization_rows={'value_output': 'NVFP5'}", "format='NVFP5': needs"),
        ("hsmoe_tiny", "trainer.max_stepz=2", "max_stepz"),
        ("hsmoe_tiny", "data.micro_batch_size=3", "global_batch_size=4: needs a multiple of micro_batch_size = 3"),
        ("hsmoe_tiny", "data.seq_length=512", "needs at most seq_length = 256 positions"),
        ("hsmoe_tiny", "trainer.strategy.expert_model_parallel_size=2", "expert_model_parallel_size=2: needs a divisor"),
        ("hsmoe_tiny", "log.log_dir=/proc/none", "dir='/proc/none/run': needs a run folder that can be written"),
    ],
)
def test_bad_input_is_one_line_and_a_failing_exit_code(recipe, override, message, tmp_path, cache_dir):
    places = [f"log.log_dir={tmp_path}", "log.name=run", f"data.cache_dir={cache_dir}"]
    arguments = ["llm", "pretrain", "--factory", recipe, "--yes", *places, override]
    code, errors = run_in_processes(nemo_command_in_this_process, 1, arguments, str(tmp_path))[0]
    assert code != 0
    assert any(message in line for line in errors.splitlines() if "rror" in line), errors[-3000:]
    assert "Traceback" not in errors


def test_executor_runs_two_processes_and_tells_when_they_fail(tmp_path, cache_dir):
    executor = ["run.executor=local_cpu", "run.executor.ntasks_per_node=2"]
    result = pretrain("hsmoe_tiny(num_gpus_per_node=2)", tmp_path, cache_dir, "trainer.max_steps=2", *executor)
    assert result.returncode == 0, result.stdout[-3000:]
    assert [line["step"] for line in metrics_of(tmp_path)] == [1, 2]
    result = pretrain("hsmoe_tiny(num_gpus_per_node=2,corpus=/nowhere)", tmp_path, cache_dir, *executor)
    assert result.returncode != 0
    assert "job failed" in result.stderr


def test_killed_and_resumed_is_the_unbroken_run_bit_for_bit(tmp_path, cache_dir):
    overrides = ["trainer.max_steps=10", "log.ckpt.every_n_train_steps=4", "trainer.limit_val_batches=0"]
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    for folder in (unbroken, broken):
        folder.mkdir()
    assert pretrain("hsmoe_tiny", unbroken, cache_dir, *overrides).returncode == 0
    places = [f"log.log_dir={broken}", "log.name=run", f"data.cache_dir={cache_dir}"]
    process = subprocess.Popen(
        ["nemo", "llm", "pretrain", "--factory", "hsmoe_tiny", "--yes", *places, *SHORT, *overrides],
        env=environment(), cwd=broken, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 300
    while not ((broken / "run" / "metrics.jsonl").exists() and len(metrics_of(broken)) >= 6):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert pretrain("hsmoe_tiny", broken, cache_dir, *overrides).returncode == 0
    for name in ("step", "loss", "lr", "grad_norm", "consumed_samples"):
        assert [line[name] for line in metrics_of(broken)] == [line[name] for line in metrics_of(unbroken)], name


def test_report():
    result = command("hsmoe", "report", "hsmoe_5b", "--json")
    figures = json.loads(result.stdout)
    assert abs(figures["total"] / 5e9 - 1) < 0.01
    assert sum(figures["breakdown"].values()) == figures["total"]
    assert figures["active"] == 814_648_320
    table = command("hsmoe", "report", "hsmoe_33b").stdout
    assert "33,733,585,920" in table
    assert "3,145,728,000" in table
    wrong = command("hsmoe", "report", "hsmoe_7b")
    assert wrong.returncode == 1
    assert wrong.stderr.strip() == "error: recipe='hsmoe_7b': needs one of hsmoe_5b, hsmoe_33b, hsmoe_1b, hsmoe_tiny"


def test_help_is_quick_to_import():
    result = command(sys.executable, "-X", "importtime", "-c", "import nemo_hsmoe.cli")
    assert "torch" not in {line.split("|")[-1].strip() for line in result.stderr.splitlines()}
    assert command("hsmoe", "--help").returncode == 0
