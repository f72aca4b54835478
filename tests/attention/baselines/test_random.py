"""Random buckets: the definition and the arguments of their draws."""

import dataclasses

import pytest
import torch

from megasparse.attention.contract import AttentionContext, AttentionInputs
from megasparse.ops.random import RngContext
from tests.helpers.comparing import assert_same_with_gradients, softmax_over
from tests.helpers.models import Single, padded_and_packed

EVALUATION = RngContext.evaluation(0, 2)


def codes(rng=EVALUATION, layer=0, head_offset=0, length=40, first=0, seed=0):
    single = Single("random", causal=True)
    _, q, k, v = single.inputs(length, seed)
    context = AttentionContext(layer, rng, head_offset)
    return single.mechanism.assign(AttentionInputs(q, k, v, None, None, True), first, context)[:, :, 0]


def dense(single, q, k, v, mask):
    """Return the softmax over the keys of one's bucket whose rank inside it is less than 8 from one's own."""
    code = codes(length=q.shape[2])
    same = (code[..., :, None] == code[..., None, :]) & mask[:, None, :, None] & mask[:, None, None, :]
    rank = same.tril().sum(-1)  # one's own place among the real tokens of the bucket
    seen = same & ((rank[..., :, None] - rank[..., None, :]).abs() < 8)
    seen = seen.tril() if single.causal else seen
    return softmax_over(q @ k.transpose(-1, -2) / 4, seen, v)


@pytest.mark.parametrize("causal,length", [(True, 37), (False, 1), (False, 128)])
def test_forward_and_gradients_equal_the_definition(causal, length):
    single = Single("random", causal)
    x, *heads = single.inputs(length, dtype=torch.float64)
    mask = padded_and_packed(length)["key_mask"]
    assert_same_with_gradients(lambda *h: single(x, *h, key_mask=mask).out, lambda *h: dense(single, *h, mask), heads)


def test_a_bucket_depends_only_on_head_and_position():
    whole = codes()
    assert torch.equal(codes(seed=1), whole)  # other tokens
    assert torch.equal(codes(length=17), whole[..., :17]) and torch.equal(codes(length=9, first=31), whole[..., 31:])
    assert torch.equal(codes(dataclasses.replace(EVALUATION, samples=torch.tensor([7, 9]))), whole)
    assert torch.equal(codes(head_offset=1)[:, 0], whole[:, 1])
    assert not torch.equal(whole[:, 0], whole[:, 1]) and not torch.equal(codes(layer=1), whole)


def test_training_draws_new_buckets_each_step_and_evaluation_does_not():
    first, second = (codes(RngContext(0, step, torch.arange(2), training=True)) for step in (1, 2))
    assert not torch.equal(first, second)
    assert torch.equal(codes(RngContext(0, 1, torch.arange(2), training=True)), first)
    assert torch.equal(codes(), codes())
