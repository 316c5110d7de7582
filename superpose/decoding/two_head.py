"""Two-Head decoding (G.2): projected streams, a norm-preserving mix, one output head a stream."""

from collections.abc import Sequence

import torch
from torch import Tensor

from superpose.models.layout import OutputHead

MIXER_NOISE = 1e-3  # standard deviation of the mixers around the identity (G.2)


class TwoHead(torch.nn.Module):
    """``z = Norm(sum_n W_n E(x^n))``, and the logits of stream n from a head of its own.

    Norm rescales to the weighted mean of the streams' input norms. Two streams in the paper, N here.

    Attributes:
        mixers: ``(N, D, D)``, the W_n, at the start the identity and noise of 1e-3.
        heads: N weights ``(V, D)``, at the start the model's own output head.
    """

    name = "two_head"
    guide = None

    def __init__(self, head: OutputHead, num_streams: int):
        """Start from the backbone's head; the noise comes from torch's global generator."""
        super().__init__()
        size = head.weight.shape[1]
        noise = MIXER_NOISE * torch.randn(num_streams, size, size)
        self.mixers = torch.nn.Parameter(torch.eye(size) + noise)
        self.heads = torch.nn.ParameterList(
            head.weight.detach().float().clone() for _ in range(num_streams)
        )

    @property
    def num_streams(self) -> int:
        """N, for which there are mixers and heads."""
        return len(self.heads)

    def mix(self, embeddings: Tensor, weights: Tensor) -> Tensor:
        """The mixed input ``(B, T, D)`` of ``embeddings (B, N, T, D)`` (see the class)."""
        if weights.dim() == 2:
            weights = weights.unsqueeze(-1).expand(embeddings.shape[:3])
        weights = weights.to(embeddings.dtype)  # (B, N, T)
        mixers = self.mixers.to(embeddings.dtype)
        # weighted first: three operands at once would hold W_n for every position
        mixed = torch.einsum("bnte,nde->btd", weights.unsqueeze(-1) * embeddings, mixers)
        norm = (weights * embeddings.norm(dim=-1)).sum(dim=1)  # (B, T)
        return mixed * (norm / mixed.norm(dim=-1).clamp_min(1e-12)).unsqueeze(-1)

    def output_heads(self, head: OutputHead) -> Sequence[OutputHead]:
        """The N heads, with the bias, scale and soft-cap of the backbone's ``head``."""
        return [OutputHead(weight, head.bias, head.softcap, head.scale) for weight in self.heads]

    def stream_logits(self, head: OutputHead, hidden: Tensor, guide: Tensor | None) -> Tensor:
        """Each stream's logits from its own head: ``(N, B, V)``."""
        return torch.stack([own.logits(hidden) for own in self.output_heads(head)])
