"""Learning-rate schedules, in optimizer steps: warm-up, then constant, linear, cosine or plateau."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau


@dataclass(frozen=True)
class Schedule:
    """What moves the learning rate.

    Attributes:
        per_step: stepped after every optimizer step.
        per_validation: stepped with the monitored metric after every validation, or None.
    """

    per_step: LambdaLR
    per_validation: ReduceLROnPlateau | None = None


def constant(optimizer: Optimizer, max_steps: int, warmup_steps: int = 0) -> Schedule:
    """Linear warm-up over ``warmup_steps``, then the peak rate."""
    return _per_step(optimizer, warmup_steps, lambda step: 1.0)


def linear(
    optimizer: Optimizer, max_steps: int, warmup_steps: int = 0, final_fraction: float = 0.0
) -> Schedule:
    """Warm-up, then a straight line down to ``final_fraction`` of the peak at ``max_steps``."""

    def decay(step: int) -> float:
        return 1.0 - (1.0 - final_fraction) * _progress(step, warmup_steps, max_steps)

    return _per_step(optimizer, warmup_steps, decay)


def cosine(
    optimizer: Optimizer, max_steps: int, warmup_steps: int = 0, final_fraction: float = 0.0
) -> Schedule:
    """Warm-up, then half a cosine down to ``final_fraction`` of the peak at ``max_steps``."""

    def decay(step: int) -> float:
        half_wave = 0.5 * (1.0 + math.cos(math.pi * _progress(step, warmup_steps, max_steps)))
        return final_fraction + (1.0 - final_fraction) * half_wave

    return _per_step(optimizer, warmup_steps, decay)


def plateau(
    optimizer: Optimizer,
    max_steps: int,
    warmup_steps: int = 0,
    patience: int = 10,
    factor: float = 0.5,
) -> Schedule:
    """The paper's schedule: warm-up, and the rate times ``factor`` whenever ``patience``
    validations have passed without a new minimum of the monitored metric."""
    reduce = ReduceLROnPlateau(optimizer, mode="min", patience=patience, factor=factor)
    check_warmup(warmup_steps)
    return Schedule(_WarmupOnly(optimizer, warmup_steps), reduce)


class _WarmupOnly(LambdaLR):
    """Linear warm-up that leaves the rate alone afterwards, so that another scheduler can lower it."""

    def __init__(self, optimizer: Optimizer, warmup_steps: int):
        self.warmup_steps = warmup_steps
        super().__init__(optimizer, lambda step: min(1.0, (step + 1) / max(1, warmup_steps)))

    def get_lr(self) -> list[float | Tensor]:
        if self.last_epoch >= self.warmup_steps:
            return [group["lr"] for group in self.optimizer.param_groups]
        return super().get_lr()


def check_warmup(warmup_steps: int) -> None:
    """Refuse an impossible warm-up, by its key."""
    if warmup_steps < 0:
        raise ValueError(f"method.scheduler.warmup_steps must be at least 0, got {warmup_steps}")


def _progress(step: int, warmup_steps: int, max_steps: int) -> float:
    """0 at the end of the warm-up, 1 at ``max_steps``."""
    return min(1.0, max(0, step - warmup_steps) / max(1, max_steps - warmup_steps))


def _per_step(optimizer: Optimizer, warmup_steps: int, decay: Callable[[int], float]) -> Schedule:
    check_warmup(warmup_steps)

    def factor(step: int) -> float:
        return (step + 1) / warmup_steps if step < warmup_steps else decay(step)

    return Schedule(LambdaLR(optimizer, factor))
