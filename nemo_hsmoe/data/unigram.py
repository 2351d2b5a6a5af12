"""Add-one unigram model: what a predictor that knows only token frequencies would score."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nemo_hsmoe.data.tokenizer import VOCABULARY_SIZE


def unigram_negative_log_likelihood(prefix: str, vocabulary_size: int = VOCABULARY_SIZE) -> Tensor:
    """`-log((count + 1) / (total + vocabulary))` in nats of every token, counted over an indexed dataset.

    Args:
        prefix: path of the dataset without `.bin`.

    Returns:
        float32 Tensor `[vocabulary_size]`.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(prefix)
    counts = np.zeros(vocabulary_size, dtype=np.int64)
    for index in range(len(dataset)):
        counts += np.bincount(dataset[index], minlength=vocabulary_size)
    counts = torch.from_numpy(counts).double()
    return (torch.log(counts.sum() + vocabulary_size) - torch.log(counts + 1)).float()
