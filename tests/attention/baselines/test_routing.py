"""Routing attention: the definitions of both windows, and the centroids' moving average."""

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megasparse.attention.contract import RecomputeCache
from megasparse.model.build import build_model
from megasparse.ops.random import RngContext
from megasparse.training.checkpoints.checkpoint import persistent_buffers
from megasparse.training.engines import build_engine
from megasparse.training.ranks import Ranks
from tests.helpers.comparing import assert_same_with_gradients, softmax_over
from tests.helpers.models import Single, padded_and_packed, small
from tests.helpers.tiny import DummyBatches, tiny_config


def similarities(single, q, k):
    """Similarities μ·x of every token and centroid, (B, H, L, N), of queries and keys; a decoder has one kind."""
    centroids = single.mechanism.centroids.double()[None]
    return [F.normalize(x.double(), dim=-1) @ centroids.transpose(-1, -2) for x in (q, q if single.causal else k)]


def band(single, q, k, mask, documents):
    """Pairs of tokens in one bucket that are near each other among the real tokens of the bucket."""
    queries, keys = (s.argmax(-1) for s in similarities(single, q, k))
    real = mask[:, None, :, None] & mask[:, None, None, :] & (documents[:, None, :, None] == documents[:, None, None])
    same = (queries[..., :, None] == keys[..., None, :]) & real
    before = same.tril().sum(-1, keepdim=True)  # c: keys of the query's bucket at or before it
    rank = same.cumsum(-1) - 1  # of the keys in the query's bucket
    seen = same & (rank >= before - 8) & (rank < before + 8)
    seen = seen.tril(-1) if single.causal else seen  # shared QK: itself only as last resort
    alone = ~seen.any(-1, keepdim=True) & mask[:, None, :, None]
    return seen | (alone & torch.eye(q.shape[2], dtype=torch.bool))


def top_k(single, q, k, mask, documents):
    """Pairs that are both among the 8 nearest tokens of some centroid, chosen inside their document."""
    seen = torch.zeros(*q.shape[:3], q.shape[2], dtype=torch.bool)
    for b in range(len(q)):
        for document in documents[b].unique():
            inside = mask[b] & (documents[b] == document)
            size = min(8, int(inside.sum()))
            members = []
            for similarity in similarities(single, q, k):
                chosen = similarity[b].masked_fill(~inside[None, :, None], -torch.inf).topk(size, dim=1).indices
                members.append(torch.zeros_like(similarity[b]).scatter_(1, chosen, 1.0))
            seen[b] |= members[0] @ members[1].transpose(-1, -2) > 0
    return seen.tril() if single.causal else seen


@pytest.mark.parametrize("name,pattern", [("routing", band), ("routing top_k", top_k)])
@pytest.mark.parametrize("causal,length", [(True, 70), (False, 1), (False, 70)])
def test_forward_and_gradients_equal_the_definition(name, pattern, causal, length):
    single = Single(name, causal)
    x, *heads = single.inputs(length, dtype=torch.float64)
    masks = padded_and_packed(length)
    mask = masks["key_mask"]
    seen = pattern(single, *heads[:2], *masks.values())

    def dense(q, k, v):
        score = q @ F.normalize(q, dim=-1).transpose(-1, -2) if causal else q @ k.transpose(-1, -2) / 4
        return softmax_over(score, seen, v)

    unread = [1] if causal else []  # shared QK has no keys
    assert_same_with_gradients(lambda *h: single(x, *h, **masks).out, dense, heads, unread=unread)
    if pattern is top_k:
        blind = ~seen.any(-1) & mask[:, None]
        statistic = single(x, *heads, **masks).statistics["queries_in_no_cluster"]
        assert statistic.item() == pytest.approx(blind.sum().item() / (2 * mask.sum().item()))


def passed(single, *batches, step=0, **masks):
    """The centroids' mechanism after forward passes in training, one a micro-batch, and the step's end."""
    for batch in batches:
        single(*batch, training=True, step=step, **masks)
    single.mechanism.after_step(True, lambda sums: sums)
    return single.mechanism.centroids


@pytest.mark.parametrize("name", ["routing", "routing top_k"])
@pytest.mark.parametrize("causal", [True, False])
def test_the_moving_average_equals_its_definition_over_all_micro_batches(name, causal):
    single = Single(name, causal)
    single.mechanism.config = single.mechanism.config.model_copy(update={"decay": 0.7})
    old = single.mechanism.centroids.clone().double()
    batches = [single.inputs(50, seed) for seed in (1, 2)]
    expected = old.clone()
    q, k = (torch.cat([batch[i] for batch in batches]) for i in (1, 2))
    codes = [s.argmax(-1) for s in similarities(single, q, k)]
    for head in range(2):
        for bucket in range(16):
            chosen = zip((q, q if causal else k), codes, strict=True)
            members = torch.cat([F.normalize(x.double(), dim=-1)[:, head][c[:, head] == bucket] for x, c in chosen])
            if len(members):
                moved = 0.7 * old[head, bucket] + 0.3 * members.mean(0)
                expected[head, bucket] = moved / moved.norm()
    whole = Single(name, causal)
    whole.mechanism.config = single.mechanism.config
    ours = passed(single, *batches)
    torch.testing.assert_close(ours.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours.norm(dim=-1), torch.ones(2, 16))
    joined = [torch.cat(pair) for pair in zip(*batches, strict=True)]
    torch.testing.assert_close(passed(whole, joined), ours, rtol=0, atol=2e-7)


def test_padding_evaluation_and_skipped_steps_do_not_move_centroids():
    single, other = Single("routing", True), Single("routing", True)
    before = single.mechanism.centroids.clone()
    inputs = single.inputs(40)
    single(*inputs)
    single.mechanism.after_step(True, lambda sums: sums)
    assert torch.equal(single.mechanism.centroids, before)
    single(*inputs, training=True)
    single.mechanism.after_step(False, lambda sums: sums)
    assert torch.equal(single.mechanism.centroids, before)
    single.mechanism.after_step(True, lambda sums: sums)  # and the skipped step's sums are gone
    assert torch.equal(single.mechanism.centroids, before)

    mask = torch.ones(2, 40, dtype=torch.bool)
    mask[:, 30:] = False
    x, *heads = inputs
    shorter = [x[:, :30], *(h[:, :, :30] for h in heads)]
    torch.testing.assert_close(passed(single, inputs, key_mask=mask), passed(other, shorter))
    assert not torch.equal(single.mechanism.centroids, before)


def test_a_replay_does_not_route_or_count_again():
    single = Single("routing", True)
    recompute, inputs = RecomputeCache(), single.inputs(40)
    first = single(*inputs, training=True, recompute=recompute).out
    sums = single.mechanism._sums.clone()
    recompute.replay()
    single.mechanism.initialise(5, "elsewhere")
    assert torch.equal(single(*inputs, training=True, recompute=recompute).out, first)
    assert torch.equal(single.mechanism._sums, sums)


def test_the_first_centroids_depend_on_seed_and_layer():
    first, again, other = (persistent_buffers(build_model(small(("routing",)), seed)) for seed in (0, 0, 1))
    names = list(first)
    assert len(names) == 3 and all(torch.equal(first[n], again[n]) for n in names)
    assert not torch.equal(first[names[0]], first[names[1]]) and not torch.equal(first[names[0]], other[names[0]])
    torch.testing.assert_close(first[names[0]].norm(dim=-1), torch.ones(2, 16))


MODEL: dict[str, Any] = {
    "max_length": 24, "layers": 2, "d_model": 16, "d_ff": 16, "heads": 2, "positions": {"kind": "learned"},
    "attention": {"pattern": ["routing"], "routing": {"chunk": 4, "decay": 0.5}},
}  # fmt: skip


def trained(config, steps):
    """An engine after so many steps."""
    engine = build_engine(build_model(config.model, 0), config, partial(RngContext, 0, training=True), Ranks())
    for step, data in zip(range(1, steps + 1), DummyBatches(config, Ranks()), strict=False):
        engine.train_step(data.micro_batches, step, 0.01)
    return engine


def test_a_step_that_is_not_finite_leaves_the_centroids(tmp_path):
    config = tiny_config(tmp_path, model=MODEL)
    engine = trained(config, 0)
    before = {name: buffer.clone() for name, buffer in persistent_buffers(engine.module).items()}
    weight = next(engine.module.parameters())
    kept = weight.detach().clone()
    data = next(iter(DummyBatches(config, Ranks(), 0)))
    with torch.no_grad():
        weight.fill_(math.nan)
    assert not engine.train_step(data.micro_batches, 1, 0.01).applied
    assert all(torch.equal(buffer, before[name]) for name, buffer in persistent_buffers(engine.module).items())
    with torch.no_grad():
        weight.copy_(kept)
    engine.train_step(data.micro_batches, 1, 0.01)
    expected = persistent_buffers(trained(config, 1).module)
    assert all(torch.equal(buffer, expected[name]) for name, buffer in persistent_buffers(engine.module).items())
