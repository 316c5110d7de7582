"""A suite's figures along a training run: one row a revision, and how they move with the step."""

from collections.abc import Mapping
from typing import Any

from scipy.stats import spearmanr

from superpose.models.revisions import step_of

Row = dict[str, Any]


def trajectory_rows(summaries: Mapping[str, Mapping[str, float]]) -> list[Row]:
    """Rows of a ``SUITE.trajectory`` table: ``revision``, ``step`` (None if its name tells none).

    Args:
        summaries: of each revision, its figures by name.
    """
    return [{"revision": name, "step": step_of(name)} | dict(of) for name, of in summaries.items()]


def growth(rows: list[Row], column: str) -> dict[str, float]:
    """Where a figure is lowest, and whether it grows with the training step.

    Returns:
        ``lowest_step``, and of three revisions or more ``rank_correlation``: Spearman's, of the
        figure with the step; 1 if it grows from each revision to the next. Empty if fewer than two
        revisions tell their step.
    """
    told = [(row["step"], row[column]) for row in rows if row["step"] is not None]
    if len(told) < 2:
        return {}
    found = {"lowest_step": float(min(told, key=lambda pair: pair[1])[0])}
    if len(told) > 2 and len({value for _, value in told}) > 1:
        found["rank_correlation"] = float(spearmanr(*zip(*told, strict=True)).statistic)
    return found
