"""What a decoder is, and the plainest one: the mixed pass as it comes."""

from typing import Protocol

from torch import Tensor

from superpose.models.layout import OutputHead
from superpose.models.loading import LanguageModel
from superpose.streams.mixing import mix_embeddings


class Decoder(Protocol):
    """How N streams are mixed into one input, and told apart in its output.

    Attributes:
        name: ``raw``, ``guided``, ``joint`` or ``two_head``: the part of metric names.
        num_streams: the only N it decodes, or None for any.
        guide: the small model that reads every stream on its own, or None.
    """

    @property
    def name(self) -> str:
        """See the class."""

    @property
    def num_streams(self) -> int | None:
        """See the class."""

    @property
    def guide(self) -> LanguageModel | None:
        """See the class."""

    def mix(self, embeddings: Tensor, weights: Tensor) -> Tensor:
        """The mixed input ``(B, T, D)``.

        Args:
            embeddings: ``(B, N, T, D)``.
            weights: ``(B, N)`` or ``(B, N, T)``, sum 1 over N.
        """

    def stream_logits(self, head: OutputHead, hidden: Tensor, guide: Tensor | None) -> Tensor:
        """The logits ``(N, B, V)`` of the streams' next tokens; ``(1, B, V)`` if they share them.

        Args:
            head: the backbone's output head.
            hidden: ``(B, D)`` final hidden state of the mixed pass.
            guide: ``(N, B, V')`` logits of the guide, None where there is no guide.
        """


class Raw:
    """The mixed pass as it comes: every stream gets the same logits.

    By eq. 6 they are close to the logarithm of ``sqrt(P_A P_B)``: a token that one stream wants and
    the other does not is pushed down, so its argmax seldom serves either.
    """

    name = "raw"
    num_streams = None
    guide = None

    def mix(self, embeddings: Tensor, weights: Tensor) -> Tensor:
        """The weighted mean (eq. 1)."""
        return mix_embeddings(embeddings, weights)

    def stream_logits(self, head: OutputHead, hidden: Tensor, guide: Tensor | None) -> Tensor:
        """One set of logits for all."""
        return head.logits(hidden).unsqueeze(0)
