import itertools

import pytest
import torch

import megasparse.ops.bucketed_attention.ranges as ranges
from megasparse.ops.bucketed_attention import windows_by_key_rank
from tests.helpers.operators import random_masks


def random_codes(length, rounds, buckets, seed):
    return torch.randint(0, buckets, (2, 2, rounds, length), generator=torch.Generator().manual_seed(seed))


def defined(query_codes, key_codes, chunk, causal, key_mask=None, segments=None):
    """[b][h][i][r]: the set of key numbers, straight from the definition."""

    def seen(b, h, i, r):
        keys = [
            j
            for j in range(key_codes.shape[-1])
            if key_codes[b, h, r, j] == query_codes[b, h, r, i]
            and (key_mask is None or key_mask[b, j])
            and (segments is None or segments[b, i] == segments[b, j])
        ]
        before, after = [j for j in keys if j <= i], [j for j in keys if j > i]
        return set(before[-chunk:]) | set([] if causal else after[:chunk])

    batch, heads, rounds, queries = query_codes.shape
    return [
        [[[seen(b, h, i, r) for r in range(rounds)] for i in range(queries)] for h in range(heads)]
        for b in range(batch)
    ]


def as_sets(index, rounds):
    listed = index.unflatten(-1, (rounds, -1)).tolist()
    windows = [[[[[j for j in r if j >= 0] for r in i] for i in h] for h in b] for b in listed]
    assert all(len(r) == len(set(r)) for b in windows for h in b for i in h for r in i)
    return [[[[set(r) for r in i] for i in h] for h in b] for b in windows]


@pytest.mark.parametrize("queries,keys", [(1, 1), (17, 17), (17, 7), (7, 17)])
@pytest.mark.parametrize("buckets", [1, 4, 60])
def test_each_query_sees_the_keys_of_the_definition(queries, keys, buckets, monkeypatch):
    monkeypatch.setattr(ranges, "_PIECE_ELEMENTS", 100)  # several pieces
    mask, documents = random_masks(keys)
    documents = documents if queries == keys else None
    for causal, rounds, chunk, key_mask, segments in itertools.product(
        [True, False], [1, 3], [1, 4], [None, mask], [None, documents]
    ):
        query_codes, key_codes = random_codes(queries, rounds, buckets, 1), random_codes(keys, rounds, buckets, 2)
        settings = (query_codes, key_codes, chunk, causal, key_mask, segments)
        expected = defined(*settings)
        every = windows_by_key_rank(*settings, distinct=False)
        assert every.dtype == torch.int32
        assert every.shape == (2, 2, queries, rounds * chunk * (1 if causal else 2))
        assert as_sets(every, rounds) == expected
        once = as_sets(windows_by_key_rank(*settings), rounds)
        for b, h, i in itertools.product(range(2), range(2), range(queries)):
            assert set().union(*once[b][h][i]) == set().union(*expected[b][h][i])
            assert sum(map(len, once[b][h][i])) == len(set().union(*once[b][h][i]))


def test_no_later_key_moves_a_causal_window():
    query_codes, key_codes = random_codes(30, 2, 3, 1), random_codes(30, 2, 3, 2)
    before = windows_by_key_rank(query_codes, key_codes, 4, causal=True)
    key_codes[..., 20:] = 0
    query_codes[..., 20:] = 0
    after = windows_by_key_rank(query_codes, key_codes, 4, causal=True)
    assert torch.equal(before[:, :, :20], after[:, :, :20])
    assert not torch.equal(before, after)


@pytest.mark.parametrize("causal", [True, False])
def test_later_queries_by_themselves_see_the_same_keys(causal):
    query_codes, key_codes = random_codes(25, 3, 4, 1), random_codes(9, 3, 4, 2)
    whole = windows_by_key_rank(query_codes, key_codes, 2, causal)
    for first in (1, 8, 24):
        assert torch.equal(
            windows_by_key_rank(query_codes[..., first:], key_codes, 2, causal, first_query=first), whole[:, :, first:]
        )
