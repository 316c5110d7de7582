"""The distillation loss, KL(P_target || P_student), fused with the output projection (eq. 5).

For one valid position with stream weights w_n, temperature tau, and a head's logit map phi (scale,
then soft-capping):

    P_target = sum_n w_n softmax(phi(W_t t_n + b_t) / tau)         (eq. 4, 5: temper, then average)
    z        = phi(W_s h + b_s) / tau,  Q = softmax(z)
    loss     = sum_v P_target (log P_target - log Q)               nats
    dloss/dz = Q - P_target

The gradient needs nothing that the loss does not, so both are formed in one sweep over chunks of C
positions, and the backward pass only scales what is there. Two C x V buffers are reused for all
chunks and streams: the extra memory is 2 C V numbers and the gradient of the head (V D), whatever
the number of positions and streams, and N + 3 products of size P x D x V are done in all.
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


@dataclass(frozen=True)
class MixtureKL:
    """The loss of one batch.

    Attributes:
        total: sum over valid positions of KL(P_target || P_student) in nats at the temperature,
            0-dim, differentiable once in the student's hidden states and head. Divide by the
            number of valid positions of the whole (accumulated) batch; no factor of tau squared.
        per_position: the same, unreduced and detached, ``(B, T)``; 0 at masked positions.
    """

    total: Tensor
    per_position: Tensor


def mixture_kl(
    student_hidden: Tensor,
    student_head: Head,
    teacher_hidden: Tensor,
    teacher_head: Head,
    weights: Tensor,
    *,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    chunk_size: int | None = None,
) -> MixtureKL:
    """KL from the mixture of N teacher streams to the student, without any (B, T, V) tensor.

    Args:
        student_hidden: ``(B, T, D)`` the student's final hidden states of the mixed pass.
        student_head: its output head.
        teacher_hidden: ``(B, N, T, D')`` the frozen teacher's single-stream hidden states; never
            differentiated.
        teacher_head: its output head, of the same vocabulary.
        weights: ``(B, N)`` non-negative, sum 1 over N. Streams of weight 0 are not read, so a
            one-hot row costs one teacher product, not N.
        mask: ``(B, T)`` bool, True at valid positions; None is all.
        temperature: tau, divides the logits on both sides.
        chunk_size: C, positions at a time; None chooses it from the memory of the buffers. It
            changes the result by rounding only.

    Returns:
        The loss, in float32 (float64 if an input is), also under autocast. With all positions
        masked the total is 0 with zero gradients. The backward pass runs once: its gradients lie
        in place, and a second one raises RuntimeError.

    Raises:
        ValueError: if the vocabularies differ, the weights are no mixture, or the temperature or
            chunk size is not positive.
    """
    _check(student_head, teacher_head, weights, temperature, chunk_size)
    dtype = common_dtype(student_hidden, student_head.weight, teacher_hidden, teacher_head.weight)
    num_rows, length, _ = student_hidden.shape
    valid = torch.ones(num_rows, length, dtype=torch.bool, device=student_hidden.device)
    work = _Work(
        teacher_hidden=teacher_hidden.detach(),
        teacher=LogitMap.of(teacher_head, dtype, temperature),
        student=LogitMap.of(student_head, dtype, temperature),
        weights=torch.nn.functional.normalize(weights.detach().to(dtype), p=1.0, dim=1),
        mask=valid if mask is None else mask.bool(),
        chunk_size=chunk_size
        or auto_chunk_size(student_head.weight.shape[0], dtype, student_hidden.device.type),
    )
    total, per_position = fused_sum(
        lambda wanted: _sweep(student_hidden.detach(), work, wanted),
        (student_hidden, student_head.weight, student_head.bias),
        "mixture_kl",
    )
    return MixtureKL(total, per_position)


def _check(
    student_head: Head,
    teacher_head: Head,
    weights: Tensor,
    temperature: float,
    chunk_size: int | None,
) -> None:
    """Refuse what would give a wrong number instead of an error."""
    student_vocab, teacher_vocab = student_head.weight.shape[0], teacher_head.weight.shape[0]
    if student_vocab != teacher_vocab:
        raise ValueError(
            f"teacher and student must have one vocabulary, got {teacher_vocab} logits of the "
            f"teacher and {student_vocab} of the student; use two models with the same tokenizer"
        )
    if temperature <= 0:
        raise ValueError(f"temperature must be positive, got {temperature}; 1 leaves the logits")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1 position, got {chunk_size}; or None")
    sums = weights.detach().double().sum(dim=1)
    if bool((weights < 0).any()) or bool(((sums - 1).abs() > 1e-3).any()):
        raise ValueError(
            "weights must be non-negative and sum to 1 over the streams of each row, got "
            f"{weights.tolist()}"
        )


@dataclass(frozen=True)
class _Work:
    """Everything of a call that is not differentiated."""

    teacher_hidden: Tensor  # (B, N, T, D')
    teacher: LogitMap
    student: LogitMap
    weights: Tensor  # (B, N)
    mask: Tensor  # (B, T)
    chunk_size: int


def _fill_target(target: Tensor, logits: Tensor, chunk: Chunk, work: _Work) -> None:
    """P_target of a chunk into ``target (C, V)``; ``logits (C, V)`` is scratch.

    Adding probabilities is as good as log space here: a probability that underflows in float32
    contributes 0 to the loss and to its gradient either way.
    """
    for stream in chunk.streams:
        hidden = work.teacher_hidden[chunk.rows, stream, chunk.positions].to(target.dtype)
        work.teacher.project(hidden, out=logits)
        weight = work.weights[chunk.rows, stream].unsqueeze(1)  # (C, 1)
        for block in row_blocks(target):
            work.teacher.temper_(logits[block])
            probs = torch.softmax(logits[block], dim=-1)
            if stream == chunk.streams[0]:
                torch.mul(probs, weight[block], out=target[block])
            else:
                target[block].addcmul_(probs, weight[block])


def _divergence_(target: Tensor, logits: Tensor, student: LogitMap, with_grad: bool) -> Tensor:
    """KL per position ``(C,)`` of ``target (C, V)`` and the student's ``W h + b`` in ``logits``.

    With ``with_grad``, ``logits`` ends as the gradient of the loss by ``W h + b``. The value is
    ``sum_v p (log p - log q) - p + q``: the correction makes it accurate near 0 (see ``kl`` in
    ``divergences``) and costs a sum over the gradient.
    """
    values = []
    tiny = torch.finfo(target.dtype).tiny
    for block in row_blocks(target):
        p, z = target[block], logits[block]
        slope = student.temper_(z)
        log_q = torch.log_softmax(z, dim=-1)
        terms = p.clamp_min(tiny).log_().sub_(log_q).mul_(p)
        torch.exp(log_q, out=z).sub_(p)  # Q - P
        values.append(terms.sum(dim=-1) + z.sum(dim=-1))
        if with_grad:
            if slope is not None:
                z.mul_(slope)
            if student.factor != 1.0:
                z.mul_(student.factor)
    return torch.cat(values)


def _sweep(
    hidden: Tensor, work: _Work, wanted: Sequence[bool]
) -> tuple[Tensor, list[Tensor | None]]:
    """The loss per position ``(B, T)`` and its gradients by hidden states, head weight and bias.

    Only the ``wanted`` gradients are formed. They accumulate in the dtype of the computation.
    """
    weight = work.student.weight
    with torch.autocast(hidden.device.type, enabled=False):
        per_position = weight.new_zeros(hidden.shape[:2])
        grad_hidden = torch.zeros_like(hidden) if wanted[0] else None
        grad_weight = torch.zeros_like(weight) if wanted[1] else None
        grad_bias = weight.new_zeros(weight.shape[0]) if wanted[2] else None
        pieces = list(chunks(work.weights > 0, work.mask, work.chunk_size))
        rows = max((len(chunk.rows) for chunk in pieces), default=0)
        buffers = weight.new_empty(2, rows, weight.shape[0])
        for chunk in pieces:
            where = (chunk.rows, chunk.positions)
            target, logits = buffers[0, : len(chunk.rows)], buffers[1, : len(chunk.rows)]
            _fill_target(target, logits, chunk, work)
            chunk_hidden = hidden[where].to(weight.dtype)  # (C, D)
            work.student.project(chunk_hidden, out=logits)
            per_position[where] = _divergence_(target, logits, work.student, any(wanted))
            if grad_hidden is not None:
                grad_hidden[where] = (logits @ weight).to(hidden.dtype)
            if grad_weight is not None:
                grad_weight.addmm_(logits.t(), chunk_hidden)
            if grad_bias is not None:
                grad_bias.add_(logits.sum(dim=0))
    return per_position, [grad_hidden, grad_weight, grad_bias]
