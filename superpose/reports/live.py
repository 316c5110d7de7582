"""Continuations side by side in the terminal, as they grow."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

ROW_KEYS = ("group", "stream", "prompt", "nll_nats", "alone", "nll_nats_alone")


class SideBySide:
    """Shows the latest state of some groups of continuations, until all of their steps are done.

    Call it with prompts and texts, ``[group][stream]``, as often as they change; :meth:`stop` takes
    the last picture away.
    """

    def __init__(self, console: Console):
        """Show on ``console``, a terminal."""
        self.live = Live(console=console, transient=True, vertical_overflow="crop")

    def __call__(self, prompts: Sequence[Sequence[str]], texts: Sequence[Sequence[str]]) -> None:
        """Show this state."""
        self.live.start()  # does nothing once it runs
        self.live.update(side_by_side(prompts, texts), refresh=True)

    def stop(self) -> None:
        """Give the terminal back."""
        self.live.stop()


def continuations_table(rows: Sequence[dict[str, Any]]) -> Table:
    """The continuations of a result's table ``generation.continuations``."""
    decoder = next(key for key in rows[0] if key not in ROW_KEYS)
    groups: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(row)
    prompts = [[row["prompt"] for row in group] for group in groups.values()]
    texts = [[row[decoder] for row in group] for group in groups.values()]
    return side_by_side(prompts, texts, f"continuations, {decoder.replace('_', ' ')}")


def side_by_side(
    prompts: Sequence[Sequence[str]], texts: Sequence[Sequence[str]], title: str | None = None
) -> Table:
    """A column a stream, a row a group: the prompt dim, its continuation plain."""
    table = Table(title=title, title_justify="left", title_style="bold", expand=True)
    table.show_lines = len(prompts) > 1
    for number in range(1, len(prompts[0]) + 1):
        table.add_column(f"stream {number}", ratio=1, overflow="fold")
    for group in zip(prompts, texts, strict=True):
        cells = zip(*group, strict=True)
        table.add_row(*(Text.assemble((f"{prompt} ▸", "dim"), text) for prompt, text in cells))
    return table
