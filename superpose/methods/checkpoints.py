"""Checkpoint files that are either whole or not there, and the reading of them."""

import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO


class AtomicCheckpointIO(TorchCheckpointIO):
    """Write beside the target and rename, so that a killed run leaves the old file as it was."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        """Save ``checkpoint`` to ``path`` through a temporary file of the same folder."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)

    def load_checkpoint(
        self, path: Any, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read with :func:`read_checkpoint`, whose errors tell a user what to do."""
        return read_checkpoint(Path(path))


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a .ckpt; tensors and plain values only, nothing that could run code.

    Raises:
        ValueError: if the file is missing, truncated, or not a checkpoint of superpose.
    """
    if not path.is_file():
        raise ValueError(f"checkpoint={path} does not exist; give a run folder or a .ckpt file")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises several kinds for a truncated or foreign file
        reason = " ".join(str(error).split())[:150]
        raise ValueError(
            f"checkpoint={path} ({path.stat().st_size} bytes) cannot be read, it is truncated or "
            f"no checkpoint ({reason}); give another one of the run's checkpoints/ folder"
        ) from None
    if "superpose" not in checkpoint:
        raise ValueError(
            f"checkpoint={path} was not written by superpose (it does not say its base model); "
            "give a .ckpt of a superpose run, or load a Hugging Face folder with model.path"
        )
    return checkpoint
