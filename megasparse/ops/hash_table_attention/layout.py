"""Pairs that can meet: groups of tokens, buckets of a hash, and slices of rows (a batch element's head).

G rows at a time, L length, m hashes, τ code bits, T buckets.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megasparse.ops.blocks import at_most


def groups(
    q: Tensor, k: Tensor, query_mask: Tensor | None, key_mask: Tensor | None, segments: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    """Numbers (B·H, Lq) and (B·H, Lk) such that a query and a key may meet iff theirs are equal; None if all may.

    A document's number is its own (>= 0); masked queries have −1 and masked keys −2, which meet nobody.
    """
    if query_mask is None and key_mask is None and segments is None:
        return None
    numbers = []
    for x, mask, masked in ((q, query_mask, -1), (k, key_mask, -2)):
        number = torch.zeros(x.shape[0], x.shape[2], dtype=torch.int64, device=x.device)
        if segments is not None:
            number = segments.to(torch.int64)
        if mask is not None:
            number = number.masked_fill(~mask, masked)
        numbers.append(number[:, None].expand(-1, x.shape[1], -1).flatten(0, 1))
    return numbers[0], numbers[1]


def row_slices(rows: int, elements: int, each: int) -> Iterator[slice]:
    """Slices of all rows, as many at a time as keep `each` elements a row within `elements`."""
    step = max(1, at_most(elements) // max(1, each))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


class Buckets(NamedTuple):
    """Hash codes. queries: (G, m, Lq). keys: (G, m, Lk). Integers in [0, tables): a query meets a key in a hash iff
    equal.
    """

    queries: Tensor
    keys: Tensor
    tables: int


def buckets(q_codes: Tensor, k_codes: Tensor, group: tuple[Tensor, Tensor] | None, code_bits: int) -> Buckets:
    """The codes themselves where 2^τ tables are small enough and all tokens may meet; else (group, code) numbered
    densely, row by row, so that there are never more buckets than tokens, however many documents there are.
    """
    length = q_codes.shape[2]
    most = length + k_codes.shape[2]
    if group is None and 1 << code_bits <= most:
        return Buckets(q_codes, k_codes, 1 << code_bits)
    dense = torch.empty(*q_codes.shape[:2], most, dtype=torch.int32, device=q_codes.device)
    first = None if group is None else torch.cat(group, dim=-1) << code_bits
    for hash_ in range(q_codes.shape[1]):
        both = torch.cat([q_codes[:, hash_], k_codes[:, hash_]], dim=-1).to(torch.int64)  # (G, Lq + Lk)
        ordered, order = torch.sort(both if first is None else both + first, dim=-1)
        number = torch.zeros_like(ordered)
        number[:, 1:] = (ordered[:, 1:] != ordered[:, :-1]).cumsum(-1)
        dense[:, hash_].scatter_(-1, order, number.to(torch.int32))
    return Buckets(dense[..., :length], dense[..., length:], most)
