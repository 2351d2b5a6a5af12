"""Configuration of the hybrid sparse MoE transformer."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Optional

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_hsmoe.quantization.policy import PRESETS, QuantizationPolicy
from nemo_hsmoe.runtime.errors import require


def transformer_engine_available() -> bool:
    """Tell whether TransformerEngine is installed and CUDA is there for it."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


SharedExpertPlacement = Literal["replicated", "sharded"]


@dataclass
class HybridSparseMoEConfig(TransformerConfig):
    """Shape and behaviour of `HybridSparseMoEModel`; the defaults are the 5B model.

    Each layer computes `x + attention(norm(x))`, then `x + routed(n) + shared(n) + dense(n)` with `n = norm(x)`.

    Attributes:
        num_layers, hidden_size, num_attention_heads: trunk; the head dimension is `hidden_size / num_attention_heads`.
        vocab_size, seq_length: embedding rows and longest context, in tokens.
        num_moe_experts, moe_router_topk, moe_ffn_hidden_size: routed experts a layer, experts a token uses, inner width
            of one expert.
        num_shared_experts, shared_expert_ffn_hidden_size: experts every token uses and their inner width; 0 removes them.
        shared_expert_placement: `replicated` keeps all of them on every rank; `sharded` spreads them over the
            expert-parallel ranks, which then gather tokens and reduce-scatter outputs.
        dense_ffn_hidden_size: inner width of the gated (SwiGLU) branch; 0 removes it.
        router_logit_scale: factor on router logits; None means 1/√hidden_size, 1.0 is the literal specification.
        router_init_std, router_bias_init: initial router weight σ and bias.
        balance_bias_update_rate: step of the auxiliary-loss-free balancing bias (Wang et al. 2024,
            arXiv:2408.15664), added to the logits for selection only; 0 turns balancing off.
        embedding_init_std, expert_init_std: initial σ; experts are divided by √num_moe_experts besides.
        init_seed: seed of every initial draw; draws are keyed by logical parameter name.
        use_transformer_engine: None takes TransformerEngine where it is installed and CUDA is there.
        quantization: preset of the quantisation policy, one of `nemo_hsmoe.quantization.PRESETS`.
        quantization_rows: rows of the policy to replace, tensor class → format, such as
            `{"routed_expert_weight": "NVFP4_16x16", "value_output": "none"}`.
        first_layers_unquantized, last_layers_unquantized: layers at either end that keep the parameters' precision.

    Raises:
        ConfigurationError: for a value that cannot work, naming the argument and what would be right.
    """

    num_layers: int = 24
    hidden_size: int = 1536
    num_attention_heads: int = 8
    vocab_size: int = 128_256
    seq_length: int = 4096

    num_moe_experts: int = 64
    moe_router_topk: int = 4
    moe_ffn_hidden_size: int = 896
    num_shared_experts: int = 8
    shared_expert_ffn_hidden_size: int = 448
    shared_expert_placement: SharedExpertPlacement = "replicated"
    dense_ffn_hidden_size: int = 512

    router_logit_scale: Optional[float] = None
    router_init_std: float = 1.0
    router_bias_init: float = 0.0
    balance_bias_update_rate: float = 0.01
    embedding_init_std: float = 0.02
    expert_init_std: float = 0.02
    init_seed: int = 1234

    rotary_base: int = 10_000
    use_transformer_engine: Optional[bool] = None

    quantization: str = "none"
    quantization_rows: Optional[dict[str, str]] = None
    first_layers_unquantized: int = 0
    last_layers_unquantized: int = 0

    normalization: str = "RMSNorm"
    layernorm_epsilon: float = 1e-6
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    add_bias_linear: bool = False
    activation_func: Callable = F.gelu
    masked_softmax_fusion: bool = False
    calculate_per_token_loss: bool = True
    perform_initialization: bool = False
    moe_router_pre_softmax: bool = True
    moe_router_dtype: Optional[Literal["fp32", "fp64"]] = "fp32"
    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] = "alltoall"
    moe_router_load_balancing_type: str = "none"

    def __post_init__(self) -> None:
        self._check_sizes()
        self.moe_permute_fusion = self.moe_permute_fusion or transformer_engine_available()
        if self.num_shared_experts:
            self.moe_shared_expert_intermediate_size = self.num_shared_experts * self.shared_expert_ffn_hidden_size
        if self.ffn_hidden_size is None:
            self.ffn_hidden_size = self.moe_ffn_hidden_size
        super().__post_init__()
        self._check_parallelism()
        self._check_quantization()

    @property
    def effective_router_logit_scale(self) -> float:
        """The factor in force on router logits."""
        return self.hidden_size**-0.5 if self.router_logit_scale is None else self.router_logit_scale

    def quantization_policy(self) -> QuantizationPolicy:
        """The policy in full.

        Raises:
            ConfigurationError: when this machine cannot carry it out.
        """
        policy = QuantizationPolicy.preset(
            self.quantization, first_layers=self.first_layers_unquantized, last_layers=self.last_layers_unquantized
        )
        return policy.with_rows(self.quantization_rows or {})

    def _check_quantization(self) -> None:
        require(self.quantization in PRESETS, "quantization", self.quantization, f"needs one of {', '.join(PRESETS)}")
        QuantizationPolicy().with_rows(self.quantization_rows or {})
        for name in ("first_layers_unquantized", "last_layers_unquantized"):
            value = getattr(self, name)
            require(isinstance(value, int) and value >= 0, name, value, "needs a number of layers, 0 for none")
        unquantized = self.first_layers_unquantized + self.last_layers_unquantized
        require(
            unquantized <= self.num_layers,
            "first_layers_unquantized + last_layers_unquantized",
            unquantized,
            f"needs at most num_layers = {self.num_layers}",
        )

    def _check_sizes(self) -> None:
        for name in ("num_layers", "hidden_size", "num_attention_heads", "vocab_size", "seq_length", "num_moe_experts",
                     "moe_router_topk", "moe_ffn_hidden_size"):  # fmt: skip
            value = getattr(self, name)
            require(isinstance(value, int) and value > 0, name, value, "needs a positive whole number")
        for name in ("num_shared_experts", "shared_expert_ffn_hidden_size", "dense_ffn_hidden_size"):
            value = getattr(self, name)
            require(isinstance(value, int) and value >= 0, name, value, "needs a whole number, 0 to leave it out")
        require(
            self.hidden_size % (2 * self.num_attention_heads) == 0,
            "hidden_size",
            self.hidden_size,
            f"needs a multiple of 2 × num_attention_heads = {2 * self.num_attention_heads} (rotary pairs)",
        )
        require(
            self.moe_router_topk <= self.num_moe_experts,
            "moe_router_topk",
            self.moe_router_topk,
            f"needs at most num_moe_experts = {self.num_moe_experts}",
        )
        require(
            self.shared_expert_placement in ("replicated", "sharded"),
            "shared_expert_placement",
            self.shared_expert_placement,
            "needs 'replicated' or 'sharded'",
        )
        for name in ("hidden_dropout", "attention_dropout"):
            value = getattr(self, name)
            require(isinstance(value, (int, float)) and 0 <= value < 1, name, value, "needs a probability from 0 to below 1")
        require(
            self.balance_bias_update_rate >= 0,
            "balance_bias_update_rate",
            self.balance_bias_update_rate,
            "needs a number that is not negative, 0 to turn balancing off",
        )

    def _check_parallelism(self) -> None:
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
            require(getattr(self, name) == 1, name, getattr(self, name), "needs 1: this model shards over experts and data")
        experts = self.expert_model_parallel_size
        require(
            isinstance(experts, int) and experts > 0, "expert_model_parallel_size", experts, "needs a positive whole number"
        )
        require(
            self.num_moe_experts % experts == 0,
            "expert_model_parallel_size",
            experts,
            f"needs a divisor of the {self.num_moe_experts} routed experts",
        )
        require(
            self.shared_expert_placement == "replicated" or self.num_shared_experts % experts == 0,
            "expert_model_parallel_size",
            experts,
            f"needs a divisor of the {self.num_shared_experts} shared experts when they are sharded",
        )


def parameter_device(config: TransformerConfig) -> Optional[torch.device]:
    """Where new parameters go: the current CUDA device, or torch's default device with `use_cpu_initialization`."""
    return None if config.use_cpu_initialization else torch.cuda.current_device()
