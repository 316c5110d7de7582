"""What suites share that score rows of unequal length."""

from collections.abc import Sequence

from torch import Tensor

# Positions of a row that are measured at a time: as many as keep their logits within this.
CHUNK_BYTES = 128 * 2**20


def batches_by_length(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Row numbers in batches of like lengths, the longest first: little padding, early failure."""
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def position_chunks(valid: Tensor, logits_each: int) -> Sequence[Tensor]:
    """The true positions of ``valid (T,)``, in runs whose logits fit into memory.

    Args:
        valid: bool.
        logits_each: float32 logits that are held at once for each position.
    """
    return valid.nonzero().squeeze(1).split(max(1, CHUNK_BYTES // (4 * logits_each)))


def check_at_least_one(**settings: int | None) -> None:
    """Raise ValueError for a suite's setting below 1; None is no limit."""
    for key, value in settings.items():
        if value is not None and value < 1:
            raise ValueError(f"suite.{key} must be at least 1, got {value}")
