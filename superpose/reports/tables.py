"""Tables for the terminal (rich) and for reports (Markdown), from results alone."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from rich.console import Console
from rich.table import Table

from superpose.reports.glossary import BASE, meaning_of
from superpose.reports.results import Result

Row = dict[str, Any]
MAX_ROWS = 20  # of a detail table in a report; the rest stays in results.json


LEFT_TO_THE_REPORT = (
    "*standard_error", "*unrelated*", "*.control.*", "*.stream_*", "*.rank_truth.top_*",
    "*.rank.median_confident", "*.rank.top_50", "*lambada.single.first_token_accuracy",
    "*lambada.guide.first_token_accuracy", "throughput.*.prefill_seconds",
    "throughput.*_bytes*",
)  # fmt: skip


@dataclass(frozen=True)
class Grid:
    """A table of formatted cells.

    Attributes:
        columns: headings.
        rows: texts, as many a row as there are columns.
        numeric: which columns hold numbers, to be aligned on the right.
    """

    columns: list[str]
    rows: list[list[str]]
    numeric: list[bool]


def metrics_grid(
    metrics: dict[str, float],
    labels: tuple[str, str] = ("base", "model"),
    paper: Mapping[str, str] | None = None,
) -> Grid:
    """The metrics of a result, ``base.X`` beside ``X`` with the change where both exist.

    Args:
        metrics: dotted names to numbers.
        labels: headings of the base model's and the measured model's column.
        paper: the paper's figures by metric; a column of its own if any of them is here.
    """
    paper = paper or {}
    names = [name for name in metrics if not name.startswith(BASE)]
    names += [
        short
        for name in metrics
        if name.startswith(BASE) and (short := name.removeprefix(BASE)) not in metrics
    ]
    compared = any(name.startswith(BASE) for name in metrics)
    rows = []
    for name in names:
        base, value = metrics.get(BASE + name), metrics.get(name)
        meaning = meaning_of(name)
        better = {"lower": "↓", "higher": "↑"}.get(meaning.better, "")
        change = None if base is None or value is None else value - base
        numbers = [base, value] if compared else [value]
        cells = [format_cell(number) for number in numbers]
        cells += [format_cell(change, signed=True)] if compared else []
        rows.append([name, *cells, " ".join(filter(None, (meaning.unit, better)))])
    values = [*labels, "change"] if compared else [labels[1]]
    headings = ["metric", *values, "unit, better"]
    if any(name in paper for name in names):
        headings.append("paper")
        rows = [[*row, paper.get(name, "")] for name, row in zip(names, rows, strict=True)]
    numeric = [0 < index <= len(values) for index in range(len(headings))]
    return Grid(headings, rows, numeric)


def rows_grid(rows: Sequence[Row], max_rows: int | None = None) -> Grid:
    """The rows of a results table; of more than ``max_rows`` as many, evenly chosen per model."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    shown = rows if max_rows is None else _thinned(rows, max_rows)
    return Grid(
        columns,
        [[format_cell(row.get(column)) for column in columns] for row in shown],
        [all(not isinstance(row.get(column), str) for row in rows) for column in columns],
    )


def _thinned(rows: Sequence[Row], max_rows: int) -> list[Row]:
    """At most ``max_rows`` rows, the same ones of every model, its first and last among them."""
    if len(rows) <= max_rows:
        return list(rows)
    models = list(dict.fromkeys(row.get("model") for row in rows))
    wanted = max(2, max_rows // len(models))
    shown = []
    for model in models:
        own = [row for row in rows if row.get("model") == model]
        step = (len(own) - 1) / (wanted - 1)
        places = dict.fromkeys(round(index * step) for index in range(wanted))
        shown += [own[place] for place in places]
    return shown


def summary_grid(rows: Sequence[Row]) -> Grid:
    """Few models with many columns: turned round, one line a column."""
    models = [str(row.get("model", "")) for row in rows]
    columns = [column for column in rows[0] if column != "model"]
    body = [[column, *[format_cell(row.get(column)) for row in rows]] for column in columns]
    return Grid(["", *models], body, [False, *[True] * len(rows)])


def format_cell(value: Any, signed: bool = False) -> str:
    """A number in about four significant digits, None as a dash, anything else as it is."""
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    sign = "+" if signed else ""
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):{sign},}"
    size = abs(value)
    if size >= 1000:
        return f"{value:{sign},.0f}"
    if size >= 100:
        return f"{value:{sign}.1f}"
    if size >= 10:
        return f"{value:{sign}.2f}"
    return f"{value:{sign}.4f}" if size >= 1e-3 else f"{value:{sign}.2e}"


def markdown(grid: Grid) -> str:
    """A grid as a Markdown table."""
    lines = [grid.columns, ["---:" if numeric else "---" for numeric in grid.numeric], *grid.rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |"
        for line in lines
    )


def rich_table(grid: Grid, title: str | None = None) -> Table:
    """A grid for the terminal."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for index, (heading, numeric) in enumerate(zip(grid.columns, grid.numeric, strict=True)):
        table.add_column(
            heading,
            justify="right" if numeric else "left",
            no_wrap=numeric or index == 0,
            overflow="fold",
        )
    for row in grid.rows:
        table.add_row(*row)
    return table


def print_results(console: Console, results: Iterable[Result]) -> None:
    """Print the metrics of each result as one table; a checkpoint beside its base.

    Errors, denominators, controls and single streams are left to the report.
    """
    for result in results:
        shown = {
            name: value
            for name, value in result["metrics"].items()
            if not any(fnmatchcase(name, pattern) for pattern in LEFT_TO_THE_REPORT)
        }
        console.print(rich_table(metrics_grid(shown, labels_of(result)), title(result)))


def title(result: Result) -> str:
    """One line that says what a result is of."""
    parts = [result["suite"], name_of(result["model"])]
    if data := name_of(result["data"]):
        parts += ["on", data]
    return " ".join(part for part in parts if part)


def labels_of(result: Result) -> tuple[str, str]:
    """Headings of the base model's and the measured model's column, as the tables name them."""
    for rows in result["tables"].values():
        models = list(dict.fromkeys(str(row["model"]) for row in rows if "model" in row))
        if len(models) > 1:
            return models[0], models[-1]
    return "base", "model"


def name_of(described: Any) -> str:
    """A model or data set in a few words, however its result describes it."""
    if not isinstance(described, dict):
        return "" if described is None else str(described)
    if described.get("names"):
        return " and ".join(dict.fromkeys(map(str, described["names"])))
    parts = (described.get("name"), described.get("path"))
    return " ".join(dict.fromkeys(str(part) for part in parts if part))
