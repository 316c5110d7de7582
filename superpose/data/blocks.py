"""Documents to blocks: rows of at most T token ids, each from a known document."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

PACKINGS = ("document", "concat")
_BATCH = 256  # documents a call of the fast tokenizer gets at once


@dataclass(frozen=True)
class Block:
    """At most T tokens of one document (``concat``: of the document its first token is from)."""

    ids: np.ndarray  # (<= T,) int32
    document: int


def leading_bos(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """``[bos]`` if the tokenizer itself begins a text with BOS, else ``[]``.

    Every block then begins with it too, so that position 0 of every stream is BOS and the mean of
    the streams there is BOS itself.
    """
    ids = tokenizer("a")["input_ids"]
    starts_with_bos = tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id]
    return ids[:1] if starts_with_bos else []


def token_ids(documents: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[np.ndarray]:
    """Token ids of each document, int32, without special tokens."""
    batch: list[str] = []
    for document in documents:
        batch.append(document)
        if len(batch) == _BATCH:
            yield from _encode(batch, tokenizer)
            batch = []
    if batch:
        yield from _encode(batch, tokenizer)


def _encode(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[np.ndarray]:
    # verbose=False: a document longer than the model's limit is fine, it is cut into blocks
    encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return (np.asarray(ids, dtype=np.int32) for ids in encoded)


def pack(
    documents: Iterable[str],
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    packing: str = "concat",
    min_length: int = 2,
) -> Iterator[Block]:
    """Cut documents into blocks of ``length`` tokens.

    Args:
        documents: texts.
        tokenizer: gives the ids; if it begins a text with BOS, so does every block.
        length: T, tokens of a block, BOS included.
        packing: ``document`` - one block a document, its first T tokens, shorter ones ended by EOS
            (and padded later); ``concat`` - all documents in a row, parted by EOS, cut every T
            tokens, nothing padded; the incomplete last block is dropped.
        min_length: with ``document``, shorter documents are left out (tokens, EOS not counted).

    Raises:
        ValueError: for an unknown packing or a length below 2.
    """
    check_packing(length, packing, min_length)
    bos = np.asarray(leading_bos(tokenizer), dtype=np.int32)
    eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    content = length - len(bos)
    rest = np.empty(0, dtype=np.int32)
    rest_document = 0
    for number, ids in enumerate(token_ids(documents, tokenizer)):
        if packing == "document" and len(bos) + len(ids) < min_length:
            continue
        ids = np.append(ids, eos).astype(np.int32)
        if packing == "document":
            yield Block(np.concatenate([bos, ids[:content]]), number)
            continue
        first = number if len(rest) == 0 else rest_document
        ids = np.concatenate([rest, ids])
        for start in range(0, len(ids) - content + 1, content):
            document = first if start == 0 else number
            yield Block(np.concatenate([bos, ids[start : start + content]]), document)
        cut = len(ids) - len(ids) % content
        rest, rest_document = ids[cut:], first if cut == 0 else number


def check_packing(length: int, packing: str, min_length: int) -> None:
    """Refuse impossible settings of the ``data`` group, by their key."""
    if packing not in PACKINGS:
        raise ValueError(f"data.packing must be one of {', '.join(PACKINGS)}, got {packing!r}")
    if length < 2:
        raise ValueError(
            f"data.length must be at least 2 (a token and the one that follows), got {length}"
        )
    if min_length < 2:
        raise ValueError(
            f"data.min_length must be at least 2 (shorter texts predict nothing), got {min_length}"
        )


@dataclass(frozen=True)
class BlockTable:
    """K blocks in memory.

    Attributes:
        ids: ``(K, T)`` int32, padded on the right.
        lengths: ``(K,)`` tokens of each block.
        documents: ``(K,)`` number of the document each block is from.
    """

    ids: Tensor
    lengths: Tensor
    documents: Tensor

    @classmethod
    def from_blocks(cls, blocks: Iterable[Block], length: int, pad_id: int) -> "BlockTable":
        """Gather blocks; ``pad_id`` fills the places behind short ones."""
        rows, lengths, documents = [], [], []
        for block in blocks:
            rows.append(pad(block.ids, length, pad_id))
            lengths.append(len(block.ids))
            documents.append(block.document)
        ids = np.stack(rows) if rows else np.empty((0, length), dtype=np.int32)
        return cls(torch.from_numpy(ids), torch.tensor(lengths), torch.tensor(documents))

    def __len__(self) -> int:
        """K."""
        return len(self.ids)

    def select(self, rows: Tensor) -> "BlockTable":
        """The blocks of the given row numbers."""
        return BlockTable(self.ids[rows], self.lengths[rows], self.documents[rows])

    def hold_out(self, fraction: float) -> tuple["BlockTable", "BlockTable"]:
        """Split into (training, held-out) blocks; the same blocks whatever the seed.

        The held-out part is the tail of every document, the given fraction of it; where documents
        are shorter than that, every so-manieth document as a whole. Contiguous, since neighbouring
        blocks tell of each other.
        """
        if not 0.0 < fraction <= 1.0:
            raise ValueError(
                f"data.validation_fraction must lie above 0 and at most at 1, got {fraction}"
            )
        _, counts = torch.unique_consecutive(self.documents, return_counts=True)
        held_out, quota, start = [], 0.0, 0
        for count in counts.tolist():
            quota += count * fraction
            tail = min(int(quota + 1e-9), count)
            quota -= tail
            held_out.append(torch.arange(start + count - tail, start + count))
            start += count
        rows = torch.cat(held_out) if held_out else torch.empty(0, dtype=torch.long)
        training = torch.ones(len(self), dtype=torch.bool)
        training[rows] = False
        return self.select(training.nonzero().squeeze(1)), self.select(rows)


def pad(ids: np.ndarray, length: int, pad_id: int) -> np.ndarray:
    """``ids`` filled up on the right to ``length`` with ``pad_id``."""
    return np.pad(ids, (0, length - len(ids)), constant_values=pad_id)


def pad_id_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """An id to fill places with; masks come from lengths, never from this id."""
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return int(token_id)
    return 0
