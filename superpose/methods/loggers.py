"""Loggers that need more than their constructor."""

import os
from typing import Any

from lightning.pytorch.loggers import WandbLogger


def wandb_logger(
    save_dir: str, project: str, name: str | None, offline: bool | None
) -> WandbLogger:
    """A Weights & Biases logger that never asks and never waits.

    Args:
        save_dir: the run's folder; an offline run lies in its ``wandb/``.
        project: W&B project.
        name: name of the run, or None.
        offline: True or False; None is offline exactly where ``WANDB_API_KEY`` and ``WANDB_MODE``
            are unset.
    """
    if offline is None:
        offline = not (os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE"))
    settings: dict[str, Any] = {"project": project, "name": name}
    return WandbLogger(save_dir=save_dir, offline=offline, **settings)
