import itertools

import pytest
import torch
import torch.nn.functional as F

import megasparse.ops.cluster_attention as module
from megasparse.ops.cluster_attention import ClusterAttentionSpec, cluster_attention
from tests.helpers import operators
from tests.helpers.operators import assert_equal, assert_within_bars, random_masks


def members(index, length):
    """True where a token (row) is in a cluster's list (column): (B, H, length, W). index: (B, H, W, M)."""
    return (index[..., None, :, :] == torch.arange(length, device=index.device)[:, None, None]).any(-1)


def defined(q, k, v, clusters, spec, key_mask=None, segments=None):
    """Return dense out_i = Σ_j N_ij exp(scale·q_i·k_j − lse_i) v_j and lse, N_ij the number of clusters that hold query
    i and key j, at most 1 with spec.count_clusters."""
    query, key = members(clusters[0], q.shape[2]), members(clusters[1], k.shape[2])
    count = torch.einsum("bhiw,bhjw->bhij", query.to(q.dtype), key.to(q.dtype)).expand(*q.shape[:3], -1)
    if spec.count_clusters:
        count = count.clamp_max(1.0)
    if spec.causal:
        count = count.tril()
    if key_mask is not None:
        count = count * key_mask[:, None, None, :]
    if segments is not None:
        count = count * (segments[:, None, :, None] == segments[:, None, None, :])
    score = spec.scale * q @ k.transpose(-1, -2) + count.log()
    blind = (count == 0).all(-1)  # outside the softmax, whose gradient would be NaN
    score = score.masked_fill(blind[..., None], 0.0)
    out = (torch.softmax(score, dim=-1) @ v).masked_fill(blind[..., None], 0.0)
    return out, torch.logsumexp(score, dim=-1).masked_fill(blind, -torch.inf)


def random_heads(queries, keys=None, dim=5, dtype=torch.float64):
    return operators.random_heads(queries, keys, (2, 3), dim, dtype)


def few_heads(length):
    return operators.random_heads(length, rows=(1, 1), dtype=torch.float32)


def random_lists(shape, length, places, seed=1):
    """Distinct tokens in random order, some places empty."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.rand(*shape, length, generator=generator).argsort(-1)[..., :places]
    tokens = F.pad(tokens, (0, max(0, places - length)), value=-1)
    return tokens.masked_fill(torch.rand(tokens.shape, generator=generator) < 0.3, -1).to(torch.int32)


def call(attention, heads, *lists, key_mask=None, segments=None, **rule):
    return attention(*heads, lists, ClusterAttentionSpec(**rule), key_mask, segments)


def gradients(attention, heads, *lists, **rule):
    return operators.gradients(lambda *heads: call(attention, heads, *lists, **rule), heads)


def assert_equal_to_the_definition(heads, lists, bar=1e-9, **rule):
    assert_equal(gradients(cluster_attention, heads, *lists, **rule), gradients(defined, heads, *lists, **rule), bar)


@pytest.mark.parametrize("elements", [1, 150])
@pytest.mark.parametrize("length", [1, 23])
def test_forward_and_gradients_equal_the_definition(length, elements, monkeypatch):
    monkeypatch.setattr(module, "_CPU_BLOCK_ELEMENTS", elements)
    heads = random_heads(length, length)
    mask, documents = random_masks(length)
    flags = [[True, False], [True, False], [None, mask], [None, documents], [(2, 3), (1, 3), (2, 1), (1, 1)]]
    cases = list(itertools.product(*flags))
    for causal, count, key_mask, segments, rows in cases[:: 3 if elements == 150 else 13]:
        lists = random_lists((*rows, 4), length, 6), random_lists((*rows, 4), length, 9, seed=5)
        rule = dict(causal=causal, scale=0.7, count_clusters=count, key_mask=key_mask, segments=segments)
        assert_equal_to_the_definition(heads, lists, **rule)


def test_other_lengths_and_rows_of_keys_than_of_queries():
    lists = random_lists((2, 3, 5), 7, 4), random_lists((1, 1, 5), 19, 11)
    for count in (True, False):
        assert_equal_to_the_definition(random_heads(7, 19), lists, causal=False, scale=1.0, count_clusters=count)


def test_a_cluster_listed_twice_counts_once_or_twice():
    heads = few_heads(9)
    once = [random_lists((1, 1, 1), 9, 6, seed) for seed in (1, 5)]
    twice = [index.repeat(1, 1, 2, 1) for index in once]
    rule = dict(causal=False, scale=1.0)
    out, lse = call(cluster_attention, heads, *once, count_clusters=False, **rule)
    torch.testing.assert_close(call(cluster_attention, heads, *twice, count_clusters=True, **rule), (out, lse))
    doubled = call(cluster_attention, heads, *twice, count_clusters=False, **rule)
    torch.testing.assert_close(doubled, (out, lse + torch.tensor(2.0).log()))


@pytest.mark.parametrize("scale", [0.0, 1e4])
def test_zero_vectors_and_huge_scores_are_right_and_finite_in_fp32(scale):
    """Rounding of a score of 1e8 is magnified by keys of 1e4."""
    heads = [x * scale for x in random_heads(13)[:2]] + random_heads(13)[2:]
    lists = random_lists((1, 1, 4), 13, 6), random_lists((1, 1, 4), 13, 6, seed=5)
    rule = dict(causal=True, scale=1.0, count_clusters=True)
    assert_equal_to_the_definition(heads, lists, bar=1e-4, **rule)
    out, _, *grads = gradients(cluster_attention, [x.float() for x in heads], *lists, **rule)
    assert all(x.isfinite().all() for x in (out, *grads))


def test_a_query_that_sees_nothing_gives_zero_and_no_gradient():
    heads = few_heads(4)
    lists = torch.tensor([[[[0, 1, -1]]]]), torch.tensor([[[[1, -1]]]])
    rule = dict(causal=True, scale=1.0, count_clusters=False)
    out, lse, *grads = gradients(cluster_attention, heads, *lists, **rule)
    for blind in (0, 2, 3):
        assert (out[:, :, blind] == 0).all() and (lse[:, :, blind] == -torch.inf).all()
        assert (grads[0][:, :, blind] == 0).all()
    torch.testing.assert_close(out[:, :, 1], heads[2][:, :, 1])
    assert (grads[1][:, :, [0, 2, 3]] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_narrow_types_are_within_their_bars(dtype):
    heads = random_heads(200, dim=32, dtype=dtype)
    lists = random_lists((2, 3, 9), 200, 40), random_lists((2, 3, 9), 200, 40, seed=5)
    rule = dict(causal=False, scale=0.2, count_clusters=True)
    exact = gradients(defined, [x.double() for x in heads], *lists, **rule)
    assert_within_bars(gradients(cluster_attention, heads, *lists, **rule), exact, dtype)
