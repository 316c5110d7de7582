"""suite=lambada: predict the last word of a passage - read alone, and read in a mixture."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from superpose.config import LambadaSettings
from superpose.data.blocks import pad_id_of
from superpose.data.lambada import ClozeExample, EncodedExample, encode_examples
from superpose.losses.ranks import token_rank
from superpose.models.layout import final_hidden, mixed_hidden, output_head
from superpose.models.loading import LanguageModel
from superpose.streams.batch import StreamBatch
from superpose.streams.mixing import check_weights
from superpose.suites.batching import batches_by_length, check_at_least_one
from superpose.suites.progress import Progress, silent


@dataclass(frozen=True)
class FirstToken:
    """How well the target's first token is predicted.

    Attributes:
        accuracy: fraction of examples whose first target token is the argmax, 0 to 1.
        median_rank: median rank of that token among the tokenizer's tokens, 1 is the argmax.
    """

    accuracy: float
    median_rank: float

    @classmethod
    def of(cls, ranks: Tensor) -> "FirstToken":
        """From ranks of any shape, at least one."""
        ranks = ranks.double()
        return cls(float((ranks == 1).double().mean()), float(ranks.quantile(0.5)))


@dataclass(frozen=True)
class LambadaResult:
    """What :func:`lambada` measured.

    Attributes:
        accuracy: single-stream; fraction of examples of which every target token is the argmax.
        perplexity: single-stream; exp of the mean over examples of the target's summed negative
            log-likelihood (nats). Both as lm-eval's ``lambada_openai`` defines them.
        single: first target token, single-stream, all examples.
        mixed: first target token in the mixed pass, all streams together.
        streams: the same, one entry a stream.
        counts: ``examples`` and ``target_tokens`` scored singly, ``groups`` and ``mixed_examples``
            read mixed, ``truncated`` contexts cut to the position limit, ``mixed_truncated``
            contexts cut to their group's length, ``border_merges``, and ``ties`` and
            ``mixed_ties``: target tokens whose logit another token has exactly.
    """

    accuracy: float
    perplexity: float
    single: FirstToken
    mixed: FirstToken
    streams: tuple[FirstToken, ...]
    counts: dict[str, int]

    @property
    def stream_mean(self) -> FirstToken:
        """Mean over the streams: the accuracy of ``mixed``, but a mean of medians."""
        return FirstToken(
            math.fsum(stream.accuracy for stream in self.streams) / len(self.streams),
            math.fsum(stream.median_rank for stream in self.streams) / len(self.streams),
        )

    def metrics(self) -> dict[str, float]:
        """Every figure by its dotted name."""
        metrics = {
            "lambada.single.accuracy": self.accuracy,
            "lambada.single.perplexity": self.perplexity,
            "lambada.single.first_token_accuracy": self.single.accuracy,
            "lambada.single.median_rank": self.single.median_rank,
            "lambada.mixed.first_token_accuracy": self.mixed.accuracy,
            "lambada.mixed.median_rank": self.mixed.median_rank,
        }
        names = [f"stream_{number}" for number in range(1, len(self.streams) + 1)]
        for name, first in zip(
            [*names, "stream_mean"], [*self.streams, self.stream_mean], strict=True
        ):
            metrics[f"lambada.mixed.{name}.first_token_accuracy"] = first.accuracy
            metrics[f"lambada.mixed.{name}.median_rank"] = first.median_rank
        return metrics

    def tables(self) -> dict[str, list[dict[str, Any]]]:
        """``lambada.summary``: one row a reading, None where a column does not apply."""
        readings = [("single", self.counts["examples"], self.single)]
        for number, stream in enumerate(self.streams, start=1):
            readings.append((f"mixed, stream {number}", self.counts["groups"], stream))
        mixed_examples = self.counts["mixed_examples"]
        readings.append(("mixed, mean of streams", mixed_examples, self.stream_mean))
        readings.append(("mixed, all", mixed_examples, self.mixed))
        rows = [
            {
                "reading": reading,
                "examples": examples,
                "accuracy": self.accuracy if reading == "single" else None,
                "perplexity": self.perplexity if reading == "single" else None,
                "first_token_accuracy": first.accuracy,
                "median_rank": first.median_rank,
            }
            for reading, examples, first in readings
        ]
        return {"lambada.summary": rows}


def lambada(
    model: LanguageModel,
    examples: Sequence[ClozeExample],
    settings: LambadaSettings,
    num_streams: int,
    progress: Progress = silent,
) -> LambadaResult:
    """Measure a model on cloze examples, single-stream and with N contexts in one mixed pass.

    Of M examples, group i of the mixed reading takes the N examples i, i + M // N,
    i + 2 (M // N), ...; their contexts lose tokens on the left until all have the length of the
    shortest, or ``settings.length``, so that they end at one position (BOS, where the tokenizer
    gives one, stays at position 0); the mean of their embeddings (eq. 1) is read once. No result
    depends on ``settings.batch_size``.

    Args:
        model: model and tokenizer.
        examples: contexts with their last words.
        settings: see :class:`superpose.config.LambadaSettings`.
        num_streams: N.
        progress: wraps the batches, see :data:`superpose.suites.progress.Progress`.

    Raises:
        ValueError: for settings out of range, fewer examples than streams, an example that cannot
            be scored (names its row), or a model whose outputs are not finite.
    """
    _check(model, settings, num_streams)
    encoded = encode_examples(model.tokenizer, examples[: settings.limit], model.max_length)
    num_groups = len(encoded) // num_streams
    if num_groups == 0:
        raise ValueError(
            f"streams.num_streams={num_streams} needs at least {num_streams} LAMBADA examples, got "
            f"{len(encoded)}; raise suite.limit or give a larger file with suite.path"
        )
    groups = [
        tuple(encoded[index : num_groups * num_streams : num_groups]) for index in range(num_groups)
    ]
    with torch.no_grad():
        single = _score_single(model, encoded, settings.batch_size, progress)
        mixed = _score_mixed(model, groups, settings, progress)
    return LambadaResult(
        accuracy=float(single.correct.double().mean()),
        perplexity=math.exp(float(single.nll.mean())),
        single=FirstToken.of(single.ranks),
        mixed=FirstToken.of(mixed.ranks.flatten()),
        streams=tuple(FirstToken.of(ranks) for ranks in mixed.ranks.unbind(dim=1)),
        counts={
            "examples": len(encoded),
            "target_tokens": sum(len(example.target_ids) for example in encoded),
            "groups": num_groups,
            "mixed_examples": num_groups * num_streams,
            "truncated": sum(example.truncated for example in encoded),
            "mixed_truncated": mixed.truncated,
            "border_merges": sum(example.border_merge for example in encoded),
            "ties": single.ties,
            "mixed_ties": mixed.ties,
        },
    )


@dataclass
class _SingleScores:
    nll: Tensor  # (M,) float64, nats of the whole target
    correct: Tensor  # (M,) bool, every target token is the argmax
    ranks: Tensor  # (M,) int64, of the first target token
    ties: int = 0


@dataclass
class _MixedScores:
    ranks: Tensor  # (G, N) int64, of the first target token
    truncated: int = 0
    ties: int = 0


def _score_single(
    model: LanguageModel, encoded: Sequence[EncodedExample], batch_size: int, progress: Progress
) -> _SingleScores:
    """One ordinary pass over context and target; logits at the target's positions only."""
    scores = _SingleScores(
        nll=torch.zeros(len(encoded), dtype=torch.float64),
        correct=torch.zeros(len(encoded), dtype=torch.bool),
        ranks=torch.zeros(len(encoded), dtype=torch.int64),
    )
    head, device, pad_id = output_head(model.model), model.model.device, pad_id_of(model.tokenizer)
    read = [example.context_ids + example.target_ids[:-1] for example in encoded]
    batches = batches_by_length([len(ids) for ids in read], batch_size)
    for rows in progress(batches, "lambada, single", len(batches)):
        input_ids = pad_sequence(
            [torch.tensor(read[row]) for row in rows], batch_first=True, padding_value=pad_id
        )
        hidden = final_hidden(model.model, input_ids=input_ids.to(device))  # (B, T, D)
        counts = [len(encoded[row].target_ids) for row in rows]
        index = torch.tensor([i for i, count in enumerate(counts) for _ in range(count)])
        position = torch.tensor(
            [len(read[row]) - c + i for row, c in zip(rows, counts, strict=True) for i in range(c)]
        )
        targets = torch.tensor([token for row in rows for token in encoded[row].target_ids])
        targets = targets.to(device)
        logits = head.logits(hidden[index.to(device), position.to(device)])  # (P, V)
        nll = torch.nn.functional.cross_entropy(logits, targets, reduction="none").double()
        greedy = token_rank(logits, targets) == 1
        ranks = token_rank(logits[:, : model.num_tokens], targets)
        scores.ties += _count_ties(logits, targets)
        parts = (values.cpu().split(counts) for values in (nll, greedy, ranks))
        for row, row_nll, row_greedy, row_ranks in zip(rows, *parts, strict=True):
            if not row_nll.isfinite().all():
                raise ValueError(
                    f"LAMBADA example {row + 1} has a log-likelihood of {-float(row_nll.sum())}; "
                    f"the outputs of {model.name} are not finite, so try model.dtype=float32"
                )
            scores.nll[row] = row_nll.sum()
            scores.correct[row] = row_greedy.all()
            scores.ranks[row] = row_ranks[0]
    return scores


def _score_mixed(
    model: LanguageModel,
    groups: Sequence[tuple[EncodedExample, ...]],
    settings: LambadaSettings,
    progress: Progress,
) -> _MixedScores:
    """One mixed pass a group; logits at the contexts' common last position only."""
    num_streams = len(groups[0])
    scores = _MixedScores(ranks=torch.zeros(len(groups), num_streams, dtype=torch.int64))
    head, device, pad_id = output_head(model.model), model.model.device, pad_id_of(model.tokenizer)
    lengths = [_common_length(group, settings.length) for group in groups]
    batches = batches_by_length(lengths, settings.batch_size)
    for rows in progress(batches, f"lambada, {num_streams} mixed", len(batches)):
        contexts = [
            torch.tensor([example.last_context(lengths[row]) for example in groups[row]]).T
            for row in rows
        ]  # each (T, N)
        input_ids = pad_sequence(contexts, batch_first=True, padding_value=pad_id)  # (B, T, N)
        batch = StreamBatch.uniform(input_ids.transpose(1, 2).to(device))
        last = torch.tensor([lengths[row] - 1 for row in rows], device=device)
        hidden = mixed_hidden(model.model, batch)  # (B, T, D)
        logits = head.logits(hidden[torch.arange(len(rows), device=device), last])  # (B, V)
        logits = logits[:, None, : model.num_tokens].expand(-1, num_streams, -1)  # (B, N, V)
        targets = torch.tensor(
            [[example.target_ids[0] for example in groups[row]] for row in rows], device=device
        )
        scores.ranks[rows] = token_rank(logits, targets).cpu()
        scores.ties += _count_ties(logits, targets)
        scores.truncated += sum(
            len(example.context_ids) > lengths[row] for row in rows for example in groups[row]
        )
    return scores


def _check(model: LanguageModel, settings: LambadaSettings, num_streams: int) -> None:
    """Refuse settings out of range, by their key."""
    check_weights(num_streams, "uniform", retention=0.0)
    check_at_least_one(limit=settings.limit, batch_size=settings.batch_size, length=settings.length)
    model.check_length(settings.length, "suite.length")


def _common_length(group: Sequence[EncodedExample], limit: int) -> int:
    return min(limit, *(len(example.context_ids) for example in group))


def _count_ties(logits: Tensor, targets: Tensor) -> int:
    """Targets ``(...)`` whose logit in ``(..., V)`` another token has exactly."""
    own = logits.gather(-1, targets.unsqueeze(-1))
    return int(((logits == own).sum(dim=-1) > 1).sum())
