"""Statistics and result of ``suite=superposition``: metrics and tables, nothing measured here."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from superpose.data.token_kinds import KINDS
from superpose.losses.superposition import MixtureMeasures, StreamMeasures
from superpose.suites.statistics import (
    SMALLEST_DENOMINATOR,
    Estimate,
    GroupSums,
    PositionMoments,
    RankHistogram,
    ratio_of_sums,
)

TOP_K = (1, 5, 10, 50, 100)  # Fig. 1
# Columns of the table of several numbers of streams (Table 11)
DEGRADATION = (
    "model", "num_streams", "kl_nats", "kl_ratio", "js_ratio", "wasserstein_ratio", "rank.median",
    "rank.top_1", "rank.top_10", "rank.content.median", "rank.content.top_10",
)  # fmt: skip
KIND_TOP_K = (1, 10)  # of predictable and of content tokens
CONTROL_TOP_K = (3, 10, 100)  # Appendix B
CONFIDENCE_BINS = 10  # of equal width over 0..1 (Fig. 3)
CURVE_POINTS_PER_DECADE = 8
# kind of distance: (numerator in MixedStatistics, denominator in ReferenceStatistics, metric)
DISTANCES = {
    "kl": ("kl_smooth_nats", "pair_kl_nats", "kl_nats"),
    "js": ("js_smooth_nats", "pair_js_nats", "js_nats"),
    "wasserstein": ("wasserstein", "pair_wasserstein", "wasserstein"),
}
UNRELATED = {
    "kl": "kl_unrelated_nats",
    "js": "js_unrelated_nats",
    "wasserstein": "wasserstein_unrelated",
}

Row = dict[str, Any]


class ReferenceStatistics:
    """What the reference's single-stream passes say: denominators and the frequency control."""

    def __init__(self, num_tokens: int) -> None:
        """Start empty."""
        self.groups = GroupSums()
        self.control = RankHistogram(num_tokens)
        self.overlap_pairs = 0
        self.pairs = 0

    @property
    def num_positions(self) -> int:
        """Valid positions of all groups."""
        return int(self.groups.total("positions"))

    def begin_group(self) -> None:
        """What is added next belongs to a new group."""
        self.groups.begin()

    def add(self, streams: StreamMeasures, control: list[Tensor], truth: Tensor) -> None:
        """Some positions of the current group.

        Args:
            streams: of C positions.
            control: for each of N streams the ranks ``(N-1, C')`` of the others' next tokens.
            truth: ``(N, C')`` next tokens.
        """
        self.groups.add("positions", streams.tokens.shape[1])
        if streams.pair_kl_nats is None or streams.pair_js_nats is None:
            return
        self.groups.add("pair_kl_nats", total(streams.pair_kl_nats))
        self.groups.add("pair_js_nats", total(streams.pair_js_nats))
        for ranks in control:
            self.control.add(ranks)
        same = truth.unsqueeze(0) == truth.unsqueeze(1)  # (N, N, C')
        num_streams, num_positions = truth.shape
        self.overlap_pairs += int(same.sum()) - num_streams * num_positions
        self.pairs += num_streams * (num_streams - 1) * num_positions

    def add_transport(self, pair_wasserstein: Tensor | None, count: int) -> None:
        """Wasserstein distances between streams at ``count`` positions of the current group."""
        self.groups.add("transported", count)
        if pair_wasserstein is not None:
            self.groups.add("pair_wasserstein", total(pair_wasserstein))

    def control_row(self) -> Row:
        """Appendix B; only None for a single stream."""
        row: Row = {f"top_{k}": self.control.share_within(k) for k in CONTROL_TOP_K}
        row["median"] = self.control.median()
        row["token_overlap"] = self.overlap_pairs / self.pairs if self.pairs else None
        return row


class MixedStatistics:
    """What the mixed passes of one model say."""

    def __init__(self, num_tokens: int, length: int) -> None:
        """Start empty."""
        self.groups = GroupSums()
        self.ranks, self.ranks_truth = RankHistogram(num_tokens), RankHistogram(num_tokens)
        self.by_kind = {kind: RankHistogram(num_tokens) for kind in KINDS}
        self.by_confidence = [RankHistogram(num_tokens) for _ in range(CONFIDENCE_BINS)]
        self.total_variation, self.kl = PositionMoments(length), PositionMoments(length)

    def begin_group(self) -> None:
        """What is added next belongs to a new group."""
        self.groups.begin()

    def add(
        self,
        positions: Tensor,
        measures: MixtureMeasures,
        confidence: Tensor,
        content: Tensor,
        ranks_truth: Tensor,
    ) -> None:
        """Some positions of the current group.

        Args:
            positions: ``(C,)``.
            measures: of them.
            confidence: ``(N, C)`` single-stream probability of each stream's argmax token.
            content: ``(N, C)`` bool, whether that token is a content word.
            ranks_truth: ``(N, C')`` ranks of the next tokens.
        """
        assert measures.js_smooth_nats is not None
        self.groups.add("kl_tau1_nats", total(measures.kl_nats))
        self.groups.add("kl_smooth_nats", total(measures.kl_smooth_nats))
        self.groups.add("js_smooth_nats", total(measures.js_smooth_nats))
        self.groups.add("total_variation", total(measures.total_variation))
        self.total_variation.add(positions, measures.total_variation)
        self.kl.add(positions, measures.kl_smooth_nats)
        self.ranks.add(measures.ranks)
        self.ranks_truth.add(ranks_truth)
        self.by_kind["content"].add(measures.ranks[content])
        self.by_kind["predictable"].add(measures.ranks[~content])
        bins = (confidence * CONFIDENCE_BINS).long().clamp_max(CONFIDENCE_BINS - 1)
        for index, histogram in enumerate(self.by_confidence):
            histogram.add(measures.ranks[bins == index])

    def add_transport(self, distances: Tensor) -> None:
        """Wasserstein distances to the target at some positions of the current group."""
        self.groups.add("wasserstein", total(distances))

    def confident(self) -> RankHistogram:
        """Ranks of tokens whose own single-stream probability is above one half."""
        histogram = RankHistogram(len(self.ranks.counts))
        for upper in self.by_confidence[CONFIDENCE_BINS // 2 :]:
            histogram.counts += upper.counts
        return histogram


@dataclass(frozen=True)
class SuperpositionResult:
    """Statistics of all models against one reference.

    Attributes:
        num_streams: N.
        reference: of the single-stream passes.
        models: of the mixed passes, by model name; the first is the reference, the last is the one
            the metrics without a prefix speak of.
    """

    num_streams: int
    reference: ReferenceStatistics = field(repr=False)
    models: dict[str, MixedStatistics] = field(repr=False)

    def metrics(self) -> dict[str, float]:
        """Dotted names to numbers; what is undefined (the ratios for N = 1) is left out.

        ``superposition.*`` is the last model, ``base.superposition.*`` the reference if it is
        another one. KL and JS are smoothed (tau 1.5) but for ``kl_tau1_nats``.
        """
        names = list(self.models)
        prefixes = {names[-1]: "superposition."}
        if len(names) > 1:
            prefixes[names[0]] = "base.superposition."
        found = {
            prefix + key: value
            for name, prefix in prefixes.items()
            for key, value in self._summary(self.models[name]).items()
        }
        found |= {f"superposition.{key}": value for key, value in self._reference_metrics().items()}
        return {key: float(value) for key, value in found.items() if value is not None}

    def tables(self) -> dict[str, list[Row]]:
        """``superposition.{summary, rank_by_kind, rank_cdf, by_position, confidence, control}``."""
        tables: dict[str, list[Row]] = {
            "superposition.summary": [
                {"model": name, "num_streams": self.num_streams} | self._summary(model)
                for name, model in self.models.items()
            ],
            "superposition.rank_by_kind": [
                {"model": name, "kind": kind} | _of_kind(model, kind)
                for name, model in self.models.items()
                for kind in KINDS
            ],
            "superposition.rank_cdf": self._rank_cdf(),
            "superposition.by_position": self._by_position(),
            "superposition.confidence": self._confidence(),
        }
        if self.reference.pairs:
            row = self.reference.control_row() | {"pairs": self.reference.pairs}
            tables["superposition.control"] = [{"model": next(iter(self.models))} | row]
        return tables

    def counts(self) -> dict[str, int]:
        """How much was measured."""
        groups = self.reference.groups
        return {
            "groups": groups.num_groups,
            "positions": self.reference.num_positions,
            "wasserstein_positions": int(groups.total("transported")),
            "ranks": self.num_streams * self.reference.num_positions,
        }

    def _reference_metrics(self) -> Row:
        groups = self.reference.groups
        found: Row = {
            UNRELATED[kind]: value_of(groups.mean(pair, _count_of(kind)))
            for kind, (_, pair, _) in DISTANCES.items()
        }
        control = self.reference.control_row()
        return found | {f"control.{key}": value for key, value in control.items()}

    def _summary(self, model: MixedStatistics) -> Row:
        row: Row = {}
        for kind, (name, pair, metric) in DISTANCES.items():
            row[metric] = value_of(self._mean(model, name, _count_of(kind)))
            ratio = self._ratio(model, name, pair, _count_of(kind))
            row[f"{kind}_ratio"] = value_of(ratio)
            row[f"{kind}_ratio_standard_error"] = ratio.standard_error if ratio else None
        for name in ("kl_tau1_nats", "total_variation"):
            row[name] = value_of(self._mean(model, name, "positions"))
        for name, histogram in (("rank", model.ranks), ("rank_truth", model.ranks_truth)):
            row[f"{name}.median"] = histogram.median()
            row |= {f"{name}.top_{k}": histogram.share_within(k) for k in TOP_K}
        row["rank.median_confident"] = model.confident().median()
        for kind in KINDS:
            row |= {f"rank.{kind}.{key}": value for key, value in _of_kind(model, kind).items()}
        return row

    def _mean(self, model: MixedStatistics, name: str, count: str) -> Estimate | None:
        counts = self.reference.groups.list_of(count)
        sums = model.groups.list_of(name)
        return ratio_of_sums(sums, counts) if sums and counts else None

    def _ratio(self, model: MixedStatistics, name: str, pair: str, count: str) -> Estimate | None:
        """Superposition Approximation Ratio (eq. 3), a ratio of means."""
        unrelated = self.reference.groups.mean(pair, count)
        sums = model.groups.list_of(name)
        if unrelated is None or unrelated.value < SMALLEST_DENOMINATOR or not sums:
            return None
        return ratio_of_sums(sums, self.reference.groups.list_of(pair))

    def _rank_cdf(self) -> list[Row]:
        control = self.reference.control
        return [
            {
                "model": name,
                "k": k,
                "argmax": model.ranks.share_within(k),
                "ground_truth": model.ranks_truth.share_within(k),
                "control": control.share_within(k),
            }
            for name, model in self.models.items()
            for k in curve_ranks(len(control.counts))
        ]

    def _by_position(self) -> list[Row]:
        rows = []
        for name, model in self.models.items():
            pairs = zip(model.total_variation.estimates(), model.kl.estimates(), strict=True)
            for position, (tvd, kl) in enumerate(pairs):
                if tvd is not None and kl is not None:
                    rows.append(
                        {
                            "model": name,
                            "position": position,
                            "total_variation": tvd.value,
                            "standard_error": tvd.standard_error,
                            "kl_nats": kl.value,
                        }
                    )
        return rows

    def _confidence(self) -> list[Row]:
        return [
            {
                "model": name,
                "probability_from": index / CONFIDENCE_BINS,
                "probability_to": (index + 1) / CONFIDENCE_BINS,
                "count": histogram.total,
                "median_rank": histogram.median(),
                "top_10": histogram.share_within(10),
            }
            for name, model in self.models.items()
            for index, histogram in enumerate(model.by_confidence)
            if histogram.total
        ]


def degradation(results: Sequence[SuperpositionResult]) -> list[Row]:
    """Table 11: one row a model and number of streams, models in order."""
    rows = [row for result in results for row in result.tables()["superposition.summary"]]
    names = list(results[0].models)
    rows.sort(key=lambda row: names.index(row["model"]))  # stable: N stays in the given order
    return [{column: row[column] for column in DEGRADATION} for row in rows]


def _of_kind(model: MixedStatistics, kind: str) -> Row:
    """Ranks of the argmax tokens of one kind, and their share of all."""
    histogram = model.by_kind[kind]
    row: Row = {"share": histogram.total / model.ranks.total, "median": histogram.median()}
    return row | {f"top_{k}": histogram.share_within(k) for k in KIND_TOP_K}


def curve_ranks(num_tokens: int) -> list[int]:
    """Ranks at which a curve is written down: evenly spaced in their logarithm, and the TOP_K."""
    ranks = {k for k in TOP_K if k <= num_tokens} | {num_tokens}
    exponent = 0
    while (k := round(10 ** (exponent / CURVE_POINTS_PER_DECADE))) < num_tokens:
        ranks.add(k)
        exponent += 1
    return sorted(ranks)


def total(values: Tensor) -> float:
    """Sum in float64, whatever the device can do."""
    return float(values.detach().cpu().to(torch.float64).sum())


def value_of(estimate: Estimate | None) -> float | None:
    """The number without its error."""
    return None if estimate is None else estimate.value


def _count_of(kind: str) -> str:
    return "transported" if kind == "wasserstein" else "positions"
