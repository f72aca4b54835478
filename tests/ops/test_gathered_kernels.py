import pytest
import torch

from megasparse.ops import gathered_attention_kernels as kernels
from megasparse.ops.gathered_attention import reference as defined
from tests.helpers.kernels import DEVICE
from tests.helpers.operators import BARS, as_views, assert_gradients_of_one_output_alone, assert_within_bars
from tests.helpers.operators import random_heads as heads_on
from tests.ops.test_gathered_attention import gradients
from tests.ops.test_gathered_attention import random_index as index_on


def random_heads(queries, keys, dim=16, rows=(2, 2), dtype=torch.float32):
    return heads_on(queries, keys, rows, dim, dtype, DEVICE)


def random_index(queries, keys, places, rows=(2, 2)):
    return index_on(queries, keys, places, rows, device=DEVICE)


def assert_equal_to_the_definition(heads, index):
    exact = gradients(defined, [x.double() for x in heads], index, 0.3)
    assert_within_bars(gradients(kernels.gathered_attention, heads, index, 0.3), exact, heads[0].dtype, floor=1e-6)


@pytest.mark.parametrize(
    "queries,keys,places,rows",
    [(1, 1, 1, (2, 2)), (1, 9, 12, (1, 2)), (11, 11, 4, (2, 2)), (9, 6, 9, (2, 1)), (5, 20, 30, (1, 1))],
)
def test_forward_and_gradients_are_those_of_the_definition(queries, keys, places, rows):
    index = random_index(queries, keys, places, rows)
    assert_equal_to_the_definition(random_heads(queries, keys), index.to(torch.int32))


@pytest.mark.parametrize("dtype", BARS, ids=str)
def test_every_dtype_and_a_head_dim_between_powers_of_two(dtype):
    assert_equal_to_the_definition(random_heads(9, 13, 40, (1, 2), dtype), random_index(9, 13, 5, (1, 2)))


def test_keys_that_all_choose_and_keys_that_none_does():
    """The first has more tiles of entries than one step of `join_tiles` takes, the next ones end or begin in a tile."""
    index = torch.zeros(1, 1, 24, 30, dtype=torch.int64, device=DEVICE)
    index[:, :, 12:] = torch.arange(30, device=DEVICE) // 5
    index[:, :, 20:, 3:] = -1
    assert_equal_to_the_definition(random_heads(24, 12, rows=(1, 1)), index)


def test_views_and_broadcast_gradients_are_read_right():
    heads = as_views(random_heads(5, 7, rows=(1, 2)))
    assert not heads[0].is_contiguous()
    index = random_index(5, 7, 4, (1, 2))
    assert_equal_to_the_definition(heads, index)
    assert_equal_to_the_definition([x.mT.contiguous().mT for x in heads], index)
    assert_equal_to_the_definition(heads, index.mT.contiguous().mT)
    one, other = (lambda *x, f=f: f(*x, index, scale=0.3) for f in (kernels.gathered_attention, defined))
    assert_gradients_of_one_output_alone(one, other, heads)


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", BARS, ids=str)
@pytest.mark.parametrize("dim", [16, 24, 32, 64, 128, 256])
@pytest.mark.parametrize("length,places,rows", [(1, 3, (2, 2)), (17, 5, (1, 2)), (100, 4, (1, 1))])
def test_kernels_at_every_head_dim_and_length(length, places, rows, dim, dtype):
    heads = random_heads(length, length + 3, dim, rows, dtype)
    assert_equal_to_the_definition(heads, random_index(length, length + 3, places, rows))
