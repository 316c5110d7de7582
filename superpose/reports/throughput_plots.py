"""Figures of suite=throughput: tokens a second, and what is gained on the ordinary ways."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from superpose.reports.drawing import COLOURS, GREY, Row, column, new_axes, new_panels, styled

MODE_COLOURS = dict(
    zip(("raw", "separate", "guided", "batch", "guide_batch"), COLOURS, strict=False)
) | {"sequential": GREY}
APART = 0.08  # octaves between modes at one number of streams, lest their bars hide each other
LIMITS = {"memory_limit": "--", "compute_limit": ":"}


@styled
def tokens_per_second(rows: Sequence[Row]) -> Figure:
    """Tokens a second by the number of streams, a line a mode (Table 9)."""
    figure, axes = new_axes("New tokens a second, all streams together")
    for mode, of_mode in _by_mode(rows):
        _line(axes, mode, of_mode, "tokens_per_second")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(_plain))
    axes.yaxis.set_minor_formatter(FuncFormatter(_few))
    axes.tick_params(axis="y", which="minor", labelsize=7)
    axes.grid(which="minor", visible=False)
    axes.set_ylabel("tokens / s")
    _streams(axes, rows)
    axes.set_ylim(top=2 * axes.get_ylim()[1])  # room for the legend
    axes.legend(ncols=3)
    return figure


@styled
def speedups(rows: Sequence[Row]) -> Figure:
    """Gain of each mode on sequential and on batched decoding, beside its two limits."""
    rows = [row for row in rows if row["mode"] != "guide_batch"]  # another model, far above
    references = list(dict.fromkeys(row["against"] for row in rows))
    figure, panels = new_panels("Gain of each mode, and its limits", len(references))
    for axes, against in zip(panels, references, strict=True):
        shown = [row for row in rows if row["against"] == against]
        for mode, of_mode in _by_mode(shown):
            _line(axes, mode, of_mode, "ratio")
            for limit, style in LIMITS.items():
                axes.axhline(
                    of_mode[0][limit], linestyle=style, linewidth=1.0, color=MODE_COLOURS[mode]
                )
        axes.axhline(1.0, color=GREY, linewidth=0.8)
        axes.set_ylim(0, 1.3 * axes.get_ylim()[1])
        axes.set_ylabel(f"times as fast as {against}")
        _streams(axes, shown)
        axes.legend(ncols=2)
    figure.tight_layout()
    return figure


def _line(axes: Axes, mode: str, rows: Sequence[Row], name: str) -> None:
    means = column(rows, name)
    sides = [
        [0.0 if row[side] is None else abs(row[side] - mean) for row, mean in zip(rows, means, strict=True)]
        for side in ("low", "high")
    ]  # fmt: skip
    aside = 2.0 ** (APART * (list(MODE_COLOURS).index(mode) - (len(MODE_COLOURS) - 1) / 2))
    style: dict[str, Any] = {"fmt": "o-", "markersize": 4, "capsize": 3}
    axes.errorbar(
        [row["streams"] * aside for row in rows], means, sides, color=MODE_COLOURS[mode],
        label=mode.replace("_", " "), **style,
    )  # fmt: skip


def _by_mode(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    modes = dict.fromkeys(row["mode"] for row in rows)
    return [
        (mode, sorted((row for row in rows if row["mode"] == mode), key=lambda row: row["streams"]))
        for mode in modes
    ]


def _streams(axes: Axes, rows: Sequence[Row]) -> None:
    """The x axis: streams, each of the counts measured."""
    counts = sorted({row["streams"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_xlim(counts[0] / 1.5, counts[-1] * 1.5)
    axes.tick_params(axis="x", which="minor", length=0)
    axes.set_xlabel("streams S, all groups")


def _plain(value: float, _: object) -> str:
    return f"{value:,.6g}"


def _few(value: float, position: object) -> str:
    """Of the ticks between two powers of ten only 2, 3 and 5."""
    return _plain(value, position) if f"{value:.0e}"[0] in "235" else ""
