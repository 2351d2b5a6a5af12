"""The parts recipes are put together from, each a `run.Config` with this project's defaults."""

from typing import Any, Literal, Optional

import nemo_run as run
import torch
from megatron.core.optimizer import OptimizerConfig
from nemo import lightning as nl
from nemo.lightning.pytorch.optim import OptimizerModule

from nemo_hsmoe.model.config import HybridSparseMoEConfig
from nemo_hsmoe.model.sizes import config_for
from nemo_hsmoe.plugin.callbacks import QuantizationMonitor, RunMetrics, RunSummary
from nemo_hsmoe.plugin.checkpointing import HybridSparseMoECheckpoint, RunLogger, RunResume
from nemo_hsmoe.plugin.data import CorpusDataModule
from nemo_hsmoe.plugin.module import HybridSparseMoELightningModule, HybridSparseMoENeMoConfig
from nemo_hsmoe.plugin.optim import HybridSparseMoEOptimizerModule, RunLengthCosineScheduler
from nemo_hsmoe.plugin.strategy import HybridSparseMoEStrategy
from nemo_hsmoe.runtime.errors import require

Precision = Literal["bf16", "fp32"]

LITERAL_TARGET_ITERATIONS = 22_000_000
WARMUP_FRACTION = 0.02
CHECKPOINT_FRACTION = 100_000 / LITERAL_TARGET_ITERATIONS
VALIDATION_FRACTION = 1_000_000 / LITERAL_TARGET_ITERATIONS
SHORTEST_INTERVAL = 50
PEAK_LEARNING_RATE = 3e-4
FINAL_LEARNING_RATE = 1e-5


def interval(fraction: float, max_steps: int) -> int:
    """Iterations between two events that the specification gives as a fraction of the run."""
    return max(SHORTEST_INTERVAL, round(fraction * max_steps))


def checked_parallelism(num_nodes: int, num_gpus_per_node: int, expert_parallelism: Optional[int]) -> int:
    """Expert parallelism of a run; None takes every process.

    Raises:
        ConfigurationError: when the sizes do not fit.
    """
    for name, value in (("num_nodes", num_nodes), ("num_gpus_per_node", num_gpus_per_node)):
        require(isinstance(value, int) and value > 0, name, value, "needs a positive whole number")
    processes = num_nodes * num_gpus_per_node
    if expert_parallelism is None:
        return processes
    require(
        isinstance(expert_parallelism, int) and expert_parallelism > 0 and processes % expert_parallelism == 0,
        "expert_parallelism",
        expert_parallelism,
        f"needs a divisor of num_nodes × num_gpus_per_node = {processes}",
    )
    return expert_parallelism


def model(size: str, seq_length: int, expert_parallelism: int, seed: int, **fields: Any) -> run.Config:
    """The model of one size, checked now and built when the run starts."""
    require(isinstance(seed, int) and 0 <= seed < 2**32, "seed", seed, "needs a whole number from 0 to 2**32 - 1")
    sized = config_for(size, seq_length=seq_length, init_seed=seed, **fields)
    require(
        sized.num_moe_experts % expert_parallelism == 0,
        "expert_parallelism",
        expert_parallelism,
        f"needs a divisor of the {sized.num_moe_experts} routed experts",
    )
    require(
        sized.shared_expert_placement == "replicated" or sized.num_shared_experts % expert_parallelism == 0,
        "expert_parallelism",
        expert_parallelism,
        f"needs a divisor of the {sized.num_shared_experts} shared experts when they are sharded",
    )
    defaults = HybridSparseMoENeMoConfig()
    changed = {
        name: getattr(sized, name)
        for name in HybridSparseMoEConfig.__annotations__
        if getattr(sized, name) != getattr(defaults, name)
    }
    return run.Config(HybridSparseMoELightningModule, config=run.Config(HybridSparseMoENeMoConfig, **changed))


def trainer(
    max_steps: int,
    num_nodes: int,
    num_gpus_per_node: int,
    expert_parallelism: int,
    accelerator: str,
    precision: Precision,
    async_checkpoints: bool,
    validation_batches: int,
    seed: int,
    max_time: Optional[str] = None,
    log_every_n_steps: int = 10,
) -> run.Config:
    """NeMo trainer with this plugin's strategy and callbacks."""
    require(isinstance(max_steps, int) and max_steps > 0, "max_steps", max_steps, "needs a positive number of iterations")
    require(precision in ("bf16", "fp32"), "precision", precision, "needs 'bf16' or 'fp32'")
    overlap = accelerator == "gpu"
    strategy = run.Config(
        HybridSparseMoEStrategy,
        expert_model_parallel_size=expert_parallelism,
        ckpt_async_save=async_checkpoints,
        seed=seed,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
    )
    plugins = []
    if precision == "bf16":
        plugins.append(
            run.Config(
                nl.MegatronMixedPrecision,
                precision="bf16-mixed",
                params_dtype=torch.bfloat16,
                pipeline_dtype=torch.bfloat16,
                autocast_enabled=False,
                grad_reduce_in_fp32=True,
            )
        )
    return run.Config(
        nl.Trainer,
        accelerator=accelerator,
        devices=num_gpus_per_node,
        num_nodes=num_nodes,
        max_steps=max_steps,
        max_time=max_time,
        strategy=strategy,
        plugins=plugins or None,
        callbacks=[
            run.Config(RunMetrics, log_every_n_steps=log_every_n_steps),
            run.Config(RunSummary),
            run.Config(QuantizationMonitor),
        ],
        val_check_interval=interval(VALIDATION_FRACTION, max_steps),
        check_val_every_n_epoch=None,
        limit_val_batches=validation_batches,
        limit_test_batches=0,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )


def optimizer(
    precision: Precision,
    max_steps: int,
    learning_rate: float = PEAK_LEARNING_RATE,
    final_learning_rate: float = FINAL_LEARNING_RATE,
) -> run.Config[OptimizerModule]:
    """AdamW (β 0.9, 0.95, ε 1e-8, decay 0.1, clip 1.0) with linear warm-up and cosine decay."""
    return run.Config(
        HybridSparseMoEOptimizerModule,
        config=run.Config(
            OptimizerConfig,
            optimizer="adam",
            lr=learning_rate,
            min_lr=final_learning_rate,
            adam_beta1=0.9,
            adam_beta2=0.95,
            adam_eps=1e-8,
            weight_decay=0.1,
            clip_grad=1.0,
            bf16=precision == "bf16",
            use_distributed_optimizer=True,
        ),
        lr_scheduler=run.Config(
            RunLengthCosineScheduler,
            warmup_steps=max(1, round(WARMUP_FRACTION * max_steps)),
            constant_steps=0,
            min_lr=final_learning_rate,
        ),
    )


def data(seq_length: int, micro_batch_size: int, global_batch_size: int, corpus: Optional[str], seed: int) -> run.Config:
    """Packed local text; `corpus` names a file or folder, None the Python standard library."""
    return run.Config(
        CorpusDataModule,
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        global_batch_size=global_batch_size,
        corpus=None if corpus is None else [corpus],
        seed=seed,
    )


def logger(dir: Optional[str], name: str, max_steps: int) -> run.Config:
    """Run folder `dir/name` with TensorBoard and checkpoints below it."""
    return run.Config(
        RunLogger,
        log_dir=dir,
        name=name,
        use_datetime_version=False,
        ckpt=run.Config(HybridSparseMoECheckpoint, every_n_train_steps=interval(CHECKPOINT_FRACTION, max_steps)),
    )


def resume() -> run.Config:
    """Continue from the newest complete checkpoint of the run folder, or start."""
    return run.Config(RunResume, resume_if_exists=True, resume_ignore_no_checkpoint=True)
