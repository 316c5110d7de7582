"""suite=generation: N continuations from one mixed pass, beside those of each prompt alone."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from superpose.config import GenerationSettings
from superpose.data.blocks import leading_bos
from superpose.data.lambada import EncodedExample
from superpose.decoding.generate import Generation, Tokens, encode_prompts, generate_from_ids
from superpose.decoding.raw import Decoder, Raw
from superpose.models.loading import LanguageModel
from superpose.suites.batching import check_at_least_one
from superpose.suites.continuations import distinct, jaccard
from superpose.suites.progress import Progress, silent
from superpose.suites.scoring import score_targets

Watch = Callable[[Sequence[Sequence[str]], Sequence[Sequence[str]]], None]
"""``watch(prompts, texts)`` sees some groups' prompts and continuations grow: [group][stream]."""


def nobody(prompts: Sequence[Sequence[str]], texts: Sequence[Sequence[str]]) -> None:
    """Show nothing."""


@dataclass(frozen=True)
class Continuation:
    """One stream's continuation.

    Attributes:
        text: the new text.
        token_ids: its tokens.
        nll_nats: mean negative log-likelihood of its tokens under the teacher, which reads prompt
            and continuation alone; nats a token.
    """

    text: str
    token_ids: tuple[int, ...]
    nll_nats: float


@dataclass(frozen=True)
class GenerationResult:
    """What :func:`generation` made.

    Attributes:
        decoder: how the streams were told apart.
        prompts: ``[group][stream]``.
        mixed: continuations from the mixed pass, ``[group][stream]``.
        alone: the teacher's continuations of the same prompts, each read alone with the same
            settings.
        cache_bytes: KV cache of the mixed passes, and of the guide, a stream.
    """

    decoder: str
    prompts: list[list[str]]
    mixed: list[list[Continuation]]
    alone: list[list[Continuation]]
    cache_bytes: tuple[float, float]

    def metrics(self) -> dict[str, float]:
        """Every figure by its dotted name; ``generation.single`` is each prompt alone."""
        named = {
            **_measures("generation", self.mixed),
            **_measures("generation.single", self.alone),
            "generation.cache_bytes_per_stream": self.cache_bytes[0],
            "generation.guide_cache_bytes_per_stream": self.cache_bytes[1],
        }
        return {name: value for name, value in named.items() if value is not None}

    def tables(self) -> dict[str, list[dict[str, Any]]]:
        """``generation.continuations``: a row a stream."""
        rows = [
            {
                "group": g + 1,
                "stream": n + 1,
                "prompt": prompt,
                self.decoder: mixed.text,
                "nll_nats": mixed.nll_nats,
                "alone": alone.text,
                "nll_nats_alone": alone.nll_nats,
            }
            for g, group in enumerate(zip(self.prompts, self.mixed, self.alone, strict=True))
            for n, (prompt, mixed, alone) in enumerate(zip(*group, strict=True))
        ]
        return {"generation.continuations": rows}

    def counts(self) -> dict[str, int]:
        """How many groups and tokens."""
        tokens = sum(len(stream.token_ids) for group in self.mixed for stream in group)
        return {
            "groups": len(self.mixed),
            "prompts": sum(map(len, self.prompts)),
            "new_tokens": tokens,
        }


def _measures(prefix: str, groups: list[list[Continuation]]) -> dict[str, float | None]:
    streams = [stream for group in groups for stream in group]
    overlaps = [jaccard([stream.token_ids for stream in group]) for group in groups]
    known = [overlap for overlap in overlaps if overlap is not None]
    return {
        f"{prefix}.jaccard": math.fsum(known) / len(known) if known else None,
        f"{prefix}.distinct_1": distinct([stream.token_ids for stream in streams], 1),
        f"{prefix}.distinct_2": distinct([stream.token_ids for stream in streams], 2),
        f"{prefix}.nll_nats": math.fsum(stream.nll_nats for stream in streams) / len(streams),
    }


def generation(
    model: LanguageModel,
    teacher: LanguageModel,
    decoder: Decoder,
    prompts: Sequence[Sequence[str]],
    settings: GenerationSettings,
    progress: Progress = silent,
    watch: Watch = nobody,
) -> GenerationResult:
    """Continue groups of N prompts from one mixed pass each, and every prompt alone.

    Args:
        model: the model that reads the mixture.
        teacher: the single-stream model that continues each prompt alone and scores everything.
        decoder: how the streams are told apart.
        prompts: ``[group][stream]``.
        settings: see :class:`superpose.config.GenerationSettings`.
        progress: wraps the batches.
        watch: sees the continuations grow, instead of a bar.

    Raises:
        ValueError: as :func:`superpose.decoding.generate`; for settings out of range.
    """
    check_at_least_one(batch_size=settings.batch_size)
    groups = encode_prompts(model, prompts)
    made: list[Generation] = []
    starts = range(0, len(groups), settings.batch_size)
    description = f"generation, {decoder.name}"
    watched = watch is not nobody  # then a bar would only be in the way
    for start in starts if watched else progress(starts, description, len(starts)):
        batch = slice(start, start + settings.batch_size)

        def show(tokens: Tokens, shown: Sequence[Sequence[str]] = prompts[batch]) -> None:
            decode = model.tokenizer.decode
            watch(shown, [[str(decode(ids)) for ids in group] for group in tokens])

        made.append(_generate(model, groups[batch], decoder, settings, show))
    alone: list[Generation] = []
    single = [[stream] for group in groups for stream in group]
    starts = range(0, len(single), settings.batch_size)
    for start in progress(starts, "generation, each prompt alone", len(starts)):
        alone.append(
            _generate(teacher, single[start : start + settings.batch_size], Raw(), settings)
        )
    num_streams = len(groups[0])
    mixed_streams = _scored(teacher, single, made, settings, progress)
    alone_streams = _scored(teacher, single, alone, settings, progress)
    caches = [
        sum(getattr(part, name) for part in made) / len(single)
        for name in ("cache_bytes", "guide_cache_bytes")
    ]
    return GenerationResult(
        decoder=decoder.name,
        prompts=[list(group) for group in prompts],
        mixed=_grouped(mixed_streams, num_streams),
        alone=_grouped(alone_streams, num_streams),
        cache_bytes=(caches[0], caches[1]),
    )


def _generate(
    model: LanguageModel,
    groups: Tokens,
    decoder: Decoder,
    settings: GenerationSettings,
    on_step: Callable[[Tokens], None] | None = None,
) -> Generation:
    return generate_from_ids(
        model, groups, decoder, len(leading_bos(model.tokenizer)),
        max_new_tokens=settings.max_new_tokens, do_sample=settings.do_sample,
        temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p,
        seed=settings.seed, on_step=on_step,
    )  # fmt: skip


def _scored(
    teacher: LanguageModel,
    prompts: Tokens,
    made: Sequence[Generation],
    settings: GenerationSettings,
    progress: Progress,
) -> list[Continuation]:
    """The continuations one after the other, with the teacher's likelihood of each."""
    tokens = [tuple(ids) for part in made for group in part.token_ids for ids in group]
    texts: list[str] = [text for part in made for group in part.texts for text in group]
    encoded = [
        EncodedExample(tuple(prompt[0]), ids) for prompt, ids in zip(prompts, tokens, strict=True)
    ]
    with torch.no_grad():
        scores = score_targets(teacher, encoded, settings.batch_size, progress, "generation, nll")
    nll = [total / len(ids) for total, ids in zip(scores.nll.tolist(), tokens, strict=True)]
    return [Continuation(*parts) for parts in zip(texts, tokens, nll, strict=True)]


def _grouped(streams: list[Continuation], num_streams: int) -> list[list[Continuation]]:
    return [streams[i : i + num_streams] for i in range(0, len(streams), num_streams)]


def group_prompts(
    prompts: Sequence[Any], num_streams: int, limit: int | None
) -> tuple[list[list[str]], int]:
    """Groups of N prompts, and how many prompts were left over.

    Args:
        prompts: texts, of which N after N make a group, or groups already.
        num_streams: N.
        limit: groups to keep, the first ones; None is all.

    Raises:
        ValueError: for fewer prompts than N, or something that is not text.
    """
    check_at_least_one(limit=limit)
    flat: list[Any] = []
    for prompt in prompts:
        grouped = isinstance(prompt, list | tuple)
        if grouped and len(prompt) != num_streams:
            raise ValueError(
                f"suite.prompts has a group of {len(prompt)} prompts, expected "
                f"streams.num_streams={num_streams} in each"
            )
        flat += prompt if grouped else [prompt]
    odd = [prompt for prompt in flat if not isinstance(prompt, str)]
    if odd:
        raise ValueError(f"suite.prompts must be texts, got {odd[0]!r}; put it into quotes")
    if len(flat) < num_streams:
        raise ValueError(
            f"streams.num_streams={num_streams} needs at least {num_streams} prompts, got "
            f"{len(flat)}; give more, or set streams.num_streams"
        )
    count = len(flat) // num_streams
    groups = [list(flat[i * num_streams : (i + 1) * num_streams]) for i in range(count)]
    return groups[:limit], len(flat) - count * num_streams


def read_prompts(path: str | Path) -> list[str]:
    """Prompts of a file: the lines of a text file, or ``text`` or ``prompt`` of .jsonl rows.

    Empty lines are skipped.

    Raises:
        ValueError: for a missing or empty file, or a row without text (named by its line).
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(
            f"suite.path={path} is not a file; give a text file with a prompt a line, or .jsonl"
        )
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"suite.path={path} is not UTF-8 (byte {error.object[error.start]:#x} at "
            f"{error.start}); convert it first"
        ) from None
    prompts = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            rows = file.suffix == ".jsonl"
            prompts.append(_prompt_of(line, f"{path}, line {number}") if rows else line)
    if not prompts:
        raise ValueError(f"suite.path={path} has no prompts; give one a line")
    return prompts


def _prompt_of(line: str, where: str) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"suite.path={where} is no JSON: {error}") from None
    for key in ("prompt", "text"):
        if isinstance(row, dict) and isinstance(row.get(key), str):
            return str(row[key])
    raise ValueError(f'suite.path={where} has no text; expected {{"prompt"}} or {{"text"}}')
