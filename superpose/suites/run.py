"""Suites as ``suite=NAME`` runs them: several models, one data source, one common result.

Each function here wraps the pure suite of the same name. ``models`` is ordered: the first is the
reference (a student's teacher), the last is the one the run is about; its metrics carry the plain
names of the design, those of the reference beside it begin with ``base.``.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from superpose.config import (
    AttentionPatchingSettings,
    LambadaSettings,
    PatchedLambadaSettings,
    PerplexitySettings,
    SuperpositionSettings,
)
from superpose.data.datamodule import batched
from superpose.data.lambada import ClozeExample, load_lambada, read_lambada
from superpose.data.sources import DataSource
from superpose.models.loading import LanguageModel
from superpose.suites.attention_patching import TEXTS
from superpose.suites.attention_patching import attention_patching as measure_patching
from superpose.suites.lambada import lambada as measure_lambada
from superpose.suites.perplexity import perplexity as measure_perplexity
from superpose.suites.progress import Progress
from superpose.suites.superposition import superposition as measure_superposition
from superpose.suites.superposition_result import degradation

log = logging.getLogger(__name__)

DEFAULT_GROUPS = 1024  # of a generator without end, where a suite asks for all
DEFAULT_HUB_EXAMPLES = "EleutherAI/lambada_openai"


@dataclass(frozen=True)
class SuiteOutput:
    """What a suite gives to the reports.

    Attributes:
        metrics: dotted name to number.
        tables: name to rows; a table of several models has a column ``model``.
        counts: what was measured, and what was cut or left out.
        data: what it was measured on, if that is not the ``data`` group.
    """

    metrics: dict[str, float]
    tables: dict[str, list[dict[str, Any]]]
    counts: dict[str, int]
    data: dict[str, Any] | None = None


class SuiteData:
    """What a suite may measure on: held-out groups of a source, N texts each."""

    def __init__(self, source: DataSource, *stream_counts: int, split: str = "test") -> None:
        """Bind a source to the numbers of streams asked for, in order."""
        self.source, self.stream_counts, self.split = source, stream_counts, split

    @property
    def num_streams(self) -> int:
        """N, for a suite that measures one.

        Raises:
            ValueError: if several were asked for.
        """
        if len(self.stream_counts) > 1:
            raise ValueError(
                f"streams.num_streams={list(self.stream_counts)} is for suite=superposition, other "
                "suites measure one number of texts; run them with -m streams.num_streams="
                + ",".join(map(str, self.stream_counts))
            )
        return self.stream_counts[0]

    def groups(self, model: LanguageModel, num_streams: int, limit: int | None) -> list[Any]:
        """At most ``limit`` held-out groups, tokenised for ``model``; all of them for None."""
        if limit is None and self.source.unlimited:
            limit = DEFAULT_GROUPS
        groups = self.source.held_out_groups(model.tokenizer, num_streams, self.split)
        return list(islice(groups, limit))


Models = Mapping[str, LanguageModel]


def superposition(
    models: Models, data: SuiteData, settings: SuperpositionSettings, progress: Progress
) -> SuiteOutput:
    """:func:`superpose.suites.superposition.superposition` on held-out groups.

    Of several numbers of streams the first has the metrics and the detailed tables, and
    ``superposition.degradation`` compares all of them.
    """
    reference = next(iter(models.values()))
    reference.check_length(data.source.length, "data.length")
    size = settings.batch_size
    results = []
    for count in data.stream_counts:
        groups = data.groups(reference, count, settings.limit)
        described = "superposition" if count == data.stream_counts[0] else f"{count} streams"
        batches = progress(batched(groups, size), described, -(-len(groups) // size))
        results.append(measure_superposition(models, batches, settings))
    tables = results[0].tables()
    if len(results) > 1:
        tables = {"superposition.degradation": degradation(results)} | tables
    return SuiteOutput(results[0].metrics(), tables, results[0].counts())


def attention_patching(
    models: Models, data: SuiteData, settings: AttentionPatchingSettings, progress: Progress
) -> SuiteOutput:
    """:func:`superpose.suites.attention_patching.attention_patching` on groups of three texts."""
    reference = next(iter(models.values()))
    reference.check_length(data.source.length, "data.length")
    groups = data.groups(reference, TEXTS, settings.limit)
    size = settings.batch_size
    batches = progress(batched(groups, size), "attention patching", -(-len(groups) // size))
    examples = patched_examples(data.source, settings.lambada)
    result = measure_patching(models, batches, settings, examples, progress)
    return SuiteOutput(result.metrics(), result.tables(), result.counts())


def patched_examples(
    source: DataSource, settings: PatchedLambadaSettings
) -> Sequence[ClozeExample] | None:
    """The examples of ``suite.lambada.path``, else the data's own cloze set, else None."""
    if settings.examples == 0:
        return None
    if settings.path is not None:
        return read_lambada(settings.path, "suite.lambada.path")
    own = source.cloze_examples(settings.examples)
    if own is None:
        log.info(
            "attention patching: the LAMBADA part is left out, for the data has no cloze set; "
            "give suite.lambada.path=FILE"
        )
    return own


def lambada(
    models: Models, data: SuiteData, settings: LambadaSettings, progress: Progress
) -> SuiteOutput:
    """:func:`superpose.suites.lambada.lambada`, one model after the other."""
    examples, described = cloze_examples(data.source, settings)
    results = {
        name: measure_lambada(model, examples, settings, data.num_streams, progress)
        for name, model in models.items()
    }
    return replace(_side_by_side(results), data=described)


def perplexity(
    models: Models, data: SuiteData, settings: PerplexitySettings, progress: Progress
) -> SuiteOutput:
    """:func:`superpose.suites.perplexity.perplexity` on held-out blocks."""
    reference = next(iter(models.values()))
    groups = data.groups(reference, 1, settings.limit)
    results = {
        name: measure_perplexity(
            model, list(batched(groups, settings.batch_size)), settings, progress
        )
        for name, model in models.items()
    }
    return _side_by_side(results)


def cloze_examples(
    source: DataSource, settings: LambadaSettings
) -> tuple[Sequence[ClozeExample], dict[str, Any]]:
    """The examples that the settings name, and where they are from.

    In this order: ``suite.path``, ``suite.dataset``, the data's own cloze set, OpenAI's LAMBADA.
    """
    if settings.path is not None:
        examples: Sequence[ClozeExample] = read_lambada(settings.path)
        return examples[: settings.limit], {"name": "lambada", "path": settings.path}
    own = source.cloze_examples(settings.limit or DEFAULT_GROUPS)
    if settings.dataset is None and own is not None:
        return own, {"name": f"cloze set of {source.describe()['name']}"}
    dataset = settings.dataset or DEFAULT_HUB_EXAMPLES
    examples = load_lambada(dataset, settings.revision, settings.split)
    described = {"name": "lambada", "path": dataset, "revision": settings.revision}
    return examples[: settings.limit], described


def _side_by_side(results: Mapping[str, Any]) -> SuiteOutput:
    """Metrics of the last model under their own names, of the first under ``base.``."""
    names = list(results)
    metrics = dict(results[names[-1]].metrics())
    if len(names) > 1:
        metrics |= {f"base.{key}": value for key, value in results[names[0]].metrics().items()}
    tables: dict[str, list[dict[str, Any]]] = {}
    for name, result in results.items():
        for table, rows in result.tables().items():
            tables.setdefault(table, []).extend({"model": name, **row} for row in rows)
    return SuiteOutput(metrics, tables, dict(results[names[-1]].counts))
