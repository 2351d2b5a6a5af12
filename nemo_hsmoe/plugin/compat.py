"""Fixes for NeMo 2.7.3 × Megatron Core 0.16.1 × NeMo-Run 0.11.1 that subclassing cannot reach.

docs/architecture.md lists what each one changes.
"""

import functools
import importlib
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


def _cuda_is_available() -> bool:
    import torch

    return torch.cuda.is_available()


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
    experiment: Any = importlib.import_module("nemo_run.run.experiment").Experiment
    wait = experiment._wait_for_jobs

    @functools.wraps(wait)
    def wait_and_tell(self, jobs):
        wait(self, jobs)
        statuses = {job.id: str(job.status(runner=self._runner)) for job in jobs}
        raise_if_failed(statuses, self._id)

    experiment._wait_for_jobs = wait_and_tell


def raise_if_failed(statuses: dict[str, str], experiment_id: str) -> None:
    """Raise `JobFailedError` naming every job that did not succeed.

    Args:
        statuses: final state of each job, as NeMo-Run names it.
        experiment_id: where its logs are found.
    """
    failed = {name: status for name, status in statuses.items() if any(word in status.upper() for word in _FAILED)}
    if failed:
        listing = ", ".join(f"{name} {status}" for name, status in failed.items())
        raise JobFailedError(f"job failed ({listing}); its log: nemo experiment logs {experiment_id} 0")
