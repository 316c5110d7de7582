"""The table of all jobs at the end of a sweep, and its means over seeds."""

import atexit
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

LOG_WIDTH = 140  # columns of the tables in a log file
STATUS_FILE = "status.json"
SWEEP_FILE = "sweep.json"
COLUMNS = {
    "superposition.kl_ratio": "kl ratio",
    "superposition.rank.top_10": "top 10",
    "lambada.single.accuracy": "single cloze",
    "lambada.mixed.first_token_accuracy": "mixed cloze",
    "perplexity.nll_nats": "NLL (nats)",
}
Row = dict[str, Any]


class SweepTable(Callback):
    """Hydra callback: prints the table when the process ends, failed jobs included."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Remember where the sweep's jobs lie."""
        folder = Path(config.hydra.sweep.dir)
        # At the end of the process: Hydra reports no end for a sweep in which a job failed.
        width = None if sys.stdout.isatty() else LOG_WIDTH
        atexit.register(lambda: print_sweep(folder, Console(width=width)))


def read_sweep(folder: Path) -> list[Row]:
    """One row a job: its folder, overrides, status, metric or error, and its results' metrics."""
    rows = []
    files = sorted(folder.glob(f"*/{STATUS_FILE}"), key=lambda file: file.parent.name.zfill(9))
    for file in files:
        results = file.parent / "results.json"
        metrics = json.loads(results.read_text("utf-8"))["metrics"] if results.is_file() else {}
        row = {"job": file.parent.name, **json.loads(file.read_text("utf-8")), "metrics": metrics}
        rows.append(row)
    return rows


def over_seeds(rows: list[Row]) -> list[Row]:
    """Mean and standard deviation of each metric over the jobs that differ in ``seed`` alone."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row["status"] == "ok":
            rest = [part for part in row["overrides"] if not part.startswith("seed=")]
            groups.setdefault(" ".join(rest), []).append(row)
    return [
        {
            "overrides": overrides,
            "seeds": len(jobs),
            "metrics": {
                name: (statistics.mean(values), statistics.stdev(values))
                for name in jobs[0]["metrics"]
                if len(values := [j["metrics"][name] for j in jobs if name in j["metrics"]]) > 1
            },
        }
        for overrides, jobs in groups.items()
        if len(jobs) > 1
    ]


def print_sweep(folder: Path, console: Console) -> None:
    """Print the tables of a sweep, and write their rows to ``sweep.json`` in its folder."""
    rows = read_sweep(folder)
    if not rows:
        return
    shown = [name for name in COLUMNS if any(name in row["metrics"] for row in rows)]
    console.print(_jobs(rows, shown, f"{len(rows)} jobs in {folder}"))
    groups = over_seeds(rows)
    if groups:
        console.print(_seeds(rows, groups, shown))
    text = json.dumps({"jobs": rows, "over_seeds": groups}, indent=1)
    (folder / SWEEP_FILE).write_text(text + "\n", encoding="utf-8")


def common_overrides(rows: list[Row]) -> set[str]:
    """What every job was given: it tells none from another."""
    return set(rows[0]["overrides"]).intersection(*(row["overrides"] for row in rows))


def _jobs(rows: list[Row], shown: list[str], title: str) -> Table:
    table = Table(title=title)
    for column in ("job", "overrides", "status", "metric", *(COLUMNS[name] for name in shown)):
        table.add_column(column, overflow="fold")
    common = common_overrides(rows)
    for row in rows:
        metric = f"{row['metric']:.4f}" if "metric" in row else row.get("error", "")[:60]
        values = [_number(row["metrics"].get(name)) for name in shown]
        swept = [part for part in row["overrides"] if part not in common]
        table.add_row(row["job"], " ".join(swept), row["status"], metric, *values)
    return table


def _seeds(rows: list[Row], groups: list[Row], shown: list[str]) -> Table:
    """One row a group; the base model above them, if all jobs have the same."""
    table = Table(title="mean ± standard deviation over seeds")
    for column in ("overrides", "seeds", *(COLUMNS[name] for name in shown)):
        table.add_column(column, overflow="fold")
    bases = [
        tuple(row["metrics"].get(f"base.{name}") for name in shown)
        for row in rows
        if row["status"] == "ok"
    ]
    if len(set(bases)) == 1 and any(value is not None for value in bases[0]):
        table.add_row("(base model)", "", *(_number(value) for value in bases[0]))
    for group in groups:
        cells = []
        for name in shown:
            mean, deviation = group["metrics"].get(name, (None, None))
            cells.append("" if mean is None else f"{mean:.4f} ± {deviation:.4f}")
        swept = [part for part in group["overrides"].split() if part not in common_overrides(rows)]
        table.add_row(" ".join(swept), str(group["seeds"]), *cells)
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
