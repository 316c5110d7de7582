"""Figures, made from the tables of a result or from ``metrics.csv`` alone.

A new figure is a function from the rows of one table to a :class:`Figure`, and a row of
:data:`FIGURES`. Nothing else in superpose imports matplotlib; no window or global state is used.
"""

import csv
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

from superpose.reports.results import Result

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


@dataclass(frozen=True)
class FigureKind:
    """How a table is drawn: the function, and the caption that stands below it in a report."""

    draw: Callable[[Sequence[Row]], Figure]
    caption: str


@styled
def rank_cdf(rows: Sequence[Row]) -> Figure:
    """Share of tokens at or above each rank in the mixed logits (Fig. 1)."""
    figure, axes = _new("Rank of the streams' tokens in the mixed logits")
    for colour, (model, of_model) in zip(COLOURS, _by_model(rows), strict=False):
        ranks = [row["k"] for row in of_model]
        axes.plot(ranks, _column(of_model, "argmax"), color=colour, label=f"{model}: argmax")
        truth = _column(of_model, "ground_truth")
        axes.plot(ranks, truth, "--", color=colour, label=f"{model}: actual next token")
    control = [row for row in rows if row["model"] == rows[0]["model"] and _given(row, "control")]
    if control:
        axes.plot(
            [row["k"] for row in control],
            _column(control, "control"),
            ":",
            color=GREY,
            label="control: another text's token",
        )
    _log_ranks(axes, "x")
    axes.set_xlim(1, max(row["k"] for row in rows))
    axes.set_xlabel("rank k (1 is best)")
    _percent(axes, "P(rank ≤ k)")
    axes.legend()
    return figure


@styled
def variation_by_position(rows: Sequence[Row]) -> Figure:
    """Total variation distance by position, with its standard error (Fig. 4)."""
    figure, axes = _new("Distance from the ideal mixture along the text")
    for colour, (model, of_model) in zip(COLOURS, _by_model(rows), strict=False):
        positions = [row["position"] for row in of_model]
        means = _column(of_model, "total_variation")
        errors = [row.get("standard_error") or 0.0 for row in of_model]
        low = [mean - error for mean, error in zip(means, errors, strict=True)]
        high = [mean + error for mean, error in zip(means, errors, strict=True)]
        axes.fill_between(positions, low, high, color=colour, alpha=0.2, linewidth=0)
        axes.plot(positions, means, color=colour, label=str(model))
    axes.set_xlabel("position (tokens)")
    axes.set_ylabel("total variation distance, τ = 1")
    axes.set_ylim(0, 1)
    axes.set_xlim(left=0)
    axes.legend()
    return figure


@styled
def confidence_curve(rows: Sequence[Row]) -> Figure:
    """Median rank in the mixed logits by the token's own single-stream probability (Fig. 3)."""
    figure, axes = _new("Rank by the token's confidence in its own stream")
    for colour, (model, of_model) in zip(COLOURS, _by_model(rows), strict=False):
        centres = [(row["probability_from"] + row["probability_to"]) / 2 for row in of_model]
        medians = _column(of_model, "median_rank")
        axes.plot(centres, medians, "o-", markersize=4, color=colour, label=str(model))
    _counts_below(axes, _by_model(rows)[0][1])
    _log_ranks(axes, "y")
    axes.set_xlim(0, 1)
    axes.set_ylim(bottom=0.6)
    axes.set_xlabel("single-stream probability of the argmax token")
    axes.set_ylabel("median rank, mixed logits")
    axes.legend()
    return figure


FIGURES: dict[str, FigureKind] = {
    "superposition.rank_cdf": FigureKind(
        rank_cdf,
        "Share of tokens that stand among the first k of the mixed logits; higher is better. "
        "Solid: the argmax of each stream read alone. Dashed: the actual next token. Dotted: "
        "another text's next token in a single stream's logits, which is what frequent words "
        "alone give.",
    ),
    "superposition.by_position": FigureKind(
        variation_by_position,
        "Total variation distance between the mixed pass's distribution and the mean of the "
        "streams' own, by position; lower is better. Band: one standard error over groups.",
    ),
    "superposition.confidence": FigureKind(
        confidence_curve,
        "Median rank, in the mixed logits, of the streams' argmax tokens, by the probability that "
        "the stream alone gives them; 1 is best. Grey: tokens counted.",
    ),
}


@styled
def training_curve(metrics_csv: str | Path) -> Figure | None:
    """Loss and validation metrics of a run by optimizer step, from its ``metrics.csv``.

    Returns:
        None if the file holds nothing to draw.
    """
    series = read_series(metrics_csv)
    losses = [name for name in series if name.endswith("_nats")]
    shares = [name for name in ("val/kl_ratio", "val/top10") if name in series]
    panels = [names for names in (losses, shares) if names]
    if not panels:
        return None
    figure = Figure(figsize=(SIZE[0] * (1.5 if len(panels) > 1 else 1), SIZE[1]))
    FigureCanvasAgg(figure)
    for index, names in enumerate(panels, start=1):
        axes = figure.add_subplot(1, len(panels), index)
        colours = COLOURS if names is losses else COLOURS[2:]
        for colour, name in zip(colours, names, strict=False):
            steps, values = zip(*series[name], strict=True)
            style = "o-" if name.startswith("val/") else "-"
            axes.plot(steps, values, style, markersize=4, color=colour, label=name)
        axes.set_xlabel("optimizer step")
        axes.set_ylabel("nats per position" if names is losses else "ratio or share")
        axes.set_ylim(bottom=0)
        axes.legend()
    figure.suptitle("Training", x=0.01, ha="left", fontsize=11)
    figure.tight_layout()
    return figure


def read_series(metrics_csv: str | Path) -> dict[str, list[tuple[float, float]]]:
    """The logged values of each name as (step, value), in order, blanks left out."""
    series: dict[str, list[tuple[float, float]]] = {}
    with Path(metrics_csv).open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if not row.get("step"):
                continue
            for name, text in row.items():
                if text and name not in ("step", "epoch"):
                    series.setdefault(name, []).append((float(row["step"]), float(text)))
    return series


def write_figures(folder: str | Path, result: Result) -> dict[str, Path]:
    """Draw every table of a result that has a figure.

    Returns:
        table name to the PNG written, ``superposition_rank_cdf.png``.
    """
    written = {}
    for table, rows in result["tables"].items():
        if rows and table in FIGURES:
            path = Path(folder) / f"{table.replace('.', '_')}.png"
            save(FIGURES[table].draw(rows), path)
            written[table] = path
    return written


@styled
def save(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, without anything in it that changes from run to run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None}, bbox_inches="tight")


def _new(title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=SIZE)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title)
    return figure, axes


def _counts_below(axes: Axes, rows: Sequence[Row]) -> None:
    """Write above the x axis how many tokens each point stands for."""
    for row in rows:
        centre = (row["probability_from"] + row["probability_to"]) / 2
        text, place = f"{row['count']:,}", (centre, 0.0)
        style: dict[str, Any] = {
            "ha": "center",
            "fontsize": 7,
            "color": GREY,
            "textcoords": "offset points",
        }
        axes.annotate(text, place, (0, 3), xycoords=("data", "axes fraction"), **style)


def _by_model(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    models = dict.fromkeys(row["model"] for row in rows)
    return [(model, [row for row in rows if row["model"] == model]) for model in models]


def _column(rows: Sequence[Row], name: str) -> list[float]:
    return [float("nan") if row[name] is None else float(row[name]) for row in rows]


def _given(row: Row, name: str) -> bool:
    return row.get(name) is not None


def _log_ranks(axes: Axes, which: str) -> None:
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.grid(which="minor", visible=False)


def _percent(axes: Axes, label: str) -> None:
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_ylabel(label)
