"""How many parameters a model has, where they are, and how that compares with the specification."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nemo_hsmoe.model.config import HybridSparseMoEConfig

SPECIFIED_BREAKDOWN = {
    "routed_experts": 3_145_728_000,
    "shared_experts": 262_144_000,
    "router": 97_152_000,
    "attention": 180_224_000,
    "dense_gated": 60_057_600,
    "embedding": 197_165_568,
}
SPECIFIED_TOTAL = 5_000_000_000
SPECIFIED_ACTIVE = 750_000_000

_GROUP_OF_NAME = (
    ("mlp.experts.", "routed_experts"),
    ("mlp.shared_experts.", "shared_experts"),
    ("mlp.router.", "router"),
    ("mlp.dense.", "dense_gated"),
    ("self_attention.", "attention"),
    ("embedding.", "embedding"),
    ("norm", "norms"),
)


@dataclass(frozen=True)
class ParameterReport:
    """Parameter counts of one model.

    Attributes:
        breakdown: parameters by component.
        total: all parameters.
        active: parameters one token uses, the embedding left out: it is a look-up, tied to the output matrix.
    """

    breakdown: dict[str, int]
    total: int
    active: int

    def as_dict(self) -> dict:
        """`total`, `active`, `breakdown`, and the specification's figures under `specified`."""
        return {
            "total": self.total,
            "active": self.active,
            "active_fraction": self.active / self.total,
            "breakdown": dict(self.breakdown),
            "specified": {
                "total": SPECIFIED_TOTAL,
                "active": SPECIFIED_ACTIVE,
                "breakdown": dict(SPECIFIED_BREAKDOWN),
            },
        }


def parameter_report(model_or_config: torch.nn.Module | HybridSparseMoEConfig) -> ParameterReport:
    """Count parameters of a configuration, in closed form, or of a built model, by walking it.

    A model sharded over expert-parallel ranks counts as the whole: sharded experts are multiplied by the group's size.
    """
    if isinstance(model_or_config, HybridSparseMoEConfig):
        config, breakdown = model_or_config, _breakdown_of_config(model_or_config)
    else:
        config, breakdown = model_or_config.config, _breakdown_of_model(model_or_config)
    routed = breakdown["routed_experts"]
    idle = routed - routed * config.moe_router_topk // config.num_moe_experts
    total = sum(breakdown.values())
    return ParameterReport(breakdown, total, total - idle - breakdown["embedding"])


def _breakdown_of_config(config: HybridSparseMoEConfig) -> dict[str, int]:
    layers, hidden = config.num_layers, config.hidden_size

    def experts(count: int, inner: int) -> int:
        return layers * count * (2 * hidden * inner + inner + hidden)

    attention_width = config.kv_channels * config.num_attention_heads
    return {
        "routed_experts": experts(config.num_moe_experts, config.moe_ffn_hidden_size),
        "shared_experts": experts(config.num_shared_experts, config.shared_expert_ffn_hidden_size),
        "router": layers * config.num_moe_experts * (hidden + 1),
        "attention": layers * 4 * hidden * attention_width,
        "dense_gated": layers * 3 * hidden * config.dense_ffn_hidden_size,
        "embedding": config.vocab_size * hidden,
        "norms": (2 * layers + 1) * hidden,
    }


def _breakdown_of_model(model: torch.nn.Module) -> dict[str, int]:
    breakdown = dict.fromkeys((group for _, group in _GROUP_OF_NAME), 0)
    shards = model.config.expert_model_parallel_size
    for name, parameter in model.named_parameters():
        group = next(group for part, group in _GROUP_OF_NAME if part in name)
        is_sharded = not getattr(parameter, "allreduce", True)
        breakdown[group] += parameter.numel() * (shards if is_sharded else 1)
    return breakdown
