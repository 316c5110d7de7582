"""The LAMBADA part of ``suite=attention_patching``: the last word, read under another's attention."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from superpose.config import PatchedLambadaSettings
from superpose.data.lambada import ClozeExample, encode_examples
from superpose.interventions.attention import donor_attention, recorded_attention
from superpose.losses.ranks import token_rank
from superpose.models.layout import final_hidden, mixed_hidden, output_head
from superpose.models.loading import LanguageModel
from superpose.streams.batch import StreamBatch
from superpose.suites.progress import Progress, silent


@dataclass(frozen=True)
class FirstToken:
    """How well the last word's first token is predicted.

    Attributes:
        accuracy: fraction of examples where it is the argmax, 0 to 1.
        median_rank: its median rank among the tokenizer's tokens, 1 is the argmax.
    """

    accuracy: float
    median_rank: float

    @classmethod
    def of(cls, ranks: Tensor) -> "FirstToken":
        """From ranks of any shape, at least one."""
        ranks = ranks.double()
        return cls(float((ranks == 1).double().mean()), float(ranks.quantile(0.5)))


@dataclass(frozen=True)
class PatchedLambada:
    """The last word's first token at the context's final position.

    Attributes:
        readings: ``vanilla``, ``donor``, ``mixing`` and, with a checkpoint, ``mixing_checkpoint``.
        examples: how many were read.
        truncated: contexts that lost tokens on the left, to the limit or to their pair's length.
    """

    readings: dict[str, FirstToken]
    examples: int
    truncated: int


def measure_lambada(
    models: Mapping[str, LanguageModel],
    examples: Sequence[ClozeExample],
    settings: PatchedLambadaSettings,
    batch_size: int,
    progress: Progress = silent,
) -> PatchedLambada:
    """Rank of the last word's first token: vanilla, under donor patching, and mixed.

    Contexts are paired by length, the two of a pair each being the other's donor and partner in the
    mixture; both lose tokens on the left until they have the shorter one's length, or
    ``settings.length``, so that they end together. All readings are of these same contexts. Of an
    odd number of examples the shortest context is left out.

    Args:
        models: the first is patched; the last, if it is another, is read mixed as well.
        examples: cloze examples; the first ``settings.examples`` are used.
        settings: see :class:`superpose.config.PatchedLambadaSettings`.
        batch_size: pairs of one pass; no result depends on it.
        progress: wraps the batches.

    Raises:
        ValueError: for fewer than two examples, or one that cannot be scored.
    """
    reference, last = first_and_last(models)
    encoded = encode_examples(reference.tokenizer, examples[: settings.examples])
    if len(encoded) < 2:
        raise ValueError(
            f"suite.lambada needs at least 2 examples (a text and its donor), got {len(encoded)}; "
            "give more in suite.lambada.path, or suite.lambada.examples=0 to leave that part out"
        )
    encoded.sort(key=lambda example: -len(example.context_ids))  # stable: one order of equals
    pairs = list(zip(encoded[::2], encoded[1::2], strict=False))
    lengths = [min(settings.length, len(second.context_ids)) for _, second in pairs]
    ranks: dict[str, list[Tensor]] = {}
    batches = _batches_of_one_length(lengths, batch_size)
    for rows in progress(batches, "attention patching, lambada", len(batches)):
        contexts = [[e.last_context(lengths[row]) for e in pairs[row]] for row in rows]
        targets = torch.tensor([[e.target_ids[0] for e in pairs[row]] for row in rows])
        for reading, found in _read(reference, last, torch.tensor(contexts), targets).items():
            ranks.setdefault(reading, []).append(found.flatten())
    return PatchedLambada(
        readings={name: FirstToken.of(torch.cat(found)) for name, found in ranks.items()},
        examples=2 * len(pairs),
        truncated=sum(
            len(example.context_ids) > length
            for pair, length in zip(pairs, lengths, strict=True)
            for example in pair
        ),
    )


def first_and_last(models: Mapping[str, LanguageModel]) -> tuple[LanguageModel, LanguageModel]:
    """The patched model, and the one that is read mixed beside it: the same if there is one."""
    values = list(models.values())
    return values[0], values[-1]


def _read(
    reference: LanguageModel, last: LanguageModel, contexts: Tensor, targets: Tensor
) -> dict[str, Tensor]:
    """Ranks ``(B, 2)`` of ``targets (B, 2)`` after ``contexts (B, 2, T)``, by reading."""
    model = reference.model
    contexts, targets = contexts.to(model.device), targets.to(model.device)
    first, second = contexts.unbind(dim=1)
    states: list[Tensor] = []
    recorded = []
    for ids in (first, second):
        with recorded_attention(model) as weights:
            states.append(final_hidden(model, input_ids=ids)[:, -1])
        recorded.append(weights)
    vanilla = torch.stack(states, dim=1)  # (B, 2, D)
    states = []
    for ids, donor in ((first, recorded[1]), (second, recorded[0])):
        with donor_attention(model, donor):
            states.append(final_hidden(model, input_ids=ids)[:, -1])
    readings = {"vanilla": (reference, vanilla), "donor": (reference, torch.stack(states, dim=1))}
    named = {"mixing": reference} | ({} if last is reference else {"mixing_checkpoint": last})
    for name, mixing in named.items():
        mixed = mixed_hidden(mixing.model, StreamBatch.uniform(contexts))[:, -1]
        readings[name] = (mixing, mixed[:, None].expand(-1, 2, -1))
    ranks = {}
    for name, (owner, hidden) in readings.items():
        logits = output_head(owner.model).logits(hidden)[..., : reference.num_tokens]  # (B, 2, V)
        ranks[name] = token_rank(logits, targets).cpu()
    return ranks


def _batches_of_one_length(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Row numbers in batches of equal lengths, in order: a pair's attention has no padding."""
    batches: list[list[int]] = []
    for row, length in enumerate(lengths):
        if batches and lengths[batches[-1][0]] == length and len(batches[-1]) < batch_size:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches
