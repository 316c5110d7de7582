"""``suite=attention_patching``: is mixing worse than a wrong attention pattern? (sec. 3, App. H)

Each group holds three unrelated texts. The pass over text A is disturbed in three ways: its input is
mixed with text C (eq. 1); it uses the attention weights of C at every layer and head (donor); its
own weights are permuted within each causal prefix (permutation). What is measured is how far A's
vanilla prediction survives, against the third text as the distance of an unrelated context.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from superpose.config import AttentionPatchingSettings
from superpose.data.lambada import ClozeExample
from superpose.data.token_kinds import content_tokens
from superpose.interventions.attention import (
    check_patchable,
    donor_attention,
    permuted_attention,
    recorded_attention,
)
from superpose.losses.divergences import kl
from superpose.losses.ranks import token_rank
from superpose.models.layout import final_hidden, mixed_hidden, output_head
from superpose.models.loading import LanguageModel
from superpose.streams.batch import StreamBatch
from superpose.suites.attention_patching_lambada import first_and_last, measure_lambada
from superpose.suites.attention_patching_result import (
    AttentionPatchingResult,
    PatchingStatistics,
)
from superpose.suites.batching import check_at_least_one, position_chunks
from superpose.suites.progress import Progress, silent

TEXTS = 3  # of a group: A, the donor C, and an unrelated one


def attention_patching(
    models: Mapping[str, LanguageModel],
    groups: Iterable[StreamBatch],
    settings: AttentionPatchingSettings,
    examples: Sequence[ClozeExample] | None = None,
    progress: Progress = silent,
) -> AttentionPatchingResult:
    """Measure what mixing, donor patching and permutation leave of a model's predictions.

    At every position where all three texts of a group have a token: the rank of A's vanilla argmax
    token in the disturbed logits, apart for predictable and content tokens (the class of that
    token, see :mod:`superpose.data.token_kinds`); KL(vanilla A || disturbed A), and its ratio to
    KL(vanilla A || vanilla third text), a ratio of means. Every distribution of a KL is smoothed by
    ``settings.temperature``, as in ``suite=superposition``; ranks need no smoothing. No result
    depends on ``settings.batch_size``: permutations are drawn by text.

    Args:
        models: by name, in order. The first is the one that is patched, and whose vanilla
            predictions everything is held against; the last, if it is another one (its student), is
            measured for its mixed pass (Table 2's row "embedding mixing, fine-tuned").
        groups: batches of 3 unrelated texts.
        settings: see :class:`superpose.config.AttentionPatchingSettings`.
        examples: LAMBADA examples, or None to leave that part out.
        progress: wraps the LAMBADA part's batches.

    Raises:
        ValueError: for an impossible setting, groups of another size, nothing to measure, models of
            different vocabularies, or an architecture whose attention cannot be patched.
    """
    _check(models, settings)
    measurement = _Measurement(models, settings)
    with torch.no_grad():
        for batch in groups:
            measurement.add(batch)
        if measurement.statistics.num_positions == 0:
            raise ValueError(
                f"suite=attention_patching found no position to measure in "
                f"{measurement.num_groups} groups of {TEXTS} texts; give more or longer texts "
                "(data.path, data.length)"
            )
        lambada = None
        if examples:
            lambada = measure_lambada(
                models, examples, settings.lambada, settings.batch_size, progress
            )
    return AttentionPatchingResult(measurement.num_groups, measurement.statistics, lambada)


class _Measurement:
    """The running statistics."""

    def __init__(
        self, models: Mapping[str, LanguageModel], settings: AttentionPatchingSettings
    ) -> None:
        self.reference, self.last = first_and_last(models)
        self.settings = settings
        self.content = content_tokens(self.reference.tokenizer)
        self.head, self.last_head = output_head(self.reference.model), output_head(self.last.model)
        self.num_groups = 0
        setups = ["mixing", "donor", "permutation"]
        if self.last is not self.reference:
            setups.append("mixing_checkpoint")
        self.statistics = PatchingStatistics(setups, self.reference.num_tokens)

    def add(self, batch: StreamBatch) -> None:
        """Measure every group of a batch."""
        if batch.num_streams != TEXTS:
            raise ValueError(
                f"suite=attention_patching needs groups of {TEXTS} texts (a text, a donor, an "
                f"unrelated one), got {batch.num_streams}"
            )
        batch = batch.to(self.reference.model.device)
        first_seed = self.settings.seed * 1_000_003 + self.num_groups
        seeds = range(first_seed, first_seed + batch.num_rows)
        hidden = self._passes(batch.input_ids, seeds)
        for row, valid in enumerate(batch.position_mask):
            self.num_groups += 1
            self.statistics.begin_group()
            for positions in position_chunks(valid, 2 * len(self.head.weight)):
                self._measure({name: states[row, positions] for name, states in hidden.items()})

    def _passes(self, texts: Tensor, seeds: Sequence[int]) -> dict[str, Tensor]:
        """Final hidden states ``(B, T, D)`` of every pass over ``texts (B, 3, T)``."""
        model = self.reference.model
        clean, donor, unrelated = texts.unbind(dim=1)
        pair = StreamBatch.uniform(texts[:, :2])
        hidden = {
            "vanilla": final_hidden(model, input_ids=clean),
            "unrelated": final_hidden(model, input_ids=unrelated),
            "mixing": mixed_hidden(model, pair),
        }
        with recorded_attention(model) as weights:
            final_hidden(model, input_ids=donor)
        with donor_attention(model, weights):
            hidden["donor"] = final_hidden(model, input_ids=clean)
        weights.clear()
        with permuted_attention(model, seeds):
            hidden["permutation"] = final_hidden(model, input_ids=clean)
        if self.last is not self.reference:
            hidden["mixing_checkpoint"] = mixed_hidden(self.last.model, pair)
        return hidden

    def _measure(self, hidden: dict[str, Tensor]) -> None:
        """C positions of one group: states ``(C, D)`` of every pass."""
        vanilla = self.head.logits(hidden["vanilla"])  # (C, V)
        tokens = vanilla[:, : self.reference.num_tokens].argmax(dim=-1)
        smooth = self._smooth(vanilla)
        unrelated = kl(smooth, self._smooth(self.head.logits(hidden["unrelated"])))
        content = self.content[tokens.cpu()]
        self.statistics.add_positions(content, unrelated)
        for setup in self.statistics.setups:
            head = self.last_head if setup == "mixing_checkpoint" else self.head
            logits = head.logits(hidden[setup])
            ranks = token_rank(logits[:, : self.reference.num_tokens], tokens).cpu()
            self.statistics.add(setup, content, ranks, kl(smooth, self._smooth(logits)))

    def _smooth(self, logits: Tensor) -> Tensor:
        return (logits / self.settings.temperature).log_softmax(dim=-1)


def _check(models: Mapping[str, LanguageModel], settings: AttentionPatchingSettings) -> None:
    """Refuse impossible settings by their key, and models that cannot be compared or patched."""
    check_at_least_one(limit=settings.limit, batch_size=settings.batch_size)
    if not settings.temperature > 0:
        raise ValueError(
            f"suite.temperature must be above 0, got {settings.temperature}; the paper takes 1.5"
        )
    if settings.lambada.examples < 0 or settings.lambada.examples == 1:
        raise ValueError(
            "suite.lambada.examples must be at least 2 (a text and its donor), or 0 to leave that "
            f"part out, got {settings.lambada.examples}"
        )
    check_at_least_one(**{"lambada.length": settings.lambada.length})
    reference, last = first_and_last(models)
    reference.check_length(settings.lambada.length, "suite.lambada.length")
    sizes = [len(output_head(model.model).weight) for model in (reference, last)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"suite=attention_patching compares models of one vocabulary, got logits of {sizes[0]} "
            f"and {sizes[1]}; give the checkpoint's own base model"
        )
    check_patchable(reference.model, reference.path)
