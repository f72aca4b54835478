import pytest
import torch

from megasparse.ops.cluster_attention import gpu as kernels
from megasparse.ops.cluster_attention.reference import cluster_attention as defined
from tests.helpers import operators
from tests.helpers.kernels import DEVICE
from tests.helpers.operators import BARS, as_views, assert_gradients_of_one_output_alone, assert_within_bars
from tests.ops.test_cluster_attention import call, gradients
from tests.ops.test_cluster_attention import random_lists as lists_on


def random_heads(queries, keys, dim=16, rows=(1, 2), dtype=torch.float32):
    return operators.random_heads(queries, keys, rows, dim, dtype, DEVICE)


def random_lists(shape, length, places, seed=1):
    return lists_on(shape, length, places, seed, DEVICE)


def assert_equal_to_the_definition(heads, lists, **rule):
    rule = {"causal": False, "scale": 0.3, "count_clusters": True, **rule}
    exact = gradients(defined, [x.double() for x in heads], *lists, **rule)
    ours = gradients(kernels.cluster_attention, heads, *lists, **rule)
    assert_within_bars(ours, exact, heads[0].dtype, floor=1e-6)


@pytest.mark.parametrize(
    "length,rows,masked,documents,causal,count",
    [
        (1, (1, 1), False, False, False, True),
        (9, (2, 2), True, False, False, True),
        (9, (1, 1), False, True, True, False),
        (17, (2, 1), True, True, False, True),
    ],
)
def test_forward_and_gradients_are_those_of_the_definition(length, rows, masked, documents, causal, count):
    mask, segments = operators.random_masks(length, device=DEVICE)
    rule = {
        "causal": causal,
        "count_clusters": count,
        "key_mask": mask if masked else None,
        "segments": segments if documents else None,
    }
    lists = random_lists((*rows, 2), length, 6), random_lists((*rows, 2), length, 9, seed=5)
    assert_equal_to_the_definition(random_heads(length, length, rows=(2, rows[1])), lists, **rule)


def test_other_lengths_rows_and_places_of_keys_than_of_queries():
    lists = random_lists((1, 2, 2), 40, 35), random_lists((1, 1, 2), 75, 70, seed=5)  # several tiles of both
    assert_equal_to_the_definition(random_heads(40, 75, dtype=torch.float16), lists)


@pytest.mark.parametrize("dtype", BARS, ids=str)
def test_every_dtype_and_a_head_dim_between_powers_of_two(dtype):
    lists = random_lists((1, 1, 2), 19, 12), random_lists((1, 1, 2), 19, 15, seed=5)
    assert_equal_to_the_definition(random_heads(19, 19, 40, (1, 1), dtype), lists, causal=True)


def test_tokens_in_many_clusters_and_in_none():
    """The first 3 are in all of 9 clusters, the others in one or two, the last ones in none."""
    tokens = torch.arange(9)[:, None] % 5 + torch.tensor([3, 4])
    lists = torch.cat([torch.arange(3).expand(9, -1), tokens], dim=1).flip(-1)[None, None].to(DEVICE, torch.int32)
    assert_equal_to_the_definition(random_heads(11, 11, rows=(1, 1)), (lists, lists))


@pytest.mark.parametrize("clusters", [33, pytest.param(133, marks=pytest.mark.kernels)])
def test_pairs_that_met_in_an_earlier_cluster(clusters):
    """Bits in several words, and (from 128 clusters on) in several steps of `meetings`."""
    places = torch.arange(clusters) % 5
    tokens = torch.stack([places, places + 2, torch.full_like(places, 6), torch.full_like(places, -1)], dim=-1)
    tokens[:-1, 2] = -1  # the last two meet in the last cluster alone, and once in an earlier word
    tokens[7, 2] = 6
    lists = kernels._lists(tokens[None, None].to(DEVICE), 9)
    words = kernels._meetings(lists, lists)[0, 0].cpu()  # (W, M, Mk/32)
    members = (tokens[:, :, None] == torch.arange(9)).any(1)  # (W, L)
    for cluster, found in enumerate(words[..., 0]):
        earlier = members[:cluster].long().T @ members[:cluster].long() > 0
        for place, token in enumerate(tokens[cluster].tolist()):
            for other, key in enumerate(tokens[cluster].tolist()):
                if token >= 0 and key >= 0:
                    assert bool(found[place] >> other & 1) == earlier[token, key]


def test_views_are_read_right():
    heads = as_views(random_heads(7, 7))
    assert not heads[0].is_contiguous()
    lists = [random_lists((1, 1, 2), 7, 5, seed).mT.contiguous().mT for seed in (1, 5)]
    mask = torch.ones(7, 1, dtype=torch.bool, device=DEVICE).T
    assert_equal_to_the_definition(heads, lists, key_mask=mask)
    assert_equal_to_the_definition([x[:, :1].mT.contiguous().mT for x in heads], lists)


def test_gradients_of_one_output_alone_and_broadcast():
    lists = random_lists((1, 1, 1), 7, 5), random_lists((1, 1, 1), 7, 5, seed=5)
    rule = dict(causal=False, scale=0.3, count_clusters=False)
    one, other = (lambda *x, f=f: call(f, x, *lists, **rule) for f in (kernels.cluster_attention, defined))
    assert_gradients_of_one_output_alone(one, other, random_heads(7, 7, rows=(1, 1)))


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", BARS, ids=str)
@pytest.mark.parametrize("dim", [16, 24, 32, 64, 128, 256])
@pytest.mark.parametrize("length,places,rows", [(1, 3, (2, 2)), (17, 9, (1, 2)), (100, 70, (1, 1))])
def test_kernels_at_every_head_dim_and_length(length, places, rows, dim, dtype):
    lists = [random_lists((*rows, 2), length, places, seed) for seed in (1, 5)]
    heads = random_heads(length, length, dim, rows, dtype)
    assert_equal_to_the_definition(heads, lists, causal=dim % 32 == 0)
