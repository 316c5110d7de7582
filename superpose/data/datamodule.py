"""Groups to batches: the LightningDataModule."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import PreTrainedTokenizerBase

from superpose.data.groups import Group
from superpose.data.sources import DataSource, IndexedGroups, SequentialGroups
from superpose.streams.batch import StreamBatch
from superpose.streams.mixing import check_weights, draw_weights


def collate(groups: Iterable[Group], weights: torch.Tensor | None = None) -> StreamBatch:
    """Stack groups into a batch; without ``weights (B, N)`` they are uniform."""
    groups = list(groups)
    batch = StreamBatch.uniform(
        torch.stack([group.input_ids for group in groups]),
        torch.stack([group.attention_mask for group in groups]),
    )
    return batch if weights is None else StreamBatch(batch.input_ids, batch.attention_mask, weights)


def batched(groups: Iterable[Group], batch_size: int) -> Iterator[StreamBatch]:
    """Batches of ``batch_size`` groups with uniform weights; the last one may be smaller."""
    iterator = iter(groups)
    while rows := list(itertools.islice(iterator, batch_size)):
        yield collate(rows)


class TrainingBatches(IterableDataset):
    """Endless training batches; batch b of rank r is a function of (seed, b, r) alone.

    With W ranks and K workers, worker k makes the batches k, k + K, ... of its rank, which is the
    order in which the DataLoader hands them out; so neither number changes what is trained on.
    """

    def __init__(
        self,
        groups: IndexedGroups | SequentialGroups,
        batch_size: int,
        num_streams: int,
        weights: str,
        retention: float,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        first_batch: int = 0,
    ):
        """See :class:`StreamsDataModule`; ``first_batch`` is where a resumed run goes on."""
        super().__init__()
        self.groups, self.batch_size, self.num_streams = groups, batch_size, num_streams
        self.weights, self.retention, self.seed = weights, retention, seed
        self.rank, self.world_size, self.first_batch = rank, world_size, first_batch

    def __iter__(self) -> Iterator[StreamBatch]:
        """Batches from ``first_batch`` on, those of this worker."""
        worker = get_worker_info()
        worker_index, num_workers = (worker.id, worker.num_workers) if worker else (0, 1)
        batches = itertools.count(self.first_batch + worker_index, num_workers)
        if isinstance(self.groups, SequentialGroups):
            stream = self.groups.shard(self.rank, self.world_size)
            skipped = self.first_batch * self.batch_size
            rows = itertools.islice(stream, skipped, None)
            for batch in batches:
                yield self._batch(batch, list(itertools.islice(rows, self.batch_size)))
        else:
            for batch in batches:
                first = (batch * self.world_size + self.rank) * self.batch_size
                yield self._batch(batch, [self.groups[first + k] for k in range(self.batch_size)])

    def _batch(self, batch: int, rows: list[Group]) -> StreamBatch:
        generator = torch.Generator().manual_seed(
            (self.seed * 1_000_003 + batch) * 1_009 + self.rank
        )
        weights = draw_weights(len(rows), self.num_streams, self.weights, self.retention, generator)
        return collate(rows, weights)


class StreamsDataModule(lightning.LightningDataModule):
    """Training, validation and held-out batches of one data source.

    Its state in a checkpoint is the number of consumed batches, so that a resumed run goes on with
    the batch that would have come next.
    """

    def __init__(
        self,
        source: DataSource,
        tokenizer: PreTrainedTokenizerBase,
        num_streams: int,
        weights: str = "uniform",
        retention: float = 0.0,
        seed: int = 0,
    ):
        """Bind a source to a tokenizer and to the settings of the ``streams`` group.

        Args:
            source: what the ``data`` group describes.
            tokenizer: the model's.
            num_streams: N.
            weights: ``uniform`` or ``dirichlet``, drawn per row (training only).
            retention: fraction of one-hot rows (training only).
            seed: of the order of groups and of the weights.
        """
        super().__init__()
        check_weights(num_streams, weights, retention)
        self.source, self.tokenizer, self.num_streams = source, tokenizer, num_streams
        self.weights, self.retention, self.seed = weights, retention, seed
        self.first_batch = 0

    def train_dataloader(self) -> DataLoader:
        """Endless batches of ``data.batch_size`` rows; a run is measured in steps."""
        trainer = self.trainer
        dataset = TrainingBatches(
            self.source.training_groups(self.tokenizer, self.num_streams, self.seed),
            self.source.batch_size,
            self.num_streams,
            self.weights,
            self.retention,
            self.seed,
            rank=trainer.global_rank if trainer else 0,
            world_size=trainer.world_size if trainer else 1,
            first_batch=self.first_batch,
        )
        return DataLoader(
            dataset,
            batch_size=None,
            num_workers=self.source.num_workers,
            pin_memory=torch.cuda.is_available(),
        )

    def val_dataloader(self) -> DataLoader:
        """The same ``data.validation_groups`` held-out groups at every validation."""
        groups = self.held_out("validation", self.source.validation_groups)
        rank = self.trainer.global_rank if self.trainer else 0
        world_size = self.trainer.world_size if self.trainer else 1
        if len(groups) < world_size:
            raise ValueError(
                f"{len(groups)} validation groups for {world_size} devices: each needs one; raise "
                "data.validation_groups, or hold out more text with data.validation_fraction"
            )
        batches = list(batched(groups[rank::world_size], self.source.batch_size))
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]

    def held_out(self, split: str, limit: int | None) -> list[Group]:
        """At most ``limit`` groups that are never trained on."""
        groups = self.source.held_out_groups(self.tokenizer, self.num_streams, split)
        return list(itertools.islice(groups, limit))

    def state_dict(self) -> dict[str, Any]:
        """Batches consumed so far, on each rank."""
        assert self.trainer is not None
        progress = self.trainer.fit_loop.epoch_loop.batch_progress
        return {"consumed_batches": progress.total.completed, **self._order()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on after the batches that the checkpoint had consumed.

        Raises:
            ValueError: if a setting that the order of the data depends on is another one.
        """
        for key, value in self._order().items():
            if state_dict[key] != value:
                raise ValueError(
                    f"resume=true continues the data where the run stopped, but {key} was "
                    f"{state_dict[key]} there and is {value} now; keep it, or start anew from the "
                    "run's weights with resume=false"
                )
        self.first_batch = state_dict["consumed_batches"]

    def _order(self) -> dict[str, Any]:
        """What the order of the training data depends on, by key."""
        assert self.trainer is not None
        return {
            "data.batch_size": self.source.batch_size,
            "data.length": self.source.length,
            "streams.num_streams": self.num_streams,
            "seed": self.seed,
            "the number of devices": self.trainer.world_size,
        }
