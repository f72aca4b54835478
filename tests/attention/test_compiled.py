"""torch.compile: an attention layer is one graph, and computes what it computes without it."""

import pytest
import torch

from megasparse.attention.contract import AttentionContext
from megasparse.attention.heads import AttentionLayer, Padding
from tests.helpers.models import named, random_tokens, small, training_draws


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", ["full", "local relative", "lsh", "yoso", "smart_bird"])
def test_a_layer_is_one_graph(name, backend):
    layer = AttentionLayer(small(attention=named(name)), layer=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) / 6)
    context = AttentionContext(0, training_draws(2), tokens=random_tokens(2, 128))
    x, padding = torch.randn(2, 128, 32, generator=generator), Padding()

    def results(attend):
        leaf = x.clone().requires_grad_()
        layer.zero_grad()
        out, auxiliary = attend(leaf)
        objective = (out * out.detach().cos()).sum()
        (objective if auxiliary is None else objective + auxiliary).backward()
        return [out.detach(), leaf.grad, *(weight.grad for weight in layer.parameters())]

    def attend(x):
        found = layer(x, context, padding)
        return found.out, found.auxiliary_loss

    torch._dynamo.reset()
    compiled = torch.compile(attend, backend=backend, fullgraph=True)
    for ours, expected in zip(results(compiled), results(attend), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
