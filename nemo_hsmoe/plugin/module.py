"""`HybridSparseMoEModel` as a NeMo model."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Optional

import torch
from megatron.core import parallel_state
from nemo.collections.llm import GPTModel
from nemo.lightning import io
from nemo.lightning.megatron_parallel import MegatronLossReduction
from torch import Tensor

from nemo_hsmoe.model.config import HybridSparseMoEConfig
from nemo_hsmoe.model.hybrid_moe import HybridSparseMoEModel


@dataclass
class HybridSparseMoENeMoConfig(HybridSparseMoEConfig, io.IOMixin):
    """`HybridSparseMoEConfig` that NeMo can store in a checkpoint."""


class TokenMeanLoss(MegatronLossReduction):
    """Loss averaged over the valid tokens of the whole global batch.

    Attributes:
        valid_tokens: of the global batch reduced last.
    """

    valid_tokens: int = 0

    def forward(self, batch: dict[str, Tensor], forward_out: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Sum of token losses, number of valid tokens, and both for the report."""
        tokens = batch["loss_mask"].sum()
        report = torch.stack([forward_out.detach().float(), tokens.float()])
        return forward_out, tokens.to(torch.int), {"loss_and_tokens": report}

    def reduce(self, losses_reduced_per_micro_batch: list[dict[str, Tensor]]) -> Tensor:
        """Mean over all micro-batches and data-parallel ranks; 0 when no token was valid."""
        total = torch.stack([report["loss_and_tokens"] for report in losses_reduced_per_micro_batch]).sum(dim=0)
        torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        loss, tokens = total
        self.valid_tokens = int(tokens)
        return loss / tokens.clamp_min(1.0)


class HybridSparseMoELightningModule(GPTModel):
    """NeMo's GPT module around `HybridSparseMoEModel`.

    A batch holds `tokens`, `labels`, `loss_mask` and, where there is padding, `padding_mask`; see `PackedTokenDataset`.
    """

    def configure_model(self, vp_stage: Optional[int] = None) -> None:
        """Build the model once; TransformerEngine layers add weight gradients to Megatron's buffers themselves."""
        if not hasattr(self, "module"):
            self.module = HybridSparseMoEModel(self.config, vp_stage=vp_stage)
            for part in self.module.modules():
                if hasattr(part, "fuse_wgrad_accumulation"):
                    part.fuse_wgrad_accumulation = True

    def forward(self, input_ids: Tensor, **arguments) -> Tensor:
        """Call the wrapped model; see `HybridSparseMoEModel.forward`."""
        return self.module(input_ids, **arguments)

    def data_step(self, dataloader_iter: Iterator) -> dict[str, Optional[Tensor]]:
        """Take one micro-batch and move it to the device; `padding_mask` becomes None when nothing is padded."""
        batch = next(dataloader_iter)
        batch = dict(batch[0] if isinstance(batch, tuple) else batch)
        if not batch["padding_mask"].any():
            batch["padding_mask"] = None
        return {
            name: None if tensor is None else tensor.cuda(non_blocking=True)
            for name, tensor in batch.items()
            if name != "position_ids"
        }

    def forward_step(self, batch: dict[str, Optional[Tensor]]) -> Tensor:
        """Sum of the micro-batch's token losses."""
        return self.forward(
            batch["tokens"],
            labels=batch["labels"],
            loss_mask=batch["loss_mask"],
            padding_mask=batch["padding_mask"],
        )

    @property
    def training_loss_reduction(self) -> TokenMeanLoss:
        """Mean over the valid tokens of the global batch."""
        if self._training_loss_reduction is None:
            self._training_loss_reduction = TokenMeanLoss()
        return self._training_loss_reduction

    @property
    def validation_loss_reduction(self) -> TokenMeanLoss:
        """Mean over the valid tokens of the global batch."""
        if self._validation_loss_reduction is None:
            self._validation_loss_reduction = TokenMeanLoss()
        return self._validation_loss_reduction
