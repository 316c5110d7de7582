"""``report.md``: what a run did and found, readable without anything but its folder."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from superpose.reports import plots, tables
from superpose.reports.glossary import BASE, meaning_of
from superpose.reports.paper import paper_figures
from superpose.reports.results import Result

FILE_NAME = "report.md"
FIGURES_FOLDER = "figures"
TRAINING_CURVE = "training_curve.png"


def write_report(folder: str | Path, results: Sequence[Result]) -> Path:
    """Write the figures and the report of a run.

    Args:
        folder: the run's folder; gets ``figures/`` and ``report.md``. A ``metrics.csv`` in it is
            drawn as the training curve.
        results: one a suite, as in ``results.json``.

    Returns:
        Path of ``report.md``. All paths inside are relative to the folder.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    parts = [f"# {' and '.join(dict.fromkeys(result['suite'] for result in results)) or 'run'}"]
    if results:
        parts.append(_setting(results[0]))
    parts += _training(folder)
    for result in results:
        parts += _section(folder, result)
    parts.append(_meanings(name for result in results for name in result["metrics"]))
    path = folder / FILE_NAME
    path.write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")
    return path


def _setting(result: Result) -> str:
    """Command, model, data and environment, of which all results of a run have the same."""
    environment = result["environment"]
    versions = ("python", "torch", "transformers", "lightning", "superpose", "torch_threads")
    shown = [f"{key} {environment[key]}" for key in versions if environment.get(key) is not None]
    lines = [
        ("Model", _described(result["model"])),
        ("Data", _described(result["data"])),
        ("Seed", str(result["seed"])),
        ("Commit", environment.get("commit") or ""),
        ("Environment", ", ".join(shown)),
        ("Platform", environment.get("platform") or ""),
    ]
    listed = "\n".join(f"- {name}: {text}" for name, text in lines if text)
    command = f"```\n{result['command']}\n```\n\n" if result.get("command") else ""
    return command + listed


def _described(value: Any) -> str:
    """Everything that a result says of its model or data, in one line."""
    if not isinstance(value, dict):
        return tables.name_of(value)
    details = [
        f"{key} {tables.format_cell(item)}"
        for key, item in value.items()
        if key not in ("name", "names", "path", "fingerprints") and item is not None
    ]
    return ", ".join([tables.name_of(value), *details])


def _training(folder: Path) -> list[str]:
    source = folder / "metrics.csv"
    figure = plots.training_curve(source) if source.is_file() else None
    if figure is None:
        return []
    plots.save(figure, folder / FIGURES_FOLDER / TRAINING_CURVE)
    image = f"![training curve]({FIGURES_FOLDER}/{TRAINING_CURVE})"
    return ["## Training", image, "Loss and held-out metrics by optimizer step (`metrics.csv`)."]


def _section(folder: Path, result: Result) -> list[str]:
    """One result: its metrics, figures and tables."""
    counts = ", ".join(
        f"{value:,} {name.replace('_', ' ')}" for name, value in result["counts"].items()
    )
    seconds = f"{result['elapsed_seconds']:.1f} s"
    labels, paper = tables.labels_of(result), paper_figures(result["config"] or {})
    metrics = tables.metrics_grid(result["metrics"], labels, paper)
    parts = [
        f"## {result['suite']}",
        f"Measured: {counts or 'see below'}; {seconds}.",
        tables.markdown(metrics),
    ]
    for table, path in plots.write_figures(folder / FIGURES_FOLDER, result).items():
        relative = path.relative_to(folder).as_posix()
        parts += [f"![{table}]({relative})", plots.FIGURES[table].caption]
    for table, rows in result["tables"].items():
        parts += _table(table, rows)
    return parts


def _table(name: str, rows: list[tables.Row]) -> list[str]:
    if not rows:
        return []
    if name.endswith(".summary"):
        if len(rows) <= 2:  # base and checkpoint: the metrics are this table already
            return [f"### {name}", "The metrics above, one row a model: see `results.json`."]
        return [f"### {name}", tables.markdown(tables.summary_grid(rows))]
    grid = tables.rows_grid(rows, tables.MAX_ROWS)
    parts = [f"### {name}", tables.markdown(grid)]
    if len(grid.rows) < len(rows):
        parts.append(f"{len(grid.rows)} of {len(rows)} rows; all of them are in `results.json`.")
    return parts


def _meanings(names: Iterable[str]) -> str:
    """A list of what the metrics mean, metrics of one meaning in one line."""
    grouped: dict[str, list[str]] = {}
    for name in dict.fromkeys(name.removeprefix(BASE) for name in names):
        meaning = meaning_of(name)
        if meaning.text:
            better = f"{meaning.better} is better" if meaning.better else ""
            tail = "; ".join(filter(None, (meaning.unit, better)))
            text = meaning.text + (f" ({tail})" if tail else "")
            grouped.setdefault(text, []).append(f"`{name}`")
    if not grouped:
        return ""
    lines = "\n".join(f"- {', '.join(names)}: {text}." for text, names in grouped.items())
    return f"## What the metrics mean\n\n{lines}"
