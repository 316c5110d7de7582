"""What the ``data`` group builds: where groups of N blocks come from.

Every source answers the same three questions - groups to train on, groups held out, cloze examples -
so that nothing above knows one corpus from another.
"""

import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from transformers import PreTrainedTokenizerBase

from superpose.data import corpus, stories
from superpose.data.blocks import Block, BlockTable, check_packing, pack, pad_id_of
from superpose.data.groups import EpochGroups, Group, group_of
from superpose.data.lambada import ClozeExample

log = logging.getLogger(__name__)

SHORTEST_STORY = 20  # tokens that every story has
HELD_OUT_SEED = 0  # held-out groups are the same whatever the seed of a run
SPLITS = ("validation", "test")


class IndexedGroups(Protocol):
    """Endless training groups that can be reached by their number."""

    def __getitem__(self, index: int) -> Group:
        """Group number ``index``; a pure function of the index."""


@runtime_checkable
class SequentialGroups(Protocol):
    """Endless training groups that can only be read in order."""

    def shard(self, rank: int, world_size: int) -> Iterator[Group]:
        """The groups of one rank, without end."""


class DataSource(ABC):
    """A corpus with its settings: the object that ``conf/data/*.yaml`` describes.

    Attributes:
        unlimited: there is no such thing as all of its held-out groups.
    """

    unlimited = False

    def __init__(
        self,
        length: int,
        packing: str,
        batch_size: int,
        num_workers: int = 0,
        validation_groups: int = 64,
        min_length: int = 2,
    ):
        """Keep what all corpora share.

        Args:
            length: T, tokens of a block.
            packing: ``document`` or ``concat``, see :func:`superpose.data.blocks.pack`.
            batch_size: B, rows (groups) of a batch.
            num_workers: processes that prepare batches; 0 prepares them in the main process.
            validation_groups: groups of the validation during training.
            min_length: with packing ``document``, documents of fewer tokens are left out.
        """
        check_packing(length, packing, min_length)
        for key, value, least in (
            ("batch_size", batch_size, 1),
            ("num_workers", num_workers, 0),
            ("validation_groups", validation_groups, 1),
        ):
            if value < least:
                raise ValueError(f"data.{key} must be at least {least}, got {value}")
        self.length, self.packing, self.min_length = length, packing, min_length
        self.batch_size, self.num_workers = batch_size, num_workers
        self.validation_groups = validation_groups

    @abstractmethod
    def training_groups(
        self, tokenizer: PreTrainedTokenizerBase, num_streams: int, seed: int
    ) -> IndexedGroups | SequentialGroups:
        """Endless groups of N blocks to train on; a function of the seed."""

    @abstractmethod
    def held_out_groups(
        self, tokenizer: PreTrainedTokenizerBase, num_streams: int, split: str
    ) -> Iterator[Group]:
        """Groups never trained on; ``split`` is ``validation`` or ``test``."""

    def blocks(
        self, documents: Iterable[str], tokenizer: PreTrainedTokenizerBase
    ) -> Iterator[Block]:
        """The blocks of some documents, by the settings of this source."""
        return pack(documents, tokenizer, self.length, self.packing, self.min_length)

    def cloze_examples(self, count: int) -> Sequence[ClozeExample] | None:
        """Cloze examples that belong to the corpus, or None if it has none."""
        return None

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What results.json says of the data."""


class Stories(DataSource):
    """The embedded stories: unlimited, train, validation and test disjoint by seed."""

    unlimited = True

    def training_groups(
        self, tokenizer: PreTrainedTokenizerBase, num_streams: int, seed: int
    ) -> IndexedGroups:
        """Every story is used once."""
        return StoryGroups(self, tokenizer, num_streams, "train", seed)

    def held_out_groups(
        self, tokenizer: PreTrainedTokenizerBase, num_streams: int, split: str
    ) -> Iterator[Group]:
        """Stories of the validation or the test seed, without end."""
        groups = StoryGroups(self, tokenizer, num_streams, split, HELD_OUT_SEED)
        return (groups[index] for index in itertools.count())

    def cloze_examples(self, count: int) -> Sequence[ClozeExample]:
        """Test stories in LAMBADA's form: the last word follows only from an earlier sentence."""
        return stories.cloze_examples(count, HELD_OUT_SEED)

    def describe(self) -> dict[str, Any]:
        """Name and block settings."""
        return {"name": "stories", "length": self.length, "packing": self.packing}


class StoryGroups:
    """Groups of stories; story numbers follow from the group's number alone."""

    def __init__(
        self,
        source: Stories,
        tokenizer: PreTrainedTokenizerBase,
        num_streams: int,
        split: str,
        seed: int,
    ):
        """Stories of one split and seed, N blocks a group."""
        self.source, self.tokenizer, self.num_streams = source, tokenizer, num_streams
        self.split, self.seed = split, seed
        self.pad_id = pad_id_of(tokenizer)
        self.stories_per_block = 1
        if source.packing == "concat":
            self.stories_per_block += source.length // SHORTEST_STORY

    def __getitem__(self, index: int) -> Group:
        """Group number ``index``."""
        first = index * self.num_streams
        table = BlockTable.from_blocks(
            (self._block(first + stream) for stream in range(self.num_streams)),
            self.source.length,
            self.pad_id,
        )
        return group_of(table.ids, table.lengths)

    def _block(self, number: int) -> Block:
        first = number * self.stories_per_block
        texts = (
            stories.story(self.split, self.seed, first + k) for k in range(self.stories_per_block)
        )
        return next(self.source.blocks(texts, self.tokenizer))


class LocalText(DataSource):
    """Local .txt, .jsonl or .parquet files, tokenised once and kept in memory."""

    def __init__(
        self,
        path: str,
        text_column: str = "text",
        sample_by: str = "document",
        validation_fraction: float = 0.05,
        **shared: Any,
    ):
        """Describe the files; nothing is read yet.

        Args:
            path: file, folder or glob.
            text_column: column of the text in .jsonl and .parquet rows.
            sample_by: what a document of a .txt file is: document, paragraph or line.
            validation_fraction: held-out part, see :meth:`BlockTable.hold_out`; 1 holds out all,
                which is what an evaluation wants.
            **shared: settings of :class:`DataSource`.
        """
        super().__init__(**shared)
        self.path, self.text_column, self.sample_by = path, text_column, sample_by
        self.validation_fraction = validation_fraction
        self._tables: dict[str, tuple[BlockTable, BlockTable]] = {}

    def training_groups(
        self, tokenizer: PreTrainedTokenizerBase, num_streams: int, seed: int
    ) -> IndexedGroups:
        """Every block that is not held out, once an epoch."""
        training, _ = self._split(tokenizer)
        return EpochGroups(training, num_streams, seed, f"data.path={self.path} (training part)")

    def held_out_groups(
        self, tokenizer: PreTrainedTokenizerBase, num_streams: int, split: str
    ) -> Iterator[Group]:
        """The held-out part, each block once; one part serves as validation and as test."""
        _, held_out = self._split(tokenizer)
        key = f"data.path={self.path} (held-out part)"
        return EpochGroups(held_out, num_streams, HELD_OUT_SEED, key).first_epoch()

    def describe(self) -> dict[str, Any]:
        """Path and block settings."""
        return {
            "name": "text",
            "path": self.path,
            "length": self.length,
            "packing": self.packing,
            "min_length": self.min_length,
            "sample_by": self.sample_by,
            "validation_fraction": self.validation_fraction,
        }

    def _split(self, tokenizer: PreTrainedTokenizerBase) -> tuple[BlockTable, BlockTable]:
        key = tokenizer.name_or_path
        if key not in self._tables:
            documents = corpus.read_documents(self.path, self.text_column, self.sample_by)
            blocks = self.blocks(documents, tokenizer)
            table = BlockTable.from_blocks(blocks, self.length, pad_id_of(tokenizer))
            log.info(
                "data %s: %d blocks of %d tokens from %d documents",
                self.path, len(table), self.length, len(torch.unique(table.documents)),
            )  # fmt: skip
            self._tables[key] = table.hold_out(self.validation_fraction)
        return self._tables[key]
