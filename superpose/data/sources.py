"""What the ``data`` group builds: where groups of N blocks come from.

Every source answers the same three questions - groups to train on, groups held out, cloze examples -
so that nothing above knows one corpus from another.
"""

import itertools
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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


@dataclass(frozen=True)
class StreamedGroups:
    """Endless training groups that can only be read in order, sharded by rank."""

    source: "StreamedText"
    tokenizer: PreTrainedTokenizerBase
    num_streams: int
    seed: int

    def shard(self, rank: int, world_size: int) -> Iterator[Group]:
        """The groups of one rank, without end."""
        return self.source.stream_groups(
            self.tokenizer, self.num_streams, self.seed, rank, world_size
        )


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
    ) -> IndexedGroups | StreamedGroups:
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


class StreamedText(DataSource):
    """A data set read through ``datasets`` in streaming mode: a hub id, or local files."""

    def __init__(
        self,
        path: str,
        name: str | None = None,
        split: str = "train",
        revision: str | None = None,
        text_column: str = "text",
        validation_documents: int = 1000,
        shuffle_buffer: int = 4096,
        **shared: Any,
    ):
        """Describe the data set; nothing is opened yet.

        Args:
            path: hub id (``HuggingFaceFW/fineweb``), or a file, folder or glob of .txt, .jsonl or
                .parquet.
            name: configuration of the hub data set (``sample-10BT``).
            split: its split.
            revision: its hub revision.
            text_column: the column that holds the text.
            validation_documents: the first documents of the stream, held out.
            shuffle_buffer: blocks kept in memory from which groups are drawn at random.
            **shared: settings of :class:`DataSource`; at most one worker.
        """
        super().__init__(**shared)
        if self.num_workers > 1:
            raise ValueError(
                f"data.num_workers must be 0 or 1 for streamed data, got {self.num_workers}"
            )
        self.path, self.name, self.split, self.revision = path, name, split, revision
        self.text_column = text_column
        self.validation_documents, self.shuffle_buffer = validation_documents, shuffle_buffer

    def training_groups(
        self, tokenizer: PreTrainedTokenizerBase, num_streams: int, seed: int
    ) -> StreamedGroups:
        """Groups drawn from a buffer over the stream, endless."""
        return StreamedGroups(self, tokenizer, num_streams, seed)

    def held_out_groups(
        self, tokenizer: PreTrainedTokenizerBase, num_streams: int, split: str
    ) -> Iterator[Group]:
        """Groups of the first ``validation_documents`` documents."""
        documents = itertools.islice(self._documents(self._dataset()), self.validation_documents)
        blocks = self.blocks(documents, tokenizer)
        table = BlockTable.from_blocks(blocks, self.length, pad_id_of(tokenizer))
        key = f"data.path={self.path} (first {self.validation_documents} documents)"
        return EpochGroups(table, num_streams, HELD_OUT_SEED, key).first_epoch()

    def describe(self) -> dict[str, Any]:
        """Data set and block settings."""
        return {
            "name": self.path,
            "configuration": self.name,
            "split": self.split,
            "revision": self.revision,
            "length": self.length,
            "packing": self.packing,
        }

    def stream_groups(
        self,
        tokenizer: PreTrainedTokenizerBase,
        num_streams: int,
        seed: int,
        rank: int,
        world_size: int,
    ) -> Iterator[Group]:
        """Endless groups of one rank: N blocks of different documents out of a random buffer."""
        generator = torch.Generator().manual_seed(seed)
        pad_id = pad_id_of(tokenizer)
        buffer: list[Block] = []
        while True:  # one turn an epoch; a corpus smaller than the buffer fills it in several
            # Every rank reads the stream and keeps its share: `datasets` splits by files, which may
            # be fewer than ranks, and then applies a skip to each part anew.
            documents = self._documents(self._dataset())
            own = itertools.islice(documents, self.validation_documents + rank, None, world_size)
            read = 0
            for block in self.blocks(own, tokenizer):
                read += 1
                buffer.append(block)
                while len(buffer) >= self.shuffle_buffer:
                    table = BlockTable.from_blocks(
                        _draw(buffer, num_streams, generator), self.length, pad_id
                    )
                    yield group_of(table.ids, table.lengths)
            if read < num_streams:
                raise ValueError(
                    f"data.path={self.path} gives {read} blocks of {self.length} tokens after the "
                    f"first {self.validation_documents} documents, fewer than "
                    f"streams.num_streams={num_streams}; lower data.validation_documents or "
                    "data.length"
                )

    def _dataset(self) -> Any:
        import datasets

        options: dict[str, Any] = {"streaming": True, "split": self.split}
        if self.path.startswith((".", "/", "~")) or any(sign in self.path for sign in "*?["):
            files = corpus.find_files(self.path)
            kinds = {file.suffix for file in files}
            if len(kinds) > 1:
                raise ValueError(
                    f"data.path={self.path} mixes {', '.join(sorted(kinds))} files; stream one kind"
                )
            kind = {".txt": "text", ".jsonl": "json", ".parquet": "parquet"}[kinds.pop()]
            return datasets.load_dataset(kind, data_files=[str(f) for f in files], **options)
        try:
            return datasets.load_dataset(self.path, self.name, revision=self.revision, **options)
        except (OSError, ValueError, ImportError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(
                f"data.path={self.path} could not be opened through `datasets`: {reason[:300]}; "
                "without network use data=text data.path='FOLDER/*.parquet' or data=stories"
            ) from error

    def _documents(self, dataset: Any) -> Iterator[str]:
        for row in dataset:
            if self.text_column not in row:
                raise ValueError(
                    f"data.path={self.path} has no column {self.text_column!r} but "
                    f"{', '.join(row)}; name one with data.text_column"
                )
            if row[self.text_column]:
                yield row[self.text_column]


def _draw(buffer: list[Block], num_streams: int, generator: torch.Generator) -> list[Block]:
    """Take N blocks of different documents out of the buffer, at random."""
    drawn: list[int] = []
    taken: set[int] = set()
    for place in torch.randperm(len(buffer), generator=generator).tolist():
        if buffer[place].document not in taken:
            taken.add(buffer[place].document)
            drawn.append(place)
            if len(drawn) == num_streams:
                break
    else:
        raise ValueError(
            f"the {len(buffer)} blocks of the shuffle buffer come from {len(taken)} documents, "
            f"fewer than streams.num_streams={num_streams}; raise data.shuffle_buffer"
        )
    blocks = [buffer[place] for place in drawn]
    for place in sorted(drawn, reverse=True):
        buffer[place] = buffer[-1]
        buffer.pop()
    return blocks
