"""Ordinary next-token pretraining: how the packaged models are made."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from superpose.methods.base import Method
from superpose.models.layout import embed, final_hidden, output_head
from superpose.models.loading import LanguageModel
from superpose.streams.batch import StreamBatch


class Pretrain(Method):
    """Train the model itself on next-token cross-entropy, every stream as a text of its own.

    Logged: ``train/nll_nats`` and ``val/nll_nats``, nats per predicted token.
    """

    model_names = ("model",)
    loss_name = "nll_nats"

    def __init__(self, model: LanguageModel, **settings: Any):
        """Train ``model`` in place (in float32); ``settings`` are those of :class:`Method`."""
        super().__init__(model, **settings)
        self.model = model.model.float().requires_grad_(True)

    @property
    def trained(self) -> PreTrainedModel:
        """The model."""
        return self.model

    def training_step(self, batch: StreamBatch, batch_idx: int) -> Tensor:
        """Sum over predicted tokens of the negative log-likelihood."""
        total, num_tokens = self._nll(batch)
        return self.count(total, num_tokens)

    def validation_step(self, batch: StreamBatch, batch_idx: int) -> None:
        """Add up over the validation batches."""
        total, num_tokens = self._nll(batch)
        self.sums["nll"] += float(total)
        self.sums["tokens"] += num_tokens

    def on_validation_epoch_end(self) -> None:
        """Mean over all validation tokens, of all ranks."""
        sums = self.reduced_sums()
        self.log_validation({"val/nll_nats": sums["nll"] / sums["tokens"]})

    def _nll(self, batch: StreamBatch) -> tuple[Tensor, int]:
        ids = batch.input_ids.flatten(0, 1)  # (B N, T)
        predicted = batch.attention_mask.flatten(0, 1)[:, 1:].bool()  # (B N, T - 1)
        hidden = final_hidden(self.model, inputs_embeds=embed(self.model, ids))[:, :-1]
        logits = output_head(self.model).logits(hidden[predicted])  # (tokens, V)
        total = torch.nn.functional.cross_entropy(logits, ids[:, 1:][predicted], reduction="sum")
        return total, int(predicted.sum())
