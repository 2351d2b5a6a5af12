"""Initial values, keyed by logical parameter name so that they do not depend on how a model is sharded."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch
from torch import Tensor

from nemo_hsmoe.model.config import HybridSparseMoEConfig
from nemo_hsmoe.model.experts import ExpertWeights
from nemo_hsmoe.model.router import StraightThroughTopKRouter

Draw = Callable[[Tensor, torch.Generator], None]


@torch.no_grad()
def initialize_parameters(model: torch.nn.Module, config: HybridSparseMoEConfig) -> None:
    """Fill every parameter of `model`.

    Embedding N(0, 0.02). Attention projections and the dense branch Xavier-uniform, ±√(6 / (fan in + fan out)), gate and
    up each with its own fans. Expert weights N(0, 0.02)/√64, every expert of every layer its own draw. Router
    N(0, `router_init_std`) with bias `router_bias_init`. Norm scales 1, other biases 0. σ values are the
    configuration's. A parameter's draw depends on `config.init_seed` and its logical name alone.
    """
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False, prefix=module_name):
            if parameter.is_meta:
                continue
            if isinstance(module, ExpertWeights) and parameter.dim() == 3:
                std = config.expert_init_std / math.sqrt(config.num_moe_experts)
                for offset, weight in enumerate(parameter):
                    key = f"{name}.{module.first_local_expert + offset}"
                    weight.normal_(0.0, std, generator=_generator(config.init_seed, key, weight.device))
            else:
                _draw_for(module, name, config)(parameter, _generator(config.init_seed, name, parameter.device))


def _draw_for(module: torch.nn.Module, name: str, config: HybridSparseMoEConfig) -> Draw:
    if isinstance(module, StraightThroughTopKRouter):
        if name.endswith("bias"):
            return _constant(config.router_bias_init)
        return _normal(config.router_init_std)
    if "word_embeddings" in name:
        return _normal(config.embedding_init_std)
    if name.endswith("bias"):
        return _constant(0.0)
    if "norm" in name:
        return _constant(1.0)
    if name.endswith("dense.linear_fc1.weight"):
        return _xavier_gate_and_up
    return _xavier


def _constant(value: float) -> Draw:
    return lambda parameter, generator: parameter.fill_(value)


def _normal(std: float) -> Draw:
    return lambda parameter, generator: parameter.normal_(0.0, std, generator=generator)


def _xavier(parameter: Tensor, generator: torch.Generator) -> None:
    bound = math.sqrt(6.0 / (parameter.shape[0] + parameter.shape[1]))
    parameter.uniform_(-bound, bound, generator=generator)


def _xavier_gate_and_up(parameter: Tensor, generator: torch.Generator) -> None:
    for half in parameter.chunk(2, dim=0):
        _xavier(half, generator)


def _generator(seed: int, name: str, device: torch.device) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return torch.Generator(device=device).manual_seed(int.from_bytes(digest, "little") >> 1)
