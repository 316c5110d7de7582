"""How a suite tells how far it is, without knowing of terminals."""

from collections.abc import Callable, Iterable
from typing import Any

Progress = Callable[[Iterable[Any], str, int], Iterable[Any]]
"""``progress(iterable, description, total)`` yields the items of ``iterable``, showing a bar."""


def silent(iterable: Iterable[Any], description: str, total: int) -> Iterable[Any]:
    """Show nothing."""
    return iterable
