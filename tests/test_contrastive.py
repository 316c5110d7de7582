"""Joint Contrastive guidance and its fused cross-entropy against the plain formula (eq. 7)."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from superpose.losses import projection
from superpose.losses.contrastive import (
    Guidance,
    contrastive_logits,
    others_mean,
    stream_cross_entropy,
)

B, T, D, D_GUIDE, V = 3, 5, 6, 4, 23


@dataclass
class Head:
    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None
    scale: float = 1.0

    def logits(self, hidden: Tensor) -> Tensor:
        logits = torch.nn.functional.linear(hidden, self.weight, self.bias) * self.scale
        return logits if self.softcap is None else self.softcap * (logits / self.softcap).tanh()


@dataclass
class Case:
    hidden: Tensor
    head: Head
    labels: Tensor
    predicted: Tensor
    guidance: Guidance | None

    @property
    def trained(self) -> list[Tensor]:
        tensors = [self.hidden, self.head.weight]
        tensors += [] if self.head.bias is None else [self.head.bias]
        return tensors + ([self.guidance.alpha, self.guidance.beta] if self.guidance else [])


def case(
    num_streams: int = 2, seed: int = 0, guided: bool = True, width: int = V, guide_width: int = V,
    bias: bool = False, dtype: torch.dtype = torch.float64, **head: float,
) -> Case:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    guidance = None
    if guided:
        guidance = Guidance(
            hidden=normal(B, num_streams, T, D_GUIDE),
            head=Head(normal(guide_width, D_GUIDE)),
            alpha=torch.tensor(0.7, dtype=dtype, requires_grad=True),
            beta=torch.tensor(1.3, dtype=dtype, requires_grad=True),
        )
    return Case(
        hidden=normal(B, T, D).requires_grad_(),
        head=Head(
            normal(width, D).requires_grad_(), normal(width).requires_grad_() if bias else None, **head
        ),
        labels=torch.randint(V, (B, num_streams, T), generator=generator),
        predicted=torch.rand(B, num_streams, T, generator=generator) < 0.8,
        guidance=guidance,
    )  # fmt: skip


def plain(case: Case, num_tokens: int | None = None) -> Tensor:
    """The sum of all cross-entropies by the formula, stream by stream."""
    total = torch.zeros((), dtype=case.hidden.dtype)
    large = case.head.logits(case.hidden)[..., :num_tokens]  # (B, T, V)
    num_streams = case.labels.shape[1]
    for row in range(B):
        active = [n for n in range(num_streams) if case.predicted[row, n].any()]
        for n in active:
            logits = large[row]
            if case.guidance is not None and len(active) > 1:
                guide = {
                    m: case.guidance.head.logits(case.guidance.hidden[row, m])[:, :num_tokens]
                    for m in active
                }
                others = sum(guide[m] for m in active if m != n) / (len(active) - 1)
                logits = logits + case.guidance.alpha * guide[n] - case.guidance.beta * others
            log_probs = logits.log_softmax(-1)
            for t in range(T):
                if case.predicted[row, n, t]:
                    total = total - log_probs[t, case.labels[row, n, t]]
    return total


VARIANTS = {
    "guided": {},
    "three streams": {"num_streams": 3},
    "one stream": {"num_streams": 1},
    "without guide": {"guided": False},
    "bias": {"bias": True},
    "softcap and scale": {"softcap": 3.0, "scale": 0.5},
}


@pytest.mark.parametrize("chunk_size", [1, 4, None])
@pytest.mark.parametrize("variant", VARIANTS)
def test_value_and_every_gradient_are_those_of_the_plain_formula(variant, chunk_size):
    fused, reference = case(**VARIANTS[variant]), case(**VARIANTS[variant])
    loss = stream_cross_entropy(
        fused.hidden, fused.head, fused.labels, fused.predicted, fused.guidance,
        chunk_size=chunk_size,
    )  # fmt: skip
    expected = plain(reference)
    torch.testing.assert_close(loss.total, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(loss.per_position.sum(), expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(loss.per_position != 0, fused.predicted)
    (3.0 * loss.total).backward()
    (3.0 * expected).backward()
    for ours, theirs in zip(fused.trained, reference.trained, strict=True):
        zero = torch.zeros_like(theirs)
        theirs = zero if theirs.grad is None else theirs.grad
        torch.testing.assert_close(ours.grad, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("block_elements", [1, 60])
def test_blocks_of_rows_change_nothing(monkeypatch, block_elements):
    whole, in_blocks = case(softcap=3.0), case(softcap=3.0)
    for made in (whole, in_blocks):
        loss = stream_cross_entropy(
            made.hidden, made.head, made.labels, made.predicted, made.guidance
        )
        loss.total.backward()
        monkeypatch.setattr(projection, "CPU_BLOCK_ELEMENTS", block_elements)
    for ours, theirs in zip(in_blocks.trained, whole.trained, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)


def test_a_row_with_one_stream_left_is_an_ordinary_row():
    made = case(num_streams=2)
    made.predicted[0, 1] = False  # a one-hot row
    alone = case(num_streams=2)
    loss = stream_cross_entropy(made.hidden, made.head, made.labels, made.predicted, made.guidance)
    logits = alone.head.logits(alone.hidden)[0].log_softmax(-1)
    expected = -logits[torch.arange(T), alone.labels[0, 0]] * made.predicted[0, 0]
    torch.testing.assert_close(loss.per_position[0, 0], expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(loss.per_position[0, 1], torch.zeros(T, dtype=torch.float64))


@pytest.mark.parametrize("num_tokens", [V, 20])
def test_padded_widths_are_cut_to_the_shared_tokens(num_tokens):
    made = case(width=V + 3, guide_width=V + 9)
    made.labels.clamp_(max=num_tokens - 1)
    loss = stream_cross_entropy(
        made.hidden, made.head, made.labels, made.predicted, made.guidance, num_tokens=num_tokens
    )
    torch.testing.assert_close(loss.total, plain(made, num_tokens), rtol=1e-12, atol=1e-12)
    loss.total.backward()
    assert made.head.weight.grad.shape == (V + 3, D)
    assert made.head.weight.grad[num_tokens:].abs().max() == 0
    with pytest.raises(ValueError, match="backbone and guide have 26 and 32 logits"):
        stream_cross_entropy(made.hidden, made.head, made.labels, made.predicted, made.guidance)
    with pytest.raises(ValueError, match="num_tokens=40 is above the 26 logits"):
        stream_cross_entropy(
            made.hidden, made.head, made.labels, made.predicted, made.guidance, num_tokens=40
        )


def test_two_streams_are_the_formula_of_the_paper():
    large, guide = torch.randn(7), torch.randn(2, 7)
    logits = contrastive_logits(large, guide, 0.5, 2.0)
    torch.testing.assert_close(logits[0], large + 0.5 * guide[0] - 2.0 * guide[1])
    torch.testing.assert_close(logits[1], large + 0.5 * guide[1] - 2.0 * guide[0])


def test_equal_streams_and_equal_weights_leave_the_mixed_logits():
    large, guide = torch.randn(4, 7), torch.randn(1, 4, 7).expand(3, -1, -1)
    torch.testing.assert_close(
        contrastive_logits(large, guide, 1.0, 1.0), large.expand(3, -1, -1), atol=1e-5, rtol=1e-5
    )
    assert torch.equal(contrastive_logits(large, guide[:1], 5.0, 3.0), large[None])
    torch.testing.assert_close(others_mean(guide), guide)


def test_nothing_to_predict_is_zero_with_zero_gradients():
    made = case()
    made.predicted[:] = False
    loss = stream_cross_entropy(made.hidden, made.head, made.labels, made.predicted, made.guidance)
    loss.total.backward()
    assert loss.total == 0
    assert all(tensor.grad.abs().max() == 0 for tensor in made.trained)


def test_a_second_backward_pass_and_missing_gradients():
    made = case()
    loss = stream_cross_entropy(made.hidden, made.head, made.labels, made.predicted, made.guidance)
    loss.total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="stream_cross_entropy can be differentiated once only"):
        loss.total.backward()
    with torch.no_grad():
        assert not stream_cross_entropy(
            made.hidden, made.head, made.labels, made.predicted, made.guidance
        ).total.requires_grad


def test_only_alpha_and_beta_are_trained_with_a_frozen_backbone():
    made = case(dtype=torch.float32)
    hidden, head = made.hidden.detach(), Head(made.head.weight.detach())
    loss = stream_cross_entropy(hidden, head, made.labels, made.predicted, made.guidance)
    loss.total.backward()
    reference = case()
    plain(reference).backward()
    for name in ("alpha", "beta"):
        ours, theirs = getattr(made.guidance, name).grad, getattr(reference.guidance, name).grad
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)
