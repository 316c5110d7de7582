"""Joint Contrastive training (section 5 of arXiv 2609.29845): backbone, alpha and beta together."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from superpose.decoding import Decoder
from superpose.decoding.joint_contrastive import JointContrastive as Contrastive
from superpose.decoding.joint_contrastive import check_guide
from superpose.losses.contrastive import Guidance, StreamCrossEntropy, stream_cross_entropy
from superpose.methods.base import Method
from superpose.models.layout import mixed_hidden, output_head, stream_hidden
from superpose.models.loading import LanguageModel
from superpose.models.students import freeze, student_of
from superpose.streams.batch import StreamBatch


class JointContrastive(Method):
    """Train on the streams' own next tokens, read from one mixed pass with a guide's help (eq. 7).

    The loss is the mean over all streams' next tokens of the cross-entropy of
    ``l_large(z) + alpha l_guide(x^n) - beta mean of l_guide over the other streams``. Only one-hot
    rows (``streams.retention``) see no guide: they are ordinary next-token rows.

    Logged: ``train/nll_nats``, ``train/alpha`` and ``train/beta`` at every step, ``val/nll_nats``
    (nats a token) with ``val/alpha`` and ``val/beta``.
    """

    frozen = ("guide",)
    loss_name = "nll_nats"

    def __init__(
        self,
        model: LanguageModel,
        head_lr: float,
        guide: LanguageModel | None = None,
        freeze_backbone: bool = False,
        **settings: Any,
    ):
        """Start from ``model``'s weights and alpha = beta = 1.

        Args:
            model: the backbone.
            head_lr: peak learning rate of alpha and beta.
            guide: the small model, frozen.
            freeze_backbone: fit alpha and beta only (the post-hoc variant, G.1).
            **settings: of :class:`Method`.

        Raises:
            ValueError: without a guide, or with one of other tokens.
        """
        super().__init__(model, guide=guide, **settings)
        if guide is None:
            raise ValueError(
                "method=joint_contrastive needs a guide, a small model of the same tokens: "
                "guide=tiny, guide=truncated, or guide=pretrained guide.path=FOLDER"
            )
        check_guide(model, guide)
        self.guide = freeze(guide.model)
        self.freeze_backbone, self.head_lr = freeze_backbone, head_lr
        self.backbone = student_of(model.model)
        if freeze_backbone:
            self.backbone.requires_grad_(False)
            self.model_names = ("model",)  # it is its own base
        self.alpha = torch.nn.Parameter(torch.tensor(1.0))
        self.beta = torch.nn.Parameter(torch.tensor(1.0))

    @property
    def trained(self) -> PreTrainedModel:
        """The backbone."""
        return self.backbone

    def train(self, mode: bool = True) -> "JointContrastive":
        """A frozen backbone stays in eval mode, as the guide does."""
        super().train(mode)
        if self.freeze_backbone:
            self.backbone.eval()
        return self

    def parameter_groups(self) -> list[dict[str, Any]]:
        """The backbone, and alpha and beta at a rate of their own, without weight decay."""
        head = {"params": [self.alpha, self.beta], "lr": self.head_lr, "weight_decay": 0.0}
        if self.freeze_backbone:
            return [head]
        return [{"params": list(self.backbone.parameters())}, head]

    def decoder(self, model: LanguageModel) -> Decoder:
        """Guidance with alpha and beta as they are now."""
        assert self.guide_model is not None
        num_streams = self.provenance.get("num_streams")
        alpha, beta = float(self.alpha.detach()), float(self.beta.detach())
        return Contrastive(model, self.guide_model, alpha, beta, num_streams, "joint")

    def head_provenance(self) -> dict[str, Any]:
        """Alpha and beta as they are now."""
        return {"alpha": float(self.alpha.detach()), "beta": float(self.beta.detach())}

    def training_step(self, batch: StreamBatch, batch_idx: int) -> Tensor:
        """Sum over the streams' next tokens of their negative log-likelihood."""
        scalars = {"train/alpha": self.alpha.detach(), "train/beta": self.beta.detach()}
        self.log_dict(scalars)
        return self.count(self._loss(batch).total, batch.num_predicted)

    def validation_step(self, batch: StreamBatch, batch_idx: int) -> None:
        """Add up over the validation batches."""
        self.sums["nll"] += float(self._loss(batch).total)
        self.sums["tokens"] += batch.num_predicted

    def on_validation_epoch_end(self) -> None:
        """Mean over all validation tokens, of all ranks."""
        sums = self.reduced_sums()
        self.log_validation(
            {
                "val/nll_nats": sums["nll"] / sums["tokens"],
                "val/alpha": float(self.alpha.detach()),
                "val/beta": float(self.beta.detach()),
            }
        )

    def _loss(self, batch: StreamBatch) -> StreamCrossEntropy:
        with torch.no_grad():
            guide_hidden = stream_hidden(self.guide, batch)  # (B, N, T, D')
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.freeze_backbone):
            hidden = mixed_hidden(self.backbone, batch)  # (B, T, D)
        labels, predicted = batch.next_tokens()
        return stream_cross_entropy(
            hidden,
            output_head(self.backbone),
            labels,
            predicted,
            Guidance(guide_hidden, output_head(self.guide), self.alpha, self.beta),
            num_tokens=self.base.num_tokens,
        )
