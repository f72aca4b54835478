import pytest
import torch

from megasparse.ops.bucketed_attention import Window
from megasparse.ops.local_attention import LocalAttentionSpec, RelativeVectors
from megasparse.ops.positions import sinusoids
from tests.helpers.comparing import assert_same_with_gradients, softmax_over
from tests.helpers.definitions import relative_local_attention as defined_relative
from tests.helpers.definitions import visible
from tests.helpers.models import Single

CHUNK, LENGTH = 8, 64


@pytest.mark.parametrize(
    "causal,masked,sinks", [(False, False, 0), (False, True, 3), (True, False, 3), (True, True, 0)]
)
def test_sinks_are_in_the_softmax_of_the_window_once(causal, masked, sinks):
    single, length = Single("local", causal, settings={"sinks": sinks}), 50
    x, *heads = single.inputs(length, dtype=torch.float64)
    masks, number = {}, torch.arange(length).expand(2, -1)  # of each token in its document
    if masked:
        real = torch.rand(2, length, generator=torch.Generator().manual_seed(2)) > 0.3
        document = torch.tensor([0] * 2 + [1] * 18 + [2] * 30).expand(2, -1)
        masks = {"key_mask": real, "segments": document}
        same = real[:, None] & real[:, :, None] & (document[:, None] == document[:, :, None])
        number = torch.where(real, same.tril(-1).sum(-1), length)
    codes = torch.zeros(2, 1, 1, length, dtype=torch.int64)
    near = visible(codes, Window("chunk", CHUNK, ahead=not causal), causal, **masks)[:, :, 0]
    own = visible(codes, Window("chunk", length, ahead=not causal), causal, **masks)[:, :, 0]  # all of the document
    seen = near | own & (number < sinks)[:, None, None]

    assert_same_with_gradients(
        lambda *heads: single(x, *heads, **masks).out,
        lambda q, k, v: softmax_over(0.25 * q @ k.transpose(-1, -2), seen & near.any(-1, keepdim=True), v),
        heads,
    )


@pytest.mark.parametrize("causal", [True, False])
def test_relative_positions_equal_transformer_xl(causal):
    single = Single("local relative", causal)
    x, *heads = single.inputs(50, dtype=torch.float64)
    positions = single.mechanism.double().relative
    steps = range(2 * CHUNK - 1, -CHUNK if causal else -2 * CHUNK, -1)
    embedded = torch.cat([sinusoids(step, 1, 32) for step in steps]).double()

    def dense(q, k, v):
        r = torch.einsum("es,hsd->hed", embedded, positions.projection)
        u, w = positions.content_bias, positions.distance_bias
        return defined_relative(q, k, v, RelativeVectors(r, u, w), LocalAttentionSpec(CHUNK, causal, 0.25))

    assert_same_with_gradients(lambda *heads: single(x, *heads).out, dense, heads, list(positions.parameters()))
