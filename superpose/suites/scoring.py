"""How well given continuations are predicted, every text read on its own."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from superpose.data.blocks import pad_id_of
from superpose.data.lambada import EncodedExample
from superpose.losses.ranks import token_rank
from superpose.models.layout import final_hidden, output_head
from superpose.models.loading import LanguageModel
from superpose.suites.batching import batches_by_length
from superpose.suites.progress import Progress


@dataclass
class TargetScores:
    """How M targets are predicted from their contexts, each read alone.

    Attributes:
        nll: ``(M,)`` float64, negative log-likelihood of the whole target, nats.
        correct: ``(M,)`` bool, every target token is the argmax.
        ranks: ``(M,)`` int64, rank of the first target token among the tokenizer's tokens.
        ties: target tokens whose logit another token has exactly.
    """

    nll: Tensor
    correct: Tensor
    ranks: Tensor
    ties: int = 0

    @property
    def perplexity(self) -> float:
        """exp of the mean over targets of their negative log-likelihood."""
        return math.exp(float(self.nll.mean()))


def score_targets(
    model: LanguageModel,
    encoded: Sequence[EncodedExample],
    batch_size: int,
    progress: Progress,
    description: str,
) -> TargetScores:
    """One ordinary pass over context and target; logits at the target's positions only.

    Args:
        model: the model.
        encoded: contexts and targets.
        batch_size: rows of a pass; no result depends on it.
        progress: wraps the batches.
        description: of the progress.

    Raises:
        ValueError: if the outputs are not finite.
    """
    scores = TargetScores(
        nll=torch.zeros(len(encoded), dtype=torch.float64),
        correct=torch.zeros(len(encoded), dtype=torch.bool),
        ranks=torch.zeros(len(encoded), dtype=torch.int64),
    )
    head, device, pad_id = output_head(model.model), model.model.device, pad_id_of(model.tokenizer)
    read = [example.context_ids + example.target_ids[:-1] for example in encoded]
    batches = batches_by_length([len(ids) for ids in read], batch_size)
    for rows in progress(batches, description, len(batches)):
        input_ids = pad_sequence(
            [torch.tensor(read[row]) for row in rows], batch_first=True, padding_value=pad_id
        )
        hidden = final_hidden(model.model, input_ids=input_ids.to(device))  # (B, T, D)
        counts = [len(encoded[row].target_ids) for row in rows]
        index = torch.tensor([i for i, count in enumerate(counts) for _ in range(count)])
        position = torch.tensor(
            [len(read[row]) - c + i for row, c in zip(rows, counts, strict=True) for i in range(c)]
        )
        targets = torch.tensor([token for row in rows for token in encoded[row].target_ids])
        targets = targets.to(device)
        logits = head.logits(hidden[index.to(device), position.to(device)])  # (P, V)
        nll = torch.nn.functional.cross_entropy(logits, targets, reduction="none").double()
        greedy = token_rank(logits, targets) == 1
        ranks = token_rank(logits[:, : model.num_tokens], targets)
        scores.ties += count_ties(logits, targets)
        parts = (values.cpu().split(counts) for values in (nll, greedy, ranks))
        for row, row_nll, row_greedy, row_ranks in zip(rows, *parts, strict=True):
            if not row_nll.isfinite().all():
                raise ValueError(
                    f"example {row + 1} has a log-likelihood of {-float(row_nll.sum())}; "
                    f"the outputs of {model.name} are not finite, so try model.dtype=float32"
                )
            scores.nll[row] = row_nll.sum()
            scores.correct[row] = row_greedy.all()
            scores.ranks[row] = row_ranks[0]
    return scores


def count_ties(logits: Tensor, targets: Tensor) -> int:
    """Targets ``(...)`` whose logit in ``(..., V)`` another token has exactly."""
    own = logits.gather(-1, targets.unsqueeze(-1))
    return int(((logits == own).sum(dim=-1) > 1).sum())
