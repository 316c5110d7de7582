"""Two-Head training (G.2 of arXiv 2609.29845): projected streams, one output head a stream."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from superpose.decoding.two_head import TwoHead as Head
from superpose.losses.contrastive import stream_cross_entropy
from superpose.methods.base import Method
from superpose.models.layout import embed, final_hidden, output_head
from superpose.models.loading import LanguageModel
from superpose.models.students import student_of
from superpose.streams.batch import StreamBatch

# Dynamic loss balancing, with the paper's constants.
EMA_DECAY = 0.99  # of the streams' losses, an optimizer step
GAMMA = 5.0
BALANCE_WARMUP_STEPS = 100  # with weights 1
LEAST_WEIGHT, MOST_WEIGHT = 0.1, 10.0


class TwoHead(Method):
    """Train mixers, heads and backbone on ``sum_n a_n L_n``, L_n the cross-entropy of stream n.

    The weights follow the streams' losses, so that none is left behind: ``a_n`` is proportional to
    ``(Lbar_n / sum_m Lbar_m) ** 5`` with mean 1, clipped to 0.1..10; Lbar is a moving average over
    optimizer steps. One-hot rows (``streams.retention``) train their stream's mixer and head alone.

    Logged: ``train/nll_nats`` (unweighted), ``train/weight_n`` of every stream n (from 1),
    ``val/nll_nats``.
    """

    loss_name = "nll_nats"

    def __init__(self, model: LanguageModel, num_streams: int, head_lr: float, **settings: Any):
        """Start from ``model``'s weights; the heads are N copies of its output head.

        Args:
            model: the backbone.
            num_streams: N.
            head_lr: peak learning rate of mixers and heads.
            **settings: of :class:`Method`.
        """
        super().__init__(model, **settings)
        self.head_lr = head_lr
        self.backbone = student_of(model.model)
        self.head = Head(output_head(self.backbone), num_streams)
        embeddings = self.backbone.get_input_embeddings().weight
        if (own := self.backbone.get_output_embeddings()).weight is not embeddings:
            own.requires_grad_(False)  # the N heads stand in its place
        self.average: Tensor
        self.register_buffer("average", torch.zeros(num_streams, dtype=torch.float64))
        self._window = torch.zeros(2, num_streams, dtype=torch.float64)  # loss sums, tokens

    @property
    def trained(self) -> PreTrainedModel:
        """The backbone."""
        return self.backbone

    def on_new_weights(self) -> None:
        """The heads start as copies of the new weights' head."""
        with torch.no_grad():
            for weight in self.head.heads:
                weight.copy_(output_head(self.backbone).weight)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """The backbone, and mixers and heads at a rate of their own."""
        trained = [p for p in self.backbone.parameters() if p.requires_grad]
        return [{"params": trained}, {"params": list(self.head.parameters()), "lr": self.head_lr}]

    def decoder(self, model: LanguageModel) -> Head:
        """Mixers and heads."""
        return self.head

    def head_state(self) -> dict[str, Tensor]:
        """Mixers and heads."""
        return {key: value.detach().cpu() for key, value in self.head.state_dict().items()}

    def training_step(self, batch: StreamBatch, batch_idx: int) -> Tensor:
        """Weighted sum over the streams' next tokens of their negative log-likelihood."""
        losses, counts = self._losses(batch)
        self._window += torch.stack([torch.stack([x.detach() for x in losses]).cpu(), counts])
        weights = self.balance().tolist()
        self.log_dict({f"train/weight_{n}": weight for n, weight in enumerate(weights, start=1)})
        self.count(torch.stack(losses).sum(), batch.num_predicted)  # logged without the weights
        return torch.stack([w * x for w, x in zip(weights, losses, strict=True)]).sum()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Move the average of the streams' losses, by the sums of all ranks."""
        sums = self.reduced(self._window.flatten().tolist())
        self._window.zero_()
        totals, counts = torch.tensor(sums, dtype=torch.float64).view(2, -1)
        means = (totals / counts.clamp_min(1)).to(self.average.device)
        started = self.average.sum() > 0
        moved = torch.lerp(means, self.average, EMA_DECAY) if started else means
        self.average = torch.where(counts.to(moved.device) > 0, moved, self.average)
        super().on_before_optimizer_step(optimizer)

    def balance(self) -> Tensor:
        """The weights a_n ``(N,)`` of the streams' losses."""
        if self.global_step < BALANCE_WARMUP_STEPS:
            return torch.ones_like(self.average)
        shares = (self.average / self.average.sum()) ** GAMMA
        return (shares / shares.mean()).clamp(LEAST_WEIGHT, MOST_WEIGHT)

    def validation_step(self, batch: StreamBatch, batch_idx: int) -> None:
        """Add up over the validation batches."""
        losses, _ = self._losses(batch)
        self.sums["nll"] += float(torch.stack(losses).sum())
        self.sums["tokens"] += batch.num_predicted

    def on_validation_epoch_end(self) -> None:
        """Mean over all validation tokens, of all ranks."""
        sums = self.reduced_sums()
        self.log_validation({"val/nll_nats": sums["nll"] / sums["tokens"]})

    def _losses(self, batch: StreamBatch) -> tuple[list[Tensor], Tensor]:
        """Each stream's summed loss, and its number of predicted tokens ``(N,)``."""
        mixed = self.head.mix(embed(self.backbone, batch.input_ids), batch.weights)
        hidden = final_hidden(self.backbone, inputs_embeds=mixed)  # (B, T, D)
        labels, predicted = batch.next_tokens()
        heads = self.head.output_heads(output_head(self.backbone))
        losses = [
            stream_cross_entropy(hidden, head, labels[:, n : n + 1], predicted[:, n : n + 1]).total
            for n, head in enumerate(heads)
        ]
        return losses, predicted.sum(dim=(0, 2)).double().cpu()
