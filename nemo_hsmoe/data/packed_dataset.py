"""Packed token sequences for training, on Megatron's `GPTDataset`."""

from __future__ import annotations

from typing import Optional

import torch
from megatron.core.datasets.gpt_dataset import GPTDataset
from torch import Tensor

from nemo_hsmoe.data.tokenizer import PADDING


class PackedTokenDataset(GPTDataset):
    """Sequences cut from the stream of all documents, shuffled anew every epoch, last one padded.

    Each item holds `tokens`, `labels`, `position_ids` (int64), `loss_mask` (float32, 0 where the label is padding) and
    `padding_mask` (bool, True where the token is padding), all `[sequence_length]`. Padding keeps its own id.
    """

    def __getitem__(self, idx: Optional[int]) -> dict[str, Tensor]:
        """Item `idx`; None gives an item that counts for nothing, which fills an incomplete batch."""
        token_ids, _ = self._query_document_sample_shuffle_indices(0 if idx is None else idx)
        text = torch.from_numpy(token_ids).long()
        tokens, labels = text[:-1].contiguous(), text[1:].contiguous()
        is_filler = idx is None
        return {
            "tokens": tokens,
            "labels": labels,
            "position_ids": torch.arange(tokens.numel()),
            "loss_mask": torch.zeros(labels.numel()) if is_filler else (labels != PADDING).float(),
            "padding_mask": torch.full_like(tokens, True, dtype=torch.bool) if is_filler else tokens == PADDING,
        }
