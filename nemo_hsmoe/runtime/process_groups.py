"""Process groups for scripts and tests that do not come through NeMo."""

from __future__ import annotations

import os
import tempfile

import torch

from nemo_hsmoe.runtime import cpu
from nemo_hsmoe.runtime.errors import require


def ensure_model_parallel(expert_parallel_size: int = 1, seed: int = 1234) -> None:
    """Initialise torch.distributed and Megatron's groups unless that is done already.

    Under torchrun the environment gives rank and world size; otherwise a world of one process is made through a file,
    which needs no port. The back end is NCCL with CUDA and gloo without.

    Args:
        expert_parallel_size: ranks that share one set of experts; divides the world size.
        seed: seed of Megatron's random-number tracker.
    """
    from megatron.core import parallel_state, tensor_parallel

    cpu.install()
    if not torch.distributed.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        if "RANK" in os.environ and "MASTER_ADDR" in os.environ:
            if torch.cuda.is_available():
                torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
            torch.distributed.init_process_group(backend)
        else:
            handle, path = tempfile.mkstemp(prefix="hsmoe-store-")
            os.close(handle)
            torch.distributed.init_process_group(backend, store=torch.distributed.FileStore(path, 1), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        processes = torch.distributed.get_world_size()
        require(
            processes % expert_parallel_size == 0,
            "expert_model_parallel_size",
            expert_parallel_size,
            f"needs a divisor of the number of processes, {processes}",
        )
        parallel_state.initialize_model_parallel(
            expert_model_parallel_size=expert_parallel_size, create_gloo_process_groups=False
        )
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
