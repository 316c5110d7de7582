"""Exact least squares ``y = x W + b`` from sufficient statistics, and what it explains.

No optimiser: the inputs of a language model's blocks are so badly conditioned (1e4 to 1e11) that
thousands of gradient steps stay far from the optimum.

Features are first scaled to unit variance. If every pivot of the Cholesky factorisation of their
correlation matrix is above :data:`SMALLEST_PIVOT`, that factorisation solves it, without a ridge;
otherwise (duplicated or constant features, fewer rows than features) its eigendecomposition does,
directions below ``D * eps`` of the largest eigenvalue being left out: the solution of least norm.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from superpose.regression.statistics import PairStatistics

EPSILON = torch.finfo(torch.float64).eps
# Of a correlation matrix: the share of a feature's variance that the features before it leave.
SMALLEST_PIVOT = 1e-10


@dataclass(frozen=True)
class LinearMap:
    """The least-squares map ``y = (x - mean_x) W + mean_y``.

    Attributes:
        weight: W, ``(D, D')`` float64.
        mean_x: ``(D,)`` of the rows it was fitted to.
        mean_y: ``(D',)`` of them.
        method: ``cholesky`` or ``eigen``.
    """

    weight: Tensor
    mean_x: Tensor
    mean_y: Tensor
    method: str

    @property
    def bias(self) -> Tensor:
        """b ``(D',)`` of ``y = x W + b``."""
        return self.mean_y - self.mean_x @ self.weight


def fit(statistics: PairStatistics) -> LinearMap:
    """The map of least squared error over the rows of ``statistics``."""
    scale = _inverse_scale(statistics)
    correlation = scale[:, None] * statistics.xx * scale
    product = scale[:, None] * statistics.xy
    factor, failed = torch.linalg.cholesky_ex(correlation)
    if not failed and bool(factor.diagonal().square().min() > SMALLEST_PIVOT):
        solved, method = torch.cholesky_solve(product, factor), "cholesky"
    else:
        values, vectors = torch.linalg.eigh(correlation)
        kept = values > _cut_off(values)
        inside = (vectors[:, kept].T @ product) / values[kept, None]
        solved, method = vectors[:, kept] @ inside, "eigen"
    return LinearMap(scale[:, None] * solved, statistics.mean_x, statistics.mean_y, method)


def residual_squares(linear: LinearMap, statistics: PairStatistics) -> Tensor:
    """Residual sum of squares ``(D',)`` of each output over the rows of ``statistics``.

    They may be other rows than those that ``linear`` was fitted to.
    """
    rows = statistics.about(linear.mean_x, linear.mean_y)
    explained = (linear.weight * (2 * rows.xy - rows.xx @ linear.weight)).sum(dim=0)
    return (rows.yy - explained).clamp_min(0.0)


def r2(linear: LinearMap, statistics: PairStatistics) -> float:
    """Share of y's variance explained: 1 - sum of squared errors / sum of squared deviations.

    Sums run over rows and features; deviations are from each feature's own mean in ``statistics``,
    so predicting the features' means scores 0. 1 where y is constant and met exactly.
    """
    return _share(residual_squares(linear, statistics).sum(), statistics.yy.sum())


def per_feature_r2(linear: LinearMap, statistics: PairStatistics) -> Tensor:
    """The same for each output alone, ``(D',)``; NaN for an output that is constant."""
    varies = ~constant(statistics.yy, statistics.mean_y, statistics.count)
    ratio = residual_squares(linear, statistics) / statistics.yy
    return torch.where(varies, 1.0 - ratio, torch.nan)


def r2_by_rank(linear: LinearMap, fitted: PairStatistics, held_out: PairStatistics) -> Tensor:
    """R2 on ``held_out`` of the best map of every rank: reduced-rank regression.

    The least-squares map of rank k is ``W V_k V_k'``, with the first k eigenvectors V of the
    fitted values' covariance ``W' X'X W``; all ranks share one eigendecomposition.

    Args:
        linear: the full map, :func:`fit` of ``fitted``.
        fitted: the rows it was fitted to.
        held_out: the rows to explain.

    Returns:
        ``(D' + 1,)``, rank 0 (the means alone) first.
    """
    outputs = output_directions(linear, fitted)
    rotated = linear.weight @ outputs  # (D, D')
    rows = held_out.about(linear.mean_x, linear.mean_y)
    gains = (rotated * (2 * rows.xy @ outputs - rows.xx @ rotated)).sum(dim=0)
    residuals = rows.yy.sum() - torch.cat([gains.new_zeros(1), gains.cumsum(0)])
    return 1.0 - residuals / held_out.yy.sum()


def reduced(linear: LinearMap, fitted: PairStatistics, rank: int) -> LinearMap:
    """The least-squares map of rank at most ``rank`` (reduced-rank regression)."""
    kept = output_directions(linear, fitted)[:, :rank]
    return LinearMap(
        linear.weight @ kept @ kept.T, linear.mean_x, linear.mean_y, f"{linear.method}, rank {rank}"
    )


def output_directions(linear: LinearMap, fitted: PairStatistics) -> Tensor:
    """Orthonormal output directions ``(D', D')``, those of most fitted variance first."""
    covariance = linear.weight.T @ fitted.xx @ linear.weight
    return torch.linalg.eigh(covariance).eigenvectors.flip(dims=(1,))


def effective_rank(by_rank: Tensor, share: float = 0.9) -> int:
    """The smallest rank that reaches ``share`` of the full R2 of :func:`r2_by_rank`."""
    reaches = by_rank >= share * by_rank[-1]
    return int(reaches.nonzero()[0])


def spectrum(statistics: PairStatistics) -> tuple[int, float]:
    """Numerical rank and condition number of the inputs' covariance.

    Eigenvalues below ``D * eps`` of the largest count as zero; the condition number is the largest
    over the smallest that is left, 1 for inputs that never change.
    """
    values = torch.linalg.eigvalsh(statistics.xx)
    kept = values[values > _cut_off(values)]
    return len(kept), float(kept[-1] / kept[0]) if len(kept) else 1.0


def constant(squares: Tensor, mean: Tensor, count: int) -> Tensor:
    """``(D,)`` bool: features whose deviations are nothing but the rounding of their mean."""
    return squares <= count * (EPSILON * mean).square() * 16


def _inverse_scale(statistics: PairStatistics) -> Tensor:
    """One over the root of each feature's squares ``(D,)``; 0 for a constant feature."""
    squares = statistics.xx.diagonal()
    varies = ~constant(squares, statistics.mean_x, statistics.count)
    return torch.where(varies, squares.rsqrt(), 0.0)


def _cut_off(values: Tensor) -> Tensor:
    return len(values) * EPSILON * values.max().clamp_min(0.0)


def _share(residual: Tensor, total: Tensor) -> float:
    if float(total) == 0.0:
        return 1.0 if float(residual) == 0.0 else 0.0
    return 1.0 - float(residual / total)
