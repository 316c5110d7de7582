"""What losses share that are fused with the output projection: heads, chunks, one backward pass.

A fused loss never holds the logits of all positions. It sweeps over chunks of C positions, forms
their logits in buffers that are reused, and - since the gradient needs nothing that the loss does
not - the gradients with them; the backward pass only scales what is there.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# All C x V buffers together, when the chunk size is chosen here. Accelerators want large products.
BUFFER_BYTES_CPU, BUFFER_BYTES_ACCELERATOR = 64 * 2**20, 2**30
# Positions. Below 64 the products slow down (time at C = 32, 64, 128, 256 with SmolLM2's head on a
# CPU: 1.54, 1.18, 1, 0.95), and at such vocabularies the gradient of the head is far larger anyway.
MIN_CHUNK, MAX_CHUNK = 64, 1024
CPU_BLOCK_ELEMENTS = 2**18  # element-wise work goes over blocks of rows that stay in a core's cache

Sweep = Callable[[Sequence[bool]], tuple[Tensor, list[Tensor | None]]]
"""``sweep(wanted)``: the unreduced loss, and the gradients of its sum by the trained tensors; None
for those that are not wanted."""


class Head(Protocol):
    """What a loss reads of an output head; ``superpose.models.layout.OutputHead`` is one.

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
class LogitMap:
    """A head in the dtype of the computation, detached, with the temperature folded in."""

    weight: Tensor
    bias: Tensor | None
    softcap: float | None
    scale: float
    temperature: float

    @classmethod
    def of(
        cls,
        head: Head,
        dtype: torch.dtype,
        temperature: float = 1.0,
        num_tokens: int | None = None,
    ) -> "LogitMap":
        """The map of ``head``, to its first ``num_tokens`` logits (None is all)."""
        bias = None if head.bias is None else head.bias[:num_tokens].detach().to(dtype)
        weight = head.weight[:num_tokens].detach().to(dtype)
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


def auto_chunk_size(
    vocab_size: int,
    dtype: torch.dtype = torch.float32,
    device_type: str = "cpu",
    num_buffers: int = 2,
) -> int:
    """Positions C per chunk, 64 <= C <= 1024, such that the C x V buffers fit their budget.

    The budget is 64 MiB on a CPU and 1 GiB elsewhere; the least C goes before it.
    """
    budget = BUFFER_BYTES_CPU if device_type == "cpu" else BUFFER_BYTES_ACCELERATOR
    return max(MIN_CHUNK, min(MAX_CHUNK, budget // (num_buffers * vocab_size * dtype.itemsize)))


def common_dtype(*tensors: Tensor) -> torch.dtype:
    """float32, or float64 if one of the tensors is: the dtype that a loss is computed in."""
    return torch.float64 if torch.float64 in {x.dtype for x in tensors} else torch.float32


class Chunk(NamedTuple):
    """Up to C positions ``(rows[c], positions[c])`` of rows that use the same streams."""

    rows: Tensor
    positions: Tensor
    streams: list[int]


def chunks(used: Tensor, mask: Tensor, chunk_size: int) -> Iterator[Chunk]:
    """Cut the positions of ``mask (B, T)`` into chunks of even size, one set of streams at a time.

    ``used (B, N)`` says which streams a row uses.
    """
    patterns = [tuple(row) for row in used.tolist()]
    for pattern in dict.fromkeys(patterns):
        in_group = torch.tensor([row == pattern for row in patterns], device=mask.device)
        rows, positions = (mask & in_group[:, None]).nonzero(as_tuple=True)
        streams = [n for n, is_used in enumerate(pattern) if is_used]
        if len(rows):
            count = math.ceil(len(rows) / chunk_size)
            for piece in zip(rows.chunk(count), positions.chunk(count), strict=True):
                yield Chunk(*piece, streams)


def row_blocks(like: Tensor) -> Iterator[slice]:
    """Blocks of rows of a (C, V) buffer for the element-wise work: all rows on an accelerator."""
    size = like.shape[0]
    if like.device.type == "cpu":
        size = max(1, CPU_BLOCK_ELEMENTS // like.shape[1])
    return (slice(start, start + size) for start in range(0, like.shape[0], size))


def fused_sum(sweep: Sweep, trained: Sequence[Tensor | None], name: str) -> tuple[Tensor, Tensor]:
    """The sum of an unreduced loss, differentiable once, and the loss itself, detached.

    Args:
        sweep: computes both the loss and its gradients.
        trained: the tensors it gives gradients for, in that order; None for one that is absent.
        name: of the loss, for the error of a second backward pass.

    Returns:
        (0-dim total, unreduced loss). Without a tensor that requires gradients, none are formed.
    """
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in trained):
        return _GradientInForward.apply(sweep, name, *trained)
    with torch.no_grad():
        unreduced, _ = sweep([False] * len(trained))
    return unreduced.sum(), unreduced


class _GradientInForward(torch.autograd.Function):
    """Gradients in the forward pass; the backward pass scales them by the incoming scalar."""

    @staticmethod
    def forward(
        ctx: Any, sweep: Sweep, name: str, *trained: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        unreduced, grads = sweep(ctx.needs_input_grad[2:])
        dtypes = [None if x is None else x.dtype for x in trained]
        ctx.name = name
        ctx.grads = [g if g is None else g.to(d) for g, d in zip(grads, dtypes, strict=True)]
        ctx.mark_non_differentiable(unreduced)
        ctx.set_materialize_grads(False)
        return unreduced.sum(), unreduced

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        grads, ctx.grads = ctx.grads, None
        if grads is None:
            raise RuntimeError(
                f"{ctx.name} can be differentiated once only, because its gradients are scaled in "
                f"place; call {ctx.name} again for a second backward pass"
            )
        if grad_total is None:
            return None, None, *(None for _ in grads)
        return None, None, *(g if g is None else g.mul_(grad_total) for g in grads)
