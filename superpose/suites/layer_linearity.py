"""``suite=layer_linearity``: how linear each step of the residual stream is (App. F).

Score of Razzhigaev et al. (2405.12250) for the states X, Y of neighbouring layers, mean-centred and
of Frobenius norm 1: ``1 - min_A ||X A - Y||_F^2``. Its increment form explains y - x, what the block
adds: the residual is the same, since A - I is as free as A, and only the norm it is divided by is
another one. States are what blocks hand on; none has passed the final norm.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from superpose.config import LayerLinearitySettings
from superpose.interventions.capture import captured_states
from superpose.models.layout import final_hidden
from superpose.models.loading import LanguageModel
from superpose.regression.least_squares import fit, residual_squares, spectrum
from superpose.regression.statistics import ChainStatistics, PairStatistics
from superpose.streams.batch import StreamBatch
from superpose.suites.batching import check_at_least_one
from superpose.suites.progress import Progress, silent

KINDS = {"linearity": "", "linearity_increment": "increment."}  # column, prefix of the metric


@dataclass(frozen=True)
class Layer:
    """One block.

    Attributes:
        linearity: share of the variance of the block's output that a linear map of its input
            explains, over the rows it was fitted to; 0 to 1.
        linearity_increment: the same of what the block adds to its input.
        rank: numerical rank of the input's covariance.
        condition_number: of that covariance.
    """

    linearity: float
    linearity_increment: float
    rank: int
    condition_number: float


@dataclass(frozen=True)
class LayerLinearityResult:
    """What :func:`layer_linearity` measured.

    Attributes:
        layers: block by block, the first one first.
        counts: ``texts``, ``tokens`` (the rows of every regression) and ``hidden_size`` (its
            unknowns for each output).
    """

    layers: list[Layer]
    counts: dict[str, int]

    def summary(self) -> dict[str, float]:
        """Means over all blocks and over thirds of the depth, and the least linear block."""
        found: dict[str, float] = {}
        for column, prefix in KINDS.items():
            scores = [getattr(layer, column) for layer in self.layers]
            found |= {
                f"{prefix}{name}": value
                for name, value in (("mean", _mean(scores)), ("min", min(scores)), *_thirds(scores))
            }
        return found

    def metrics(self) -> dict[str, float]:
        """:meth:`summary` by dotted names."""
        return {f"layer_linearity.{name}": value for name, value in self.summary().items()}

    def tables(self) -> dict[str, list[dict[str, Any]]]:
        """``layer_linearity.layers``: a row a block, counted from 0."""
        rows = [{"layer": index, **vars(layer)} for index, layer in enumerate(self.layers)]
        return {"layer_linearity.layers": rows}


def layer_linearity(
    model: LanguageModel,
    batches: Sequence[StreamBatch],
    settings: LayerLinearitySettings,
    progress: Progress = silent,
) -> LayerLinearityResult:
    """Regress each block's output on its input, over all tokens of all texts.

    Every stream of a batch ``(B, N, T)`` is a text of its own, read alone; padding is left out.
    Exact least squares in float64 from sums kept while streaming: any number of tokens in
    O(L D^2) memory, and no result depends on the batch size.

    Args:
        model: model and tokenizer, L blocks of width D.
        batches: texts.
        settings: see :class:`superpose.config.LayerLinearitySettings`.
        progress: wraps the batches.

    Raises:
        ValueError: for a setting out of range, texts of no more than D tokens together (any states
            would score 1), a text longer than the position limit, or states that are not finite.
    """
    check_at_least_one(limit=settings.limit, batch_size=settings.batch_size)
    chain, texts = ChainStatistics(), 0
    with torch.no_grad(), captured_states(model.model) as states:
        for batch in progress(batches, f"layer linearity of {model.name}", len(batches)):
            model.check_length(batch.length, "data.length")
            batch = batch.to(model.model.device)
            final_hidden(model.model, input_ids=batch.input_ids.flatten(0, 1))
            tokens = batch.attention_mask.flatten(0, 1).bool()  # (B N, T)
            chain.add([state[tokens] for state in states])
            texts += len(tokens)
    num_blocks, size = len(states) - 1, model.model.config.get_text_config().hidden_size
    if chain.count <= size:
        raise ValueError(
            f"suite=layer_linearity got {chain.count} tokens in {texts} texts, but needs more than "
            f"the {size} dimensions of {model.name}, or every layer would score 1; raise suite.limit "
            "or data.length, or give more text with data.path"
        )
    layers = [_measure(chain.pair(index)) for index in range(num_blocks)]
    counts = {"texts": texts, "tokens": chain.count, "hidden_size": size}
    return LayerLinearityResult(layers, counts)


def _measure(pair: PairStatistics) -> Layer:
    residual = float(residual_squares(fit(pair), pair).sum())
    outputs = float(pair.yy.sum())
    increments = float(pair.yy.sum() - 2 * pair.xy.trace() + pair.xx.trace())  # of y - x
    rank, condition_number = spectrum(pair)
    return Layer(_score(residual, outputs), _score(residual, increments), rank, condition_number)


def _score(residual: float, total: float) -> float:
    """1 - residual / total; a block that adds nothing, or the same everywhere, is linear."""
    return 1.0 if total <= 0.0 else 1.0 - min(residual / total, 1.0)


def _thirds(scores: Sequence[float]) -> list[tuple[str, float]]:
    """Means over the first, middle and last third of the blocks, each of one block at least."""
    count = len(scores)
    edges = [0, -(-count // 3), count - -(-count // 3), count]
    parts: Mapping[str, Sequence[float]] = {
        "first_third": scores[: edges[1]],
        "middle_third": scores[edges[1] : edges[2]] or scores,
        "last_third": scores[edges[2] :],
    }
    return [(name, _mean(part)) for name, part in parts.items()]


def _mean(scores: Sequence[float]) -> float:
    return sum(scores) / len(scores)
