"""torch.compile of a whole model: one graph, or where layers are reversible, no break inside what a layer computes."""

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters

from megasparse.model.build import build_model
from tests.helpers.comparing import gradients
from tests.helpers.models import attention, padded_pairs, random_tokens, small, small_pair


@pytest.mark.parametrize(
    ("build", "tokens", "activations"),
    [
        (small, lambda step: random_tokens(2, 128, seed=step), "stored"),
        (small, lambda step: random_tokens(2, 128, seed=step), "reversible"),
        (small_pair, lambda step: padded_pairs(2, 88, seed=step), "stored"),
    ],
    ids=["stored", "reversible", "encoder-decoder, stored"],
)
def test_a_model_is_compiled_with_all_its_attention(build, tokens, activations):
    """With dropout and tiles, of two steps, whose draws differ."""
    settings = {"dropout": 0.1, "activations": activations, "feed_forward_tiles": 2, "loss_tiles": 2}
    config = build(layers=2, attention=attention("lsh", "lha"), **settings)
    model, graphs = build_model(config, seed=0), []
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(
        model, backend=lambda *given: graphs.append(1) or aot_eager(*given), fullgraph=activations == "stored"
    )
    for step in range(2):
        ours, expected = (gradients(model, tokens(step), step, call) for call in (compiled, model))
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
    if activations == "stored":
        assert len(graphs) == 1
    assert all("_Reversible" in reason for reason in counters["graph_break"])
