"""What suites share that score rows of unequal length."""

from collections.abc import Sequence


def batches_by_length(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Row numbers in batches of like lengths, the longest first: little padding, early failure."""
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def check_at_least_one(**settings: int | None) -> None:
    """Raise ValueError for a suite's setting below 1; None is no limit."""
    for key, value in settings.items():
        if value is not None and value < 1:
            raise ValueError(f"suite.{key} must be at least 1, got {value}")
