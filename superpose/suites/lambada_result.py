"""What :func:`superpose.suites.lambada.lambada` gives: one reading of the examples after another."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class WordScore:
    """How well the last words are predicted.

    Attributes:
        accuracy: fraction of examples of which every target token is the argmax, 0 to 1.
        first_token_accuracy: the same of the target's first token alone.
        median_rank: median rank of that token among the tokenizer's tokens, 1 is the argmax.
    """

    accuracy: float
    first_token_accuracy: float
    median_rank: float

    @classmethod
    def of(cls, correct: Tensor, ranks: Tensor) -> "WordScore":
        """From ``correct (...)`` bool, whole words, and ``ranks (...)``, first tokens."""
        ranks = ranks.flatten().double()
        return cls(
            accuracy=float(correct.double().mean()),
            first_token_accuracy=float((ranks == 1).double().mean()),
            median_rank=float(ranks.quantile(0.5)),
        )


@dataclass(frozen=True)
class MixedScore:
    """One decoder's reading of N contexts in one mixed pass.

    Attributes:
        all: all streams together.
        streams: one entry a stream.
        jaccard: token-set overlap of the streams' greedy continuations, mean over groups; None if
            it was left out or N = 1.
    """

    all: WordScore
    streams: tuple[WordScore, ...]
    jaccard: float | None

    @property
    def stream_mean(self) -> WordScore:
        """Mean over the streams: the accuracies of ``all``, but a mean of medians."""
        names = ("accuracy", "first_token_accuracy", "median_rank")
        sums = [math.fsum(getattr(score, name) for score in self.streams) for name in names]
        return WordScore(*(total / len(self.streams) for total in sums))


@dataclass(frozen=True)
class LambadaResult:
    """What was measured.

    Attributes:
        single: the model on every context alone, all examples; accuracy as lm-eval's
            ``lambada_openai`` defines it.
        perplexity: exp of the mean over examples of the target's summed negative log-likelihood
            (nats), single-stream, as lm-eval defines it too.
        guide: the guide on every context alone; None without a guide.
        guide_perplexity: its perplexity.
        mixed: by decoder (``raw``, ``guided``, ``joint``, ``two_head``).
        counts: ``examples`` and ``target_tokens`` scored singly, ``groups`` and ``mixed_examples``
            read mixed, ``truncated`` contexts cut to the position limit, ``mixed_truncated``
            contexts cut to their group's length, ``border_merges``, and ``ties`` and
            ``mixed_ties``: target tokens (mixed: first ones, raw) whose logit another token has
            exactly.
    """

    single: WordScore
    perplexity: float
    guide: WordScore | None
    guide_perplexity: float | None
    mixed: Mapping[str, MixedScore]
    counts: dict[str, int]

    def metrics(self) -> dict[str, float]:
        """Every figure by its dotted name; ``lambada.mixed`` is the raw reading."""
        metrics = _named("lambada.single", self.single)
        metrics["lambada.single.perplexity"] = self.perplexity
        if self.guide is not None and self.guide_perplexity is not None:
            metrics |= _named("lambada.guide", self.guide)
            metrics["lambada.guide.perplexity"] = self.guide_perplexity
        for name, score in self.mixed.items():
            prefix = f"lambada.{'mixed' if name == 'raw' else name}"
            metrics |= _named(prefix, score.all)
            for number, stream in enumerate(score.streams, start=1):
                metrics |= _named(f"{prefix}.stream_{number}", stream)
            metrics |= _named(f"{prefix}.stream_mean", score.stream_mean)
            if score.jaccard is not None:
                metrics[f"{prefix}.jaccard"] = score.jaccard
        return metrics

    def tables(self) -> dict[str, list[dict[str, Any]]]:
        """``lambada.summary``: a row a reading (Tables 5 and 6); None where a column is empty."""
        examples = self.counts["examples"]
        rows = [_row("single", examples, self.single, perplexity=self.perplexity)]
        if self.guide is not None:
            rows.append(
                _row("single, guide", examples, self.guide, perplexity=self.guide_perplexity)
            )
        for name, score in self.mixed.items():
            reading = "mixed" if name == "raw" else f"mixed, {name.replace('_', ' ')}"
            rows += self._mixed_rows(reading, score)
        return {"lambada.summary": rows}

    def _mixed_rows(self, reading: str, score: MixedScore) -> Sequence[dict[str, Any]]:
        groups, total = self.counts["groups"], self.counts["mixed_examples"]
        rows = [
            _row(f"{reading}, stream {number}", groups, stream)
            for number, stream in enumerate(score.streams, start=1)
        ]
        rows.append(_row(f"{reading}, mean of streams", total, score.stream_mean))
        rows.append(_row(f"{reading}, all", total, score.all, jaccard=score.jaccard))
        return rows


def _named(prefix: str, score: WordScore) -> dict[str, float]:
    return {
        f"{prefix}.accuracy": score.accuracy,
        f"{prefix}.first_token_accuracy": score.first_token_accuracy,
        f"{prefix}.median_rank": score.median_rank,
    }


def _row(
    reading: str,
    examples: int,
    score: WordScore,
    perplexity: float | None = None,
    jaccard: float | None = None,
) -> dict[str, Any]:
    return {
        "reading": reading,
        "examples": examples,
        "accuracy": score.accuracy,
        "first_token_accuracy": score.first_token_accuracy,
        "median_rank": score.median_rank,
        "perplexity": perplexity,
        "jaccard": jaccard,
    }
