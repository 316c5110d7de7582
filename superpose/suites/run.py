"""Suites as ``suite=NAME`` runs them: several models, one data source, one common result.

Each function here wraps the pure suite of the same name. ``models`` is ordered: the first is the
reference (a student's teacher), the last is the one the run is about; its metrics carry the plain
names of the design, those of the reference beside it begin with ``base.``.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from superpose.config import (
    AdditivitySettings,
    AttentionPatchingSettings,
    GenerationSettings,
    LambadaSettings,
    LayerLinearitySettings,
    PatchedLambadaSettings,
    PerplexitySettings,
    SuperpositionSettings,
    ThroughputSettings,
)
from superpose.data.datamodule import batched
from superpose.data.lambada import ClozeExample, load_lambada, read_lambada
from superpose.data.sources import DataSource
from superpose.decoding import Decoder
from superpose.models.loading import LanguageModel
from superpose.models.revisions import OneAtATime
from superpose.suites.additivity import additivity as measure_additivity
from superpose.suites.attention_patching import TEXTS
from superpose.suites.attention_patching import attention_patching as measure_patching
from superpose.suites.batching import check_at_least_one
from superpose.suites.generation import Watch, group_prompts, nobody, read_prompts
from superpose.suites.generation import generation as generate_and_measure
from superpose.suites.lambada import lambada as measure_lambada
from superpose.suites.layer_linearity import layer_linearity as measure_layer_linearity
from superpose.suites.perplexity import perplexity as measure_perplexity
from superpose.suites.progress import Progress
from superpose.suites.superposition import superposition as measure_superposition
from superpose.suites.superposition_result import degradation
from superpose.suites.throughput import check_settings as check_throughput
from superpose.suites.throughput import throughput as measure_throughput
from superpose.suites.trajectory import growth, trajectory_rows

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

    def __init__(
        self,
        source: DataSource,
        *stream_counts: int,
        split: str = "test",
        decoders: Mapping[str, Sequence[Decoder]] | None = None,
        watch: Watch = nobody,
    ) -> None:
        """Bind a source to the numbers of streams asked for, in order.

        Args:
            source: the texts.
            stream_counts: N, once or several times.
            split: of the source.
            decoders: by model, how its streams are told apart: raw, guided where there is a guide,
                a trained head.
            watch: sees continuations grow.
        """
        self.source, self.stream_counts, self.split = source, stream_counts, split
        self.decoders, self.watch = decoders or {}, watch

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
        name: measure_lambada(
            model, examples, settings, data.num_streams, progress, data.decoders[name]
        )
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


def generation(
    models: Models, data: SuiteData, settings: GenerationSettings, progress: Progress
) -> SuiteOutput:
    """:func:`superpose.suites.generation.generation` with the last model, judged by the first."""
    name, model = list(models.items())[-1]
    prompts, described = prompts_of(model, data, settings)
    groups, left_over = group_prompts(prompts, data.num_streams, settings.limit)
    decoder = decoder_of(data.decoders[name], settings.decoder)
    teacher = next(iter(models.values()))
    result = generate_and_measure(model, teacher, decoder, groups, settings, progress, data.watch)
    counts = result.counts() | ({"left_over": left_over} if left_over else {})
    return SuiteOutput(result.metrics(), result.tables(), counts, described)


def throughput(
    models: Models, data: SuiteData, settings: ThroughputSettings, progress: Progress
) -> SuiteOutput:
    """:func:`superpose.suites.throughput.throughput` of the last model, on held-out prompts."""
    check_throughput(settings)
    name, model = list(models.items())[-1]
    groups = data.groups(model, data.num_streams, max(settings.groups))
    result = measure_throughput(model, groups, data.decoders[name], settings, progress)
    return SuiteOutput(result.metrics(), result.tables(), result.counts())


def additivity(
    models: Models, data: SuiteData, settings: AdditivitySettings, progress: Progress
) -> SuiteOutput:
    """:func:`superpose.suites.additivity.additivity` on held-out groups, model by model."""
    return _each(measure_additivity, models, data, data.num_streams, settings, progress)


def layer_linearity(
    models: Models, data: SuiteData, settings: LayerLinearitySettings, progress: Progress
) -> SuiteOutput:
    """:func:`superpose.suites.layer_linearity.layer_linearity` on held-out blocks, model by model."""
    return _each(measure_layer_linearity, models, data, 1, settings, progress)


def _each(
    measure: Callable[..., Any],
    models: Models,
    data: SuiteData,
    num_streams: int,
    settings: Any,
    progress: Progress,
) -> SuiteOutput:
    """One suite on each model; revisions of one model (loaded one at a time) as a trajectory."""
    check_at_least_one(limit=settings.limit, batch_size=settings.batch_size)
    groups = data.groups(models[next(iter(models))], num_streams, settings.limit)
    batches = list(batched(groups, settings.batch_size))
    results = {name: measure(models[name], batches, settings, progress) for name in models}
    output = _side_by_side(results)
    if not isinstance(models, OneAtATime):
        return output
    rows = trajectory_rows({name: result.summary() for name, result in results.items()})
    suite = measure.__name__
    grown = {f"{suite}.trajectory.{key}": value for key, value in growth(rows, "mean").items()}
    kept = {key: value for key, value in output.metrics.items() if not key.startswith("base.")}
    return replace(
        output, metrics=kept | grown, tables={f"{suite}.trajectory": rows} | output.tables
    )


def prompts_of(
    model: LanguageModel, data: SuiteData, settings: GenerationSettings
) -> tuple[Sequence[Any], dict[str, Any] | None]:
    """The prompts that the settings name, or the first words of held-out texts; and whence."""
    if settings.prompts is not None:
        return settings.prompts, {"name": "given prompts"}
    if settings.path is not None:
        return read_prompts(settings.path), {"name": "prompts", "path": settings.path}
    check_at_least_one(prompt_tokens=settings.prompt_tokens)
    length = settings.prompt_tokens
    prompts = []
    for group in data.groups(model, data.num_streams, settings.limit):
        shown = zip(group.input_ids[:, :length], group.attention_mask[:, :length], strict=True)
        firsts = [ids[mask.bool()].tolist() for ids, mask in shown]
        prompts.append(
            [str(model.tokenizer.decode(ids, skip_special_tokens=True)) for ids in firsts]
        )
    return prompts, None


def decoder_of(decoders: Sequence[Decoder], name: str | None) -> Decoder:
    """The decoder of that name, or the last one.

    Raises:
        ValueError: if there is none, with those that there are.
    """
    found = {decoder.name: decoder for decoder in decoders}
    if name is not None and name not in found:
        raise ValueError(
            f"suite.decoder={name} does not apply here, there are {', '.join(found)}; guided needs "
            "guide=NAME, joint and two_head a checkpoint trained with that method"
        )
    return decoders[-1] if name is None else found[name]


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
