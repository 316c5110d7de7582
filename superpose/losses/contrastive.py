"""Joint Contrastive guidance (eq. 7) and the per-stream cross-entropy that trains it, fused.

A guide model has read each of the N streams on its own. With the logits l_large of the one mixed
pass and l_n those of the guide on stream n, the logits of stream n are

    l_large + alpha l_n - beta mean_{m != n} l_m         (eq. 7; N = 2 is the paper's formula)

and its loss is the cross-entropy with its own next token. Gradients, with p_n the softmax of these
logits and y_n the one-hot next token:

    dloss/dl_large = sum_n (p_n - y_n)
    dloss/dalpha   = sum_n <p_n - y_n, l_n>
    dloss/dbeta    = - sum_n <p_n - y_n, mean_{m != n} l_m>

A chunk of C positions takes 1 + N buffers of C x V numbers, whatever the number of positions; the
guide is frozen, and its logits are formed once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from superpose.losses.projection import (
    Chunk,
    Head,
    LogitMap,
    auto_chunk_size,
    chunks,
    common_dtype,
    fused_sum,
    row_blocks,
)


def contrastive_logits(
    large: Tensor, guide: Tensor, alpha: Tensor | float, beta: Tensor | float
) -> Tensor:
    """The streams' own logits (eq. 7).

    Args:
        large: ``(..., V)`` logits of the mixed pass.
        guide: ``(N, ..., V)`` logits of the guide, stream by stream.
        alpha: weight of a stream's own guide logits.
        beta: weight of the mean of the other streams' guide logits.

    Returns:
        ``(N, ..., V)``. A single stream has no others to be told from: its logits are ``large``.
    """
    if len(guide) == 1:
        return large.unsqueeze(0)
    return large + alpha * guide - beta * others_mean(guide)


def others_mean(guide: Tensor) -> Tensor:
    """``(N, ...)``: at n the mean over all m but n of ``guide (N, ...)``, N at least 2."""
    return (guide.sum(dim=0) - guide) / (len(guide) - 1)


@dataclass(frozen=True)
class Guidance:
    """What a guide model adds to a batch.

    Attributes:
        hidden: ``(B, N, T, D')`` the frozen guide's hidden states of each stream on its own; never
            differentiated.
        head: its output head.
        alpha: 0-dim, weight of a stream's own guide logits.
        beta: 0-dim, weight of the other streams' mean.
    """

    hidden: Tensor
    head: Head
    alpha: Tensor
    beta: Tensor


@dataclass(frozen=True)
class StreamCrossEntropy:
    """The loss of one batch.

    Attributes:
        total: sum over all predicted tokens of their negative log-likelihood in nats, 0-dim,
            differentiable once in hidden states, head, alpha and beta. Divide by the number of
            predicted tokens of the whole (accumulated) batch.
        per_position: the same, unreduced and detached, ``(B, N, T)``; 0 where nothing is predicted.
    """

    total: Tensor
    per_position: Tensor


def stream_cross_entropy(
    hidden: Tensor,
    head: Head,
    labels: Tensor,
    predicted: Tensor,
    guidance: Guidance | None = None,
    *,
    num_tokens: int | None = None,
    chunk_size: int | None = None,
) -> StreamCrossEntropy:
    """Cross-entropy of every stream's next token, from one mixed pass and no (B, N, T, V) tensor.

    Args:
        hidden: ``(B, T, D)`` final hidden states of the mixed pass.
        head: the output head.
        labels: ``(B, N, T)`` int64; at t the token that follows position t in stream n.
        predicted: ``(B, N, T)`` bool; whether that token is to be predicted. A stream without any
            in its row takes no part there: a row with one stream left is an ordinary next-token
            row, which the guide does not touch.
        guidance: alpha, beta and the guide's hidden states; None is the same logits for all streams.
        num_tokens: the probabilities are over the first ``num_tokens`` logits, those that the
            tokenizer can name; None is all. A guide needs it where the two widths differ.
        chunk_size: C, positions at a time; None chooses it from the memory of the buffers. It
            changes the result by rounding only.

    Returns:
        The loss, in float32 (float64 if an input is), also under autocast. With nothing to predict
        it is 0 with zero gradients.

    Raises:
        ValueError: if the logits of head and guide have different widths, or fewer than
            ``num_tokens``.
    """
    inputs = (hidden, head.weight, *((guidance.hidden, guidance.head.weight) if guidance else ()))
    dtype = common_dtype(*inputs)
    heads = (head, guidance.head) if guidance else (head,)
    vocab_size = _vocab_size(heads, num_tokens)
    num_buffers = 1 + (labels.shape[1] if guidance else 0)
    work = _Work(
        labels=labels,
        predicted=predicted.bool(),
        large=LogitMap.of(head, dtype, num_tokens=vocab_size),
        guide=LogitMap.of(guidance.head, dtype, num_tokens=vocab_size) if guidance else None,
        guidance=guidance,
        chunk_size=chunk_size
        or auto_chunk_size(vocab_size, dtype, hidden.device.type, num_buffers),
    )
    scalars = (guidance.alpha, guidance.beta) if guidance else (None, None)
    total, per_position = fused_sum(
        lambda wanted: _sweep(hidden.detach(), head, work, wanted),
        (hidden, head.weight, head.bias, *scalars),
        "stream_cross_entropy",
    )
    return StreamCrossEntropy(total, per_position)


def _vocab_size(heads: Sequence[Head], num_tokens: int | None) -> int:
    """How many logits the loss is over."""
    widths = [head.weight.shape[0] for head in heads]
    if num_tokens is None and len(set(widths)) > 1:
        raise ValueError(
            f"backbone and guide have {widths[0]} and {widths[1]} logits; give num_tokens, the size "
            "of the tokenizer that both share"
        )
    if num_tokens is not None and num_tokens > min(widths):
        raise ValueError(f"num_tokens={num_tokens} is above the {min(widths)} logits of a head")
    return widths[0] if num_tokens is None else num_tokens


@dataclass(frozen=True)
class _Work:
    """Everything of a call but the hidden states; V is the number of logits it is over."""

    labels: Tensor  # (B, N, T)
    predicted: Tensor  # (B, N, T)
    large: LogitMap
    guide: LogitMap | None
    guidance: Guidance | None
    chunk_size: int


class _Gradients:
    """The gradients by hidden states, head weight, head bias, alpha and beta, as they add up."""

    def __init__(self, hidden: Tensor, head: Head, dtype: torch.dtype, wanted: Sequence[bool]):
        """Zeros of the shapes of the trained tensors; None for those not wanted."""
        weight, bias = head.weight, head.bias
        self.hidden = torch.zeros_like(hidden) if wanted[0] else None
        self.weight = torch.zeros_like(weight, dtype=dtype) if wanted[1] else None
        self.bias = torch.zeros_like(bias, dtype=dtype) if wanted[2] and bias is not None else None
        self.wanted = tuple(wanted)
        self.alpha = self.beta = torch.zeros((), dtype=torch.float64, device=hidden.device)

    def add(self, chunk: Chunk, chunk_hidden: Tensor, by_logits: Tensor, weight: Tensor) -> None:
        """Propagate ``by_logits (C, V)``, the gradient by ``W h + b``."""
        num_tokens = by_logits.shape[1]
        if self.hidden is not None:
            where = (chunk.rows, chunk.positions)
            self.hidden[where] = (by_logits @ weight).to(self.hidden.dtype)
        if self.weight is not None:
            self.weight[:num_tokens].addmm_(by_logits.t(), chunk_hidden)
        if self.bias is not None:
            self.bias[:num_tokens].add_(by_logits.sum(dim=0))

    def as_list(self) -> list[Tensor | None]:
        """In the order of the trained tensors."""
        scalars = [self.alpha if self.wanted[3] else None, self.beta if self.wanted[4] else None]
        return [self.hidden, self.weight, self.bias, *scalars]


def _sweep(
    hidden: Tensor, head: Head, work: _Work, wanted: Sequence[bool]
) -> tuple[Tensor, list[Tensor | None]]:
    """The loss ``(B, N, T)`` and its gradients; only the ``wanted`` ones are formed."""
    weight = work.large.weight
    used, positions = work.predicted.any(dim=2), work.predicted.any(dim=1)
    with torch.autocast(hidden.device.type, enabled=False):
        loss = weight.new_zeros(work.labels.shape)
        grads = _Gradients(hidden, head, weight.dtype, wanted)
        for chunk in chunks(used, positions, work.chunk_size):
            chunk_hidden = hidden[chunk.rows, chunk.positions].to(weight.dtype)  # (C, D)
            large = weight.new_empty(len(chunk.rows), weight.shape[0])  # (C, V)
            work.large.project(chunk_hidden, out=large)
            guide = _guide_logits(chunk, work, large)  # (k, C, V)
            values = _cross_entropy_(large, guide, chunk, work, grads)  # (k, C)
            for stream, of_stream in zip(chunk.streams, values, strict=True):
                loss[chunk.rows, stream, chunk.positions] = of_stream
            if any(wanted[:3]):
                grads.add(chunk, chunk_hidden, large, weight)
    return loss, grads.as_list()


def _guide_logits(chunk: Chunk, work: _Work, large: Tensor) -> Tensor | None:
    """The guide's logits ``(k, C, V)`` of the k streams of a chunk, or None without guidance."""
    if work.guidance is None or work.guide is None or len(chunk.streams) == 1:
        return None
    logits = large.new_empty(len(chunk.streams), *large.shape)
    for out, stream in zip(logits, chunk.streams, strict=True):
        hidden = work.guidance.hidden[chunk.rows, stream, chunk.positions].to(large.dtype)
        work.guide.project(hidden, out=out)
        work.guide.temper_(out)
    return logits


def _cross_entropy_(
    large: Tensor, guide: Tensor | None, chunk: Chunk, work: _Work, grads: _Gradients
) -> Tensor:
    """Cross-entropy ``(k, C)`` of the k streams of a chunk.

    ``large (C, V)`` comes as ``W h + b`` and, if gradients are wanted, ends as the gradient by it.
    """
    values = []
    where = [(chunk.rows, n, chunk.positions) for n in chunk.streams]
    labels = torch.stack([work.labels[at] for at in where])  # (k, C)
    predicted = torch.stack([work.predicted[at] for at in where])
    for block in row_blocks(large):
        z, y, is_predicted = large[block], labels[:, block], predicted[:, block].to(large.dtype)
        slope = work.large.temper_(z)
        if guide is None or work.guidance is None:
            log_probs = torch.log_softmax(z, dim=-1).expand(len(y), -1, -1)
        else:
            alpha, beta = work.guidance.alpha.detach(), work.guidance.beta.detach()
            logits = contrastive_logits(z, guide[:, block], alpha.to(z), beta.to(z))
            log_probs = torch.log_softmax(logits, dim=-1)  # (k, c, V)
        values.append(-log_probs.gather(-1, y.unsqueeze(-1)).squeeze(-1) * is_predicted)
        if any(grads.wanted):
            error = log_probs.exp()  # p_n - y_n
            error.scatter_add_(-1, y.unsqueeze(-1), error.new_full((*y.shape, 1), -1.0))
            error.mul_(is_predicted.unsqueeze(-1))
            if guide is not None:
                own, others = guide[:, block], others_mean(guide[:, block])
                grads.alpha = grads.alpha + torch.linalg.vecdot(error, own).double().sum()
                grads.beta = grads.beta - torch.linalg.vecdot(error, others).double().sum()
            torch.sum(error, dim=0, out=z)
            if slope is not None:
                z.mul_(slope)
            if work.large.factor != 1.0:
                z.mul_(work.large.factor)
    return torch.cat(values, dim=1)
