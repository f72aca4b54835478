"""The keys that are counted are those that mechanisms use, and no others."""

import numpy as np
import pytest
import torch

from megasparse.attention.observation import calls
from megasparse.hub.replace import load_replaced, replace_attention, save_replaced
from tests.helpers.models import Single
from tests.hub.test_replace_decoders import HEADS, LHA, SEPARATE, build, inputs
from tools.bench.decoders import attending
from tools.bench.visible_keys import best_pairs, scored_pairs, seen_pairs, weights
from tools.key_choice import visible_keys

LENGTH = 48
NAMES = [
    "full", "local", "local sinks", "lsh separate, local", "lsh local, sinks", "lha", "lha separate",
    "lha local, sinks", "smart_bird", "smart_bird heads", "smart_bird local, sinks", "ranked", "ranked members, sinks",
    "routing local", "routing sinks",
]  # fmt: skip


RANKED = {"kind": "ranked", "keys": 5, "sketch_dim": 4, "buckets": 6, "probes": 3, "chunk": 3, "sinks": 2}
READ = [HEADS, {**SEPARATE, "chunk": 3}, LHA, {**LHA, "hash": "linear", "local": False}, RANKED]
READ += [
    {**RANKED, "members": 2, "sketch_heads": 2, "local": False, "sinks": 0},
    {**RANKED, "sketch_dim": 8, "sketch_signs": True},
]


@pytest.mark.parametrize("attention", READ)
def test_a_reader_in_numpy_chooses_the_same_keys_from_a_folder(attention, tmp_path):
    replaced = replace_attention(build(dtype=torch.float32), attention, seed=3)
    for bias in (bias for name, bias in replaced.named_parameters() if name.endswith("_buckets.bias")):
        torch.nn.init.normal_(bias)
    save_replaced(replaced, tmp_path / "model")
    model, tokens = load_replaced(tmp_path / "model").eval(), inputs(batch=1, length=40)["input_ids"]
    for page in (1, 2) if attention is HEADS else (1,):
        with calls(model) as found, torch.no_grad(), attending(model, None, page):
            whole = model(tokens, use_cache=False).logits
            for layer, call in enumerate(found):
                q, k = (x[0].numpy() for x in call.inputs[:2])
                ours = seen_pairs(call, torch.arange(40)).expand(4, -1, -1)
                assert np.array_equal(visible_keys(tmp_path / "model", layer, q, k, page), ours.numpy())
            cache = model(tokens[:, :30], use_cache=True).past_key_values
            assert torch.allclose(model(tokens[:, 30:], past_key_values=cache).logits, whole[:, 30:], atol=1e-4)


def test_the_reader_names_layers_that_it_cannot_read(tmp_path):
    split, draws = {"pattern": [{"full": 2, "lha": 2}, "full"]}, {**HEADS, "evaluation": "draws"}
    for number, (attention, layer, page) in enumerate(((split, 0, 1), (split, 1, 1), (RANKED, 0, 4), (draws, 0, 1))):
        save_replaced(replace_attention(build(dtype=torch.float32), attention), folder := tmp_path / str(number))
        with pytest.raises(ValueError, match=rf"layer {layer} has .* not one of \('smart_bird',{' ' * (page == 1)}"):
            visible_keys(folder, layer, *np.ones((2, 4, 8, 8)), page)


@pytest.mark.parametrize("name", NAMES)
def test_visible_keys_are_exactly_the_keys_that_reach_a_query(name):
    single = Single(name, True)
    x, q, k, _ = single.inputs(LENGTH)
    x, q, k = x[:1], q[:1], k[:1]
    ones = torch.eye(LENGTH).expand(1, q.shape[1], -1, -1)
    reached = torch.cat([single(x, q, k, part).out for part in ones.split(q.shape[3], dim=-1)], dim=-1) > 0
    with calls(single.mechanism) as found:
        single(x, q, k, ones[..., : q.shape[3]])
    for queries in (torch.arange(LENGTH), torch.tensor([3, 17, 47])):
        assert torch.equal(seen_pairs(found[0], queries).expand(q.shape[1], -1, -1), reached[0, :, queries])


@pytest.mark.parametrize("members", [None, 2])
def test_scored_pairs_are_the_members_of_the_searched_buckets_and_the_buckets(members):
    settings, queries = {"keys": LENGTH, "local": False, "members": members}, torch.arange(LENGTH // 2, LENGTH)
    single = Single("ranked", True, settings=settings)
    with calls(single.mechanism) as found:
        single(*(x[:1] for x in single.inputs(LENGTH)))
    candidates = float(seen_pairs(found[0], queries).sum()) / 2  # of two sketches: all candidates are chosen
    pairs = candidates + 8 * len(queries)  # no query is without a candidate
    assert scored_pairs(found[0], queries) == pytest.approx(pairs / float((queries + 1).sum()))


def test_an_oracle_sees_the_largest_weights():
    single = Single("full", True)
    with calls(single.mechanism) as found:
        single(*(x[:1] for x in single.inputs(LENGTH)))
    rows = torch.tensor([4, 20, 39])
    weight = weights(found[0], rows)
    seen = best_pairs(weight, rows, 3, window=5, sinks=2)
    for at, row in enumerate(rows.tolist()):
        for head in range(len(weight)):
            beside = {*range(max(0, row - 4), row + 1), *range(min(2, row + 1))}
            others = sorted(set(range(row + 1)) - beside, key=lambda key: -float(weight[head, at, key]))
            assert {*seen[head, at].nonzero().flatten().tolist()} == beside | {*others[:3]}
    assert torch.allclose(weight.sum(-1), torch.ones(()))
