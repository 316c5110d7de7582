"""How close a mixed pass comes to the ideal mixture, position by position (sections 2.2 and 2.3).

The two halves are apart because several models are measured against one reference:
:func:`measure_streams` reads the reference's single-stream logits once, :func:`measure_mixture`
holds the mixed logits of any model against it. :func:`measure_row` does both. Nothing is reduced
over positions, so a caller may pass any run of positions at a time.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from superpose.losses.divergences import js, kl, mixture_log_probs, total_variation
from superpose.losses.ranks import token_rank

SMOOTHING_TEMPERATURE = 1.5  # the paper's tau for KL and JS in Table 1


@dataclass(frozen=True)
class StreamMeasures:
    """What the N single-stream passes say about T positions.

    Attributes:
        log_target: log P_target (eq. 2), ``(T, V)`` at temperature 1.
        log_target_smooth: the same from smoothed distributions, ``(T, V)``.
        tokens: argmax of each stream, ``(N, T)`` int64.
        confidence: the stream's own probability of that token at temperature 1, ``(N, T)``.
        pair_kl_nats: smoothed KL(P_n || P_m), mean over ordered pairs n != m, ``(T,)`` nats: the
            denominator of eq. 3; None for a single stream.
        pair_js_nats: the same of JS; None for a single stream or if not asked for.
        temperature: tau of the smoothing.
    """

    log_target: Tensor
    log_target_smooth: Tensor
    tokens: Tensor
    confidence: Tensor
    pair_kl_nats: Tensor | None
    pair_js_nats: Tensor | None
    temperature: float


@dataclass(frozen=True)
class MixtureMeasures:
    """How the mixed pass of one model differs from the target, at T positions.

    Attributes:
        kl_nats: KL(P_target || P_mix) at temperature 1, ``(T,)`` nats; what distillation at
            temperature 1 minimises.
        kl_smooth_nats: the same of smoothed distributions, ``(T,)`` nats: Table 1's KL.
        js_smooth_nats: smoothed JS, ``(T,)`` nats between 0 and log 2; None if not asked for.
        total_variation: at temperature 1, ``(T,)`` between 0 and 1 (Appendix E).
        ranks: rank of each stream's argmax token in the mixed logits, ``(N, T)`` int64, 1 is best.
    """

    kl_nats: Tensor
    kl_smooth_nats: Tensor
    js_smooth_nats: Tensor | None
    total_variation: Tensor
    ranks: Tensor


def measure_row(
    stream_logits: Tensor,
    mixed_logits: Tensor,
    weights: Tensor,
    *,
    temperature: float = SMOOTHING_TEMPERATURE,
    num_tokens: int | None = None,
    with_js: bool = True,
) -> tuple[StreamMeasures, MixtureMeasures]:
    """Measure one row of a batch; see the two functions that this puts together."""
    streams = measure_streams(
        stream_logits, weights, temperature=temperature, num_tokens=num_tokens, with_js=with_js
    )
    return streams, measure_mixture(streams, mixed_logits, num_tokens=num_tokens, with_js=with_js)


def measure_streams(
    stream_logits: Tensor,
    weights: Tensor,
    *,
    temperature: float = SMOOTHING_TEMPERATURE,
    num_tokens: int | None = None,
    with_js: bool = True,
) -> StreamMeasures:
    """The target and the reference distances of one row.

    Args:
        stream_logits: ``(N, T, V)`` single-stream logits of the reference model.
        weights: ``(N,)``, sum 1. Streams of weight 0 are left out of everything, so that N below
            is the number of streams in use.
        temperature: tau, divides the logits of each stream before they are mixed (KL and JS).
        num_tokens: tokens that the tokenizer can name; an argmax never lies beyond, while
            divergences take all V logits. None is V.
        with_js: compute JS too; it costs as much as all the rest.
    """
    used = weights > 0
    stream_logits, weights = stream_logits[used].float(), weights[used]
    log_probs = stream_logits.log_softmax(dim=-1)
    smooth = (stream_logits / temperature).log_softmax(dim=-1)
    named = log_probs[..., :num_tokens]
    confidence, tokens = named.max(dim=-1)
    return StreamMeasures(
        log_target=mixture_log_probs(log_probs, weights),
        log_target_smooth=mixture_log_probs(smooth, weights),
        tokens=tokens,
        confidence=confidence.exp(),
        pair_kl_nats=pair_mean(kl, smooth),
        pair_js_nats=pair_mean(js, smooth, symmetric=True) if with_js else None,
        temperature=temperature,
    )


def measure_mixture(
    streams: StreamMeasures,
    mixed_logits: Tensor,
    *,
    num_tokens: int | None = None,
    with_js: bool = True,
) -> MixtureMeasures:
    """Hold mixed logits ``(T, V)`` of a model against the target of the same positions."""
    mixed_logits = mixed_logits.float()
    log_probs = mixed_logits.log_softmax(dim=-1)
    smooth = (mixed_logits / streams.temperature).log_softmax(dim=-1)
    named = mixed_logits[..., :num_tokens]
    return MixtureMeasures(
        kl_nats=kl(streams.log_target, log_probs),
        kl_smooth_nats=kl(streams.log_target_smooth, smooth),
        js_smooth_nats=js(streams.log_target_smooth, smooth) if with_js else None,
        total_variation=total_variation(streams.log_target, log_probs),
        ranks=stream_ranks(named, streams.tokens),
    )


def stream_ranks(logits: Tensor, tokens: Tensor) -> Tensor:
    """Rank of each stream's token ``(N, T)`` in the logits ``(T, V)`` they share: ``(N, T)``."""
    return token_rank(logits.expand(len(tokens), *logits.shape), tokens)


def pair_mean(
    divergence: Callable[[Tensor, Tensor], Tensor], log_probs: Tensor, symmetric: bool = False
) -> Tensor | None:
    """Mean of a divergence over the ordered pairs n != m of N streams.

    Args:
        divergence: of two ``(T, V)`` log-probabilities, giving ``(T,)``.
        log_probs: ``(N, T, V)``.
        symmetric: D(P, Q) = D(Q, P), so that half of the pairs tell all of it.

    Returns:
        ``(T,)``, or None for fewer than two streams, which have no pair.
    """
    if len(log_probs) < 2:
        return None
    choose = itertools.combinations if symmetric else itertools.permutations
    pairs = choose(log_probs, 2)  # of (T, V)
    return torch.stack([divergence(p, q) for p, q in pairs]).mean(dim=0)
