"""Ranks of tokens: by hand, against a sort, and ties."""

import pytest
import torch

from superpose.losses.ranks import token_rank


def test_by_hand() -> None:
    logits = torch.tensor([0.5, 2.0, -1.0, 1.0])
    ranks = [token_rank(logits, torch.tensor(token)).item() for token in range(4)]
    assert ranks == [3, 1, 4, 2]


def test_agrees_with_a_sort() -> None:
    logits = torch.randn(2, 3, 100, generator=torch.Generator().manual_seed(0))
    token = torch.randint(100, (2, 3), generator=torch.Generator().manual_seed(1))
    order = logits.argsort(dim=-1, descending=True)
    expected = 1 + (order == token[..., None]).int().argmax(dim=-1)
    ranks = token_rank(logits, token)
    assert torch.equal(ranks, expected)
    assert ranks.dtype == torch.int64
    assert (token_rank(logits, logits.argmax(dim=-1)) == 1).all()


def test_ties_go_to_the_lowest_index() -> None:
    """All tokens get different ranks, also in bfloat16, where ties of the maximum are common."""
    logits = torch.tensor([1.0, 3.0, 3.0, 1.0, 3.0], dtype=torch.bfloat16)
    ranks = token_rank(logits.expand(5, 5), torch.arange(5))
    assert ranks.tolist() == [4, 1, 2, 5, 3]
    assert token_rank(logits, logits.argmax()).item() == 1


def test_nan_is_not_rank_one() -> None:
    with pytest.raises(ValueError, match="NaN"):
        token_rank(torch.tensor([0.0, float("nan")]), torch.tensor(1))
