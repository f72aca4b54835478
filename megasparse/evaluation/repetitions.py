"""How far back texts repeat themselves: what attention beyond a window has to win. n tokens an n-gram."""

import itertools
from dataclasses import dataclass

import numpy as np
from torch import Tensor

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # odd: a product with it loses nothing


@dataclass(frozen=True)
class Repetitions:
    """Tokens whose last n tokens stood earlier in the sequence, by the distance to the latest such place.

    share: part of all tokens. right: part of these that are what followed there.
    """

    nearest: int
    furthest: int
    share: float
    right: float


def repetitions(sequence: Tensor, n: int, bounds: list[int]) -> np.ndarray:
    """Counts (bounds − 1, 2) of tokens by the distance to the latest earlier place with the same n tokens before it:
    low < distance <= high for neighbouring bounds; all of them, and those that stood there too. sequence: (L,) int64.

    n-grams are compared by a 64-bit hash.
    """
    tokens = sequence.numpy().astype(np.uint64)
    counts = np.zeros((len(bounds) - 1, 2), dtype=np.int64)
    if len(tokens) <= n:
        return counts
    code = np.zeros(len(tokens) - n, dtype=np.uint64)
    for i in range(n):
        code = (code + tokens[i : len(tokens) - n + i] + np.uint64(1)) * _MULTIPLIER
        code ^= code >> np.uint64(29)
    order = np.argsort(code, kind="stable")
    same = code[order[1:]] == code[order[:-1]]
    here, before = order[1:][same], order[:-1][same]
    right = tokens[here + n] == tokens[before + n]
    place = np.digitize(here - before, bounds, right=True) - 1
    for kept, column in ((np.ones_like(right), 0), (right, 1)):
        inside = kept & (place >= 0) & (place < len(counts))
        counts[:, column] += np.bincount(place[inside], minlength=len(counts))
    return counts


def shares(counts: np.ndarray, bounds: list[int], tokens: int) -> list[Repetitions]:
    """The rows of summed counts as parts of so many tokens."""
    return [
        Repetitions(low, high, found / tokens, right / found if found else 0.0)
        for (low, high), (found, right) in zip(itertools.pairwise(bounds), counts.tolist(), strict=True)
    ]
