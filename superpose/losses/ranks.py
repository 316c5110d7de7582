"""The rank of a token in a row of logits (rank survival, section 2.2 of arXiv 2609.29845)."""

import torch
from torch import Tensor


def token_rank(logits: Tensor, token: Tensor) -> Tensor:
    """How many tokens stand at or before ``token`` when a row is sorted by falling logit.

    Ties are counted to the lowest index, as argmax counts them: the rank is 1 exactly where
    ``logits.argmax(-1) == token`` resolves ties that way.

    Args:
        logits: ``(..., V)``, any monotone score; sliced to the tokenizer's tokens by the caller.
        token: ``(...)`` int64 token ids below V.

    Returns:
        ``(...)`` int64 ranks, 1 for the most probable token.

    Raises:
        ValueError: if the logit of a token is NaN, which would otherwise count as rank 1.
    """
    own = logits.gather(-1, token.unsqueeze(-1))  # (..., 1)
    if own.isnan().any():
        raise ValueError("token_rank got NaN logits; the model's outputs have diverged")
    index = torch.arange(logits.shape[-1], device=logits.device)
    tied_before = (logits == own) & (index < token.unsqueeze(-1))
    return 1 + ((logits > own) | tied_before).sum(dim=-1)
