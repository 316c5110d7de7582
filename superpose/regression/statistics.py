"""Sufficient statistics of least squares, gathered batch by batch in float64.

Everything is kept about the mean and merged by Chan's rule, so that a mean far from zero cancels
nothing; sums of two sets of rows, and a set minus a part of it (a fold of cross-validation), are
statistics again. Memory is O(D^2), whatever the number of rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PairStatistics:
    """What least squares needs to know of n rows of pairs x, y.

    Attributes:
        count: n.
        mean_x: ``(D,)`` float64.
        mean_y: ``(D',)``.
        xx: ``(D, D)``, the sum over rows of ``(x - mean_x)(x - mean_x)'``.
        xy: ``(D, D')``, of ``(x - mean_x)(y - mean_y)'``.
        yy: ``(D',)``, of ``(y - mean_y)^2``: the diagonal is all that is needed.
    """

    count: int
    mean_x: Tensor
    mean_y: Tensor
    xx: Tensor
    xy: Tensor
    yy: Tensor

    @classmethod
    def of(cls, x: Tensor, y: Tensor) -> "PairStatistics":
        """Of the rows of ``x (n, D)`` and ``y (n, D')``, n at least 1.

        Raises:
            ValueError: if a number is not finite.
        """
        (mean_x, x), (mean_y, y) = _centred(x), _centred(y)
        return cls(len(x), mean_x, mean_y, x.T @ x, x.T @ y, y.square().sum(dim=0))

    def about(self, mean_x: Tensor, mean_y: Tensor) -> "PairStatistics":
        """The same sums about other points than the rows' own means (held-out rows)."""
        dx, dy = self.mean_x - mean_x, self.mean_y - mean_y
        return PairStatistics(
            self.count,
            mean_x,
            mean_y,
            torch.addr(self.xx, dx, dx, alpha=self.count),
            torch.addr(self.xy, dx, dy, alpha=self.count),
            self.yy + self.count * dy.square(),
        )

    def __add__(self, other: "PairStatistics") -> "PairStatistics":
        """Of the rows of both."""
        return self._combined(other, 1)

    def __sub__(self, part: "PairStatistics") -> "PairStatistics":
        """Of the rows without ``part``, which must be among them: k-fold fits without a new pass."""
        return self._combined(part, -1)

    def _combined(self, other: "PairStatistics", sign: int) -> "PairStatistics":
        count = self.count + sign * other.count
        assert count > 0
        dx, dy = other.mean_x - self.mean_x, other.mean_y - self.mean_y
        share = sign * other.count / count
        between = sign * self.count * other.count / count
        return PairStatistics(
            count,
            self.mean_x + share * dx,
            self.mean_y + share * dy,
            torch.addr(self.xx + sign * other.xx, dx, dx, alpha=between),
            torch.addr(self.xy + sign * other.xy, dx, dy, alpha=between),
            self.yy + sign * other.yy + between * dy.square(),
        )


class ChainStatistics:
    """Pairs of neighbours in a chain of states, each state's products formed once.

    The ``xx`` of state l as an input is also its ``yy`` as an output: L + 1 states of L blocks need
    L + 1 Gram matrices and L products of neighbours, in place, O(L D^2) memory.
    """

    def __init__(self) -> None:
        """Start without rows."""
        self.count = 0
        self._means: list[Tensor] = []
        self._grams: list[Tensor] = []
        self._products: list[Tensor] = []

    def add(self, states: Sequence[Tensor]) -> None:
        """Add rows: the states ``(n, D)`` of a chain, one after the other, n at least 1.

        Raises:
            ValueError: if a number is not finite.
        """
        count = len(states[0])
        total = self.count + count
        between = self.count * count / total
        previous = shift = None  # the state before, about its mean; how far its mean is from ours
        for index, state in enumerate(states):
            mean, rows = _centred(state)
            if self.count == 0:
                self._start(mean, first=index == 0)
            difference = mean - self._means[index]
            self._grams[index].addmm_(rows.T, rows).addr_(difference, difference, alpha=between)
            if previous is not None and shift is not None:
                product = self._products[index - 1]
                product.addmm_(previous.T, rows).addr_(shift, difference, alpha=between)
            self._means[index] += difference * (count / total)
            previous, shift = rows, difference
        self.count = total

    def pair(self, index: int) -> PairStatistics:
        """Statistics of state ``index`` as x and state ``index + 1`` as y."""
        return PairStatistics(
            self.count,
            self._means[index],
            self._means[index + 1],
            self._grams[index],
            self._products[index],
            self._grams[index + 1].diagonal(),
        )

    def _start(self, mean: Tensor, first: bool) -> None:
        size = len(mean)
        if not first:
            self._products.append(mean.new_zeros(len(self._means[-1]), size))
        self._means.append(mean.clone())
        self._grams.append(mean.new_zeros(size, size))


def _centred(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The mean ``(D,)`` and the rows ``(n, D)`` about it, in float64."""
    rows = rows.double()
    mean = rows.mean(dim=0)
    if not bool(mean.isfinite().all()):
        raise ValueError(
            "activations that are not finite (NaN or infinite); try model.dtype=float32"
        )
    return mean, rows - mean
