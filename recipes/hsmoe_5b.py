"""4.98 B parameters, 0.815 B active, on four B300."""

import math
from typing import Literal, NamedTuple, Optional

import nemo_run as run
from nemo.collections import llm

from nemo_hsmoe.plugin import components
from nemo_hsmoe.runtime.errors import require

TOKENS_OF_THE_BASE_RUN = 15_000_000_000
VALIDATION_TOKENS = 8_000_000


class Batch(NamedTuple):
    """What one iteration computes, and how much of it a GPU computes at once by default."""

    sequences: int
    seq_length: int
    micro_batch_size: int

    @property
    def tokens(self) -> int:
        return self.sequences * self.seq_length


BATCHES = {"sequences": Batch(2048, 4096, 4), "literal": Batch(4, 512, 1)}


@run.cli.factory(target=llm.pretrain, name="hsmoe_5b")
def hsmoe_5b(
    dir: Optional[str] = None,
    name: str = "hsmoe_5b",
    num_nodes: int = 1,
    num_gpus_per_node: int = 4,
    expert_parallelism: Optional[int] = 4,
    batch: Literal["sequences", "literal"] = "sequences",
    micro_batch_size: Optional[int] = None,
    max_steps: Optional[int] = None,
    max_time: Optional[str] = None,
    corpus: Optional[str] = None,
    shared_experts: Literal["replicated", "sharded"] = "replicated",
    quantization: str = "auto",
    async_checkpoints: bool = True,
    seed: int = 1234,
) -> run.Partial:
    """Pre-train the 5B hybrid sparse MoE.

    Args:
        dir, name: the run folder is `dir/name`; `dir` None is `./nemo_experiments`.
        num_nodes, num_gpus_per_node: processes, one a GPU.
        expert_parallelism: ranks that share one set of experts; 1 keeps every expert on every GPU.
        batch: `sequences` for 2048 sequences of 4096 tokens an iteration, `literal` for 2048 tokens as four sequences of
            512.
        micro_batch_size: sequences a GPU computes at once; gradients accumulate over the rest. None takes 4, or 1 for the
            literal batch.
        max_steps: iterations; None takes 15 B tokens: 1,789, or 7,324,219 for the literal batch.
        max_time: stop after this long, `DD:HH:MM:SS`.
        corpus: file or folder of text; None takes the Python standard library.
        shared_experts: `replicated` on every GPU, or `sharded` over the expert-parallel ranks.
        quantization: preset of the quantisation policy: `none`, `emulated`, `native`, `auto` (native where the GPU has it,
            else emulated), `seed_literal` or `torchao`.
        async_checkpoints: write checkpoints while training goes on.
        seed: seed of initialisation and sample order.
    """
    require(batch in BATCHES, "batch", batch, f"needs one of {', '.join(BATCHES)}")
    shape = BATCHES[batch]
    expert_parallelism = components.checked_parallelism(num_nodes, num_gpus_per_node, expert_parallelism)
    micro_batch_size = shape.micro_batch_size if micro_batch_size is None else micro_batch_size
    max_steps = math.ceil(TOKENS_OF_THE_BASE_RUN / shape.tokens) if max_steps is None else max_steps
    return run.Partial(
        llm.pretrain,
        model=components.model(
            "hsmoe_5b",
            shape.seq_length,
            expert_parallelism,
            seed,
            shared_expert_placement=shared_experts,
            quantization=quantization,
        ),
        data=components.data(shape.seq_length, micro_batch_size, shape.sequences, corpus, seed),
        trainer=components.trainer(
            max_steps=max_steps,
            num_nodes=num_nodes,
            num_gpus_per_node=num_gpus_per_node,
            expert_parallelism=expert_parallelism,
            accelerator="gpu",
            precision="bf16",
            async_checkpoints=async_checkpoints,
            validation_batches=math.ceil(VALIDATION_TOKENS / shape.tokens),
            seed=seed,
            max_time=max_time,
        ),
        optim=components.optimizer("bf16", max_steps),
        log=components.logger(dir, name, max_steps),
        resume=components.resume(),
    )
