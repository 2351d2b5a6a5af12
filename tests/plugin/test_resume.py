"""Which checkpoint a run resumes from, on checkpoints a real run wrote."""

import shutil
from pathlib import Path

import pytest

from tests.processes import run_in_processes
from tests.training import train

SHORT = {
    "data.seq_length": 64,
    "model.config.seq_length": 64,
    "trainer.callbacks.1.sample_tokens": 2,
    "trainer.limit_val_batches": 0,
    "log.ckpt.every_n_train_steps": 2,
    "log.ckpt.save_top_k": 5,
}


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory, cache_dir):
    folder = tmp_path_factory.mktemp("runs")
    arguments = {"dir": str(folder), "name": "run", "max_steps": 5}
    run_in_processes(train, 1, "hsmoe_tiny", arguments, {**SHORT, "data.cache_dir": cache_dir})
    return folder / "run"


@pytest.fixture
def run_copy(finished_run, tmp_path) -> Path:
    return Path(shutil.copytree(finished_run, tmp_path / "run", symlinks=True))


def checkpoint_to_resume(folder: Path, **fields):
    from nemo.utils import AppState

    from nemo_hsmoe.plugin.checkpointing import RunResume

    AppState().log_dir = folder
    resume = RunResume(resume_if_exists=True, **{"resume_ignore_no_checkpoint": True, **fields})
    return resume._find_trainer_ckpt_path()


def everything_in(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


def test_the_newest_whatever_it_is_called(run_copy):
    names = {path.name for path in (run_copy / "checkpoints").iterdir() if not path.is_symlink()}
    assert names == {"step=2", "step=4", "step=5"}
    assert checkpoint_to_resume(run_copy).name == "step=5"
    (run_copy / "checkpoints" / "step=5").rename(run_copy / "checkpoints" / "some-last")
    assert checkpoint_to_resume(run_copy).name == "some-last"
    (run_copy / "checkpoints" / "step=4").rename(run_copy / "checkpoints" / "other-last")
    (run_copy / "checkpoints" / "notes").mkdir()
    assert checkpoint_to_resume(run_copy).name == "some-last"


def test_another_run_below_the_folder_is_not_this_one(run_copy):
    assert checkpoint_to_resume(run_copy.parent) is None


def test_unfinished_ones_are_passed_over_and_kept(run_copy):
    (run_copy / "checkpoints" / "step=5-unfinished").touch()
    before = everything_in(run_copy)
    assert checkpoint_to_resume(run_copy).name == "step=4"
    assert everything_in(run_copy) == before


def test_only_unfinished_ones_are_refused(run_copy):
    from nemo_hsmoe import ConfigurationError

    for path in list((run_copy / "checkpoints").iterdir()):
        (run_copy / "checkpoints" / f"{path.name}-unfinished").touch()
    before = everything_in(run_copy)
    with pytest.raises(ConfigurationError, match="all of these are unfinished"):
        checkpoint_to_resume(run_copy)
    assert everything_in(run_copy) == before


@pytest.mark.parametrize("victim", ["__0_0.distcp", ".metadata", "common.pt"])
def test_a_truncated_checkpoint_is_refused(run_copy, victim):
    from nemo_hsmoe import ConfigurationError

    file = run_copy / "checkpoints" / "step=5" / "weights" / victim
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ConfigurationError, match="needs a complete checkpoint") as error:
        checkpoint_to_resume(run_copy)
    assert "\n" not in str(error.value)


def test_a_folder_of_time_stamped_versions(run_copy, tmp_path):
    parent = tmp_path / "versions"
    parent.mkdir()
    older, newer = parent / "2026-12-01_10-00-00", parent / "2026-12-01_11-00-00"
    run_copy.rename(older)
    shutil.copytree(older, newer)
    shutil.rmtree(newer / "checkpoints" / "step=5")
    found = checkpoint_to_resume(parent)
    assert (found.parent.parent, found.name) == (older, "step=5")


def test_nothing_to_resume(tmp_path):
    from nemo_hsmoe import ConfigurationError

    assert checkpoint_to_resume(tmp_path) is None
    with pytest.raises(ConfigurationError, match="needs a checkpoint there to resume"):
        checkpoint_to_resume(tmp_path, resume_ignore_no_checkpoint=False)


def test_another_architecture_is_refused_before_training(run_copy, cache_dir):
    arguments = {"dir": str(run_copy.parent), "name": "run", "max_steps": 8}
    overrides = {**SHORT, "data.cache_dir": cache_dir, "model.config.moe_ffn_hidden_size": 16}
    with pytest.raises(AssertionError, match=r"needs a checkpoint of this architecture: mlp.experts.fc1_weight"):
        run_in_processes(train, 1, "hsmoe_tiny", arguments, overrides)


def test_a_run_that_leaves_an_unfinished_checkpoint_resumes_and_deletes_nothing(run_copy, cache_dir):
    checkpoints = run_copy / "checkpoints"
    (checkpoints / "step=5-unfinished").touch()
    arguments = {"dir": str(run_copy.parent), "name": "run", "max_steps": 6}
    metrics = run_in_processes(train, 1, "hsmoe_tiny", arguments, {**SHORT, "data.cache_dir": cache_dir})[0]
    assert [line["step"] for line in metrics] == [1, 2, 3, 4, 5, 6]
    assert (checkpoints / "step=5").is_dir()
    assert (checkpoints / "step=5-unfinished").exists()
    assert (run_copy / "metrics.superseded.jsonl").read_text().count("\n") == 1


def test_a_finished_run_started_again_changes_nothing(run_copy, cache_dir):
    arguments = {"dir": str(run_copy.parent), "name": "run", "max_steps": 5}
    before = {path: path.read_bytes() for path in run_copy.rglob("*.json*")}
    run_in_processes(train, 1, "hsmoe_tiny", arguments, {**SHORT, "data.cache_dir": cache_dir})
    assert {path: path.read_bytes() for path in run_copy.rglob("*.json*")} == before
