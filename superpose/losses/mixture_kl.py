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

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Both C x V buffers together, when the chunk size is chosen here. Accelerators want large products.
BUFFER_BYTES_CPU, BUFFER_BYTES_ACCELERATOR = 64 * 2**20, 2**30
# Positions. Below 64 the products slow down (time at C = 32, 64, 128, 256 with SmolLM2's head on a
# CPU: 1.54, 1.18, 1, 0.95), and at such vocabularies the gradient of the head is far larger anyway.
MIN_CHUNK, MAX_CHUNK = 64, 1024
CPU_BLOCK_ELEMENTS = 2**18  # element-wise work goes over blocks of rows that stay in a core's cache


class Head(Protocol):
    """What the loss reads of an output head; ``superpose.models.layout.OutputHead`` is one.

    ``logits = scale * (hidden @ weight.T + bias)``, then ``softcap * tanh(logits / softcap)``.
    """

    @property
    def weight(self) -> Tensor:
        """``(V, D)``."""

    @property
    def bias(self) -> Tensor | None:
        """``(V,)`` or None."""

    @property
    def softcap(self) -> float | None:
        """Final logit soft-capping, or None."""

    @property
    def scale(self) -> float:
        """Factor of the logits."""


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
    inputs = (student_hidden, student_head.weight, teacher_hidden, teacher_head.weight)
    dtype = torch.float64 if torch.float64 in {x.dtype for x in inputs} else torch.float32
    num_rows, length, _ = student_hidden.shape
    valid = torch.ones(num_rows, length, dtype=torch.bool, device=student_hidden.device)
    work = _Work(
        teacher_hidden=teacher_hidden.detach(),
        teacher=_LogitMap.of(teacher_head, temperature, dtype),
        student=_LogitMap.of(student_head, temperature, dtype),
        weights=torch.nn.functional.normalize(weights.detach().to(dtype), p=1.0, dim=1),
        mask=valid if mask is None else mask.bool(),
        chunk_size=chunk_size
        or auto_chunk_size(student_head.weight.shape[0], dtype, student_hidden.device.type),
    )
    trained = (student_hidden, student_head.weight, student_head.bias)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in trained):
        total, per_position = _FusedMixtureKL.apply(*trained, work)
    else:
        per_position, _ = _sweep(student_hidden.detach(), work, (False, False, False))
        total = per_position.sum()
    return MixtureKL(total, per_position)


def auto_chunk_size(
    vocab_size: int, dtype: torch.dtype = torch.float32, device_type: str = "cpu"
) -> int:
    """Positions C per chunk, 64 <= C <= 1024, such that two C x V buffers fit their budget.

    The budget is 64 MiB on a CPU and 1 GiB elsewhere; the least C goes before it.
    """
    budget = BUFFER_BYTES_CPU if device_type == "cpu" else BUFFER_BYTES_ACCELERATOR
    return max(MIN_CHUNK, min(MAX_CHUNK, budget // (2 * vocab_size * dtype.itemsize)))


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
class _LogitMap:
    """A head in the dtype of the computation, detached, with the temperature folded in."""

    weight: Tensor
    bias: Tensor | None
    softcap: float | None
    scale: float
    temperature: float

    @classmethod
    def of(cls, head: Head, temperature: float, dtype: torch.dtype) -> "_LogitMap":
        bias = None if head.bias is None else head.bias.detach().to(dtype)
        weight = head.weight.detach().to(dtype)
        return cls(weight, bias, head.softcap, head.scale, temperature)

    @property
    def factor(self) -> float:
        """Derivative of the tempered logits by ``W h + b``, but for the slope of the soft-cap."""
        return self.scale / self.temperature

    def project(self, hidden: Tensor, out: Tensor) -> None:
        """``W h + b`` of ``hidden (C, D)`` into ``out (C, V)``."""
        if self.bias is None:
            torch.mm(hidden, self.weight.t(), out=out)
        else:
            torch.addmm(self.bias, hidden, self.weight.t(), out=out)

    def temper_(self, logits: Tensor) -> Tensor | None:
        """``W h + b`` to ``phi(.) / tau``, in place; returns the slope of the soft-cap if any."""
        if self.softcap is None:
            if self.factor != 1.0:
                logits.mul_(self.factor)
            return None
        tanh = logits.mul_(self.scale / self.softcap).tanh_()
        slope = 1.0 - tanh.square()
        logits.mul_(self.softcap / self.temperature)
        return slope


@dataclass(frozen=True)
class _Work:
    """Everything of a call that is not differentiated."""

    teacher_hidden: Tensor  # (B, N, T, D')
    teacher: _LogitMap
    student: _LogitMap
    weights: Tensor  # (B, N)
    mask: Tensor  # (B, T)
    chunk_size: int


class _Chunk(NamedTuple):
    """Up to C valid positions ``(rows[c], positions[c])`` of rows that use the same streams."""

    rows: Tensor
    positions: Tensor
    streams: list[int]


def _chunks(work: _Work) -> Iterator[_Chunk]:
    """Cut the valid positions into chunks of even size, one set of used streams at a time."""
    used = [tuple(row) for row in (work.weights > 0).tolist()]
    for pattern in dict.fromkeys(used):
        in_group = torch.tensor([row == pattern for row in used], device=work.mask.device)
        rows, positions = (work.mask & in_group[:, None]).nonzero(as_tuple=True)
        streams = [n for n, is_used in enumerate(pattern) if is_used]
        if len(rows):
            count = math.ceil(len(rows) / work.chunk_size)
            for piece in zip(rows.chunk(count), positions.chunk(count), strict=True):
                yield _Chunk(*piece, streams)


def _blocks(like: Tensor) -> Iterator[slice]:
    """Blocks of rows of a (C, V) buffer for the element-wise work: all rows on an accelerator."""
    size = like.shape[0]
    if like.device.type == "cpu":
        size = max(1, CPU_BLOCK_ELEMENTS // like.shape[1])
    return (slice(start, start + size) for start in range(0, like.shape[0], size))


def _fill_target(target: Tensor, logits: Tensor, chunk: _Chunk, work: _Work) -> None:
    """P_target of a chunk into ``target (C, V)``; ``logits (C, V)`` is scratch.

    Adding probabilities is as good as log space here: a probability that underflows in float32
    contributes 0 to the loss and to its gradient either way.
    """
    for stream in chunk.streams:
        hidden = work.teacher_hidden[chunk.rows, stream, chunk.positions].to(target.dtype)
        work.teacher.project(hidden, out=logits)
        weight = work.weights[chunk.rows, stream].unsqueeze(1)  # (C, 1)
        for block in _blocks(target):
            work.teacher.temper_(logits[block])
            probs = torch.softmax(logits[block], dim=-1)
            if stream == chunk.streams[0]:
                torch.mul(probs, weight[block], out=target[block])
            else:
                target[block].addcmul_(probs, weight[block])


def _divergence_(target: Tensor, logits: Tensor, student: _LogitMap, with_grad: bool) -> Tensor:
    """KL per position ``(C,)`` of ``target (C, V)`` and the student's ``W h + b`` in ``logits``.

    With ``with_grad``, ``logits`` ends as the gradient of the loss by ``W h + b``. The value is
    ``sum_v p (log p - log q) - p + q``: the correction makes it accurate near 0 (see ``kl`` in
    ``divergences``) and costs a sum over the gradient.
    """
    values = []
    tiny = torch.finfo(target.dtype).tiny
    for block in _blocks(target):
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
    hidden: Tensor, work: _Work, wanted: tuple[bool, bool, bool]
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
        chunks = list(_chunks(work))
        rows = max((len(chunk.rows) for chunk in chunks), default=0)
        buffers = weight.new_empty(2, rows, weight.shape[0])
        for chunk in chunks:
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


class _FusedMixtureKL(torch.autograd.Function):
    """Gradients in the forward pass; the backward pass scales them by the incoming scalar."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, work: _Work
    ) -> tuple[Tensor, Tensor]:
        per_position, grads = _sweep(hidden, work, ctx.needs_input_grad[:3])
        dtypes = [None if x is None else x.dtype for x in (hidden, weight, bias)]
        ctx.grads = [g if g is None else g.to(d) for g, d in zip(grads, dtypes, strict=True)]
        ctx.mark_non_differentiable(per_position)
        ctx.set_materialize_grads(False)
        return per_position.sum(), per_position

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        grads, ctx.grads = ctx.grads, None
        if grads is None:
            raise RuntimeError(
                "mixture_kl can be differentiated once only, because its gradients are scaled in "
                "place; call mixture_kl again for a second backward pass"
            )
        if grad_total is None:
            return None, None, None, None
        return *(g if g is None else g.mul_(grad_total) for g in grads), None
