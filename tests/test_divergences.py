"""Divergences against numbers from pencil and paper, independent references and exact limits."""

import math
import warnings

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor

from superpose.losses import divergences
from superpose.losses.divergences import (
    js,
    kl,
    mixture_log_probs,
    total_variation,
    transport_cost,
    wasserstein,
)


def random_log_probs(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(*shape, generator=generator, dtype=torch.float64)
    return logits.log_softmax(dim=-1).to(dtype)


def test_two_tokens_by_hand() -> None:
    """P = (3/4, 1/4), Q = (1/2, 1/2): both directions of KL, JS and total variation."""
    log_p, log_q = torch.tensor([0.75, 0.25]).log(), torch.tensor([0.5, 0.5]).log()
    assert kl(log_p, log_q).item() == pytest.approx(0.130812, abs=1e-6)
    assert kl(log_q, log_p).item() == pytest.approx(0.143841, abs=1e-6)
    assert total_variation(log_p, log_q).item() == pytest.approx(0.25)
    # M = (5/8, 3/8): (0.75 ln 1.2 + 0.25 ln(2/3) + 0.5 ln 0.8 + 0.5 ln(4/3)) / 2
    assert js(log_p, log_q).item() == pytest.approx(0.033822, abs=1e-6)


def test_agrees_with_scipy() -> None:
    log_p, log_q = random_log_probs(4, 3, 50), random_log_probs(4, 3, 50, seed=1)
    p, q = log_p.double().exp().numpy(), log_q.double().exp().numpy()
    np.testing.assert_allclose(kl(log_p, log_q), scipy.stats.entropy(p, q, axis=-1), rtol=1e-5)
    jensen = 0.5 * (
        scipy.stats.entropy(p, (p + q) / 2, axis=-1) + scipy.stats.entropy(q, (p + q) / 2, axis=-1)
    )
    np.testing.assert_allclose(js(log_p, log_q), jensen, rtol=1e-5)
    assert kl(log_p, log_q).shape == (4, 3)


def test_limits() -> None:
    log_p, log_q = random_log_probs(64, 5000), random_log_probs(64, 5000, seed=1)
    for divergence in (kl, js, total_variation):
        assert divergence(log_p, log_p).abs().max() < 1e-6
        assert divergence(log_p, log_q).min() > 0
    near = (log_p + 1e-4 * log_q).log_softmax(dim=-1)
    assert kl(log_p, near).min() >= -1e-6
    for symmetric in (js, total_variation):
        torch.testing.assert_close(symmetric(log_p, log_q), symmetric(log_q, log_p))
    disjoint = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).log()
    assert js(disjoint[0], disjoint[1]).item() == pytest.approx(math.log(2))
    assert total_variation(disjoint[0], disjoint[1]).item() == 1.0
    assert kl(disjoint[0], disjoint[0]).item() == 0.0
    assert kl(disjoint[0], disjoint[1]).item() == math.inf


def test_low_precision_is_raised_to_float32() -> None:
    log_p = random_log_probs(8, 1000, dtype=torch.bfloat16)
    log_q = random_log_probs(8, 1000, seed=1, dtype=torch.bfloat16)
    value = kl(log_p, log_q)
    assert value.dtype == torch.float32
    torch.testing.assert_close(
        value.double(), kl(log_p.double(), log_q.double()), rtol=1e-5, atol=0
    )


def test_mixture_is_the_weighted_mean() -> None:
    log_probs = random_log_probs(3, 2, 4, 20)  # (N, B, T, V)
    weights = torch.tensor(
        [[0.2, 1.0], [0.3, 0.0], [0.5, 0.0]]
    )  # (N, B): the second row is one-hot
    mixed = mixture_log_probs(log_probs, weights)
    expected = (log_probs.exp() * weights[:, :, None, None]).sum(dim=0)
    torch.testing.assert_close(mixed.exp(), expected)
    torch.testing.assert_close(mixed[1], log_probs[0, 1])
    torch.testing.assert_close(mixed.exp().sum(dim=-1), torch.ones(2, 4))
    uniform = mixture_log_probs(log_probs, torch.full((3,), 1 / 3))
    torch.testing.assert_close(uniform.exp(), log_probs.exp().mean(dim=0))


def test_mixture_does_not_underflow() -> None:
    """The log of the mean of two peaked distributions would be -inf for most tokens."""
    log_probs = (200 * torch.eye(2, 6)).log_softmax(dim=-1)
    mixed = mixture_log_probs(log_probs, torch.tensor([0.5, 0.5]))
    assert mixed.isfinite().all()
    assert mixed[2:] == pytest.approx(-200.0)


def test_wasserstein_limits() -> None:
    embeddings = torch.randn(300, 8, generator=torch.Generator().manual_seed(3))
    log_p, log_q = random_log_probs(2, 300), random_log_probs(2, 300, seed=1)
    assert wasserstein(log_p, log_p, embeddings).abs().max() < 1e-12
    forward, backward = wasserstein(log_p, log_q, embeddings), wasserstein(log_q, log_p, embeddings)
    torch.testing.assert_close(forward, backward, rtol=1e-9, atol=0)
    assert forward.dtype == torch.float64
    assert (forward > 0).all()
    mixed_dtypes = wasserstein(log_p.bfloat16(), log_q.double(), embeddings.bfloat16())
    torch.testing.assert_close(mixed_dtypes, forward, rtol=0.05, atol=0)


def test_wasserstein_with_cost_0_or_1_is_total_variation() -> None:
    """Orthogonal embeddings: every move costs 1; disjoint supports are at distance 1."""
    log_p, log_q = random_log_probs(3, 20), random_log_probs(3, 20, seed=1)
    torch.testing.assert_close(
        wasserstein(log_p, log_q, torch.eye(20)), total_variation(log_p.double(), log_q.double())
    )
    disjoint = torch.tensor([[0.5, 0.5, 1e-9, 1e-9], [1e-9, 1e-9, 0.5, 0.5]]).log()
    distance = wasserstein(disjoint[:1], disjoint[1:], torch.eye(4), top_k=2)
    assert distance.item() == pytest.approx(1.0)


def test_wasserstein_keeps_the_top_tokens_of_each_side() -> None:
    """Top 1 of each side: the cosine distance of the two tokens."""
    embeddings = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
    log_p, log_q = torch.tensor([[0.6, 0.3, 0.1]]).log(), torch.tensor([[0.2, 0.7, 0.1]]).log()
    distance = wasserstein(log_p, log_q, embeddings, top_k=1)
    assert distance.item() == pytest.approx(1 - math.sqrt(0.5), abs=1e-7)


def test_transport_on_a_line_is_the_difference_of_the_cdfs() -> None:
    positions = np.arange(5.0)
    p, q = np.array([4, 1, 1, 1, 1]) / 8, np.array([1, 1, 2, 2, 4]) / 10
    expected = np.abs(np.cumsum(p - q)).sum()
    cost = np.abs(positions[:, None] - positions[None, :])
    assert transport_cost(p.astype(np.float32), 3 * q, cost) == pytest.approx(expected, abs=1e-6)


def test_a_warning_of_the_solver_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import ot

    def warning_solver(*_: object, **__: object) -> float:
        warnings.warn("numItermax reached before optimality", stacklevel=1)
        return 0.0

    monkeypatch.setattr(ot, "emd2", warning_solver)
    with pytest.raises(RuntimeError, match="numItermax reached"):
        divergences.transport_cost(np.ones(2), np.ones(2), np.ones((2, 2)))
