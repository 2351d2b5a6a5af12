"""9 M parameters with every part of the 5B model, on a laptop CPU in minutes."""

from typing import Literal, Optional

import nemo_run as run
import torch
from nemo.collections import llm

from nemo_hsmoe.plugin import components


@run.cli.factory(target=llm.pretrain, name="hsmoe_tiny")
def hsmoe_tiny(
    dir: Optional[str] = None,
    name: str = "hsmoe_tiny",
    num_nodes: int = 1,
    num_gpus_per_node: int = 1,
    expert_parallelism: Optional[int] = None,
    micro_batch_size: Optional[int] = None,
    global_batch_size: int = 4,
    max_steps: int = 240,
    max_time: Optional[str] = None,
    corpus: Optional[str] = None,
    shared_experts: Literal["replicated", "sharded"] = "replicated",
    quantization: str = "emulated",
    async_checkpoints: bool = False,
    seed: int = 1234,
) -> run.Partial:
    """Pre-train two narrow layers with all 64 routed and 8 shared experts and the whole vocabulary, in float32.

    Args:
        dir, name: the run folder is `dir/name`; `dir` None is `./nemo_experiments`.
        num_nodes, num_gpus_per_node: processes; without CUDA they are CPU processes over gloo.
        expert_parallelism: processes that share one set of experts; None takes all of them.
        micro_batch_size, global_batch_size: sequences of 256 tokens, at once in a process and an iteration; None takes
            the whole batch at once.
        max_steps: iterations.
        max_time: stop after this long, `DD:HH:MM:SS`.
        corpus: file or folder of text; None takes the Python standard library.
        shared_experts: `replicated` in every process, or `sharded` over the expert-parallel ones.
        quantization: preset of the quantisation policy: `none`, `emulated`, `native`, `auto` (native where the GPU has it,
            else emulated), `seed_literal` or `torchao`.
        async_checkpoints: write checkpoints while training goes on.
        seed: seed of initialisation and sample order.
    """
    seq_length = 256
    expert_parallelism = components.checked_parallelism(num_nodes, num_gpus_per_node, expert_parallelism)
    if micro_batch_size is None:
        micro_batch_size = max(1, global_batch_size // (num_nodes * num_gpus_per_node))
    return run.Partial(
        llm.pretrain,
        model=components.model(
            "hsmoe_tiny",
            seq_length,
            expert_parallelism,
            seed,
            shared_expert_placement=shared_experts,
            quantization=quantization,
        ),
        data=components.data(seq_length, micro_batch_size, global_batch_size, corpus, seed),
        trainer=components.trainer(
            max_steps=max_steps,
            num_nodes=num_nodes,
            num_gpus_per_node=num_gpus_per_node,
            expert_parallelism=expert_parallelism,
            accelerator="gpu" if torch.cuda.is_available() else "cpu",
            precision="fp32",
            async_checkpoints=async_checkpoints,
            validation_batches=8,
            seed=seed,
            max_time=max_time,
        ),
        optim=components.optimizer("fp32", max_steps, learning_rate=1e-2, final_learning_rate=1e-3),
        log=components.logger(dir, name, max_steps),
        resume=components.resume(),
    )
