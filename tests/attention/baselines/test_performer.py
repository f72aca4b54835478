"""Performer: the definition, per document; new features at every step."""

import torch

from megasparse.attention.contract import AttentionContext
from megasparse.ops.random import RngContext
from tests.helpers.comparing import assert_same_with_gradients
from tests.helpers.definitions import linear_attention as defined
from tests.helpers.models import Single


def masks():
    segments = torch.tensor([[0] * 7 + [1] * 12 + [2] * 5, [5] * 24])
    mask = torch.ones(2, 24, dtype=torch.bool)
    mask[0, 21:] = mask[1, :3] = False
    return {"key_mask": mask, "segments": segments}


def test_it_is_the_definition_with_padding_and_documents():
    for causal in (True, False):
        single = Single("performer", causal)
        x, *heads = single.inputs(24, dtype=torch.float64)
        projection = single.mechanism.projection(heads[0], AttentionContext(0, RngContext.evaluation(0, 2)))
        for given in ({}, {"key_mask": masks()["key_mask"]}, masks()):
            real = given.get("key_mask", torch.ones(2, 24, dtype=torch.bool))[:, None, :, None]

            def dense(q, k, v, given=given, real=real, causal=causal, projection=projection):
                return defined(q, k, v, projection, causal=causal, scale=0.25, **given).masked_fill(~real, 0.0)

            def ours(*qkv, given=given, single=single, x=x):
                return single(x, *qkv, **given).out

            assert_same_with_gradients(ours, dense, heads)


def test_features_are_new_at_every_step():
    single = Single("performer", True)
    first, same, other = (single(*single.inputs(20), training=True, step=step).out for step in (0, 0, 1))
    assert torch.equal(same, first) and not torch.allclose(other, first, atol=1e-3)
