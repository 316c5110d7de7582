"""Figures of attention patching, and of the number of streams."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from superpose.reports.drawing import (
    COLOURS,
    Row,
    by_model,
    column,
    log_ranks,
    new_axes,
    new_panels,
    percent,
    styled,
)

KIND_COLOURS = {"predictable": COLOURS[5], "content": COLOURS[0]}
WIDTH = 0.38  # of a bar; setups are 1 apart


@styled
def patching_ranks(rows: Sequence[Row]) -> Figure:
    """Median rank of the vanilla argmax token, by setup and kind of token (Table 2)."""
    figure, axes = new_axes("What disturbs a prediction")
    for offset, (kind, colour) in zip((-WIDTH / 2, WIDTH / 2), KIND_COLOURS.items(), strict=True):
        places = [place + offset for place in range(len(rows))]
        medians = column(rows, f"{kind}.median_rank")
        bars = axes.bar(places, medians, WIDTH, color=colour, label=f"{kind} tokens")
        axes.bar_label(bars, fmt="{:,.0f}", fontsize=8, padding=2)
    axes.set_xticks(range(len(rows)), [row["setup"].replace("_", ",\n") for row in rows])
    axes.grid(axis="x", visible=False)
    log_ranks(axes, "y")
    axes.set_ylim(0.8, 10 * axes.get_ylim()[1])  # room for the legend
    axes.set_xlabel("what is done to the pass")
    axes.set_ylabel("median rank (1 is undisturbed)")
    axes.legend()
    return figure


@styled
def degradation(rows: Sequence[Row]) -> Figure:
    """KL ratio, and share of tokens in the top 10, by the number of streams (Table 11)."""
    figure, (ratios, shares) = new_panels("More texts in one pass", 2)
    for colour, (model, of_model) in zip(COLOURS, by_model(rows), strict=False):
        counts = [row["num_streams"] for row in of_model]
        ratios.plot(counts, column(of_model, "kl_ratio"), "o-", color=colour, label=str(model))
        top_10 = column(of_model, "rank.top_10")
        content = column(of_model, "rank.content.top_10")
        shares.plot(counts, top_10, "o-", color=colour, label=f"{model}: all tokens")
        shares.plot(counts, content, "o--", color=colour, label=f"{model}: content")
    ratios.set_ylim(0, 1.2 * ratios.get_ylim()[1])
    ratios.set_ylabel("KL ratio (eq. 3)")
    percent(shares, "argmax tokens in the top 10")
    for axes in (ratios, shares):
        axes.set_xticks(sorted({row["num_streams"] for row in rows}))
        axes.set_xlabel("streams N")
        axes.legend()
    figure.tight_layout()
    return figure
