"""Data module: a local corpus, packed and sampled for Megatron."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

import lightning.pytorch as pl
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.num_microbatches_calculator import get_num_microbatches, update_num_microbatches
from nemo.lightning import io
from nemo.lightning.data import WrappedDataLoader
from nemo.lightning.pytorch.plugins import MegatronDataSampler

from nemo_hsmoe.data.corpus import Corpus, CorpusSplit, build_corpus
from nemo_hsmoe.data.epoch_shuffle import EpochShuffledDataset
from nemo_hsmoe.data.packed_dataset import PackedTokenDataset
from nemo_hsmoe.plugin.tokenizer import Llama3Tokenizer
from nemo_hsmoe.runtime.errors import require


class CorpusDataModule(pl.LightningDataModule, io.IOMixin):
    """Tokenises local text once, then serves packed sequences.

    Training takes the corpus' training half, shuffled anew every epoch, in an order that depends on `seed` alone.
    Validation takes the first `limit_val_batches` global batches of the held-out half, always the same ones.

    Args:
        seq_length: tokens a sequence.
        micro_batch_size, global_batch_size: sequences.
        corpus: files and folders; None takes the Python standard library.
        cache_dir: where tokenised corpora are kept.
        held_out_fraction: share of files held out.
        seed: seed of the sample order.
        num_workers: data-loading processes.

    Raises:
        ConfigurationError: for batch sizes that do not fit each other or a corpus too small for one sequence.
    """

    def __init__(
        self,
        seq_length: int = 4096,
        micro_batch_size: int = 1,
        global_batch_size: int = 2048,
        corpus: Optional[list[str]] = None,
        cache_dir: str = "~/.cache/nemo_hsmoe",
        held_out_fraction: float = 0.05,
        seed: int = 1234,
        num_workers: int = 0,
        tokenizer: Optional[Llama3Tokenizer] = None,
    ):
        super().__init__()
        for name, size in (("micro_batch_size", micro_batch_size), ("global_batch_size", global_batch_size)):
            require(isinstance(size, int) and size > 0, name, size, "needs a positive whole number of sequences")
        require(
            global_batch_size % micro_batch_size == 0,
            "global_batch_size",
            global_batch_size,
            f"needs a multiple of micro_batch_size = {micro_batch_size}",
        )
        self.seq_length = seq_length
        self.micro_batch_size = micro_batch_size
        self.global_batch_size = global_batch_size
        self.corpus = [corpus] if isinstance(corpus, str) else corpus
        self.cache_dir = cache_dir
        self.held_out_fraction = held_out_fraction
        self.seed = seed
        self.num_workers = num_workers
        self.tokenizer = tokenizer or Llama3Tokenizer()
        self.built_corpus: Optional[Corpus] = None
        self.init_global_step = 0
        self.data_sampler = MegatronDataSampler(
            seq_len=seq_length, micro_batch_size=micro_batch_size, global_batch_size=global_batch_size
        )

    def prepare_data(self) -> None:
        """Tokenise the corpus unless that was done before; Lightning calls this in one process of a node."""
        skipped = self._build_corpus(progress=True).skipped
        if skipped:
            name, reason = next(iter(skipped.items()))
            print(f"Corpus: {len(skipped)} files left out, the first of them {name} ({reason}).", flush=True)

    def setup(self, stage: str = "") -> None:
        """Build both datasets."""
        self.built_corpus = self._build_corpus(progress=False)
        trainer = self.trainer
        data_parallel = trainer.world_size
        require(
            self.global_batch_size % (self.micro_batch_size * data_parallel) == 0,
            "global_batch_size",
            self.global_batch_size,
            f"needs a multiple of micro_batch_size × processes = {self.micro_batch_size} × {data_parallel}",
        )
        require(trainer.max_steps > 0, "max_steps", trainer.max_steps, "needs a positive number of iterations")
        train = self._one_epoch(self.built_corpus.train)
        held_out = self._one_epoch(self.built_corpus.held_out)
        self._train_dataset = EpochShuffledDataset(train, trainer.max_steps * self.global_batch_size, self.seed)
        self._validation_dataset = _FixedSubset(held_out, self.validation_sequences)

    def train_dataloader(self) -> WrappedDataLoader:
        """Micro-batches of the training half, from the sample after the last one consumed."""
        self.init_global_step = self.trainer.global_step
        self.data_sampler.init_global_step = self.init_global_step
        planned = self.trainer.max_steps * self.global_batch_size
        self._train_dataset.num_samples = max(planned, self.data_sampler.init_consumed_samples) + self.global_batch_size
        return self._loader(self._train_dataset, "train")

    def val_dataloader(self) -> WrappedDataLoader:
        """Micro-batches of the held-out half, from its start."""
        return self._loader(self._validation_dataset, "validation")

    @property
    def validation_sequences(self) -> int:
        """Sequences one validation looks at."""
        return self._validation_batches() * self.global_batch_size

    def validation_items(self) -> Iterator[dict[str, torch.Tensor]]:
        """The sequences validation looks at, one by one."""
        return (self._validation_dataset[index] for index in range(self.validation_sequences))

    def state_dict(self) -> dict[str, Any]:
        """Samples consumed so far."""
        steps = self.trainer.global_step - self.init_global_step
        return {"consumed_samples": self.data_sampler.compute_consumed_samples(steps)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after the samples a checkpoint had consumed."""
        consumed = state_dict["consumed_samples"]
        self.data_sampler.init_consumed_samples = consumed
        self.data_sampler.prev_consumed_samples = consumed
        self.data_sampler.if_first_step = 1
        update_num_microbatches(consumed_samples=consumed, consistency_check=False)

    def reconfigure_limit_batches(self) -> None:
        """Restate the validation limit in micro-batches, which is what Lightning counts."""
        self.trainer.limit_val_batches = self._validation_batches() * get_num_microbatches()

    def _validation_batches(self) -> int:
        limit = self.trainer.limit_val_batches
        if not hasattr(self, "_global_validation_batches"):
            require(
                isinstance(limit, int) or limit == 0.0,
                "limit_val_batches",
                limit,
                "needs a whole number of global batches, 0 for no validation",
            )
            self._global_validation_batches = int(limit)
        return self._global_validation_batches

    def _build_corpus(self, progress: bool) -> Corpus:
        return build_corpus(self.cache_dir, self.corpus, self.held_out_fraction, progress)

    def _one_epoch(self, split: CorpusSplit) -> PackedTokenDataset:
        require(
            split.tokens > self.seq_length,
            "corpus",
            self.corpus or "the Python standard library",
            f"needs more than seq_length = {self.seq_length} tokens in each half; "
            f"{Path(split.prefix).name} has {split.tokens}",
        )
        config = GPTDatasetConfig(
            random_seed=self.seed,
            sequence_length=self.seq_length,
            blend_per_split=[([split.prefix], None), None, None],
            path_to_cache=os.path.join(os.path.dirname(split.prefix), "index"),
            tokenizer=self.tokenizer,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )
        return BlendedMegatronDatasetBuilder(PackedTokenDataset, [None, None, None], lambda: True, config).build()[0]

    def _loader(self, dataset, mode: str) -> WrappedDataLoader:
        return WrappedDataLoader(
            mode=mode,
            dataset=dataset,
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
            persistent_workers=self.num_workers > 0,
        )


class _FixedSubset(torch.utils.data.Dataset):
    """The first items of a dataset; past its end, items that count for nothing."""

    def __init__(self, dataset, length: int):
        self.dataset = dataset
        self.length = max(length, 1)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int):
        return self.dataset[index if index < len(self.dataset) else None]
