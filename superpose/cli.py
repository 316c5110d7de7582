"""How a job ends: with its result, or with one clear sentence and exit code 1."""

import gc
import json
import logging
import math
import os
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException, InstantiationException
from hydra.types import RunMode
from lightning.fabric.utilities.exceptions import MisconfigurationException

from superpose.reports.sweep import STATUS_FILE

log = logging.getLogger(__name__)

Result = TypeVar("Result")


def several_suites(arguments: list[str]) -> list[str]:
    """Command-line arguments with ``suite=[A,B]`` as Hydra's ``+suite@suites.A=A +suite@...``.

    Hydra would merge the entries of a list into one node; each needs a node of its own, as in
    training: ``suites.A.limit=8``. Exits with one sentence if a key then names no suite.
    """
    lists = [argument for argument in arguments if argument.startswith("suite=[")]
    if not lists:
        return arguments
    names = [
        name.strip(" '\"") for name in lists[-1].removeprefix("suite=[").rstrip("]").split(",")
    ]
    ambiguous = [argument for argument in arguments if argument.lstrip("+~").startswith("suite.")]
    if ambiguous or "" in names or len(set(names)) < len(names):
        what = ambiguous[0] if ambiguous else lists[-1]
        raise SystemExit(
            f"error: {what}: give each suite once, suite=[superposition,perplexity], and the keys "
            f"of one of them as suites.{names[0] or 'NAME'}.KEY=VALUE"
        )
    chosen = [f"+suite@suites.{name}={name}" for name in names]
    at = arguments.index(lists[0])
    others = [argument for argument in arguments[at:] if argument not in lists]
    return [*arguments[:at], "~suite", *chosen, *others]


def run_job(function: Callable[[], Result]) -> Result:
    """Run one job of Hydra's, alone or in a sweep.

    A user's mistake (ValueError) is logged as its sentence, without traceback; the traceback of any
    error goes to the job's log file. ``status.json`` in the job's folder says how it ended. A single
    run then exits with 1; a sweep goes on with its other jobs and exits with 1 at its end.
    """
    quiet_libraries()
    folder = Path(HydraConfig.get().runtime.output_dir)
    try:
        result = function()
        if isinstance(result, float) and not math.isfinite(result):
            raise ValueError(f"the job's metric is {result}, so a sweep cannot rank it")
    except Exception as error:
        with (folder / "traceback.log").open("w", encoding="utf-8") as file:
            traceback.print_exc(file=file)
        mistake = users_mistake(error)
        write_status(folder, {"status": "failed", "error": str(mistake or repr(error))})
        if mistake is None or os.environ.get("HYDRA_FULL_ERROR"):
            raise
        log.error("error: %s", mistake)
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            raise JobFailedError(f"job {HydraConfig.get().job.num}: {mistake}") from None
        raise SystemExit(1) from None
    finally:
        gc.collect()  # a sweep's next job starts with the memory of this one free
    metric = {"metric": result} if isinstance(result, float) else {}
    write_status(folder, {"status": "ok", **metric})
    return result


class JobFailedError(CompactHydraException):
    """A job of a sweep failed by a user's mistake; Hydra prints it without traceback."""


def users_mistake(error: Exception) -> Exception | None:
    """The sentence that a user should read, or None for what looks like a bug of ours."""
    if isinstance(error, InstantiationException) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # Hydra wraps what a constructor raises
    return error if isinstance(error, ValueError | MisconfigurationException) else None


def write_status(folder: Path, status: dict[str, Any]) -> None:
    """Write ``status.json``; with what the job was, so that a sweep's table can be made of it."""
    overrides = list(HydraConfig.get().overrides.task)
    status = {**status, "overrides": overrides}
    text = json.dumps(status, indent=2) + "\n"
    (folder / STATUS_FILE).write_text(text, encoding="utf-8")


def quiet_libraries() -> None:
    """Keep notices off the terminal that a user of superpose can do nothing about."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name in ("lightning.pytorch", "lightning.fabric", "httpx", "datasets"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in (
        r".*does not have many workers which may be a bottleneck.*",
        r".*`IterableDataset` has `__len__` defined.*",
        r".*exists and is not empty.*",
        r".*isinstance\(treespec, LeafSpec\)` is deprecated.*",
        r".*Experiment logs directory .* exists.*",
        r".*module\(s\) in eval mode at the start of training.*",  # the method switches them itself
        r".*The dirpath has changed from.*",  # a resumed run writes into a folder of its own
        r".*Trying to infer the `batch_size`.*",
    ):
        warnings.filterwarnings("ignore", message=message)
