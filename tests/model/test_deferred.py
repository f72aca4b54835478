"""Models whose matrices come later, a piece at a time: the numbers of those that are built whole."""

import pytest
import torch

from megasparse.attention import initial_weights
from megasparse.config.schema import ModelConfig
from megasparse.model.build import build_model, deferred_model, initial_weight
from megasparse.training.checkpoints.checkpoint import persistent_buffers
from megasparse.training.engines.contract import Weights
from tests.helpers.models import EVERY, PARTS, named, small, small_pair

CPU = torch.device("cpu")


def assert_the_same(config: ModelConfig) -> None:
    whole, filled = build_model(config, 7), deferred_model(config, 7)
    matrices = [name for name, weight in whole.named_parameters() if weight.dim() >= 2]
    on_meta = {name for name, weight in filled.named_parameters() if weight.is_meta}
    large = {name for name in matrices if dict(whole.named_parameters())[name].numel() >= 512}
    assert large <= on_meta <= set(matrices)
    weights = Weights(filled, lambda name, shape, *piece: initial_weight(config, 7, name, shape, *piece))
    weights.fill(CPU)
    tokens = torch.randint(250, (2, config.max_length + (config.source.length if config.source else 0)))
    expected = {**dict(whole.named_parameters()), **persistent_buffers(whole)}
    found = {**dict(filled.named_parameters()), **persistent_buffers(filled)}
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    assert all(found[name].requires_grad == expected[name].requires_grad for name in expected)
    assert torch.equal(filled(tokens)[0], whole(tokens)[0])


@EVERY
def test_every_mechanism(name, causal):
    assert_the_same(small(attention=named(name), kind="decoder" if causal else "encoder", layers=2, vocabulary=260))


@pytest.mark.parametrize(
    "config",
    [
        small(("full", "routing"), **PARTS),
        small(positions={"kind": "learned"}, output_bias=True),
        small_pair(tied_embeddings=True),
    ],
    ids=["tied", "learned positions", "encoder-decoder"],
)
def test_tied_weights_stay_one_and_pairs_have_both_stacks(config):
    assert_the_same(config)


@pytest.mark.parametrize("total", [2, 15, 16, 17, 63, 64, 65, 79, 80, 81, 128, 1000, 1003])
def test_pieces_equal_one_draw(total, monkeypatch):
    monkeypatch.setattr(initial_weights, "BLOCK", 64)
    whole = torch.randn(total, generator=torch.Generator().manual_seed(3))
    for ranks in (1, 2, 3, 8):
        size = -(-total // ranks)
        starts = [min(rank * size, total) for rank in range(ranks)]
        pieces = [
            initial_weights._normal(torch.Generator().manual_seed(3), total, s, min(size, total - s)) for s in starts
        ]
        assert torch.equal(torch.cat(pieces), whole)
