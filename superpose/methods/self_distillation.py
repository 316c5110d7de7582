"""Self-distillation on mixed embeddings (section 4 of arXiv 2609.29845)."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from superpose.losses.mixture_kl import mixture_kl
from superpose.losses.superposition import measure_row
from superpose.methods.base import Method
from superpose.models.layout import mixed_hidden, output_head, stream_hidden
from superpose.models.loading import LanguageModel
from superpose.models.students import freeze, student_of
from superpose.streams.batch import StreamBatch


class SelfDistillation(Method):
    """Train a copy of the model on KL(P_target || P_student(z)) (eq. 5).

    z is the mixed input, P_target the mean of the frozen teacher's N single-stream distributions.

    Logged: ``train/kl_nats`` (at the training temperature), ``val/kl_nats`` (at temperature 1),
    ``val/kl_ratio`` (eq. 3, smoothed by 1.5 as in Table 1; absent for N = 1), ``val/top10``
    (fraction of the streams' argmax tokens that rank among the mixed pass's first ten).
    """

    frozen = ("teacher",)
    model_names = ("teacher", "student")
    loss_name = "kl_nats"

    def __init__(self, model: LanguageModel, temperature: float = 1.0, **settings: Any):
        """Freeze ``model`` as the teacher and start the student as its copy.

        Args:
            model: the base model.
            temperature: tau of both distributions in the training loss; the loss is multiplied by
                tau squared, so that its gradient keeps its size.
            **settings: of :class:`Method`.
        """
        super().__init__(model, **settings)
        if temperature <= 0:
            raise ValueError(f"method.temperature must be positive, got {temperature}")
        self.temperature = temperature
        self.teacher = freeze(model.model)
        self.student = student_of(model.model)

    @property
    def trained(self) -> PreTrainedModel:
        """The student."""
        return self.student

    def training_step(self, batch: StreamBatch, batch_idx: int) -> Tensor:
        """Sum over valid positions of the KL, times tau squared."""
        with torch.no_grad():
            teacher_hidden = stream_hidden(self.teacher, batch)  # (B, N, T, D)
        loss = mixture_kl(
            mixed_hidden(self.student, batch),  # (B, T, D)
            output_head(self.student),
            teacher_hidden,
            output_head(self.teacher),
            batch.weights,
            mask=batch.position_mask,
            temperature=self.temperature,
        )
        num_positions = int(batch.position_mask.sum())
        return self.count(loss.total, num_positions, scale=self.temperature**2)

    def validation_step(self, batch: StreamBatch, batch_idx: int) -> None:
        """Hold the mixed pass against the target, row by row."""
        stream = stream_hidden(self.teacher, batch)
        mixed = mixed_hidden(self.student, batch)
        self.check_finite("the student's output", float(mixed.abs().max()))
        teacher_head, student_head = output_head(self.teacher), output_head(self.student)
        for row, valid in enumerate(batch.position_mask):
            streams, mixture = measure_row(
                teacher_head.logits(stream[row][:, valid]),  # (N, T, V)
                student_head.logits(mixed[row][valid]),  # (T, V)
                batch.weights[row],
                num_tokens=self.base.num_tokens,
                with_js=False,
            )
            self.sums["positions"] += int(valid.sum())
            self.sums["kl"] += float(mixture.kl_nats.sum())
            self.sums["kl_smooth"] += float(mixture.kl_smooth_nats.sum())
            self.sums["top10"] += float((mixture.ranks <= 10).float().mean(dim=0).sum())
            if streams.pair_kl_nats is not None:
                self.sums["pair_kl"] += float(streams.pair_kl_nats.sum())

    def on_validation_epoch_end(self) -> None:
        """Means over all validation positions, of all ranks."""
        sums = self.reduced_sums()
        metrics = {
            "val/kl_nats": sums["kl"] / sums["positions"],
            "val/top10": sums["top10"] / sums["positions"],
        }
        if sums["pair_kl"] > 0:
            metrics["val/kl_ratio"] = sums["kl_smooth"] / sums["pair_kl"]
        self.log_validation(metrics)
