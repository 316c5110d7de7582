"""Shared by all tests: one thread (models are tiny), no network, scripts run in this process."""

import contextlib
import io
import logging
import os
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch

# Read when transformers is imported: the hub is out of reach, and nobody waits for it.
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """One thread: the models are tiny."""
    torch.set_num_threads(1)


@dataclass(frozen=True)
class Done:
    """How a script ended."""

    returncode: int
    stdout: str
    stderr: str

    def check(self) -> "Done":
        """Fail with all that was printed unless the script succeeded."""
        assert self.returncode == 0, self.stdout + self.stderr
        return self


def run_script(script: str, *arguments: str, cwd: Path, **environment: str) -> Done:
    """Run a script of the root as ``python SCRIPT ARGUMENTS`` would in ``cwd``."""
    out, err = io.StringIO(), io.StringIO()
    root_logger = logging.getLogger()
    handlers, level = list(root_logger.handlers), root_logger.level
    code = 0
    with (
        mock.patch.object(sys, "argv", [str(ROOT / script), *arguments]),
        mock.patch.dict(os.environ, {"COLUMNS": "140", **environment}),
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    for handler in root_logger.handlers:
        if handler not in handlers:  # Hydra has put its own in their place
            handler.close()
    root_logger.handlers[:] = handlers
    root_logger.setLevel(level)
    return Done(code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="session")
def script() -> Callable[..., Done]:
    """:func:`run_script`."""
    return run_script
