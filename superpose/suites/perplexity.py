"""suite=perplexity: single-stream negative log-likelihood, the price of distillation."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from superpose.config import PerplexitySettings
from superpose.data.blocks import pad_id_of
from superpose.models.layout import final_hidden, output_head
from superpose.models.loading import LanguageModel
from superpose.streams.batch import StreamBatch
from superpose.suites.batching import batches_by_length, check_at_least_one
from superpose.suites.progress import Progress, silent
from superpose.suites.statistics import ratio_of_sums

_CHUNK = 256  # positions whose logits exist at once


@dataclass(frozen=True)
class PerplexityResult:
    """What :func:`perplexity` measured.

    Attributes:
        nll_nats: negative log-likelihood per predicted token, over all tokens of all texts.
        standard_error_nats: of ``nll_nats``, over texts (tokens of one text depend on each other);
            None of a single text.
        counts: ``texts`` scored, ``tokens`` predicted (all but the first of each text), and
            ``skipped`` texts of fewer than two tokens.
    """

    nll_nats: float
    standard_error_nats: float | None
    counts: dict[str, int]

    @property
    def ppl(self) -> float:
        """Perplexity per token, ``exp(nll_nats)``."""
        return math.exp(self.nll_nats)

    def metrics(self) -> dict[str, float]:
        """Every figure by its dotted name."""
        metrics = {"perplexity.nll_nats": self.nll_nats, "perplexity.ppl": self.ppl}
        if self.standard_error_nats is not None:
            metrics["perplexity.standard_error_nats"] = self.standard_error_nats
        return metrics

    def tables(self) -> dict[str, list[dict[str, Any]]]:
        """``perplexity.summary``: one row."""
        row = {
            "texts": self.counts["texts"],
            "tokens": self.counts["tokens"],
            "nll_nats": self.nll_nats,
            "standard_error_nats": self.standard_error_nats,
            "ppl": self.ppl,
        }
        return {"perplexity.summary": [row]}


def perplexity(
    model: LanguageModel,
    blocks: Iterable[StreamBatch],
    settings: PerplexitySettings,
    progress: Progress = silent,
) -> PerplexityResult:
    """Measure how well a model predicts single texts.

    Every stream of a batch ``(B, N, T)`` is a text of its own, whatever its weight, read alone. Its
    first token is read but not predicted; padding is neither. The mean is over tokens: sum of all
    nats / number of all predicted tokens. No result depends on ``settings.batch_size``.

    Args:
        model: model and tokenizer.
        blocks: batches of texts; read no further than ``settings.limit`` texts.
        settings: see :class:`superpose.config.PerplexitySettings`.
        progress: wraps the batches, see :data:`superpose.suites.progress.Progress`.

    Raises:
        ValueError: for settings out of range, a text longer than the model's position limit, no
            text of two tokens, or outputs that are not finite (names the text).
    """
    check_at_least_one(limit=settings.limit, batch_size=settings.batch_size)
    texts = list(islice(_texts(blocks), settings.limit))
    scored = [text for text in texts if len(text) > 1]
    for text in scored:
        model.check_length(len(text), "data.length")
    batches = batches_by_length([len(text) for text in scored], settings.batch_size)
    nats = [0.0] * len(scored)
    with torch.no_grad():
        for rows in progress(batches, "perplexity", len(batches)):
            sums = _nats(model, [scored[row] for row in rows])
            for row, value in zip(rows, sums, strict=True):
                nats[row] = value
    tokens = [float(len(text) - 1) for text in scored]
    estimate = ratio_of_sums(nats, tokens)
    if estimate is None:
        raise ValueError(
            "suite=perplexity got no text of two tokens or more, so nothing is predicted; "
            "give longer texts with data.path or a larger data.length"
        )
    return PerplexityResult(
        estimate.value,
        estimate.standard_error,
        {
            "texts": len(scored),
            "tokens": int(sum(tokens)),
            "skipped": len(texts) - len(scored),
        },
    )


def _texts(blocks: Iterable[StreamBatch]) -> Iterator[Tensor]:
    """The tokens ``(T,)`` of every stream, without padding."""
    for block in blocks:
        ids, masks = block.input_ids.flatten(0, 1), block.attention_mask.flatten(0, 1)
        for row, mask in zip(ids, masks, strict=True):
            yield row[mask.bool()]


def _nats(model: LanguageModel, texts: Sequence[Tensor]) -> list[float]:
    """Summed negative log-likelihood of each text, its first token left out."""
    device = model.model.device
    lengths = torch.tensor([len(text) for text in texts])
    input_ids = pad_sequence(
        list(texts), batch_first=True, padding_value=pad_id_of(model.tokenizer)
    ).to(device)
    hidden = final_hidden(model.model, input_ids=input_ids)  # (B, T, D)
    predicts = (torch.arange(1, input_ids.shape[1]) < lengths[:, None]).to(device)  # (B, T-1)
    rows, targets = hidden[:, :-1][predicts], input_ids[:, 1:][predicts]  # (P, D), (P,)
    head = output_head(model.model)
    nll = torch.cat(
        [
            torch.nn.functional.cross_entropy(head.logits(part), target, reduction="none")
            for part, target in zip(rows.split(_CHUNK), targets.split(_CHUNK), strict=True)
        ]
    )
    if not nll.isfinite().all():
        raise ValueError(
            f"{model.name} has outputs that are not finite in the batch of texts that begins with "
            f"{model.tokenizer.decode(texts[0])[:40]!r}; try model.dtype=float32"
        )
    per_text = nll.double().cpu().split((lengths - 1).tolist())
    return [float(values.sum()) for values in per_text]
