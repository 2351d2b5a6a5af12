"""A sample order that does not depend on how long the run will be."""

from __future__ import annotations

import numpy as np
from torch.utils.data import Dataset


class EpochShuffledDataset(Dataset):
    """Endless passes over a dataset, each in its own order.

    Sample i is item `permutation(seed, epoch)[i mod N]` with `epoch = i div N`. Megatron's own index draws one order over
    all epochs of the planned run, so a run cut short and planned anew would see other samples.

    Args:
        dataset: one epoch of items.
        num_samples: length to report.
        seed: seed of every epoch's order.
    """

    def __init__(self, dataset: Dataset, num_samples: int, seed: int):
        self.dataset = dataset
        self.num_samples = num_samples
        self.seed = seed
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int):
        epoch, position = divmod(index, len(self.dataset))
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng((self.seed, epoch)).permutation(len(self.dataset))
        return self.dataset[int(self._order[position])]
