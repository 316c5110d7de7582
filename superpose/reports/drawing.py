"""What all figures share: style, colours, axes. Only ``plots`` and its parts import matplotlib."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

Row = dict[str, Any]
P = ParamSpec("P")
R = TypeVar("R")

# Okabe and Ito's palette: told apart by colour-blind readers, and in this order by lightness.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GREY = "#7F7F7F"
SIZE = (6.0, 3.8)  # inches
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "legend.framealpha": 0.85,
    "legend.edgecolor": "none",
    "legend.fontsize": 9,
    "lines.linewidth": 1.8,
    "savefig.dpi": 150,
}


def styled(draw: Callable[P, R]) -> Callable[P, R]:
    """Run a drawing function in our style, and leave matplotlib's own settings as they were."""

    @functools.wraps(draw)
    def in_style(*args: P.args, **kwargs: P.kwargs) -> R:
        with matplotlib.rc_context(STYLE):
            return draw(*args, **kwargs)

    return in_style


def new_axes(title: str) -> tuple[Figure, Axes]:
    """A figure of the usual size with one set of axes."""
    figure = Figure(figsize=SIZE)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title)
    return figure, axes


def new_panels(title: str, count: int) -> tuple[Figure, list[Axes]]:
    """A figure of one or two axes side by side, under one title."""
    figure = Figure(figsize=(SIZE[0] * (1.5 if count > 1 else 1), SIZE[1]))
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure, [figure.add_subplot(1, count, index) for index in range(1, count + 1)]


def by_model(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """The rows of each model, in order."""
    models = dict.fromkeys(row["model"] for row in rows)
    return [(model, [row for row in rows if row["model"] == model]) for model in models]


def column(rows: Sequence[Row], name: str) -> list[float]:
    """One column, with NaN where it is undefined."""
    return [float("nan") if row[name] is None else float(row[name]) for row in rows]


def given(row: Row, name: str) -> bool:
    """Whether a row has a value."""
    return row.get(name) is not None


def log_ranks(axes: Axes, which: str) -> None:
    """Make axis ``which`` logarithmic, with ranks written out."""
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.grid(which="minor", visible=False)


def percent(axes: Axes, label: str) -> None:
    """Make the y axis one of shares from 0 to 1."""
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_ylabel(label)
