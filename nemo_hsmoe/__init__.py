"""A hybrid sparse mixture-of-experts language model on Megatron Core, and the NeMo 2.0 recipes that train it."""

import importlib
import warnings
from typing import TYPE_CHECKING, Any

for _known_and_harmless in (
    ".*Transformer Engine and Apex are not installed.*",
    ".*pynvml package is deprecated.*",
    ".*full scope is deprecated.*",
):
    warnings.filterwarnings("ignore", message=_known_and_harmless)

_PUBLIC = {
    "HybridSparseMoEConfig": "nemo_hsmoe.model.config",
    "HybridSparseMoEModel": "nemo_hsmoe.model.hybrid_moe",
    "RoutingInfo": "nemo_hsmoe.model.hybrid_moe",
    "parameter_report": "nemo_hsmoe.model.report",
    "quantize_model": "nemo_hsmoe.quantization.quantize_model",
    "save_checkpoint": "nemo_hsmoe.model.checkpoint",
    "load_checkpoint": "nemo_hsmoe.model.checkpoint",
    "log_routing_histogram": "nemo_hsmoe.health.routing",
    "ConfigurationError": "nemo_hsmoe.runtime.errors",
}

__all__ = [
    "ConfigurationError",
    "HybridSparseMoEConfig",
    "HybridSparseMoEModel",
    "RoutingInfo",
    "load_checkpoint",
    "log_routing_histogram",
    "parameter_report",
    "quantize_model",
    "save_checkpoint",
]

if TYPE_CHECKING:
    from nemo_hsmoe.health.routing import log_routing_histogram
    from nemo_hsmoe.model.checkpoint import load_checkpoint, save_checkpoint
    from nemo_hsmoe.model.config import HybridSparseMoEConfig
    from nemo_hsmoe.model.hybrid_moe import HybridSparseMoEModel, RoutingInfo
    from nemo_hsmoe.model.report import parameter_report
    from nemo_hsmoe.quantization.quantize_model import quantize_model
    from nemo_hsmoe.runtime.errors import ConfigurationError


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
