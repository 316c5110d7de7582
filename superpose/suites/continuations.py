"""How different continuations are: token-set overlap (Table 5, 6) and distinct n-grams."""

import math
from collections.abc import Sequence
from itertools import combinations


def jaccard(continuations: Sequence[Sequence[int]]) -> float | None:
    """Overlap of the token sets of N continuations: |A and B| / |A or B|, mean over pairs.

    0 is nothing in common, 1 the same tokens; lower is better separated. None for N = 1.
    """
    sets = [set(ids) for ids in continuations]
    overlaps = [len(a & b) / len(a | b) for a, b in combinations(sets, 2) if a | b]
    return math.fsum(overlaps) / len(overlaps) if overlaps else None


def distinct(continuations: Sequence[Sequence[int]], n: int) -> float | None:
    """Different n-grams over all n-grams of some continuations: 1 never repeats, 0 hardly varies.

    None if no continuation has n tokens.
    """
    grams = [tuple(ids[i : i + n]) for ids in continuations for i in range(len(ids) - n + 1)]
    return len(set(grams)) / len(grams) if grams else None
