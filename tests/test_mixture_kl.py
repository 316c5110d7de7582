"""The fused loss against the plain formula, a number from pencil and paper, its exact limits."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from superpose.losses import mixture_kl as mixture_kl_module
from superpose.losses import projection
from superpose.losses.divergences import kl, mixture_log_probs
from superpose.losses.mixture_kl import MixtureKL, mixture_kl
from superpose.losses.projection import LogitMap, auto_chunk_size


class Head(NamedTuple):
    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None
    scale: float = 1.0

    def logits(self, hidden: Tensor) -> Tensor:
        """The plain formula of an output head."""
        logits = hidden @ self.weight.t()
        if self.bias is not None:
            logits = logits + self.bias
        logits = logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


class Case(NamedTuple):
    hidden: Tensor
    student: Head
    teacher_hidden: Tensor
    teacher: Head
    weights: Tensor
    mask: Tensor

    def fused(self, **options: Any) -> MixtureKL:
        return mixture_kl(
            self.hidden,
            self.student,
            self.teacher_hidden,
            self.teacher,
            self.weights,
            mask=self.mask,
            **options,
        )


def plain(case: Case, temperature: float = 1.0) -> Tensor:
    """KL per position (B, T) through full logits and autograd, each formula as written."""
    log_q = torch.log_softmax(case.student.logits(case.hidden) / temperature, dim=-1)
    teacher = case.teacher.logits(case.teacher_hidden) / temperature  # (B, N, T, V)
    probs = (torch.softmax(teacher, dim=-1) * case.weights[:, :, None, None]).sum(dim=1)
    return torch.nn.functional.kl_div(log_q, probs, reduction="none").sum(dim=-1) * case.mask


def make_case(
    *,
    shape: tuple[int, int, int] = (3, 2, 5),
    vocab: int = 37,
    bias: bool = False,
    softcap: float | None = None,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """Random tensors; the third row is one-hot, the last position of the second row masked."""
    num_rows, num_streams, length = shape
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)

    def head() -> Head:
        return Head(normal(vocab, 8), normal(vocab) if bias else None, softcap, scale)

    weights = torch.rand(num_rows, num_streams, generator=generator, dtype=torch.float64) + 0.1
    weights[2:] = torch.nn.functional.one_hot(torch.tensor(0), num_streams).double()
    mask = torch.ones(num_rows, length, dtype=torch.bool)
    mask[1:2, -1] = False
    case = Case(
        normal(num_rows, length, 8).requires_grad_(),
        head(),
        normal(num_rows, num_streams, length, 6 if num_rows == 1 else 8),
        head(),
        (weights / weights.sum(dim=1, keepdim=True)).to(dtype),
        mask,
    )
    for tensor in trained(case)[1:]:
        tensor.requires_grad_()
    return case


def trained(case: Case) -> list[Tensor]:
    parameters = [case.hidden, case.student.weight, case.student.bias]
    return [tensor for tensor in parameters if tensor is not None]


def assert_relative(actual: Sequence[Tensor], expected: Sequence[Tensor], rtol: float) -> None:
    """The largest error of each tensor is at most ``rtol`` of its largest entry."""
    for have, want in zip(actual, expected, strict=True):
        assert have.shape == want.shape
        assert (have - want).abs().max() <= rtol * want.abs().max()


def test_two_tokens_by_hand() -> None:
    """P = (3/4, 1/4) from two streams, Q = (1/2, 1/2): log 2 - H(3/4); other way, another value."""
    identity = Head(torch.eye(2))
    streams = torch.tensor([[0.6, 0.4], [0.9, 0.1]]).log()[None, :, None, :]  # (1, 2, 1, 2)
    even = torch.tensor([[[0.5, 0.5]]]).log()
    forward = mixture_kl(even, identity, streams, identity, torch.tensor([[0.5, 0.5]]))
    assert forward.total.item() == pytest.approx(
        0.75 * math.log(1.5) + 0.25 * math.log(0.5), abs=1e-7
    )
    assert forward.total.item() == pytest.approx(0.130812, abs=1e-6)
    student = torch.tensor([[[0.75, 0.25]]]).log()
    backward = mixture_kl(student, identity, even[:, None], identity, torch.ones(1, 1))
    assert backward.total.item() == pytest.approx(0.143841, abs=1e-6)


@pytest.mark.parametrize("chunk_size", [1, 7, 14, None])
@pytest.mark.parametrize(
    "options",
    [{}, {"bias": True}, {"softcap": 3.0}, {"bias": True, "softcap": 2.0, "scale": 0.5}],
    ids=["plain", "bias", "softcap", "all"],
)
def test_equals_the_plain_formula_with_gradients(
    chunk_size: int | None, options: dict[str, Any]
) -> None:
    case = make_case(**options)
    for temperature in (1.0, 2.0):
        result = case.fused(temperature=temperature, chunk_size=chunk_size)
        wide = make_case(**options, dtype=torch.float64)
        expected = plain(wide, temperature)
        assert_relative([result.per_position], [expected], 1e-5)
        assert result.per_position.dtype == result.total.dtype == torch.float32
        assert not result.per_position.requires_grad
        grads = torch.autograd.grad(result.total, trained(case))
        expected_grads = torch.autograd.grad(expected.sum(), trained(wide))
        assert_relative([result.total, *grads], [expected.sum(), *expected_grads], 1e-5)


@pytest.mark.parametrize("block_elements", [1, 80, 10**6])
def test_blocks_of_rows_change_nothing(
    block_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = make_case(softcap=3.0).fused().per_position
    monkeypatch.setattr(projection, "CPU_BLOCK_ELEMENTS", block_elements)
    assert_relative([make_case(softcap=3.0).fused().per_position], [expected], 1e-6)


class Replayed(torch.autograd.Function):
    """``mixture_kl`` called anew in every backward pass, as gradcheck needs several."""

    @staticmethod
    def forward(ctx: Any, case: Case, options: dict[str, Any], *tensors: Tensor) -> Tensor:
        ctx.case, ctx.options = case, options
        ctx.save_for_backward(*tensors)
        return case.fused(**options).total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            total = ctx.case.fused(**ctx.options).total
            return None, None, *torch.autograd.grad(total, ctx.saved_tensors, grad)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_gradcheck_in_float64(softcap: float | None) -> None:
    case = make_case(vocab=5, shape=(3, 2, 2), bias=True, softcap=softcap, dtype=torch.float64)
    options = {"temperature": 1.5, "chunk_size": 3}

    def total(*tensors: Tensor) -> Tensor:
        return Replayed.apply(case, options, *tensors)

    assert torch.autograd.gradcheck(total, trained(case))


def test_float64_is_computed_in_float64() -> None:
    case = make_case(dtype=torch.float64, softcap=3.0)
    result = case.fused(temperature=2.0)
    assert result.total.dtype == torch.float64
    assert_relative([result.per_position], [plain(case, 2.0)], 1e-13)


def test_tied_head_adds_up_with_the_input_embedding() -> None:
    """The head's weight is the input embedding too: both gradients arrive, scaled alike."""
    case = make_case()
    ids = torch.randint(37, (3, 5), generator=torch.Generator().manual_seed(1))

    def grad(loss_of: Any) -> Tensor:
        weight = case.student.weight.detach().clone().requires_grad_()
        tied = case._replace(hidden=torch.tanh(weight[ids]), student=Head(weight))
        (loss_of(tied) / 4).backward()  # the division of gradient accumulation
        assert weight.grad is not None
        return weight.grad

    assert_relative(
        [grad(lambda tied: tied.fused().total)], [grad(lambda tied: plain(tied).sum())], 1e-5
    )


def test_frozen_parts_get_no_gradient_and_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = []
    sweep = mixture_kl_module._sweep

    def spy(hidden: Tensor, work: Any, needs: tuple[bool, bool, bool]) -> Any:
        result = sweep(hidden, work, needs)
        wanted.append([grad is not None for grad in result[1]])
        return result

    monkeypatch.setattr(mixture_kl_module, "_sweep", spy)
    case = make_case(bias=True)
    case.fused().total.backward()
    assert case.hidden.grad is not None
    case.student.weight.requires_grad_(False)
    case.fused().total.backward()
    with torch.no_grad():
        assert not case.fused().total.requires_grad
    assert wanted == [[True, True, True], [True, False, True], [False, False, False]]


def test_second_backward_is_refused() -> None:
    total = make_case().fused().total
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once only"):
        total.backward()


def test_all_masked_is_a_finite_zero_with_a_graph() -> None:
    case = make_case(bias=True)._replace(mask=torch.zeros(3, 5, dtype=torch.bool))
    result = case.fused()
    result.total.backward()
    assert result.total.item() == 0.0
    for tensor in trained(case):
        assert tensor.grad is not None
        assert (tensor.grad == 0).all()


def test_masked_positions_are_not_read() -> None:
    case = make_case()
    expected = case.fused()
    hidden, teacher = case.hidden.detach().clone(), case.teacher_hidden.clone()
    hidden[1, -1], teacher[1, :, -1] = math.nan, math.nan
    result = case._replace(hidden=hidden.requires_grad_(), teacher_hidden=teacher).fused()
    assert torch.equal(result.per_position, expected.per_position)
    assert result.per_position[1, -1] == 0
    (grad,) = torch.autograd.grad(result.total, hidden)
    assert (grad[1, -1] == 0).all()
    assert grad.isfinite().all()


def test_streams_of_weight_zero_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A one-hot row costs one teacher product: (2 N + 1) rows of three, not 3 N."""
    products = []
    project = LogitMap.project

    def spy(head: Any, hidden: Tensor, out: Tensor) -> None:
        products.append(len(hidden))
        project(head, hidden, out)

    case = make_case(shape=(3, 4, 5))
    expected = plain(case)
    case.teacher_hidden[2, 1:] = math.nan
    monkeypatch.setattr(LogitMap, "project", spy)
    result = case.fused()
    assert_relative([result.per_position], [expected], 1e-5)
    assert sum(products) == (2 * 5 - 1) * (4 + 1) + 5 * (1 + 1)


@pytest.mark.parametrize("num_streams", [1, 2, 3, 8])
def test_the_teacher_itself_has_loss_and_gradient_zero(num_streams: int) -> None:
    """Q = P_target: N streams that equal the student's; with float32's 1/3 and large logits."""
    case = make_case(shape=(2, num_streams, 6), vocab=500)
    hidden = (4 * case.hidden.detach()).requires_grad_()
    same = hidden.detach()[:, None].expand(-1, num_streams, -1, -1)
    weights = torch.full((2, num_streams), 1 / num_streams)
    result = case._replace(
        hidden=hidden, teacher_hidden=same, teacher=case.student, weights=weights
    ).fused()
    assert result.per_position.min() >= -1e-6
    assert result.per_position.max() <= 1e-6
    (grad,) = torch.autograd.grad(result.total, hidden)
    assert grad.abs().max() < 1e-4


def test_small_kl_is_accurate() -> None:
    """A student 0.001 away: KL near 1e-6, never negative, against float64 to 1 %."""
    case = make_case(shape=(4, 1, 64), vocab=2000)
    noise = torch.randn(4, 64, 8, generator=torch.Generator().manual_seed(2))
    hidden = case.teacher_hidden[:, 0] + 1e-3 * noise
    near = case._replace(hidden=hidden, student=case.teacher, weights=torch.ones(4, 1))
    wide = near._replace(
        hidden=hidden.double(),
        teacher_hidden=case.teacher_hidden.double(),
        student=Head(case.teacher.weight.double()),
        teacher=Head(case.teacher.weight.double()),
    )
    expected = plain(wide)
    assert 0 < expected[near.mask].max() < 1e-4
    per_position = near.fused().per_position
    assert per_position.min() >= -1e-6
    torch.testing.assert_close(per_position.double(), expected, rtol=0.01, atol=2e-7)


def row_of(case: Case, row: int) -> Case:
    """The batch of one row."""
    return case._replace(
        hidden=case.hidden[row : row + 1],
        teacher_hidden=case.teacher_hidden[row : row + 1],
        weights=case.weights[row : row + 1],
        mask=case.mask[row : row + 1],
    )


def test_decomposes_into_single_stream_terms() -> None:
    """KL(mix, Q) = sum_n w_n KL(P_n, Q) - JS_w; the gradients add up without the last term."""
    case = row_of(make_case(shape=(2, 3, 5), dtype=torch.float64), 0)
    weights = case.weights[0]
    result = case.fused()
    singles = [
        case._replace(
            teacher_hidden=case.teacher_hidden[:, [stream]],
            weights=torch.ones_like(weights[None, :1]),
        ).fused()
        for stream in range(3)
    ]
    log_probs = case.teacher.logits(case.teacher_hidden).log_softmax(dim=-1)[0]  # (N, T, V)
    jensen = (weights[:, None] * kl(log_probs, mixture_log_probs(log_probs, weights))).sum(dim=0)
    assert (jensen >= 0).all()
    assert (jensen <= math.log(3)).all()
    by_stream = torch.stack([single.per_position[0] for single in singles])  # (N, T)
    assert_relative([result.per_position[0]], [weights @ by_stream - jensen], 1e-12)
    grads = [torch.autograd.grad(single.total, case.hidden)[0] for single in singles]
    expected = torch.einsum("n,nbtd->btd", weights, torch.stack(grads))
    assert_relative(torch.autograd.grad(result.total, [case.hidden]), [expected], 1e-12)


def test_stream_order_does_not_matter() -> None:
    case = make_case(shape=(2, 4, 5))
    order = torch.tensor([2, 0, 3, 1])
    turned = case._replace(
        teacher_hidden=case.teacher_hidden[:, order], weights=case.weights[:, order]
    )
    assert_relative([turned.fused().per_position], [case.fused().per_position], 1e-6)


def test_micro_batches_add_up() -> None:
    """One batch of 4 rows with unequal masks and its 4 single rows give one sum and gradient."""
    case = make_case(shape=(4, 2, 5))
    grads = torch.autograd.grad(case.fused().total, trained(case))
    parts = [row_of(case, row) for row in range(4)]
    total = torch.stack([part.fused().total for part in parts]).sum()
    assert_relative(torch.autograd.grad(total, trained(case)), grads, 1e-6)


def test_bfloat16_inputs_are_computed_in_float32() -> None:
    case = make_case(vocab=1000, shape=(4, 2, 16))
    low = case._replace(
        hidden=case.hidden.detach().bfloat16().requires_grad_(),
        teacher_hidden=case.teacher_hidden.bfloat16(),
        student=Head(case.student.weight.detach().bfloat16().requires_grad_()),
        teacher=Head(case.teacher.weight.bfloat16()),
    )
    wide = low._replace(
        hidden=low.hidden.double(),
        teacher_hidden=low.teacher_hidden.double(),
        student=Head(low.student.weight.double()),
        teacher=Head(low.teacher.weight.double()),
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = low.fused()
    torch.testing.assert_close(result.per_position.double(), plain(wide), rtol=1e-4, atol=1e-6)
    result.total.backward()
    assert low.hidden.grad is not None
    assert low.hidden.grad.dtype == torch.bfloat16


def test_large_logits_stay_finite() -> None:
    case = make_case()
    result = case._replace(hidden=case.hidden * 100, teacher_hidden=case.teacher_hidden * 100)
    loss = result.fused()
    grads = torch.autograd.grad(loss.total, trained(case))
    assert loss.per_position.isfinite().all()
    assert all(grad.isfinite().all() for grad in grads)


class LargestTensor(TorchDispatchMode):
    """Records the most elements that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, Tensor):
                self.elements = max(self.elements, value.numel())
        return result


@pytest.mark.parametrize("num_streams", [1, 4])
def test_no_tensor_of_all_positions_by_vocabulary(num_streams: int) -> None:
    """The largest tensor is the pair of C x V buffers, whatever P and N."""
    case = make_case(shape=(8, num_streams, 64), vocab=1000)
    with LargestTensor() as largest:
        case.fused(chunk_size=16, temperature=2.0).total.backward()
    assert largest.elements == 2 * 16 * 1000
    with LargestTensor() as largest:
        plain(case).sum().backward()
    assert largest.elements >= 8 * 64 * 1000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"teacher": Head(torch.randn(44, 8))}, "44 logits of the teacher and 37 of the student"),
        ({"weights": torch.full((3, 2), 0.4)}, "sum to 1"),
        ({"weights": torch.tensor([[1.5, -0.5]] * 3)}, "non-negative"),
    ],
)
def test_impossible_inputs_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_case()._replace(**change).fused()


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"chunk_size": 0}])
def test_impossible_options_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        make_case().fused(**options)


def test_auto_chunk_size_keeps_the_buffers_small() -> None:
    assert auto_chunk_size(640) == 1024
    assert 2 * 4 * 49152 * auto_chunk_size(49152) <= 64 * 2**20
    assert auto_chunk_size(49152) >= 128
    assert auto_chunk_size(49152, torch.float64) == auto_chunk_size(49152) // 2
    assert auto_chunk_size(256_000) == 64
    assert auto_chunk_size(256_000, device_type="cuda") == 524
