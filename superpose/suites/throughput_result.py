"""What suite=throughput found: times of paired runs, their ratios, and the limits of those."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scipy import stats

CONFIDENCE = 0.95
AGAINST = ("sequential", "batch")  # what the N streams would be decoded with otherwise


@dataclass(frozen=True)
class StepWork:
    """What one decoding step of a group of N streams costs, caches and attention left out.

    Attributes:
        weight_bytes: of weights that are read; a batch reads them once whatever its size.
        products: multiplications with a weight, over all rows of the batch.
    """

    weight_bytes: int
    products: int


@dataclass(frozen=True)
class Limits:
    """How many times faster a decoding step can be than another mode's.

    Attributes:
        memory: while reading the weights is what takes time: small batches, short contexts.
        compute: while multiplying is: large batches, and every prefill.
    """

    memory: float
    compute: float


@dataclass(frozen=True)
class Interval:
    """A mean over repeats with its 95 % t-interval, None of a single repeat."""

    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class ModeRuns:
    """All timed repeats of one mode at one number of streams.

    Attributes:
        mode: its name.
        streams: S = N G, all streams of all groups.
        new_tokens: of a repeat, all streams together.
        steps: after the prefill, which makes the first new token.
        prefill_seconds: by repeat.
        decode_seconds: by repeat, of all steps; ``sequential`` makes them for every stream in turn.
        peak_memory_bytes: most memory above the level before, weights left out; None if unknown.
        weight_bytes: of the weights it keeps in memory, those of heads and guide included.
        cache_bytes_per_stream: KV caches at the end over S, those of a guide included.
    """

    mode: str
    streams: int
    new_tokens: int
    steps: int
    prefill_seconds: tuple[float, ...]
    decode_seconds: tuple[float, ...]
    peak_memory_bytes: int | None
    weight_bytes: int
    cache_bytes_per_stream: float

    @property
    def seconds(self) -> list[float]:
        """Prefill and decoding, by repeat."""
        return [a + b for a, b in zip(self.prefill_seconds, self.decode_seconds, strict=True)]

    @property
    def tokens_per_second(self) -> Interval:
        """New tokens of all streams over all of the time."""
        return interval([self.new_tokens / seconds for seconds in self.seconds])

    @property
    def decode_ms_per_step(self) -> float | None:
        """Milliseconds for one more token of every stream; None if the prefill makes the only one."""
        return 1000.0 * _mean(self.decode_seconds) / self.steps if self.steps else None


@dataclass(frozen=True)
class ThroughputResult:
    """What :func:`superpose.suites.throughput.throughput` measured.

    Attributes:
        runs: mode by mode, for each number of groups in turn.
        works: by mode, see :class:`StepWork`.
        settings: ``num_streams``, ``prompt_length``, ``generation_length`` and ``repeats``.
    """

    runs: Sequence[ModeRuns]
    works: Mapping[str, StepWork]
    settings: Mapping[str, int]

    def limits(self, mode: str, against: str) -> Limits:
        """The most that one mode can gain on another in a decoding step.

        With P weights a token meets in blocks and head, P_b of them in blocks, H in the head, D
        the hidden size and Q those of the guide, memory and compute limits are

            raw       against sequential  N, N                  against batch  1, N
            separate  against sequential  N P / s, N P / s      against batch  P / s, N P / s
            guided    against sequential  N P / (P + Q), N P / (P + N Q)
                      against batch       P / (P + Q),   N P / (P + N Q)

        where s = P_b + N (H + D^2): blocks, heads and mixers. Memory counts bytes, not weights,
        should the types differ. A long context lifts the memory limit against a batch, whose N
        caches are read as well; separate heads cost nothing in a prefill but at its last position.
        """
        one, other = self.works[mode], self.works[against]
        return Limits(other.weight_bytes / one.weight_bytes, other.products / one.products)

    def metrics(self) -> dict[str, float]:
        """Every figure by its name, ``throughput.groups_1.raw.tokens_per_second``."""
        named: dict[str, float | None] = {}
        for row in self._mode_rows():
            prefix = f"throughput.groups_{row['groups']}.{row['mode']}"
            for column in (
                "tokens_per_second", "prefill_seconds", "decode_ms_per_step", "peak_memory_bytes",
                "cache_bytes_per_stream",
            ):  # fmt: skip
                named[f"{prefix}.{column}"] = row[column]
        for row in self._ratio_rows():
            prefix = f"throughput.groups_{row['groups']}.{row['mode']}"
            named[f"{prefix}.speedup_{row['against']}"] = row["ratio"]
        return {name: value for name, value in named.items() if value is not None}

    def tables(self) -> dict[str, list[dict[str, Any]]]:
        """``throughput.modes`` and ``throughput.ratios``."""
        return {"throughput.modes": self._mode_rows(), "throughput.ratios": self._ratio_rows()}

    def counts(self) -> dict[str, int]:
        """What was run."""
        return dict(self.settings)

    def _groups(self, run: ModeRuns) -> int:
        return run.streams // self.settings["num_streams"]

    def _mode_rows(self) -> list[dict[str, Any]]:
        return [
            {
                "groups": self._groups(run),
                "streams": run.streams,
                "mode": run.mode,
                "tokens_per_second": run.tokens_per_second.mean,
                "low": run.tokens_per_second.low,
                "high": run.tokens_per_second.high,
                "prefill_seconds": _mean(run.prefill_seconds),
                "decode_ms_per_step": run.decode_ms_per_step,
                "peak_memory_bytes": run.peak_memory_bytes,
                "weight_bytes": run.weight_bytes,
                "cache_bytes_per_stream": run.cache_bytes_per_stream,
            }
            for run in self.runs
        ]

    def _ratio_rows(self) -> list[dict[str, Any]]:
        measured = {(run.streams, run.mode): run for run in self.runs}
        rows = []
        for run in self.runs:
            for against in AGAINST:
                other = measured.get((run.streams, against))
                if other is None or run.mode in (against, "sequential"):
                    continue
                ratio, limits = speedup(run, other), self.limits(run.mode, against)
                rows.append(
                    {
                        "groups": self._groups(run),
                        "streams": run.streams,
                        "mode": run.mode,
                        "against": against,
                        "ratio": ratio.mean,
                        "low": ratio.low,
                        "high": ratio.high,
                        "memory_limit": limits.memory,
                        "compute_limit": limits.compute,
                    }
                )
        return rows


def speedup(run: ModeRuns, other: ModeRuns) -> Interval:
    """Time of ``other`` over time of ``run``, repeat by repeat; above 1 ``run`` is faster."""
    return interval([b / a for a, b in zip(run.seconds, other.seconds, strict=True)])


def interval(values: Sequence[float]) -> Interval:
    """Mean and Student's t-interval of some repeats."""
    mean, count = _mean(values), len(values)
    if count < 2:
        return Interval(mean, None, None)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    half = float(stats.t.ppf(0.5 + CONFIDENCE / 2, count - 1)) * math.sqrt(variance / count)
    return Interval(mean, mean - half, mean + half)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
