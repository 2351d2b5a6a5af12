"""Where a recipe runs: `nemo llm pretrain --factory hsmoe_5b run.executor=local_4xb300`."""

import nemo_run as run


@run.cli.factory
@run.autoconvert
def local_4xb300() -> run.LocalExecutor:
    """Four GPUs of this machine under torchrun; collectives stay on NVLink, InfiniBand is off."""
    return run.LocalExecutor(
        ntasks_per_node=4,
        launcher="torchrun",
        env_vars={
            "NCCL_P2P_LEVEL": "NVL",
            "NCCL_IB_DISABLE": "1",
            "NCCL_DEBUG": "WARN",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "TORCH_NCCL_AVOID_RECORD_STREAMS": "1",
        },
    )


@run.cli.factory
@run.autoconvert
def local_cpu() -> run.LocalExecutor:
    """Processes of this machine under torchrun over gloo; set `run.executor.ntasks_per_node` to the recipe's processes."""
    return run.LocalExecutor(ntasks_per_node=1, launcher="torchrun", env_vars={"CUDA_VISIBLE_DEVICES": ""})
