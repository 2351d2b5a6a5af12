"""33.73 B parameters, 6.35 B active: the literal widths of the specification."""

from typing import Literal, Optional

import nemo_run as run
from nemo.collections import llm
from nemo_hsmoe.recipes.hsmoe_5b import hsmoe_5b

from nemo_hsmoe.plugin import components


@run.cli.factory(target=llm.pretrain, name="hsmoe_33b")
def hsmoe_33b(
    dir: Optional[str] = None,
    name: str = "hsmoe_33b",
    num_nodes: int = 1,
    num_gpus_per_node: int = 4,
    expert_parallelism: Optional[int] = 4,
    batch: Literal["sequences", "literal"] = "sequences",
    micro_batch_size: Optional[int] = 1,
    max_steps: Optional[int] = None,
    max_time: Optional[str] = None,
    corpus: Optional[str] = None,
    shared_experts: Literal["replicated", "sharded"] = "replicated",
    quantization: str = "auto",
    async_checkpoints: bool = True,
    seed: int = 1234,
) -> run.Partial:
    """Pre-train the 33B hybrid sparse MoE: the 5B recipe with every inner width 6144.

    Args: those of `hsmoe_5b`.
    """
    recipe = hsmoe_5b(**locals())
    recipe.model = components.model(
        "hsmoe_33b",
        recipe.data.seq_length,
        recipe.trainer.strategy.expert_model_parallel_size,
        seed,
        shared_expert_placement=shared_experts,
        quantization=quantization,
    )
    return recipe
