"""Recipes for `nemo llm pretrain --factory NAME`, and executors. Loaded through the entry point group `nemo_run.cli`."""

from nemo_hsmoe.recipes.executors import local_4xb300, local_cpu
from nemo_hsmoe.recipes.hsmoe_1b import hsmoe_1b
from nemo_hsmoe.recipes.hsmoe_5b import hsmoe_5b
from nemo_hsmoe.recipes.hsmoe_33b import hsmoe_33b
from nemo_hsmoe.recipes.hsmoe_tiny import hsmoe_tiny

__all__ = ["hsmoe_1b", "hsmoe_5b", "hsmoe_33b", "hsmoe_tiny", "local_4xb300", "local_cpu"]
