"""How a command ends on disk and on the terminal: results.json, figures, report.md, tables."""

import shlex
import sys
from pathlib import Path

from rich.console import Console

from superpose.reports import live, report, results, tables
from superpose.reports.sweep import LOG_WIDTH


def write_all(folder: Path, found: list[results.Result]) -> None:
    """Write results.json, of several suites as one, the figures and report.md."""
    results.write(folder / results.FILE_NAME, results.merged(found))
    report.write_report(folder, found)


def show(folder: Path, found: list[results.Result]) -> None:
    """Show the tables and where everything lies."""
    width = None if sys.stdout.isatty() else LOG_WIDTH
    console = Console(width=width)
    tables.print_results(console, found)
    for result in found:
        if rows := result["tables"].get("generation.continuations"):
            console.print(live.continuations_table(rows))
    for name, what in (
        ("checkpoints", "best and last checkpoint"),
        ("export", "the trained model as a Hugging Face folder"),
        ("report.md", "report with figures"),
    ):
        if (folder / name).exists():
            print(f"{folder / name}  {what}")


def command() -> str:
    """What the user typed, before :func:`superpose.cli.several_suites`."""
    typed = sys.orig_argv
    start = typed.index(sys.argv[0]) if sys.argv[0] in typed else None
    words = sys.argv if start is None else typed[start:]
    return shlex.join(["python", Path(words[0]).name, *words[1:]])
