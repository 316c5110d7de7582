"""What all training methods share: one reduction, optimizer and schedule, the checkpoint's content."""

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import lightning
import torch
from torch import Tensor
from transformers import PreTrainedModel

from superpose.decoding import Decoder
from superpose.methods.schedules import Schedule
from superpose.models.loading import LanguageModel


class Method(lightning.LightningModule):
    """A LightningModule that trains one Hugging Face model.

    The loss is reduced once, by tokens: a step returns the *sum* over its valid positions, and the
    gradients are divided by the number of valid positions of the whole optimizer step - over all
    accumulated batches and all ranks - just before clipping. So a batch of 8 gives the gradient of
    two of 4, whatever their masks.

    Attributes:
        frozen: names of submodules that are never trained and never saved.
        model_names: what reports call the models measured at the end: the base model, if the method
            leaves it as it was, and the trained one.
        loss_name: the loss in logs, ``train/NAME``.
        base: the model as it was loaded.
        provenance: what the weights belong to; saved with them.
    """

    frozen: tuple[str, ...] = ()
    model_names: tuple[str, ...] = ("base", "trained")
    loss_name = "loss"

    def __init__(
        self,
        model: LanguageModel,
        monitor: str,
        optimizer: Callable[..., torch.optim.Optimizer],
        scheduler: Callable[..., Schedule],
        guide: LanguageModel | None = None,
    ):
        """Keep the settings; a subclass sets up its models.

        Args:
            model: the base model.
            monitor: the logged metric that picks the best checkpoint and steps a plateau.
            optimizer: makes the optimizer of a list of parameters.
            scheduler: makes the schedule of (optimizer, max_steps).
            guide: the small model of the run, if it has one.
        """
        super().__init__()
        self.base, self.guide_model, self.monitor = model, guide, monitor
        self.make_optimizer, self.make_scheduler = optimizer, scheduler
        self.strict_loading = False  # frozen parts are not in a checkpoint; checked in the hook
        self.provenance: dict[str, Any] = {}
        self.sums: dict[str, float] = defaultdict(float)  # of the running validation
        self._window_total = 0.0  # loss since the last optimizer step, summed over its positions
        self._window_positions = 0
        self._plateau: torch.optim.lr_scheduler.ReduceLROnPlateau | None = None
        self._plateau_state: dict[str, Any] | None = None

    @property
    def trained(self) -> PreTrainedModel:
        """The model whose weights the method changes and exports."""
        raise NotImplementedError

    def train(self, mode: bool = True) -> "Method":
        """Switch the mode of the trained parts; frozen ones stay in eval mode."""
        super().train(mode)
        for name in self.frozen:
            getattr(self, name).eval()
        return self

    def on_fit_start(self) -> None:
        """Models come from disk in eval mode, and Lightning keeps the mode it finds."""
        self.train()

    def on_new_weights(self) -> None:
        """Called before training when ``trained`` was given the weights of a checkpoint."""

    def parameter_groups(self) -> list[dict[str, Any]]:
        """The parameters to train, in groups of one learning rate."""
        return [{"params": [p for p in self.parameters() if p.requires_grad]}]

    def decoder(self, model: LanguageModel) -> Decoder | None:
        """What was trained to tell the streams of ``model``, the trained model, apart; or None."""
        return None

    def head_provenance(self) -> dict[str, Any]:
        """What provenance has to say of a decoding head as it is now."""
        return {}

    def head_state(self) -> dict[str, Tensor]:
        """The weights of a decoding head, to be exported beside the model."""
        return {}

    def configure_optimizers(self) -> Any:
        """An optimizer of what requires gradients, and its schedule in optimizer steps."""
        optimizer = self.make_optimizer(self.parameter_groups())
        schedule = self.make_scheduler(optimizer, max_steps=self.trainer.max_steps)
        self._plateau = schedule.per_validation
        if self._plateau is not None and self._plateau_state is not None:
            self._plateau.load_state_dict(self._plateau_state)
        return [optimizer], [{"scheduler": schedule.per_step, "interval": "step"}]

    def count(self, total: Tensor, num_positions: int, scale: float = 1.0) -> Tensor:
        """Register a step's loss ``total`` (a sum over ``num_positions``) and return it, scaled.

        Raises:
            ValueError: if it is not finite: the run stops and keeps its last good checkpoint.
        """
        value = float(total.detach())
        self.check_finite("the loss", value)
        self._window_total += value
        self._window_positions += num_positions
        return total * scale

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Turn the accumulated sum into the mean over all positions of this step."""
        total, positions = self.reduced([self._window_total, float(self._window_positions)])
        self._window_total, self._window_positions = 0.0, 0
        self.log(f"train/{self.loss_name}", total / max(1.0, positions))
        # Lightning divided by the accumulated batches, and DDP averaged over the ranks.
        averaged = self.trainer.accumulate_grad_batches * self.trainer.world_size
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        torch._foreach_mul_(gradients, averaged / max(1.0, positions))

    def reduced(self, values: list[float]) -> list[float]:
        """The sums of ``values`` over all ranks."""
        if self.trainer.world_size == 1:
            return values
        summed = self.trainer.strategy.reduce(
            torch.tensor(values, dtype=torch.float64, device=self.device), reduce_op="sum"
        )
        assert isinstance(summed, Tensor)
        return summed.tolist()

    def reduced_sums(self) -> dict[str, float]:
        """The sums of the validation over all ranks; the next validation starts at zero."""
        names = sorted(self.sums)
        values = self.reduced([self.sums[name] for name in names])
        self.sums = defaultdict(float)
        return defaultdict(float, zip(names, values, strict=True))

    def log_validation(self, metrics: dict[str, float]) -> None:
        """Log a validation's metrics, the same on every rank, and step a plateau schedule.

        Raises:
            ValueError: if the monitored one is not finite, before anything is saved.
        """
        self.check_finite(self.monitor, metrics[self.monitor])
        self.log_dict(metrics)
        if self._plateau is not None:
            self._plateau.step(metrics[self.monitor])

    def check_finite(self, name: str, value: float) -> None:
        """Raise ValueError with the step and the way out if ``value`` is NaN or infinite."""
        if not math.isfinite(value):
            raise ValueError(
                f"{name} became {value} at step {self.global_step}; the last good checkpoint is "
                "kept - lower method.optimizer.lr, lengthen method.scheduler.warmup_steps or set "
                "trainer.gradient_clip_val"
            )

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Drop the frozen parts and say what the weights belong to."""
        checkpoint["state_dict"] = {
            key: value for key, value in checkpoint["state_dict"].items() if not self._frozen(key)
        }
        checkpoint["superpose"] = self.provenance | self.head_provenance()
        if self._plateau is not None:
            checkpoint["plateau"] = self._plateau.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse weights that do not fit this model exactly, or come from another base model."""
        expected = {key for key in self.state_dict() if not self._frozen(key)}
        found = set(checkpoint["state_dict"])
        if expected != found:
            odd = sorted(expected ^ found)
            raise ValueError(
                f"the checkpoint does not fit {self.base.name}: {len(odd)} weights are missing or "
                f"unexpected, such as {odd[0]}; give the checkpoint of a run with this model"
            )
        theirs = checkpoint["superpose"].get("fingerprint")
        ours = self.provenance.get("fingerprint")
        if theirs and ours and theirs != ours:
            raise ValueError(
                f"the checkpoint was trained from a base model with fingerprint {theirs}, but "
                f"model.path={self.base.path} has {ours}; give the base model of that run"
            )
        self._plateau_state = checkpoint.get("plateau")

    def _frozen(self, key: str) -> bool:
        return key.startswith(tuple(f"{name}." for name in self.frozen)) if self.frozen else False
