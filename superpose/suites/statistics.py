"""Sufficient statistics that suites keep while they stream over groups of texts."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# A denominator below this many nats (or of Wasserstein distance) is rounding, not a distance.
SMALLEST_DENOMINATOR = 1e-6


@dataclass(frozen=True)
class Estimate:
    """A ratio of sums over groups with its standard error (None for a single group)."""

    value: float
    standard_error: float | None


def ratio_of_sums(numerators: list[float], denominators: list[float]) -> Estimate | None:
    """``sum(numerators) / sum(denominators)`` over G independent groups: a ratio of means.

    The standard error is the delta method's, ``sqrt(G / (G-1) sum_g (a_g - R b_g)^2) / sum_g b_g``;
    it respects that positions of one group depend on each other.

    Returns:
        None where the denominators are 0, so that there is no ratio.
    """
    total = math.fsum(denominators)
    if total <= 0:
        return None
    ratio = math.fsum(numerators) / total
    count = len(numerators)
    if count < 2:
        return Estimate(ratio, None)
    residuals = math.fsum(
        (a - ratio * b) ** 2 for a, b in zip(numerators, denominators, strict=True)
    )
    return Estimate(ratio, math.sqrt(count / (count - 1) * residuals) / total)


class GroupSums:
    """Sums over the positions of each group, by name; means over all positions of all groups."""

    def __init__(self) -> None:
        """Start without groups."""
        self.num_groups = 0
        self._sums: dict[str, list[float]] = {}

    def begin(self) -> None:
        """What is added from now on belongs to a new group."""
        self.num_groups += 1
        for sums in self._sums.values():
            sums.append(0.0)

    def add(self, name: str, value: float) -> None:
        """Add to a sum of the current group."""
        sums = self._sums.setdefault(name, [0.0] * self.num_groups)
        sums[-1] += value

    def list_of(self, name: str) -> list[float]:
        """The sums of one name, group by group; empty if nothing was added under it."""
        return self._sums.get(name, [])

    def total(self, name: str) -> float:
        """Sum over all groups."""
        return math.fsum(self.list_of(name))

    def mean(self, name: str, count: str) -> Estimate | None:
        """Mean over positions, ``count`` being their sum's name; None if nothing was added."""
        if not self.list_of(name):
            return None
        return ratio_of_sums(self.list_of(name), self.list_of(count))


class RankHistogram:
    """How often each rank 1..V occurred: integers instead of lists, so any number of texts fits."""

    def __init__(self, num_tokens: int) -> None:
        """Start empty, for ranks up to ``num_tokens``."""
        self.counts = torch.zeros(num_tokens, dtype=torch.int64)

    def add(self, ranks: Tensor) -> None:
        """Count ranks of any shape, int64 from 1."""
        index = ranks.flatten().cpu() - 1
        self.counts.scatter_add_(0, index, torch.ones_like(index))

    @property
    def total(self) -> int:
        """Ranks counted."""
        return int(self.counts.sum())

    def share_within(self, k: int) -> float | None:
        """P(rank <= k), or None of no ranks."""
        return int(self.counts[:k].sum()) / self.total if self.total else None

    def median(self) -> float | None:
        """The median rank; of an even number of ranks the mean of the middle two."""
        if not self.total:
            return None
        cumulative = self.counts.cumsum(0)
        middle = torch.tensor([(self.total - 1) // 2, self.total // 2])
        return float(torch.searchsorted(cumulative, middle, right=True).double().mean() + 1)


class PositionMoments:
    """Mean and standard error at each of T positions, over groups."""

    def __init__(self, length: int) -> None:
        """Start empty, for T = ``length`` positions."""
        self.count, self.sum, self.square = torch.zeros(3, length, dtype=torch.float64)

    def add(self, positions: Tensor, values: Tensor) -> None:
        """One value at each of the given (distinct) positions."""
        values = values.cpu().double()
        self.count[positions] += 1
        self.sum[positions] += values
        self.square[positions] += values.square()

    def estimates(self) -> list[Estimate | None]:
        """Position by position; None where no group had a value."""
        return [
            _moments(*row)
            for row in zip(
                self.count.tolist(), self.sum.tolist(), self.square.tolist(), strict=True
            )
        ]


def _moments(count: float, total: float, square: float) -> Estimate | None:
    if count == 0:
        return None
    mean = total / count
    if count < 2:
        return Estimate(mean, None)
    variance = max(0.0, square - count * mean * mean) / (count - 1)
    return Estimate(mean, math.sqrt(variance / count))
