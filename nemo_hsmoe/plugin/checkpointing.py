"""Checkpoints that are complete or not there, and the search for the one to resume from."""

import logging as megatron_logging
import os
import re
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import torch
from lightning.pytorch.callbacks import ModelCheckpoint as LightningModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from nemo import lightning as nl
from nemo.lightning.pytorch.callbacks import ModelCheckpoint
from nemo.utils import AppState, logging
from torch.distributed.checkpoint import FileSystemReader

from nemo_hsmoe.runtime.errors import ConfigurationError, require

WEIGHTS = "weights"
_COMMON_STATE = "common.pt"
_TIME_STAMP = re.compile(r"\d{4}-\d{2}-\d{2}_\d{2}-\d{2}-\d{2}$")


class HybridSparseMoECheckpoint(ModelCheckpoint):
    """NeMo's checkpoint callback, keeping the newest `save_top_k` and deleting nothing it did not write.

    While a checkpoint is being written a marker `NAME-unfinished` lies beside it. NeMo deletes marked checkpoints at the
    next start; here they stay for the user to look at, and `RunResume` passes over them.
    """

    def __init__(
        self,
        every_n_train_steps: int = 50,
        save_top_k: int = 2,
        save_last: Any = False,
        filename: str = "{step}",
        save_optim_on_train_end: bool = True,
        **arguments: Any,
    ):
        arguments = {"monitor": "step", "mode": "max", **arguments}
        super().__init__(
            every_n_train_steps=every_n_train_steps,
            save_top_k=save_top_k,
            save_last=save_last,
            filename=filename,
            save_optim_on_train_end=save_optim_on_train_end,
            **arguments,
        )

    def setup(self, trainer, *args, **kwargs) -> None:
        """Prepare, leaving the folder as it is."""
        self.async_save = getattr(trainer.strategy, "async_save", False)
        LightningModelCheckpoint.setup(self, trainer, *args, **kwargs)

    def on_train_end(self, trainer, pl_module) -> None:
        """Save the last iteration too, unless that has happened, as one of the newest `save_top_k`."""
        if trainer.global_step and self._last_global_step_saved != trainer.global_step:
            self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer))

    def _monitor_candidates(self, trainer) -> dict[str, torch.Tensor]:
        return {**super()._monitor_candidates(trainer), "step": torch.tensor(trainer.global_step)}

    def nemo_topk_check_previous_run(self) -> None:
        """Keep what an earlier session of this run wrote."""


@dataclass
class RunLogger(nl.NeMoLogger):
    """NeMo's logger over one run folder that later sessions of the run share, with TensorBoard events below it.

    Attributes:
        verbose: show what NeMo and Megatron log below the level of a warning.
    """

    verbose: bool = False

    def setup(self, trainer, resume_if_exists: bool = False, task_config=None):
        """Check that the run folder can be written, then set up logging.

        Raises:
            ConfigurationError: when it cannot.
        """
        folder = self.explicit_log_dir or os.path.join(self.log_dir or "nemo_experiments", self.name)
        require_writable_folder("dir", folder)
        if not self.verbose:
            logging.setLevel(logging.WARNING)
            megatron_logging.getLogger("megatron.core").setLevel(megatron_logging.WARNING)
            warnings.filterwarnings("ignore", message=".*sync_dist=True.*")
        self.update_logger_directory = False
        if self.tensorboard is None:
            self.tensorboard = TensorBoardLogger(save_dir=folder, name="", version="tensorboard")
        return super().setup(trainer, resume_if_exists, task_config)

    def _setup_files_to_move(self, log_dir, app_state: AppState) -> None:
        app_state.files_to_move = []
        app_state.files_to_copy = self.files_to_copy


def require_writable_folder(name: str, folder: str) -> None:
    """Create `folder` if needed and write a byte into it.

    Raises:
        ConfigurationError: naming the argument `name`, when that fails (read-only, full, not a folder).
    """
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=os.fspath(folder)) as file:
            file.write(b"\0" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        reason = error.strerror or error
        raise ConfigurationError(name, str(folder), f"needs a run folder that can be written: {reason}") from None


class RunResume(nl.AutoResume):
    """Resumes from the newest complete checkpoint of a run folder.

    Checkpoints are looked for in `checkpoints/` of the run folder, and where there are none, in that of its subfolders:
    the versions NeMo names by time stamp. Unfinished ones are passed over with a warning. The newest is the one of the
    highest iteration, whatever it is called.

    Raises:
        ConfigurationError: when checkpoints are there but none is complete, or the newest finished one is damaged.
    """

    def setup(self, trainer, model=None) -> None:
        """Point the trainer at the checkpoint, after checking that it fits the model."""
        super().setup(trainer, model)
        if trainer.ckpt_path and model is not None:
            require_same_architecture(Path(trainer.ckpt_path), model.config)

    def _find_trainer_ckpt_path(self) -> Optional[Path]:
        log_dir = AppState().log_dir
        if self.resume_from_directory:
            folders = [Path(self.resume_from_directory)]
        elif log_dir is not None:
            folders = [Path(log_dir) / "checkpoints"]
            if not any(_checkpoints_in(folders[0])):
                versions = (path for path in Path(log_dir).glob("*/checkpoints") if _TIME_STAMP.match(path.parent.name))
                folders = sorted(versions)
        else:
            return None
        found = [path for folder in folders for path in _checkpoints_in(folder)]
        newest = newest_complete_checkpoint(found)
        if newest is None and not self.resume_ignore_no_checkpoint:
            raise ConfigurationError("resume", [str(folder) for folder in folders], "needs a checkpoint there to resume")
        return newest


def newest_complete_checkpoint(candidates: list[Path]) -> Optional[Path]:
    """The checkpoint of the highest iteration among those not marked unfinished.

    Raises:
        ConfigurationError: when all are unfinished, or the newest of the others is damaged.
    """
    finished = []
    for path in candidates:
        if ModelCheckpoint.is_checkpoint_unfinished(path):
            logging.warning(f"Passing over unfinished checkpoint {path}")
        else:
            finished.append(path)
    require(
        not candidates or bool(finished),
        "resume",
        [str(path) for path in candidates],
        "needs a complete checkpoint: all of these are unfinished; move them away to start anew",
    )
    if not finished:
        return None
    newest = max(finished, key=lambda path: (checkpoint_step(path), path.name))
    require_intact(newest)
    return newest


def checkpoint_step(path: Path) -> int:
    """Iteration a checkpoint was written after.

    Raises:
        ConfigurationError: when it cannot be read.
    """
    common = _weights_folder(path) / _COMMON_STATE
    try:
        return int(torch.load(common, map_location="cpu", weights_only=False)["global_step"])
    except Exception as error:
        reason = f"needs a complete checkpoint; {common.name} cannot be read ({type(error).__name__})"
        raise ConfigurationError("resume", str(path), reason) from None


def require_intact(path: Path) -> None:
    """Check that every file of a distributed checkpoint is there in full length.

    Raises:
        ConfigurationError: naming the file that is missing or too short.
    """
    weights = _weights_folder(path)
    try:
        storage = FileSystemReader(weights).read_metadata().storage_data
    except Exception as error:
        reason = f"needs a complete checkpoint; its metadata cannot be read ({type(error).__name__})"
        raise ConfigurationError("resume", str(path), reason) from None
    lengths: dict[str, int] = {}
    for entry in storage.values():
        lengths[entry.relative_path] = max(lengths.get(entry.relative_path, 0), entry.offset + entry.length)
    for name, length in lengths.items():
        file = weights / name
        size = file.stat().st_size if file.exists() else 0
        require(
            size >= length,
            "resume",
            str(path),
            f"needs a complete checkpoint; {name} has {size} of {length} bytes. Move it away to resume from an older one",
        )


def require_same_architecture(path: Path, config) -> None:
    """Check that a checkpoint's tensors have the shapes of a model of `config`.

    Raises:
        ConfigurationError: naming the first difference.
    """
    metadata = FileSystemReader(_weights_folder(path)).read_metadata().state_dict_metadata
    for suffix, expected in _shapes_of_architecture(config).items():
        shapes = {tuple(entry.size) for name, entry in metadata.items() if _is_model_tensor(name, suffix)}
        require(
            shapes == {expected},
            "resume",
            str(path),
            f"needs a checkpoint of this architecture: {suffix} is {_listed(shapes)} there, {expected} here",
        )


def _shapes_of_architecture(config) -> dict[str, tuple[int, ...]]:
    hidden, layers = config.hidden_size, config.num_layers
    return {
        "embedding.word_embeddings.weight": (config.vocab_size, hidden),
        "self_attention.linear_q.weight": (layers, hidden, hidden),
        "mlp.experts.fc1_weight": (layers, config.num_moe_experts, config.moe_ffn_hidden_size, hidden),
    }


def _is_model_tensor(name: str, suffix: str) -> bool:
    return name.endswith(suffix) and "optimizer" not in name


def _listed(shapes: set) -> str:
    return ", ".join(str(shape) for shape in sorted(shapes)) or "absent"


def _weights_folder(path: Path) -> Path:
    return path / WEIGHTS if (path / WEIGHTS).is_dir() else path


def _checkpoints_in(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.glob("*")) if not path.is_symlink() and _looks_like_checkpoint(path))


def _looks_like_checkpoint(path: Path) -> bool:
    return (path / WEIGHTS).is_dir() or (path / ".metadata").exists() or (path / _COMMON_STATE).exists()
