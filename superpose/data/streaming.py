"""Corpora that are read in order through ``datasets``: from the hub, or larger than memory."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from superpose.data import corpus
from superpose.data.blocks import Block, BlockTable, pad_id_of
from superpose.data.groups import EpochGroups, Group, group_of
from superpose.data.sources import HELD_OUT_SEED, DataSource


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
