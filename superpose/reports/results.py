"""``results.json``: one evaluation as plain numbers, from which every table and figure is made."""

import datetime
import json
import math
import os
import platform
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

SCHEMA = 1
FILE_NAME = "results.json"
PACKAGES = ("torch", "transformers", "lightning", "superpose")

Result = dict[str, Any]


def build(
    *,
    suite: str,
    metrics: Mapping[str, float],
    tables: Mapping[str, list[dict[str, Any]]],
    model: Any,
    data: Any,
    config: Any,
    counts: Mapping[str, int],
    seed: int,
    elapsed_seconds: float,
    command: str | None = None,
) -> Result:
    """The result of one evaluation in the form that is written.

    Args:
        suite: name of the suite, or ``train``.
        metrics: dotted name to number.
        tables: name to rows; a row maps a column to a number, a text or None (undefined).
        model: what was measured: a name or a mapping.
        data: what it was measured on.
        config: the resolved config, plain.
        counts: how many groups, positions, examples, ... the numbers rest on.
        seed: of everything drawn at random.
        elapsed_seconds: wall-clock time of the evaluation.
        command: what a user types to get it again.

    Raises:
        ValueError: for a number that is not finite, by its name.
    """
    result = {
        "schema": SCHEMA,
        "suite": suite,
        "metrics": dict(metrics),
        "tables": dict(tables),
        "model": model,
        "data": data,
        "config": config,
        "environment": environment(),
        "counts": dict(counts),
        "seed": seed,
        "elapsed_seconds": elapsed_seconds,
        "command": command,
    }
    return {key: _plain(value, key) for key, value in result.items()}


def merged(found: Sequence[Result]) -> Result:
    """Several results of one command as one; every metric and table is named after its suite.

    Args:
        found: one a suite, at least one.
    """
    if len(found) == 1:
        return found[0]
    last = dict(found[-1])
    last["suite"] = ", ".join(result["suite"] for result in found)
    for key in ("metrics", "tables"):
        last[key] = {name: value for result in found for name, value in result[key].items()}
    last["counts"] = {
        f"{result['suite']}.{name}": value
        for result in found
        for name, value in result["counts"].items()
    }
    last["elapsed_seconds"] = math.fsum(result["elapsed_seconds"] for result in found)
    return last


def write(path: str | Path, result: Result) -> Path:
    """Write a result, whole or not at all.

    Args:
        path: the file; a folder gets a ``results.json``.
        result: from :func:`build`.

    Raises:
        ValueError: for a number that is not finite, by its name.
    """
    path = Path(path)
    if path.is_dir():
        path = path / FILE_NAME
    text = json.dumps(_plain(result, ""), indent=1, ensure_ascii=False, allow_nan=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    # A temporary file in the same folder: only there is the replacement atomic.
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def read(path: str | Path) -> Result:
    """Read a result from its file, or from the folder of a run.

    Raises:
        ValueError: if there is none, or it is not one of this schema.
    """
    path = Path(path)
    if path.is_dir():
        path = path / FILE_NAME
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}); give a results.json or the folder of a run"
        ) from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON ({error}); run the evaluation again") from None
    found = result.get("schema") if isinstance(result, dict) else None
    if found != SCHEMA:
        raise ValueError(
            f"{path} has schema {found!r}, expected {SCHEMA}; it was written by another version "
            "of superpose or another program"
        )
    return result


def environment() -> dict[str, Any]:
    """Versions, commit, threads and platform that numbers may depend on."""
    found: dict[str, Any] = {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "commit": commit(),
        "torch_threads": torch.get_num_threads(),
        "platform": platform.platform(),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def commit() -> str | None:
    """Git commit of the checkout that superpose runs from, ``+changes`` if it has any, or None."""
    checkout = Path(__file__).resolve().parents[2]
    if not (checkout / ".git").exists():  # installed: a repository around it is not ours
        return None
    head = _git(checkout, "rev-parse", "HEAD")
    if not head:
        return None
    return head + ("+changes" if _git(checkout, "status", "--porcelain", "-uno") else "")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _plain(value: Any, name: str) -> Any:
    """Only what JSON knows: mappings, lists, texts, finite numbers, None; ``name`` for errors."""
    if isinstance(value, Mapping):
        prefix = f"{name}." if name else ""
        return {str(key): _plain(item, f"{prefix}{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{name}[{index}]") for index, item in enumerate(value)]
    if hasattr(value, "item"):  # numbers of numpy and torch
        value = value.item()
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(
                f"{name.removeprefix('metrics.')} is {value}, expected a finite number; results "
                "are not written with it, because the model or its data is broken (a diverged "
                "student, an empty set)"
            )
        return value
    return str(value)  # paths, dtypes
