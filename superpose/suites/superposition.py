"""``suite=superposition``: what a mixed pass keeps of N texts (arXiv 2609.29845, sec. 2.2, 2.3).

Every model's mixed pass is held against single-stream passes of one reference (the base model, a
student's frozen teacher) on identical groups, so a checkpoint and its base are a paired comparison.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from superpose.config import SuperpositionSettings
from superpose.data.token_kinds import content_tokens
from superpose.losses.divergences import wasserstein
from superpose.losses.superposition import (
    StreamMeasures,
    measure_mixture,
    measure_streams,
    pair_mean,
    stream_ranks,
)
from superpose.models.layout import (
    OutputHead,
    embed,
    mixed_hidden,
    output_head,
    stream_hidden,
)
from superpose.models.loading import LanguageModel
from superpose.streams.batch import StreamBatch
from superpose.suites.batching import position_chunks
from superpose.suites.superposition_result import (
    MixedStatistics,
    ReferenceStatistics,
    SuperpositionResult,
)


def superposition(
    models: Mapping[str, LanguageModel],
    groups: Iterable[StreamBatch],
    settings: SuperpositionSettings,
) -> SuperpositionResult:
    """Measure the mixed passes of models against the ideal mixture.

    Args:
        models: by name, in order; the first is the reference: P_target, the streams' argmax tokens
            and the distance of unrelated contexts come from its single-stream passes. Every model,
            the reference included, is measured for its mixed pass.
        groups: batches of N unrelated texts of T tokens, N and T the same throughout.
        settings: see :class:`superpose.config.SuperpositionSettings`.

    Returns:
        Statistics over the valid positions of all groups, each position counting once.

    Raises:
        ValueError: for an impossible setting, if nothing can be measured, shapes change, or the
            vocabularies differ.
    """
    _check_settings(settings)
    measurement = _Measurement(models, settings)
    with torch.no_grad():
        for batch in _passes(groups, settings):
            measurement.add(batch)
    return measurement.result()


def _passes(
    groups: Iterable[StreamBatch], settings: SuperpositionSettings
) -> Iterator[StreamBatch]:
    """The first ``limit`` groups in batches of at most ``batch_size``."""
    left = settings.limit
    for batch in groups:
        rows = batch.num_rows if left is None else min(batch.num_rows, left)
        for start in range(0, rows, settings.batch_size):
            chosen = slice(start, min(start + settings.batch_size, rows))
            yield StreamBatch(
                batch.input_ids[chosen], batch.attention_mask[chosen], batch.weights[chosen]
            )
        if left is not None:
            left -= rows
            if left == 0:  # before the next batch is asked for: a stream may be slow
                return


@dataclass(frozen=True)
class _Chunk:
    """Some valid positions of one group."""

    positions: Tensor  # (C,)
    stream_logits: Tensor  # (N, C, V), the reference's
    streams: StreamMeasures
    truth: Tensor  # (N, C') next token of each stream, where there is one
    has_truth: Tensor  # (C,) bool, C' of them true
    transported: Tensor  # (C,) bool: positions of the Wasserstein distance


class _Measurement:
    """The running statistics of all models."""

    def __init__(
        self, models: Mapping[str, LanguageModel], settings: SuperpositionSettings
    ) -> None:
        self.models, self.settings = models, settings
        self.reference = next(iter(models.values()))
        self.num_tokens = self.reference.num_tokens
        self.content = content_tokens(self.reference.tokenizer)
        self.heads = {name: output_head(model.model) for name, model in models.items()}
        _check_vocabularies(self.heads)
        self.embeddings: Tensor | None = None
        if settings.wasserstein_positions != 0:
            device = self.reference.model.device
            every_token = torch.arange(self._reference_head.weight.shape[0], device=device)
            self.embeddings = embed(self.reference.model, every_token).float().cpu()
        self.shape: tuple[int, int] | None = None
        self.num_groups = 0
        self.of_reference = ReferenceStatistics(self.num_tokens)
        self.of_models: dict[str, MixedStatistics] = {}

    @property
    def _reference_head(self) -> OutputHead:
        return next(iter(self.heads.values()))

    def add(self, batch: StreamBatch) -> None:
        """Measure every group of a batch."""
        self._check_batch(batch)
        batch = batch.to(self.reference.model.device)
        hidden = stream_hidden(self.reference.model, batch)  # (B, N, T, D)
        mixed = {name: mixed_hidden(model.model, batch) for name, model in self.models.items()}
        for row in range(batch.num_rows):
            self._add_group(
                batch, row, hidden[row], {name: states[row] for name, states in mixed.items()}
            )
            self.num_groups += 1

    def result(self) -> SuperpositionResult:
        """What was measured so far."""
        if self.shape is None or self.of_reference.num_positions == 0:
            raise ValueError(
                f"suite=superposition found no position to measure in {self.num_groups} groups; "
                "give more or longer texts (data.path, data.length) or a higher suite.limit"
            )
        return SuperpositionResult(self.shape[0], self.of_reference, self.of_models)

    def _check_batch(self, batch: StreamBatch) -> None:
        shape = (batch.num_streams, batch.length)
        if self.shape is None:
            self.shape = shape
            self.of_models = {
                name: MixedStatistics(self.num_tokens, batch.length) for name in self.models
            }
        if shape != self.shape:
            raise ValueError(
                f"suite=superposition needs groups of one shape (N, T), got {self.shape} and then "
                f"{shape}; measure them in two runs"
            )
        if bool((batch.weights <= 0).any()):
            raise ValueError(
                "suite=superposition needs a weight above 0 for every stream, got "
                f"{batch.weights.tolist()}; use uniform weights"
            )

    def _add_group(
        self, batch: StreamBatch, row: int, hidden: Tensor, mixed: dict[str, Tensor]
    ) -> None:
        """One group: ``hidden (N, T, D)`` of the reference and ``mixed (T, D)`` of each model."""
        valid = batch.position_mask[row]
        if not valid.any():
            return
        self.of_reference.begin_group()
        for statistics in self.of_models.values():
            statistics.begin_group()
        for chunk in self._chunks(batch.input_ids[row], valid, hidden, batch.weights[row]):
            self._add_reference(chunk)
            for name, states in mixed.items():
                logits = self.heads[name].logits(states[chunk.positions])
                self._add_mixed(self.of_models[name], chunk, logits)

    def _chunks(
        self, input_ids: Tensor, valid: Tensor, hidden: Tensor, weights: Tensor
    ) -> Iterator[_Chunk]:
        has_next = torch.zeros_like(valid)
        has_next[:-1] = valid[:-1] & valid[1:]
        transported = self._transported(valid)
        vocabulary = self._reference_head.weight.shape[0]
        for positions in position_chunks(valid, vocabulary * len(hidden)):
            logits = self._reference_head.logits(hidden[:, positions])  # (N, C, V)
            yield _Chunk(
                positions=positions,
                stream_logits=logits,
                streams=measure_streams(
                    logits,
                    weights,
                    temperature=self.settings.temperature,
                    num_tokens=self.num_tokens,
                ),
                truth=input_ids[:, positions[has_next[positions]] + 1],
                has_truth=has_next[positions],
                transported=transported[positions],
            )

    def _transported(self, valid: Tensor) -> Tensor:
        """``(T,)`` bool: positions of the Wasserstein distance, whatever the batch size."""
        wanted = self.settings.wasserstein_positions
        if wanted is None:
            return valid
        generator = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + self.num_groups)
        places = valid.nonzero().squeeze(1)
        order = torch.randperm(len(places), generator=generator)[:wanted]
        chosen = torch.zeros_like(valid)
        chosen[places[order.to(places.device)]] = True
        return chosen

    def _add_reference(self, chunk: _Chunk) -> None:
        named = chunk.stream_logits[..., : self.num_tokens]
        self.of_reference.add(
            chunk.streams,
            # (N, N-1 others, C'): rank of the others' next tokens in a stream's own logits
            control=[
                stream_ranks(own[chunk.has_truth], _others(chunk.truth, n))
                for n, own in enumerate(named)
            ],
            truth=chunk.truth,
        )
        if self.embeddings is not None:
            log_probs = chunk.stream_logits[:, chunk.transported].log_softmax(dim=-1)
            self.of_reference.add_transport(
                pair_mean(self._wasserstein, log_probs, symmetric=True),
                int(chunk.transported.sum()),
            )

    def _add_mixed(self, statistics: MixedStatistics, chunk: _Chunk, logits: Tensor) -> None:
        measures = measure_mixture(chunk.streams, logits, num_tokens=self.num_tokens)
        named = logits[chunk.has_truth, : self.num_tokens]
        statistics.add(
            chunk.positions.cpu(),
            measures,
            confidence=chunk.streams.confidence,
            content=self.content[chunk.streams.tokens.cpu()].to(measures.ranks.device),
            ranks_truth=stream_ranks(named, chunk.truth),
        )
        if self.embeddings is not None:
            log_probs = logits[chunk.transported].log_softmax(dim=-1)
            target = chunk.streams.log_target[chunk.transported]
            statistics.add_transport(self._wasserstein(target, log_probs))

    def _wasserstein(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        assert self.embeddings is not None
        return wasserstein(log_p.cpu(), log_q.cpu(), self.embeddings, self.settings.top_k)


def _others(truth: Tensor, n: int) -> Tensor:
    """``(N-1, C')``: the tokens of all streams but ``n``."""
    return torch.cat([truth[:n], truth[n + 1 :]])


def _check_vocabularies(heads: Mapping[str, OutputHead]) -> None:
    sizes = {name: head.weight.shape[0] for name, head in heads.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(
            "suite=superposition compares models of one vocabulary, got logits of "
            + ", ".join(f"{name}: {size}" for name, size in sizes.items())
            + "; give the checkpoint's own base model"
        )


def _check_settings(settings: SuperpositionSettings) -> None:
    """Refuse impossible values, by their key."""
    if settings.limit is not None and settings.limit < 1:
        raise ValueError(f"suite.limit must be at least 1, or null for all, got {settings.limit}")
    if settings.batch_size < 1:
        raise ValueError(f"suite.batch_size must be at least 1 group, got {settings.batch_size}")
    if not settings.temperature > 0:
        raise ValueError(
            f"suite.temperature must be above 0, got {settings.temperature}; the paper takes 1.5"
        )
    if settings.top_k < 1:
        raise ValueError(
            f"suite.top_k must be at least 1 token, got {settings.top_k}; the paper takes 256"
        )
    if settings.wasserstein_positions is not None and settings.wasserstein_positions < 0:
        raise ValueError(
            "suite.wasserstein_positions must be at least 0 (which leaves the distance out), or "
            f"null for every position, got {settings.wasserstein_positions}"
        )
