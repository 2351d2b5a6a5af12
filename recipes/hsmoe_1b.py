"""0.99 B parameters: four layers of the 5B model, on one GPU."""

from typing import Literal, Optional

import nemo_run as run
from nemo.collections import llm

from nemo_hsmoe.plugin import components


@run.cli.factory(target=llm.pretrain, name="hsmoe_1b")
def hsmoe_1b(
    dir: Optional[str] = None,
    name: str = "hsmoe_1b",
    num_nodes: int = 1,
    num_gpus_per_node: int = 1,
    expert_parallelism: Optional[int] = None,
    micro_batch_size: int = 4,
    global_batch_size: int = 32,
    max_steps: int = 1000,
    max_time: Optional[str] = None,
    corpus: Optional[str] = None,
    shared_experts: Literal["replicated", "sharded"] = "replicated",
    quantization: str = "auto",
    async_checkpoints: bool = True,
    seed: int = 1234,
) -> run.Partial:
    """Pre-train the 5B model's layer, four deep.

    Args:
        dir, name: the run folder is `dir/name`; `dir` None is `./nemo_experiments`.
        num_nodes, num_gpus_per_node: processes, one a GPU.
        expert_parallelism: ranks that share one set of experts; None takes all of them.
        micro_batch_size, global_batch_size: sequences of 4096 tokens, at once on a GPU and an iteration.
        max_steps: iterations.
        max_time: stop after this long, `DD:HH:MM:SS`.
        corpus: file or folder of text; None takes the Python standard library.
        shared_experts: `replicated` on every GPU, or `sharded` over the expert-parallel ranks.
        quantization: preset of the quantisation policy: `none`, `emulated`, `native`, `auto` (native where the GPU has it,
            else emulated), `seed_literal` or `torchao`.
        async_checkpoints: write checkpoints while training goes on.
        seed: seed of initialisation and sample order.
    """
    seq_length = 4096
    expert_parallelism = components.checked_parallelism(num_nodes, num_gpus_per_node, expert_parallelism)
    return run.Partial(
        llm.pretrain,
        model=components.model(
            "hsmoe_1b",
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
            accelerator="gpu",
            precision="bf16",
            async_checkpoints=async_checkpoints,
            validation_batches=4,
            seed=seed,
            max_time=max_time,
        ),
        optim=components.optimizer("bf16", max_steps),
        log=components.logger(dir, name, max_steps),
        resume=components.resume(),
    )
