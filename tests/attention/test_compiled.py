"""torch.compile: an attention layer is one graph for all steps, and computes what it computes without it."""

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager

from megasparse.attention.contract import AttentionContext
from megasparse.attention.heads import Padding
from megasparse.attention.mechanisms import MECHANISMS
from megasparse.ops.custom import custom
from megasparse.ops.random import dropout
from tests.helpers.comparing import objective_of
from tests.helpers.kernels import DEVICE
from tests.helpers.models import layer_of, random_tokens, training_draws

EACH_DOCUMENT = ["performer", "linformer", "longformer", "bigbird", "sparse_transformer"]
"""Mechanisms whose outputs depend on positions inside a document."""
CLUSTERS = ["smyrf", "lha top_k", "routing top_k"]
"""Mechanisms with lists of clusters, as many as the documents need."""
PADDED = torch.arange(128) < torch.tensor([[128], [100]])
DOCUMENTS = torch.arange(128).div(50, rounding_mode="floor").expand(2, 128)


LAYERS = [
    *((name, padding) for name in [*MECHANISMS, "local relative", *CLUSTERS[1:]] for padding in ("none", "packed")),
    *((name, padding) for name in [*EACH_DOCUMENT, *CLUSTERS] for padding in ("behind", "before")),
]
PADDINGS = {
    "none": Padding(),
    "packed": Padding(PADDED, DOCUMENTS),
    "behind": Padding(PADDED),
    "before": Padding(PADDED.flip(1)),
}


def test_what_asks_the_host_for_documents_is_left_out_of_cuda_graphs():
    for name in ("_by_document", "_clusters_by_document"):
        for operator in (getattr(torch.ops.megasparse, name), getattr(torch.ops.megasparse, f"{name}_backward")):
            assert torch.Tag.cudagraph_unsafe in operator.default.tags


def random_inputs():
    return torch.randn(2, 128, 32, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name,padding", LAYERS)
def test_a_layer_is_one_graph(name, padding):
    """Documents and padding break none. It has the outputs and gradients that the layer has without torch.compile."""
    padding = PADDINGS[padding]
    layer, x = layer_of(name), random_inputs()
    context = AttentionContext(0, training_draws(2), tokens=random_tokens(2, 128))

    def results(attend):
        leaf = x.clone().requires_grad_()
        layer.zero_grad()
        found = attend(leaf)
        objective_of(found).backward()
        return [found.out.detach(), leaf.grad, *(weight.grad for weight in layer.parameters())]

    def attend(x):
        return layer(x, context, padding)

    torch._dynamo.reset()
    compiled = torch.compile(attend, backend=aot_eager, fullgraph=True)
    for ours, expected in zip(results(compiled), results(attend), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["full", "lsh", "smart_bird"])
def test_steps_with_other_draws_have_one_graph(name):
    """Dropout of attention probabilities and of what comes out of the layer; hashes and keys drawn for each step."""
    layer, x = layer_of(name, 0.1 if name != "smart_bird" else 0.0), random_inputs()
    graphs, padding = [], Padding()

    def attend(x, context):
        found, rng = layer(x, context, padding), context.rng
        out = dropout(found.out, 0.1, rng.key(0, "after"), rng.rows(128, x.device))
        return out.sum() if found.auxiliary_loss is None else out.sum() + found.auxiliary_loss

    def results(attend, step):
        leaf, context = x.clone().requires_grad_(), AttentionContext(0, training_draws(2, step))
        loss = attend(leaf, context)
        loss.backward()
        return loss.detach(), leaf.grad

    torch._dynamo.reset()
    compiled = torch.compile(attend, backend=lambda *given: graphs.append(given) or aot_eager(*given), fullgraph=True)
    seen = set()
    for step in range(3):
        ours, expected = results(compiled, step), results(attend, step)
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
        seen.add(ours[0].item())
    assert len(graphs) == 1 and len(seen) == 3
    assert_keys_alone_read_the_step(*graphs[0])


def assert_keys_alone_read_the_step(graph, inputs):
    """What draws read is on the device, and what reads the step is left out of captured CUDA graphs."""
    steps = [x for x, value in zip(graph.graph.find_nodes(op="placeholder"), inputs, strict=True) if value.dim() == 0]
    readers = [user for step in steps for user in step.users]
    assert len(steps) == 1 and readers
    for reader in readers:
        assert "_late_words" in str(reader.target)
        assert torch.Tag.cudagraph_unsafe in reader.target.tags


@pytest.mark.parametrize("name", ["lsh", "lha", "yoso", "smart_bird", "local relative"])
def test_kernels_are_inside_operators(name, monkeypatch):
    """What a GPU runs, in Triton's interpreter: the compiler meets no kernel."""
    monkeypatch.setenv("MEGASPARSE_OPS", "triton")
    layer, x = layer_of(name, query_key_norm=True).to(DEVICE), random_inputs()[:1, :16]
    padding, context = Padding(), AttentionContext(0, training_draws(1))
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: layer(x, context, padding).out, backend="eager", fullgraph=True)
    ours, expected = (attend(x.to(DEVICE)) for attend in (compiled, lambda x: layer(x, context, padding).out))
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def test_a_copy_of_the_code_has_operators_of_its_own():
    """As an exported folder has one. Under our names they would take ours away, and with some of ours torch crashes."""

    def operators(module):
        def doubled(x):
            return 2 * x

        doubled.__module__ = module
        before = {*dir(torch.ops.megasparse)}
        call = custom(torch.empty_like)(doubled)
        torch._dynamo.reset()
        assert torch.compile(lambda x: call(x), backend="eager", fullgraph=True)(torch.ones(2)).tolist() == [2.0, 2.0]
        return {name for name in {*dir(torch.ops.megasparse)} - before if not name.endswith("_backward")}

    assert operators("megasparse.ops.doubled") == {"doubled"}
    assert operators("exported-1.ops") == {"exported_1_ops_doubled"}
    assert operators("exported-2.ops") == {"exported_2_ops_doubled"}
