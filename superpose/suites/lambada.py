"""suite=lambada: predict the last word of a passage - read alone, and read in a mixture."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from superpose.config import LambadaSettings
from superpose.data.lambada import ClozeExample, EncodedExample, encode_examples
from superpose.decoding.generate import check_num_streams, generate_from_ids
from superpose.decoding.mixed_pass import MixedPass
from superpose.decoding.raw import Decoder, Raw
from superpose.losses.ranks import token_rank
from superpose.models.loading import LanguageModel
from superpose.streams.mixing import check_weights
from superpose.suites.batching import batches_by_length, check_at_least_one
from superpose.suites.continuations import jaccard
from superpose.suites.lambada_result import LambadaResult, MixedScore, WordScore
from superpose.suites.progress import Progress, silent
from superpose.suites.scoring import count_ties, score_targets

Group = tuple[EncodedExample, ...]  # N examples, one a stream


def lambada(
    model: LanguageModel,
    examples: Sequence[ClozeExample],
    settings: LambadaSettings,
    num_streams: int,
    progress: Progress = silent,
    decoders: Sequence[Decoder] = (Raw(),),
) -> LambadaResult:
    """Measure a model on cloze examples, single-stream and with N contexts in one mixed pass.

    Of M examples, group i of the mixed reading takes the N examples i, i + M // N,
    i + 2 (M // N), ...; their contexts lose tokens on the left until all have the length of the
    shortest, or ``settings.length``, so that they end at one position (BOS, where the tokenizer
    gives one, stays at position 0). The mixed pass then goes on teacher-forced: every stream is
    given its own target's tokens, and beyond them its own greedy ones, until the longest target of
    its batch is read. A single guide reading is added if a decoder has a guide. No result depends
    on ``settings.batch_size``.

    Args:
        model: model and tokenizer.
        examples: contexts with their last words.
        settings: see :class:`superpose.config.LambadaSettings`.
        num_streams: N.
        progress: wraps the batches, see :data:`superpose.suites.progress.Progress`.
        decoders: how the streams are told apart, each a mixed reading of its own.

    Raises:
        ValueError: for settings out of range, fewer examples than streams, an example that cannot
            be scored (names its row), a decoder for another N, or a model whose outputs are not
            finite.
    """
    _check(model, settings, num_streams, decoders)
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
    size = settings.batch_size
    guide = next((decoder.guide for decoder in decoders if decoder.guide is not None), None)
    with torch.no_grad():
        single = score_targets(model, encoded, size, progress, "lambada, single")
        mixed = {
            decoder.name: _score_mixed(model, decoder, groups, settings, progress)
            for decoder in decoders
        }
        of_guide = None
        if guide is not None:
            own = encode_examples(guide.tokenizer, examples[: settings.limit], guide.max_length)
            of_guide = score_targets(guide, own, size, progress, "lambada, guide")
    first = next(iter(mixed.values()))
    return LambadaResult(
        single=WordScore.of(single.correct, single.ranks),
        perplexity=single.perplexity,
        guide=None if of_guide is None else WordScore.of(of_guide.correct, of_guide.ranks),
        guide_perplexity=None if of_guide is None else of_guide.perplexity,
        mixed={name: scores.summary() for name, scores in mixed.items()},
        counts={
            "examples": len(encoded),
            "target_tokens": sum(len(example.target_ids) for example in encoded),
            "groups": num_groups,
            "mixed_examples": num_groups * num_streams,
            "truncated": sum(example.truncated for example in encoded),
            "mixed_truncated": first.truncated,
            "border_merges": sum(example.border_merge for example in encoded),
            "ties": single.ties,
            "mixed_ties": first.ties,
        },
    )


@dataclass
class _MixedScores:
    correct: Tensor  # (G, N) bool, every target token is the argmax
    ranks: Tensor  # (G, N) int64, of the first target token
    overlaps: list[float] = field(default_factory=list)  # Jaccard, a group
    truncated: int = 0
    ties: int = 0

    def summary(self) -> MixedScore:
        streams = zip(self.correct.unbind(dim=1), self.ranks.unbind(dim=1), strict=True)
        return MixedScore(
            all=WordScore.of(self.correct, self.ranks),
            streams=tuple(WordScore.of(correct, ranks) for correct, ranks in streams),
            jaccard=math.fsum(self.overlaps) / len(self.overlaps) if self.overlaps else None,
        )


def _score_mixed(
    model: LanguageModel,
    decoder: Decoder,
    groups: Sequence[Group],
    settings: LambadaSettings,
    progress: Progress,
) -> _MixedScores:
    """One mixed pass a group, up to the end of the targets."""
    shape = (len(groups), len(groups[0]))
    scores = _MixedScores(
        correct=torch.ones(shape, dtype=torch.bool), ranks=torch.zeros(shape, dtype=torch.int64)
    )
    longest = max(len(example.target_ids) for group in groups for example in group)
    room = _room(model, decoder, longest)
    cut = [_contexts(group, settings.length, room) for group in groups]
    scores.truncated = sum(
        len(context) < len(example.context_ids)
        for contexts, group in zip(cut, groups, strict=True)
        for context, example in zip(contexts, group, strict=True)
    )
    description = f"lambada, {shape[1]} mixed, {decoder.name}"
    batches = batches_by_length([len(contexts[0]) for contexts in cut], settings.batch_size)
    for rows in progress(batches, description, len(batches)):
        _score_batch(model, decoder, scores, rows, cut, groups)
    scores.overlaps = _overlaps(model, decoder, groups, settings)
    return scores


def _score_batch(
    model: LanguageModel,
    decoder: Decoder,
    scores: _MixedScores,
    rows: list[int],
    contexts: Sequence[list[tuple[int, ...]]],
    groups: Sequence[Group],
) -> None:
    """Read the contexts of some groups, then their targets token by token."""
    mixed_pass = MixedPass(model, decoder)
    logits = mixed_pass.start([contexts[row] for row in rows], groups[0][0].num_bos)  # (N, G, V)
    longest = max(len(example.target_ids) for row in rows for example in groups[row])
    for step in range(longest):
        greedy = logits.argmax(dim=-1).T  # (G, N)
        targets = greedy.clone()
        has_target = torch.zeros_like(greedy, dtype=torch.bool)
        for place, row in enumerate(rows):
            for n, example in enumerate(groups[row]):
                if step < len(example.target_ids):
                    targets[place, n] = example.target_ids[step]
                    has_target[place, n] = True
        ranks = token_rank(logits, targets.T).T  # (G, N)
        scores.correct[rows] &= ((ranks == 1) | ~has_target).cpu()
        if step == 0:
            scores.ranks[rows] = ranks.cpu()
            scores.ties += count_ties(logits, targets.T)
        if step < longest - 1:
            logits = mixed_pass.step(targets)


def _overlaps(
    model: LanguageModel, decoder: Decoder, groups: Sequence[Group], settings: LambadaSettings
) -> list[float]:
    """Jaccard overlap of the greedy continuations of the first groups' contexts."""
    chosen = groups[: settings.continuation_groups]
    if not chosen or len(chosen[0]) == 1:
        return []
    if isinstance(decoder, Raw) and decoder.guide is None:
        return [1.0] * len(chosen)  # streams that share their logits continue alike
    length = settings.continuation_tokens
    room = max(1, _room(model, decoder, length))
    overlaps = []
    for start in range(0, len(chosen), settings.batch_size):
        batch = chosen[start : start + settings.batch_size]
        contexts = [[list(ids) for ids in _contexts(g, settings.length, room)] for g in batch]
        made = generate_from_ids(
            model, contexts, decoder, chosen[0][0].num_bos, max_new_tokens=length
        )
        overlaps += [jaccard(streams) for streams in made.token_ids]
    return [overlap for overlap in overlaps if overlap is not None]


def _check(
    model: LanguageModel, settings: LambadaSettings, num_streams: int, decoders: Sequence[Decoder]
) -> None:
    """Refuse settings out of range, by their key."""
    check_weights(num_streams, "uniform", retention=0.0)
    check_at_least_one(
        limit=settings.limit,
        batch_size=settings.batch_size,
        length=settings.length,
        continuation_tokens=settings.continuation_tokens,
    )
    if settings.continuation_groups < 0:
        raise ValueError(
            "suite.continuation_groups must be at least 0 (which leaves the overlap out), got "
            f"{settings.continuation_groups}"
        )
    model.check_length(settings.length, "suite.length")
    for decoder in decoders:
        check_num_streams(decoder, num_streams)
        if decoder.guide is not None:
            decoder.guide.check_length(settings.length, "suite.length")


def _room(model: LanguageModel, decoder: Decoder, num_new: int) -> int:
    """Positions that ``num_new`` further tokens, of which the last is not read, leave in front."""
    limits = [m.max_length for m in (model, decoder.guide) if m is not None and m.max_length]
    return min(limits, default=2**31) - num_new + 1


def _contexts(group: Group, *limits: int) -> list[tuple[int, ...]]:
    """The contexts of a group, cut on the left to the length of the shortest or to a limit."""
    length = min(*limits, *(len(example.context_ids) for example in group))
    return [example.last_context(length) for example in group]
