"""The four model sizes the recipes train. One function a size; keyword arguments override any field."""

from collections.abc import Callable
from typing import Any

from nemo_hsmoe.model.config import HybridSparseMoEConfig
from nemo_hsmoe.runtime.errors import require


def hsmoe_5b(**overrides: Any) -> HybridSparseMoEConfig:
    """4.98 B parameters, 0.815 B active without the embedding: the totals of the specification."""
    return HybridSparseMoEConfig(**overrides)


def hsmoe_33b(**overrides: Any) -> HybridSparseMoEConfig:
    """33.73 B parameters: the literal widths of the specification, every inner width 4 × 1536."""
    widths = dict(moe_ffn_hidden_size=6144, shared_expert_ffn_hidden_size=6144, dense_ffn_hidden_size=6144)
    return HybridSparseMoEConfig(**{**widths, **overrides})


def hsmoe_1b(**overrides: Any) -> HybridSparseMoEConfig:
    """Four layers of the 5B model, for one GPU."""
    return HybridSparseMoEConfig(**{"num_layers": 4, **overrides})


def hsmoe_tiny(**overrides: Any) -> HybridSparseMoEConfig:
    """Two narrow layers with all 64 + 8 experts and the whole vocabulary, for a laptop CPU."""
    shape = dict(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=2,
        moe_ffn_hidden_size=48,
        shared_expert_ffn_hidden_size=24,
        dense_ffn_hidden_size=64,
        seq_length=256,
        balance_bias_update_rate=0.05,
    )
    return HybridSparseMoEConfig(**{**shape, **overrides})


SIZES: dict[str, Callable[..., HybridSparseMoEConfig]] = {
    function.__name__: function for function in (hsmoe_5b, hsmoe_33b, hsmoe_1b, hsmoe_tiny)
}


def config_for(size: str, **overrides: Any) -> HybridSparseMoEConfig:
    """Build the configuration of a size by name.

    Raises:
        ConfigurationError: when `size` is not one of `SIZES`.
    """
    require(size in SIZES, "recipe", size, f"needs one of {', '.join(SIZES)}")
    return SIZES[size](**overrides)
