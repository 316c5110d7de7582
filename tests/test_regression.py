"""Streaming least squares against numpy's, on the rows themselves, in float64."""

import numpy as np
import pytest
import torch

from superpose.regression import least_squares
from superpose.regression.least_squares import (
    effective_rank,
    fit,
    per_feature_r2,
    r2,
    r2_by_rank,
    reduced,
    residual_squares,
    spectrum,
)
from superpose.regression.statistics import ChainStatistics, PairStatistics


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rows(kind: str, count: int = 400) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs of one kind, and outputs that are a nonlinear function of them."""
    x = draw(count, 12)
    if kind == "ill-conditioned":
        x = x * torch.logspace(0, -6, 12, dtype=torch.float64) @ torch.linalg.qr(draw(12, 12)).Q
    if kind == "large means":
        x = x + 1e6
    if kind == "duplicated":
        x[:, 5] = x[:, 2]
        x[:, 7] = 3 * x[:, 1] - x[:, 0]
    if kind == "constant":
        x[:, 3] = 0.1
        x[:, 4] = 0.0
    centred = (x - x.mean(0)) / x.std(0).clamp_min(1e-12)
    y = centred @ draw(12, 5, seed=1) + 0.5 * (centred @ draw(12, 5, seed=2)).tanh() + 7.0
    return x, y


def streamed(x: torch.Tensor, y: torch.Tensor, size: int = 64) -> PairStatistics:
    parts = [PairStatistics.of(a, b) for a, b in zip(x.split(size), y.split(size), strict=True)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def lstsq(x: torch.Tensor, y: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Means-removed fit by numpy: weight and residual squares."""
    a, b = (x - x.mean(0)).numpy(), (y - y.mean(0)).numpy()
    weight = np.linalg.lstsq(a, b, rcond=1e-13)[0]
    return weight, ((b - a @ weight) ** 2).sum(0)


KINDS = ("ordinary", "ill-conditioned", "large means", "duplicated", "constant")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 64, 400])
def test_fit_equals_numpy(kind: str, size: int) -> None:
    x, y = rows(kind)
    statistics = streamed(x, y, size)
    linear = fit(statistics)
    weight, residuals = lstsq(x, y)
    expected = 1 - residuals.sum() / ((y - y.mean(0)) ** 2).sum().item()
    assert r2(linear, statistics) == pytest.approx(expected, abs=1e-6)
    np.testing.assert_allclose(residual_squares(linear, statistics), residuals, rtol=1e-4)
    predicted = x @ linear.weight + linear.bias
    np.testing.assert_allclose(((y - predicted) ** 2).sum(0), residuals, rtol=1e-4)
    assert linear.method == ("eigen" if kind in ("duplicated", "constant") else "cholesky")
    if kind == "ordinary":
        np.testing.assert_allclose(linear.weight, weight, rtol=1e-9, atol=1e-12)
        assert r2(linear, statistics) == pytest.approx(expected, abs=1e-13)


def test_the_two_ways_to_solve_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    statistics = streamed(*rows("ordinary"))
    by_cholesky = fit(statistics)
    monkeypatch.setattr(least_squares, "SMALLEST_PIVOT", 2.0)
    by_eigen = fit(statistics)
    assert (by_cholesky.method, by_eigen.method) == ("cholesky", "eigen")
    torch.testing.assert_close(by_cholesky.weight, by_eigen.weight, rtol=1e-10, atol=1e-12)


def test_rank_and_condition_number() -> None:
    x, y = rows("ordinary")
    rank, condition = spectrum(streamed(x, y))
    values = np.linalg.eigvalsh(np.cov(x.numpy().T))
    assert (rank, condition) == (12, pytest.approx(values[-1] / values[0]))
    assert spectrum(streamed(*rows("duplicated")))[0] == 10
    assert spectrum(streamed(*rows("constant")))[0] == 10
    x, y = rows("ordinary", count=8)  # fewer rows than features: met exactly
    few = streamed(x, y, 3)
    assert spectrum(few)[0] == 7
    assert r2(fit(few), few) == pytest.approx(1.0, abs=1e-10)
    nothing = PairStatistics.of(torch.ones(5, 3), draw(5, 2))
    assert spectrum(nothing) == (0, 1.0)
    assert r2(fit(nothing), nothing) == 0.0


def test_statistics_merge_and_subtract_in_any_order() -> None:
    x, y = rows("large means")
    whole = PairStatistics.of(x, y)
    first, second = PairStatistics.of(x[:150], y[:150]), PairStatistics.of(x[150:], y[150:])
    for other in (streamed(x, y, 7), first + second, second + first):
        assert other.count == 400
        for name in ("mean_x", "mean_y", "xx", "xy", "yy"):
            torch.testing.assert_close(
                getattr(other, name), getattr(whole, name), rtol=1e-9, atol=1e-6
            )
    without = whole - first
    assert without.count == 250
    for name in ("mean_x", "xx", "xy", "yy"):
        torch.testing.assert_close(
            getattr(without, name), getattr(second, name), rtol=1e-8, atol=1e-5
        )


def test_held_out_rows_are_explained_as_if_predicted_one_by_one() -> None:
    x, y = rows("ordinary")
    train, held_out = streamed(x[:300], y[:300]), streamed(x[300:], y[300:] + 2.0)
    linear = fit(train)
    errors = (y[300:] + 2.0 - (x[300:] @ linear.weight + linear.bias)).square().sum(0)
    deviations = (y[300:] - y[300:].mean(0)).square().sum(0)
    torch.testing.assert_close(residual_squares(linear, held_out), errors)
    torch.testing.assert_close(per_feature_r2(linear, held_out), 1 - errors / deviations)
    assert r2(linear, held_out) == pytest.approx(float(1 - errors.sum() / deviations.sum()))


def test_a_constant_output_has_no_r2_of_its_own() -> None:
    x, y = rows("ordinary")
    y[:, 1] = 0.3
    statistics = streamed(x, y)
    by_feature = per_feature_r2(fit(statistics), statistics)
    assert by_feature.isnan().tolist() == [False, True, False, False, False]


def test_reduced_rank_regression_of_every_rank() -> None:
    x, y = rows("ordinary")
    train, held_out = streamed(x[:300], y[:300]), streamed(x[300:], y[300:])
    full = fit(train)
    by_rank = r2_by_rank(full, train, held_out)
    assert len(by_rank) == 6
    fitted = ((x[:300] - full.mean_x) @ full.weight).numpy()
    directions = np.linalg.svd(fitted, full_matrices=False)[2]
    for rank in range(6):
        kept = torch.from_numpy(directions[:rank].T @ directions[:rank])
        predicted = (x[300:] - full.mean_x) @ full.weight @ kept + full.mean_y
        error = (y[300:] - predicted).square().sum() / (y[300:] - y[300:].mean(0)).square().sum()
        assert float(by_rank[rank]) == pytest.approx(float(1 - error), abs=1e-10)
        assert r2(reduced(full, train, rank), held_out) == pytest.approx(float(by_rank[rank]))
    # in the fitted rows themselves each rank explains more than the last
    assert bool((r2_by_rank(full, train, train).diff() >= 0).all())


def test_a_map_of_known_rank_is_found() -> None:
    x = draw(500, 20)
    y = x @ draw(20, 3, seed=1) @ draw(3, 16, seed=2) + 5.0
    train, held_out = streamed(x[:400], y[:400]), streamed(x[400:], y[400:])
    by_rank = r2_by_rank(fit(train), train, held_out)
    assert float(by_rank[3]) == pytest.approx(1.0, abs=1e-12)
    assert effective_rank(by_rank, 0.9999) == 3
    assert effective_rank(by_rank) <= 3


@pytest.mark.parametrize("size", [9, 100])
def test_a_chain_is_the_statistics_of_its_pairs(size: int) -> None:
    states = [draw(100, 6, seed=index) + 100.0 * index for index in range(4)]
    states = [state.float() for state in states]  # as a model gives them
    chain = ChainStatistics()
    for parts in zip(*(state.split(size) for state in states), strict=True):
        chain.add(parts)
    assert chain.count == 100
    for index in range(3):
        expected = PairStatistics.of(states[index], states[index + 1])
        for name in ("count", "mean_x", "mean_y", "xx", "xy", "yy"):
            ours, theirs = getattr(chain.pair(index), name), getattr(expected, name)
            torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-9)


def test_what_is_not_finite_is_refused() -> None:
    x, y = rows("ordinary")
    y[3, 2] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        PairStatistics.of(x, y)
