"""Progress, speed and memory of a training run; the trajectory it leaves."""

import logging
import resource
import sys
import time
from pathlib import Path
from typing import Any

import lightning
import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import (
    Progress as RichProgress,
)

from superpose.methods.base import Method
from superpose.models.revisions import step_folder
from superpose.streams.batch import StreamBatch

log = logging.getLogger(__name__)


class Progress(lightning.Callback):
    """A bar with the whole run on a terminal, a plain line every few steps elsewhere.

    Also logs ``train/mixtures_per_second``, ``train/positions_per_second`` (mixed positions, over
    all ranks, validation not counted), ``train/peak_memory_mb`` and ``train/lr``.
    """

    def __init__(self, every_steps: int = 20):
        """``every_steps``: optimizer steps between plain lines."""
        if every_steps < 1:
            raise ValueError(
                f"callbacks.progress.every_steps must be at least 1, got {every_steps}"
            )
        self.every_steps = every_steps
        self._bar: RichProgress | None = None
        self._task: Any = None
        self._rows = self._positions = 0
        self._seconds = 0.0
        self._since = 0.0
        self._start_step = self._last_step = 0
        self._started = 0.0
        self._lr = 0.0

    def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        """Open the bar."""
        self._since = self._started = time.perf_counter()
        self._start_step = self._last_step = trainer.global_step
        if trainer.is_global_zero and sys.stderr.isatty():
            self._bar = RichProgress(
                TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}"),
                TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True),
            )  # fmt: skip
            self._task = self._bar.add_task(
                "training", total=trainer.max_steps, completed=trainer.global_step, loss=""
            )
            self._bar.start()

    def on_train_batch_start(
        self,
        trainer: lightning.Trainer,
        module: lightning.LightningModule,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Keep the rate of this step: schedules move on before it ends."""
        self._lr = trainer.optimizers[0].param_groups[0]["lr"]

    def on_train_batch_end(
        self, trainer: lightning.Trainer, module: lightning.LightningModule, outputs: Any,
        batch: StreamBatch, batch_idx: int,
    ) -> None:  # fmt: skip
        """Count what the batch held; report at the end of an optimizer step."""
        self._rows += batch.num_rows * trainer.world_size
        self._positions += batch.num_rows * batch.length * trainer.world_size
        if trainer.global_step == self._last_step:
            return  # in the middle of an accumulated step
        self._last_step = trainer.global_step
        self._seconds += time.perf_counter() - self._since
        interval = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if self._last_step % interval == 0 or self._due(trainer):
            self._report(trainer, module)
        self._since = time.perf_counter()

    def on_validation_end(
        self, trainer: lightning.Trainer, module: lightning.LightningModule
    ) -> None:
        """The time of a validation is not that of training."""
        self._since = time.perf_counter()

    def on_train_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        """Close the bar."""
        self._close()

    def on_exception(
        self,
        trainer: lightning.Trainer,
        module: lightning.LightningModule,
        exception: BaseException,
    ) -> None:
        """Close the bar."""
        self._close()

    def _due(self, trainer: lightning.Trainer) -> bool:
        step = trainer.global_step
        return step % self.every_steps == 0 or step == trainer.max_steps

    def _report(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        seconds = max(self._seconds, 1e-9)
        speed = self._positions / seconds
        module.log_dict(
            {
                "train/mixtures_per_second": self._rows / seconds,
                "train/positions_per_second": speed,
                "train/peak_memory_mb": peak_memory_mb(module.device),
                "train/lr": self._lr,
            }
        )
        self._rows = self._positions = 0
        self._seconds = 0.0
        shown = {
            name: float(value)
            for name, value in trainer.callback_metrics.items()
            if name.endswith("_nats")
        }
        text = "  ".join(f"{name} {value:.4f}" for name, value in sorted(shown.items()))
        step = trainer.global_step
        if self._bar is not None:
            self._bar.update(self._task, completed=step, loss=text)
        elif trainer.is_global_zero and self._due(trainer):
            done = max(1, step - self._start_step)
            left = (time.perf_counter() - self._started) / done * (trainer.max_steps - step)
            log.info(
                "step %d/%d  %s  %.0f positions/s  %d:%02d left",
                step, trainer.max_steps, text, speed, left // 60, left % 60,
            )  # fmt: skip

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class Trajectory(lightning.Callback):
    """Keep the weights after 0, 1, 2, 4, 8, ... optimizer steps and after the last one.

    Each is a Hugging Face folder ``step_0000008``, which ``suite.revisions`` finds again.
    """

    def __init__(self, folder: str) -> None:
        """``folder``: where the folders go."""
        self.folder = Path(folder)
        self._saved: int | None = None

    def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        """Keep the weights before the first step, unless the run is a resumed one."""
        if trainer.global_step == 0:
            self._save(trainer, module)

    def on_train_batch_end(
        self, trainer: lightning.Trainer, module: lightning.LightningModule, outputs: Any,
        batch: StreamBatch, batch_idx: int,
    ) -> None:  # fmt: skip
        """Keep them after a power of two."""
        if trainer.global_step.bit_count() == 1:
            self._save(trainer, module)

    def on_train_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        """Keep the last ones."""
        self._save(trainer, module)

    def _save(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        step = trainer.global_step
        if step == self._saved or not trainer.is_global_zero:
            return  # in the middle of an accumulated step, or another rank
        assert isinstance(module, Method)
        module.trained.save_pretrained(self.folder / step_folder(step))
        module.base.tokenizer.save_pretrained(self.folder / step_folder(step))
        self._saved = step


def peak_memory_mb(device: torch.device) -> float:
    """Peak memory in MB: of the GPU's tensors, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak * 1024 / 1e6
