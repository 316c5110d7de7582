"""Statistics and result of ``suite=attention_patching``: metrics and tables, nothing measured here."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from superpose.data.token_kinds import KINDS
from superpose.suites.attention_patching_lambada import PatchedLambada
from superpose.suites.statistics import (
    SMALLEST_DENOMINATOR,
    Estimate,
    GroupSums,
    RankHistogram,
    ratio_of_sums,
)

Row = dict[str, Any]


class PatchingStatistics:
    """Ranks by setup and kind of token, and sums of KL by group."""

    def __init__(self, setups: Sequence[str], num_tokens: int) -> None:
        """Start empty, for ranks up to ``num_tokens``."""
        self.setups = tuple(setups)
        self.groups = GroupSums()
        self.ranks = {
            setup: {kind: RankHistogram(num_tokens) for kind in KINDS} for setup in setups
        }

    @property
    def num_positions(self) -> int:
        """Positions of all groups."""
        return int(self.groups.total("positions"))

    def begin_group(self) -> None:
        """What is added next belongs to a new group."""
        self.groups.begin()

    def add_positions(self, content: Tensor, unrelated_kl_nats: Tensor) -> None:
        """C positions: which predict content ``(C,)``, and the denominator ``(C,)``."""
        self.groups.add("positions", len(content))
        self.groups.add("content", int(content.sum()))
        self.groups.add("unrelated", float(unrelated_kl_nats.double().sum()))

    def add(self, setup: str, content: Tensor, ranks: Tensor, kl_nats: Tensor) -> None:
        """The same C positions in one setup: ranks and KL ``(C,)``."""
        self.ranks[setup]["content"].add(ranks[content])
        self.ranks[setup]["predictable"].add(ranks[~content])
        self.groups.add(setup, float(kl_nats.double().sum()))

    def all_ranks(self, setup: str) -> RankHistogram:
        """Of both kinds."""
        predictable, content = self.ranks[setup].values()
        both = RankHistogram(len(content.counts))
        both.counts += predictable.counts + content.counts
        return both

    def kl_ratio(self, setup: str) -> Estimate | None:
        """KL of a setup over that of an unrelated text, a ratio of means."""
        unrelated = self.groups.mean("unrelated", "positions")
        if unrelated is None or unrelated.value < SMALLEST_DENOMINATOR:
            return None
        return ratio_of_sums(self.groups.list_of(setup), self.groups.list_of("unrelated"))


@dataclass(frozen=True)
class AttentionPatchingResult:
    """What :func:`superpose.suites.attention_patching.attention_patching` measured.

    Attributes:
        num_groups: groups of three texts.
        statistics: of their positions.
        lambada: of the LAMBADA part, None where it was left out.
    """

    num_groups: int
    statistics: PatchingStatistics = field(repr=False)
    lambada: PatchedLambada | None

    def metrics(self) -> dict[str, float]:
        """``attention_patching.*`` by dotted name; what is undefined is left out."""
        found: Row = {}
        for row in self._ranks():
            found |= {f"{row['setup']}.{key}": row[key] for key in row if key != "setup"}
        for row in self._aggregate():
            for key in ("median_rank", "top_1", "top_10", "kl_nats", "kl_ratio"):
                found[f"{row['setup']}.all.{key}"] = row[key]
        groups = self.statistics.groups
        content = groups.total("content") / groups.total("positions")
        found |= {"share.predictable": 1 - content, "share.content": content}
        found["unrelated_kl_nats"] = groups.total("unrelated") / groups.total("positions")
        for row in self._lambada():
            for key in ("first_token_accuracy", "median_rank"):
                found[f"lambada.{row['reading']}.{key}"] = row[key]
        return {
            f"attention_patching.{key}": float(value)
            for key, value in found.items()
            if value is not None
        }

    def tables(self) -> dict[str, list[Row]]:
        """``attention_patching.{ranks, aggregate, lambada}``: Table 2, Tables 3 and 4, App. H."""
        tables = {
            "attention_patching.ranks": self._ranks(),
            "attention_patching.aggregate": self._aggregate(),
        }
        if self.lambada is not None:
            tables["attention_patching.lambada"] = self._lambada()
        return tables

    def counts(self) -> dict[str, int]:
        """How much was measured; 0 LAMBADA examples if that part was left out."""
        groups, lambada = self.statistics.groups, self.lambada
        return {
            "groups": self.num_groups,
            "positions": self.statistics.num_positions,
            "content_positions": int(groups.total("content")),
            "lambada_examples": lambada.examples if lambada else 0,
            "lambada_truncated": lambada.truncated if lambada else 0,
        }

    def _ranks(self) -> list[Row]:
        return [
            {"setup": setup}
            | {
                f"{kind}.{name}": value
                for kind, histogram in by_kind.items()
                for name, value in (
                    ("median_rank", histogram.median()),
                    ("top_1", histogram.share_within(1)),
                )
            }
            for setup, by_kind in self.statistics.ranks.items()
        ]

    def _aggregate(self) -> list[Row]:
        rows = []
        for setup in self.statistics.setups:
            ranks, ratio = self.statistics.all_ranks(setup), self.statistics.kl_ratio(setup)
            rows.append(
                {
                    "setup": setup,
                    "median_rank": ranks.median(),
                    "top_1": ranks.share_within(1),
                    "top_10": ranks.share_within(10),
                    "kl_nats": self.statistics.groups.total(setup) / ranks.total,
                    "kl_ratio": ratio.value if ratio else None,
                    "kl_ratio_standard_error": ratio.standard_error if ratio else None,
                }
            )
        return rows

    def _lambada(self) -> list[Row]:
        if self.lambada is None:
            return []
        return [
            {
                "reading": name,
                "examples": self.lambada.examples,
                "first_token_accuracy": first.accuracy,
                "median_rank": first.median_rank,
            }
            for name, first in self.lambada.readings.items()
        ]
