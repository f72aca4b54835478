"""How many LSH buckets, and in which factors (Reformer section 2; Kitaev, Kaiser and Levskaya 2020)."""

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megasparse.config.attention import LSHAttentionConfig

LARGEST_SINGLE = 128
"""Hashing into n buckets costs n/2 products a token: above this, two rotations of n1·n2 = n cost far less."""


def lsh_buckets(lsh: "LSHAttentionConfig", max_length: int) -> list[int]:
    """Buckets per round as one or two even factors, each hashed by a rotation of its own.

    null gives the paper's 2·max_length/chunk, rounded up to what has such factors. It depends on the longest length
    alone, so that a shorter batch is hashed the same way. ValueError where a number given has no two even factors.
    """
    if isinstance(lsh.buckets, list):
        return list(lsh.buckets)
    if isinstance(lsh.buckets, int):
        factors = _factors(lsh.buckets)
        if factors is None:
            raise ValueError(f"{lsh.buckets} is no product of two even numbers")
        return factors
    count = 2 * math.ceil(max_length / lsh.chunk)
    while (factors := _factors(count)) is None or factors[-1] > 2 * factors[0]:
        count += 2
    return factors


def _factors(count: int) -> list[int] | None:
    """[count], or above LARGEST_SINGLE its two even factors nearest to each other; None where it has none."""
    if count <= LARGEST_SINGLE:
        return [count]
    if count % 4:
        return None
    smaller = next(f for f in range(math.isqrt(count), 1, -1) if f % 2 == 0 and count % f == 0 and count // f % 2 == 0)
    return [smaller, count // smaller]
