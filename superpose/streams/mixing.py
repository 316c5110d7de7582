"""Weights of the streams and the mixed input embeddings (eq. 1 of arXiv 2609.29845)."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

DISTRIBUTIONS = ("uniform", "dirichlet")


def mix_embeddings(embeddings: Tensor, weights: Tensor) -> Tensor:
    """The mixed input ``z_t = sum_n weights_n E(x^n_t)`` (eq. 1 for uniform weights).

    Args:
        embeddings: ``(B, N, T, D)`` token embeddings of the streams.
        weights: ``(B, N)``, or ``(B, N, T)`` where they change along the text; sum 1 over N.

    Returns:
        ``(B, T, D)`` in the dtype of the embeddings. A one-hot row is its stream's embeddings, to
        the bit.
    """
    if weights.dim() == 2:
        weights = weights.unsqueeze(-1)
    return (embeddings * weights.unsqueeze(-1).to(embeddings.dtype)).sum(dim=1)


def draw_weights(
    num_rows: int,
    num_streams: int,
    distribution: str = "uniform",
    retention: float = 0.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw the weights of a batch, row by row.

    Args:
        num_rows: B.
        num_streams: N, at least 1.
        distribution: ``uniform`` (1/N each, the paper) or ``dirichlet`` (uniform over the simplex).
        retention: probability that a row is one-hot, an ordinary single-stream row whose stream is
            drawn at random; it keeps the student a good single-stream model.
        generator: source of randomness; the same state draws the same weights.

    Returns:
        ``(B, N)`` float32, sum 1 over N.

    Raises:
        ValueError: for an unknown distribution, a retention outside 0..1 or N < 1.
    """
    check_weights(num_streams, distribution, retention)
    if distribution == "uniform":
        weights = torch.full((num_rows, num_streams), 1.0 / num_streams)
    else:  # Dirichlet(1, ..., 1): normalised exponentials
        exponentials = -torch.log1p(-torch.rand(num_rows, num_streams, generator=generator))
        weights = exponentials / exponentials.sum(dim=1, keepdim=True).clamp_min(1e-30)
    retained = torch.rand(num_rows, generator=generator) < retention
    kept_stream = torch.randint(num_streams, (num_rows,), generator=generator)
    one_hot = torch.nn.functional.one_hot(kept_stream, num_streams).float()
    return torch.where(retained[:, None], one_hot, weights)


def stream_counts(num_streams: object) -> tuple[int, ...]:
    """The numbers of streams that an evaluation is asked for: one, or a list of different ones.

    Raises:
        ValueError: for anything else, or a number below 1.
    """
    counts: list[Any] = list(num_streams) if isinstance(num_streams, Iterable) else [num_streams]
    whole = all(isinstance(count, int) and not isinstance(count, bool) for count in counts)
    if not whole or not counts or len(set(counts)) < len(counts):
        raise ValueError(
            "streams.num_streams must be a number of texts, or a list of different ones such as "
            f"[2,3,4], got {num_streams}"
        )
    for count in counts:
        check_weights(count, "uniform", retention=0.0)
    return tuple(counts)


def check_weights(num_streams: int, distribution: str, retention: float) -> None:
    """Refuse impossible settings of the ``streams`` group, by their key."""
    if num_streams < 1:
        raise ValueError(
            f"streams.num_streams must be at least 1, got {num_streams}; "
            "2 is the paper's setting and 1 an ordinary model"
        )
    if distribution not in DISTRIBUTIONS:
        raise ValueError(
            f"streams.weights must be one of {', '.join(DISTRIBUTIONS)}, got {distribution!r}"
        )
    if not 0.0 <= retention <= 1.0:
        raise ValueError(
            f"streams.retention must lie between 0 and 1 (a fraction of rows), got {retention}"
        )
