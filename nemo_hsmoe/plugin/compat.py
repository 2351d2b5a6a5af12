"""Fixes for NeMo 2.7.3 × Megatron Core 0.16.1 × NeMo-Run 0.11.1 that subclassing cannot reach.

docs/architecture.md lists what each one changes.
"""

import importlib
import logging
import sys
from typing import Any

_FAILED = ("FAILED", "CANCELLED", "UNKNOWN")
_installed = False


class JobFailedError(RuntimeError):
    """A job of an experiment did not succeed."""


def install() -> None:
    """Install every fix once."""
    global _installed
    if _installed:
        return
    _installed = True
    _raise_when_a_waited_for_job_failed()
    if not _cuda_is_available():
        _skip_cuda_device_check_on_load()
    logging.getLogger("megatron.core.transformer.transformer_layer").addFilter(_is_not_about_mlp_type)


def _cuda_is_available() -> bool:
    import torch

    return torch.cuda.is_available()


def _is_not_about_mlp_type(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Unknown MLP type")


def _skip_cuda_device_check_on_load() -> None:
    import nemo.lightning.io.pl as checkpoint_io

    checkpoint_io._fix_tensors_device = lambda checkpoint: checkpoint


def start_checkpoint_queue() -> None:
    """Start the process that collects Megatron's checkpoint write results, without importing the main script in it.

    Megatron spawns it at the first save; a spawned process imports the launching script again, here all of NeMo.
    """
    from megatron.core.dist_checkpointing.strategies.filesystem_async import _get_write_results_queue

    main = sys.modules["__main__"]
    hidden: dict[str, Any] = {name: main.__dict__.pop(name) for name in ("__file__", "__spec__") if name in main.__dict__}
    main.__spec__ = None
    sys.warnoptions.append("ignore::FutureWarning")
    try:
        _get_write_results_queue()
    finally:
        sys.warnoptions.pop()
        main.__dict__.update(hidden)


def _raise_when_a_waited_for_job_failed() -> None:
    run_api: Any = importlib.import_module("nemo_run.run.api")
    experiment: Any = run_api.Experiment

    class ExperimentTellingTheTruth(experiment):
        def __exit__(self, *exception):
            result = super().__exit__(*exception)
            if exception[0] is None and getattr(self, "_launched", False) and getattr(self, "_waited", True):
                raise_if_failed(self)
            return result

    run_api.Experiment = ExperimentTellingTheTruth


def raise_if_failed(experiment) -> None:
    """Raise `JobFailedError` naming every job of a finished experiment that did not succeed."""
    statuses = {name: str(job["status"]) for name, job in (experiment.status(return_dict=True) or {}).items()}
    failed = {name: status for name, status in statuses.items() if any(word in status.upper() for word in _FAILED)}
    if failed:
        listing = ", ".join(f"{name}: {status}" for name, status in failed.items())
        raise JobFailedError(f"job failed ({listing}); its log: nemo experiment logs {experiment._id} 0")
