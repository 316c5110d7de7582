"""Blocks to groups: N blocks from unrelated documents, read at once."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from superpose.data.blocks import BlockTable

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Group:
    """N blocks of one row: ``input_ids (N, T)`` int64 and ``attention_mask (N, T)`` int64."""

    input_ids: Tensor
    attention_mask: Tensor


def group_of(ids: Tensor, lengths: Tensor) -> Group:
    """A group of blocks ``ids (N, T)`` whose first ``lengths (N,)`` tokens are real."""
    positions = torch.arange(ids.shape[1])
    return Group(ids.long(), (positions < lengths[:, None]).long())


def assign_groups(documents: Tensor, num_streams: int, generator: torch.Generator) -> Tensor:
    """Put blocks into groups of N from different documents, each block at most once.

    Blocks are ordered document by document, in random order within and among documents, and dealt
    out in N strata: group g takes the blocks g, g + G, g + 2 G, ... of that order, G being the
    number of groups. Two blocks of one document then meet only if it has more than G blocks, so
    that no assignment could part them all.

    Args:
        documents: ``(K,)`` document number of each block.
        num_streams: N; the ``K mod N`` left-over blocks change from epoch to epoch.
        generator: source of randomness.

    Returns:
        ``(K // N, N)`` block numbers, in random order.
    """
    num_groups = len(documents) // num_streams
    shuffled = torch.randperm(len(documents), generator=generator)
    shuffled = shuffled[: num_groups * num_streams]
    _, document = torch.unique(documents[shuffled], return_inverse=True)
    order_of_document = torch.randperm(int(document.max()) + 1, generator=generator)
    ordered = shuffled[torch.argsort(order_of_document[document], stable=True)]
    groups = ordered.view(num_streams, num_groups).T  # (G, N)
    groups = groups[torch.randperm(num_groups, generator=generator)]
    columns = torch.rand(groups.shape, generator=generator).argsort(dim=1)
    return groups.gather(1, columns)


class EpochGroups:
    """Endless groups of a finite table: every block once an epoch, re-grouped each epoch.

    ``groups[i]`` is a pure function of (table, N, seed, i), so any position of a run can be reached
    at once: a resumed run continues with the very group that would have come.
    """

    def __init__(self, table: BlockTable, num_streams: int, seed: int, key: str = "data.path"):
        """Group ``table`` by ``num_streams``; ``key`` names the data in errors."""
        if len(table) < num_streams:
            raise ValueError(
                f"{key} gives {len(table)} blocks of {table.ids.shape[1]} tokens, fewer than "
                f"the {num_streams} texts of a group (streams.num_streams, or what the suite "
                "needs); give more text or a shorter data.length"
            )
        self.table, self.num_streams, self.seed = table, num_streams, seed
        self._epoch = -1
        self._assignment = torch.empty(0)
        self._warn_of_related_blocks(key)

    def __len__(self) -> int:
        """Groups of one epoch."""
        return len(self.table) // self.num_streams

    def __getitem__(self, index: int) -> Group:
        """Group number ``index`` of the endless sequence."""
        epoch, position = divmod(index, len(self))
        blocks = self._epoch_assignment(epoch)[position]
        return group_of(self.table.ids[blocks], self.table.lengths[blocks])

    def first_epoch(self, limit: int | None = None) -> Iterator[Group]:
        """The groups of the first epoch, at most ``limit``."""
        for index in range(min(len(self), limit or len(self))):
            yield self[index]

    def _epoch_assignment(self, epoch: int) -> Tensor:
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._assignment = assign_groups(self.table.documents, self.num_streams, generator)
            self._epoch = epoch
        return self._assignment

    def _warn_of_related_blocks(self, key: str) -> None:
        documents = self.table.documents[self._epoch_assignment(0)].sort(dim=1).values
        related = int((documents[:, 1:] == documents[:, :-1]).any(dim=1).sum())
        if related:
            log.warning(
                "%s: %d of %d groups hold two blocks of one document, since one document has more "
                "than 1/%d of all blocks; give more documents, or data.sample_by=paragraph",
                key, related, len(self), self.num_streams,
            )  # fmt: skip
