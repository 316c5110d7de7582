"""``suite=additivity``: is the state of a mixture the sum of its texts' states (sec. 2.4, eq. 8)?

At hidden-state index l (0 is what enters the first block, l the output of block l; none has passed
the final norm), with every state taken about its mean over the evaluation set, one mean for each
kind of pass:

    eps = || h_mix / ||h_mix|| - (sum_n h_n) / ||sum_n h_n|| ||_2

E_l is its mean over groups and positions, E_bar the mean of E_l over l.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from superpose.config import AdditivitySettings
from superpose.interventions.capture import captured_states
from superpose.models.layout import embed, final_hidden
from superpose.models.loading import LanguageModel
from superpose.streams.batch import StreamBatch
from superpose.streams.mixing import mix_embeddings
from superpose.suites.batching import check_at_least_one
from superpose.suites.progress import Progress, silent


@dataclass(frozen=True)
class AdditivityResult:
    """What :func:`additivity` measured.

    Attributes:
        errors: E_l for l = 0..L, from 0 (additive) to 2.
        counts: ``groups`` and valid ``positions``.
    """

    errors: list[float]
    counts: dict[str, int]

    def summary(self) -> dict[str, float]:
        """E_bar and its standard error over hidden-state indices."""
        mean = math.fsum(self.errors) / len(self.errors)
        squares = math.fsum((error - mean) ** 2 for error in self.errors)
        variance = squares / (len(self.errors) - 1)  # a model has one block at least
        return {"mean": mean, "standard_error": math.sqrt(variance / len(self.errors))}

    def metrics(self) -> dict[str, float]:
        """:meth:`summary` by dotted names."""
        return {f"additivity.{name}": value for name, value in self.summary().items()}

    def tables(self) -> dict[str, list[dict[str, Any]]]:
        """``additivity.layers``: E_l by hidden-state index."""
        rows = [{"layer": index, "error": error} for index, error in enumerate(self.errors)]
        return {"additivity.layers": rows}


def additivity(
    model: LanguageModel,
    batches: Sequence[StreamBatch],
    settings: AdditivitySettings,
    progress: Progress = silent,
) -> AdditivityResult:
    """Measure E_l in two passes over the groups: one for the means, one for the errors.

    No state outlives its batch, so memory does not grow with the number of groups; sums are float64
    and no result depends on the batch size.

    Args:
        model: model and tokenizer.
        batches: groups of N unrelated texts.
        settings: see :class:`superpose.config.AdditivitySettings`.
        progress: wraps the batches.

    Raises:
        ValueError: for a setting out of range, fewer than two streams, a text longer than the
            position limit, no position at which all texts have a token, or states that are not
            finite.
    """
    check_at_least_one(limit=settings.limit, batch_size=settings.batch_size)
    groups = sum(batch.num_rows for batch in batches)
    positions = sum(int(batch.position_mask.sum()) for batch in batches)
    _check(model, batches, positions)
    sums: list[Tensor] = []  # (N + 1, D) of each index
    totals: list[Tensor] = []
    with torch.no_grad(), captured_states(model.model) as states:
        for batch in progress(batches, f"additivity of {model.name}: means", len(batches)):
            sums = _added(sums, (rows.sum(dim=0) for rows in _passes(model, batch, states)))
        means = [total / positions for total in sums]
        for batch in progress(batches, f"additivity of {model.name}: errors", len(batches)):
            pairs = zip(_passes(model, batch, states), means, strict=True)
            totals = _added(totals, (additivity_error(rows - mean).sum() for rows, mean in pairs))
    errors = [float(total) / positions for total in totals]
    if not all(map(math.isfinite, errors)):
        raise ValueError(
            f"{model.name} has hidden states that are not finite on these texts; "
            "try model.dtype=float32"
        )
    return AdditivityResult(errors, {"groups": groups, "positions": positions})


def additivity_error(states: Tensor) -> Tensor:
    """Distance of the directions of the mixture's state and of the sum of its texts' (eq. 8).

    Args:
        states: ``(P, N + 1, D)`` about their means, the mixture's last.

    Returns:
        ``(P,)``, from 0 to 2.
    """
    mixed = torch.nn.functional.normalize(states[:, -1], dim=-1)
    summed = torch.nn.functional.normalize(states[:, :-1].sum(dim=1), dim=-1)
    return (mixed - summed).norm(dim=-1)


def _passes(model: LanguageModel, batch: StreamBatch, states: list[Tensor]) -> Iterator[Tensor]:
    """States ``(P, N + 1, D)`` at the P valid positions of a batch, index by index, in float64.

    The N ordinary passes and the mixed one (eq. 1, the last) are rows of one forward pass.
    """
    batch = batch.to(model.model.device)
    streams = embed(model.model, batch.input_ids)  # (B, N, T, D)
    mixed = mix_embeddings(streams, batch.weights).unsqueeze(1)
    inputs = torch.cat([streams, mixed], dim=1)  # (B, N + 1, T, D)
    final_hidden(model.model, inputs_embeds=inputs.flatten(0, 1))
    for state in states:
        yield state.view(inputs.shape).transpose(1, 2)[batch.position_mask].double()


def _added(totals: list[Tensor], more: Iterable[Tensor]) -> list[Tensor]:
    """The sums of two lists, index by index; an empty list is all zeros."""
    return [a + b for a, b in zip(totals, more, strict=True)] if totals else list(more)


def _check(model: LanguageModel, batches: Sequence[StreamBatch], positions: int) -> None:
    for batch in batches:
        model.check_length(batch.length, "data.length")
        if batch.num_streams < 2:
            raise ValueError(
                f"streams.num_streams={batch.num_streams}, but suite=additivity adds up the states of "
                "several texts; set streams.num_streams=2, the paper's, or more"
            )
    if positions < 2:
        raise ValueError(
            "suite=additivity found no positions at which all texts of a group have a token, so there "
            "is nothing to measure; give more or longer texts (data.path, data.length)"
        )
