"""Figures, made from the tables of a result or from ``metrics.csv`` alone.

A new figure is a function from the rows of one table to a :class:`Figure`, and a row of
:data:`FIGURES`. Nothing but this module and its parts (``drawing``, ``*_plots``) imports matplotlib;
no window or global state is used.
"""

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from superpose.reports import depth_plots, patching_plots, throughput_plots
from superpose.reports.drawing import (
    COLOURS,
    GREY,
    Row,
    by_model,
    column,
    given,
    log_ranks,
    new_axes,
    new_panels,
    percent,
    styled,
)
from superpose.reports.results import Result


@dataclass(frozen=True)
class FigureKind:
    """How a table is drawn: the function, and the caption that stands below it in a report."""

    draw: Callable[[Sequence[Row]], Figure]
    caption: str


@styled
def rank_cdf(rows: Sequence[Row]) -> Figure:
    """Share of tokens at or above each rank in the mixed logits (Fig. 1)."""
    figure, axes = new_axes("Rank of the streams' tokens in the mixed logits")
    for colour, (model, of_model) in zip(COLOURS, by_model(rows), strict=False):
        ranks = [row["k"] for row in of_model]
        axes.plot(ranks, column(of_model, "argmax"), color=colour, label=f"{model}: argmax")
        truth = column(of_model, "ground_truth")
        axes.plot(ranks, truth, "--", color=colour, label=f"{model}: actual next token")
    control = [row for row in rows if row["model"] == rows[0]["model"] and given(row, "control")]
    if control:
        axes.plot(
            [row["k"] for row in control],
            column(control, "control"),
            ":",
            color=GREY,
            label="control: another text's token",
        )
    log_ranks(axes, "x")
    axes.set_xlim(1, max(row["k"] for row in rows))
    axes.set_xlabel("rank k (1 is best)")
    percent(axes, "P(rank ≤ k)")
    axes.legend()
    return figure


@styled
def variation_by_position(rows: Sequence[Row]) -> Figure:
    """Total variation distance by position, with its standard error (Fig. 4)."""
    figure, axes = new_axes("Distance from the ideal mixture along the text")
    for colour, (model, of_model) in zip(COLOURS, by_model(rows), strict=False):
        positions = [row["position"] for row in of_model]
        means = column(of_model, "total_variation")
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
    figure, axes = new_axes("Rank by the token's confidence in its own stream")
    for colour, (model, of_model) in zip(COLOURS, by_model(rows), strict=False):
        centres = [(row["probability_from"] + row["probability_to"]) / 2 for row in of_model]
        medians = column(of_model, "median_rank")
        axes.plot(centres, medians, "o-", markersize=4, color=colour, label=str(model))
    _counts_below(axes, by_model(rows)[0][1])
    log_ranks(axes, "y")
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
    "additivity.layers": FigureKind(
        depth_plots.additivity_by_layer,
        "Distance of the directions of a mixture's hidden state and of the sum of its texts' states "
        "(eq. 8), by hidden-state index: 0 enters the first block, l leaves block l, before the final "
        "norm; 0 is additive.",
    ),
    "additivity.trajectory": FigureKind(
        depth_plots.additivity_by_step,
        "The same, averaged over hidden-state indices, by training step; band: standard error over "
        "indices. The paper finds it lowest at Pythia's earliest checkpoint and growing from there.",
    ),
    "layer_linearity.layers": FigureKind(
        depth_plots.linearity_by_layer,
        "Share of the variance of a block's output that the best linear map of its input explains "
        "(solid), and of what the block adds to it (dashed); 1 is linear. The paper finds a U: high "
        "in early blocks, about 0.65 in the middle, above 0.95 in the last third.",
    ),
    "superposition.degradation": FigureKind(
        patching_plots.degradation,
        "Left: KL of the mixed pass over the KL of unrelated contexts, by the number of texts mixed; "
        "lower is better. Right: share of the streams' argmax tokens among the first 10 of the mixed "
        "logits, all tokens and content words alone; higher is better.",
    ),
    "attention_patching.ranks": FigureKind(
        patching_plots.patching_ranks,
        "Median rank of a text's vanilla argmax token when its pass is disturbed: mixed with another "
        "text, under that text's attention weights (donor), with its own weights permuted; 1 is "
        "undisturbed. Predictable tokens (punctuation, digits, function words, fragments) and content "
        "words apart.",
    ),
    "throughput.modes": FigureKind(
        throughput_plots.tokens_per_second,
        "New tokens of all streams a second, prefill included, by the number of streams; bars: 95 % "
        "interval over repeats. A batch of as many streams is what a mixed pass has to be measured "
        "against, and the guide alone is what a guided pass has to beat.",
    ),
    "throughput.ratios": FigureKind(
        throughput_plots.speedups,
        "Time of the reference over the time of each mode, repeat by repeat, with its 95 % interval. "
        "Limits of a decoding step in the mode's colour: dashed while weights are read (small "
        "batches), dotted while arithmetic is the bottleneck (large ones, and prefill).",
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
    figure, all_axes = new_panels("Training", len(panels))
    for axes, names in zip(all_axes, panels, strict=True):
        colours = COLOURS if names is losses else COLOURS[2:]
        for colour, name in zip(colours, names, strict=False):
            steps, values = zip(*series[name], strict=True)
            style = "o-" if name.startswith("val/") else "-"
            axes.plot(steps, values, style, markersize=4, color=colour, label=name)
        axes.set_xlabel("optimizer step")
        axes.set_ylabel("nats per position" if names is losses else "ratio or share")
        axes.set_ylim(bottom=0)
        axes.legend()
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
