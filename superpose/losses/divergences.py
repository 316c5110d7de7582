"""Divergences between next-token distributions: unreduced, in log space, in nats.

Every function works over the last dimension, the vocabulary V, and returns one number per
position; callers reduce. Log-probabilities are raised to float32 (float64 stays float64), whatever
the model's dtype: in bfloat16 a small KL is wrong by several times its value. Definitions: section
2.3 of arXiv 2609.29845 (Table 1); total variation: Appendix E.
"""

import math
import warnings

import numpy as np
import torch
from torch import Tensor


def mixture_log_probs(log_probs: Tensor, weights: Tensor) -> Tensor:
    """Log of the target mixture, ``log P_target = logsumexp_n(log P_n + log weights_n)`` (eq. 2).

    Args:
        log_probs: ``(N, ..., V)`` log-probabilities of N streams. Smooth with a temperature before
            mixing: the mean of tempered distributions is not the tempered mean.
        weights: ``(N,)``, or ``(N, ...)`` over leading dimensions of ``log_probs``, e.g. ``(N, B)``
            for ``(N, B, T, V)``; sum 1 over N. A stream of weight 0 contributes nothing.

    Returns:
        ``(..., V)`` log-probabilities, float32 or wider. No token gets -inf through underflow, as
        the log of a mean of probabilities would.
    """
    log_probs = _at_least_float32(log_probs)
    log_weights = weights.to(log_probs.dtype).log()
    trailing = (1,) * (log_probs.dim() - weights.dim())
    return torch.logsumexp(log_probs + log_weights.reshape(*weights.shape, *trailing), dim=0)


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(P || Q) in nats; the distillation's direction is P = target, Q = student (eq. 5).

    Computed as ``sum_v p (log p - log q) - p + q``. For distributions the last two terms sum to 0;
    with them every summand is non-negative and errors of normalisation cancel to first order, so
    that a KL near 0 is accurate and never below -1e-6.

    Args:
        log_p: ``(..., V)`` log-probabilities; -inf is a probability of 0 and contributes 0.
        log_q: ``(..., V)`` log-probabilities; -inf where ``log_p`` is not gives inf.

    Returns:
        ``(...)`` nats, float32 or wider.
    """
    log_p, log_q = _at_least_float32(log_p), _at_least_float32(log_q)
    p = log_p.exp()
    plain = torch.where(p == 0, torch.zeros_like(p), p * (log_p - log_q))
    return (plain + (log_q.exp() - p)).sum(dim=-1)


def js(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Jensen-Shannon divergence in nats, ``(KL(P || M) + KL(Q || M)) / 2`` with M their mean.

    Args:
        log_p: ``(..., V)`` log-probabilities.
        log_q: ``(..., V)`` log-probabilities.

    Returns:
        ``(...)`` nats between 0 and log 2; symmetric.
    """
    log_p, log_q = _at_least_float32(log_p), _at_least_float32(log_q)
    log_m = torch.logaddexp(log_p, log_q) - math.log(2.0)
    return 0.5 * (kl(log_p, log_m) + kl(log_q, log_m))


def total_variation(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Total variation distance ``sum_v |p - q| / 2`` (Appendix E, Fig. 4), between 0 and 1.

    Args:
        log_p: ``(..., V)`` log-probabilities.
        log_q: ``(..., V)`` log-probabilities.

    Returns:
        ``(...)``, no unit; symmetric.
    """
    difference = _at_least_float32(log_p).exp() - _at_least_float32(log_q).exp()
    return 0.5 * difference.abs().sum(dim=-1)


def wasserstein(log_p: Tensor, log_q: Tensor, embeddings: Tensor, top_k: int = 256) -> Tensor:
    """Exact Wasserstein-1 distance between the top tokens of P and Q (section 2.3).

    Each distribution is restricted to its own ``top_k`` most probable tokens and renormalised; the
    ground metric is the cosine distance ``1 - cos`` of the token embeddings. Computed in float64,
    one transport problem (milliseconds) per position.

    Args:
        log_p: ``(P, V)`` log-probabilities of P positions.
        log_q: ``(P, V)`` log-probabilities.
        embeddings: ``(V, D)`` token embeddings.
        top_k: tokens kept on each side; at most V are.

    Returns:
        ``(P,)`` float64 on the CPU, between 0 and 2; symmetric.

    Raises:
        RuntimeError: if the solver does not reach the exact optimum.
    """
    top_k = min(top_k, log_p.shape[-1])
    top_p, tokens_p = log_p.detach().double().topk(top_k, dim=-1)
    top_q, tokens_q = log_q.detach().double().topk(top_k, dim=-1)
    distances = []
    for index in range(log_p.shape[0]):
        points_p = embeddings[tokens_p[index]].detach().double()
        points_q = embeddings[tokens_q[index]].detach().double()
        cosine = torch.nn.functional.normalize(points_p, dim=-1) @ torch.nn.functional.normalize(
            points_q, dim=-1
        ).transpose(0, 1)
        distances.append(
            transport_cost(
                top_p[index].exp().cpu().numpy(),
                top_q[index].exp().cpu().numpy(),
                (1.0 - cosine).clamp_min(0.0).cpu().numpy(),
            )
        )
    return torch.tensor(distances, dtype=torch.float64)


def transport_cost(mass_p: np.ndarray, mass_q: np.ndarray, cost: np.ndarray) -> float:
    """Least cost of moving ``mass_p (I,)`` onto ``mass_q (J,)`` at ``cost (I, J)`` per unit.

    Both sides are renormalised to 1 in float64: POT returns 0 with a mere warning when the two
    masses differ in the last bits.

    Raises:
        RuntimeError: if POT's exact solver warns that it has no optimum.
    """
    import ot  # here, because importing POT takes a second

    mass_p, mass_q = mass_p.astype(np.float64), mass_q.astype(np.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error", category=UserWarning)
        try:
            value = ot.emd2(
                mass_p / mass_p.sum(),
                mass_q / mass_q.sum(),
                np.ascontiguousarray(cost, dtype=np.float64),
                numItermax=1_000_000,
            )
        except UserWarning as warning:
            raise RuntimeError(
                f"exact optimal transport of {mass_p.size} onto {mass_q.size} tokens failed: "
                f"{warning}"
            ) from warning
    return float(value)


def _at_least_float32(values: Tensor) -> Tensor:
    """Float64 as it is, anything else as float32."""
    return values if values.dtype == torch.float64 else values.float()
