"""Figures over depth and over training: additivity and layer linearity."""

from collections.abc import Iterator, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from superpose.reports.drawing import COLOURS, Row, by_model, column, new_axes, styled


@styled
def additivity_by_layer(rows: Sequence[Row]) -> Figure:
    """E_l by hidden-state index, a line a model."""
    figure, axes = new_axes("Additivity error by depth")
    for colour, label, of_model in _lines(rows):
        indices = column(of_model, "layer")
        axes.plot(indices, column(of_model, "error"), color=colour, label=label)
    axes.set_xlabel("hidden-state index l")
    axes.set_ylabel("E_l (0 is additive)")
    axes.set_ylim(bottom=0)
    axes.legend()
    return figure


@styled
def additivity_by_step(rows: Sequence[Row]) -> Figure:
    """E_bar by training step, with its standard error over hidden-state indices (Fig. 2)."""
    figure, axes = new_axes("Additivity error along training")
    told = sorted((row for row in rows if row["step"] is not None), key=lambda row: row["step"])
    steps, means = column(told, "step"), column(told, "mean")
    errors = column(told, "standard_error")
    low = [mean - error for mean, error in zip(means, errors, strict=True)]
    high = [mean + error for mean, error in zip(means, errors, strict=True)]
    axes.fill_between(steps, low, high, color=COLOURS[0], alpha=0.2, linewidth=0)
    axes.plot(steps, means, "o-", markersize=4, color=COLOURS[0])
    _log_steps(axes)
    axes.set_ylabel("mean of E_l over l (0 is additive)")
    axes.set_ylim(bottom=0)
    return figure


@styled
def linearity_by_layer(rows: Sequence[Row]) -> Figure:
    """Linearity score of each block, plain and of its increment (Fig. 5)."""
    figure, axes = new_axes("Linearity of each block")
    for colour, label, of_model in _lines(rows):
        layers = column(of_model, "layer")
        axes.plot(layers, column(of_model, "linearity"), color=colour, label=label)
        increments = column(of_model, "linearity_increment")
        axes.plot(layers, increments, "--", color=colour, linewidth=1.2)
    axes.set_xlabel("block (dashed: what it adds to its input)")
    axes.set_ylabel("share explained by a linear map")
    axes.set_ylim(0, 1.02)
    axes.legend()
    return figure


def _lines(rows: Sequence[Row]) -> Iterator[tuple[Any, str | None, list[Row]]]:
    """Colour, label and rows of each model; many revisions get a scale, every other one a label."""
    models = by_model(rows)
    if len(models) <= len(COLOURS):
        yield from ((c, name, of) for c, (name, of) in zip(COLOURS, models, strict=False))
        return
    scale = matplotlib.colormaps["viridis_r"]
    labelled = -(-len(models) // len(COLOURS))
    for index, (name, of_model) in enumerate(models):
        last = index == len(models) - 1
        label = name if last or index % labelled == 0 else None
        yield scale(0.1 + 0.9 * index / (len(models) - 1)), label, of_model


def _log_steps(axes: Axes) -> None:
    """A logarithmic axis of training steps that has room for step 0."""
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xlim(left=0)
    axes.set_xlabel("training step")
    axes.grid(which="minor", visible=False)
