"""Joint Contrastive decoding (eq. 7): a small guide tells the streams of one mixed pass apart."""

import logging

from torch import Tensor

from superpose.decoding.raw import Raw
from superpose.losses.contrastive import contrastive_logits
from superpose.models.layout import OutputHead
from superpose.models.loading import LanguageModel

log = logging.getLogger(__name__)


class JointContrastive(Raw):
    """``l_large(z) + alpha l_guide(x^n) - beta mean of l_guide over the other streams``.

    Attributes:
        guide: the small model.
        alpha: weight of a stream's own guide logits.
        beta: weight of the mean of the others'.
        num_streams: the N that alpha and beta were trained for, or None if they were not.
    """

    def __init__(
        self,
        backbone: LanguageModel,
        guide: LanguageModel,
        alpha: float = 1.0,
        beta: float = 1.0,
        num_streams: int | None = None,
        name: str = "guided",
    ):
        """Take a guide and its weights; 1 and 1 are guidance without training.

        Raises:
            ValueError: if guide and backbone do not name the same tokens.
        """
        check_guide(backbone, guide)
        self.guide, self.alpha, self.beta = guide, alpha, beta  # type: ignore[assignment]
        self.num_streams, self.name = num_streams, name  # type: ignore[assignment]
        self.num_tokens = backbone.num_tokens

    def stream_logits(self, head: OutputHead, hidden: Tensor, guide: Tensor | None) -> Tensor:
        """Eq. 7 over the tokens that both tokenizers name: ``(N, B, len(tokenizer))``."""
        assert guide is not None
        large = head.logits(hidden)[..., : self.num_tokens]
        return contrastive_logits(large, guide[..., : self.num_tokens], self.alpha, self.beta)


def check_guide(backbone: LanguageModel, guide: LanguageModel) -> None:
    """Refuse a guide whose token ids mean other tokens; warn of one that saves nothing.

    The two may pad their logits to different widths.

    Raises:
        ValueError: naming the first token that differs.
    """
    ours, theirs = backbone.tokenizer.get_vocab(), guide.tokenizer.get_vocab()
    if ours != theirs:
        odd = sorted(ours.items() ^ theirs.items(), key=lambda item: item[1])
        first, count = odd[0][0], len({token for token, _ in odd})
        raise ValueError(
            f"guide.path={guide.path} and model.path={backbone.path} name tokens differently: "
            f"{count} differ, the first is {first!r} (guide {theirs.get(first)}, model "
            f"{ours.get(first)}); use a guide of the same family, or guide=truncated"
        )
    if guide.num_parameters > backbone.num_parameters:
        log.warning(
            "guide.path=%s has %.1f M parameters, more than the %.1f M of model.path=%s: reading "
            "every stream with it costs more than reading them with the model itself",
            guide.path, guide.num_parameters / 1e6, backbone.num_parameters / 1e6, backbone.path,
        )  # fmt: skip
