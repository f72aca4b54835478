"""SMYRF: the definition, in which each document's real tokens have equal clusters, and the transformation."""

import dataclasses

import pytest
import torch

from megasparse.attention.baselines.smyrf import asymmetric, equal_clusters
from megasparse.attention.contract import AttentionContext, AttentionInputs
from megasparse.ops.random import RngContext, normal
from tests.helpers.comparing import assert_same_with_gradients
from tests.helpers.models import Single, padded_and_packed

EVALUATION = RngContext.evaluation(0, 2)


def lists(q, k, rng=EVALUATION, head_offset=0):
    heads = AttentionInputs(q, k, k, None, None, False)
    return Single("smyrf", causal=False).mechanism.assign(heads, AttentionContext(0, rng, head_offset))


def test_distance_falls_as_the_score_rises():
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 3, n, 5, generator=generator, dtype=torch.float64) for n in (7, 9))
    turned_q, turned_k = asymmetric(q, 3 * k)
    constant = 2 * (q.norm(dim=-1).amax(-1) ** 2 + (3 * k).norm(dim=-1).amax(-1) ** 2)
    distance = (turned_q[..., :, None, :] - turned_k[..., None, :, :]).square().sum(-1)
    torch.testing.assert_close(distance, constant[..., None, None] - 2 * q @ (3 * k).transpose(-1, -2))
    assert asymmetric(q.bfloat16(), k.bfloat16())[0].dtype == torch.float32


def test_clusters_are_pieces_of_the_sorted_order():
    values = torch.tensor([3.0, 1.0, 2.0, 5.0, 4.0]).expand(1, 1, 2, 5)
    expected = torch.tensor([[1, 2], [0, 4], [3, -1]]).repeat(2, 1)
    assert torch.equal(equal_clusters(values, 2)[0, 0], expected)
    assert torch.equal(equal_clusters(values, 9)[0, 0], torch.tensor([[1, 2, 0, 4, 3]]).repeat(2, 1))


def dense(q, k, v, mask, documents):
    """Rounds one by one, every cluster's softmax by itself, merged by their log-sum-exps."""
    scale, outs = q.shape[-1] ** -0.5, torch.zeros_like(v)
    lines = normal(EVALUATION.key(0, "smyrf projection"), torch.tensor([[0, 1], [1 << 16, (1 << 16) + 1]]), 18).double()
    for b in range(len(q)):
        for h in range(q.shape[1]):
            score = torch.full((2, *q.shape[2:3], q.shape[2]), -torch.inf, dtype=q.dtype)
            for document in documents[b].unique():
                tokens = (mask[b] & (documents[b] == document)).nonzero().squeeze(-1)
                if len(tokens) == 0:
                    continue
                turned = [x.float().double() for x in asymmetric(q[b, h, tokens].detach(), k[b, h, tokens].detach())]
                for r in range(2):
                    queries, keys = (tokens[(x @ lines[h, r]).argsort()].split(8) for x in turned)
                    for mine, theirs in zip(queries, keys, strict=True):
                        block = scale * q[b, h, mine] @ k[b, h, theirs].T
                        score[r] = score[r].index_put((mine[:, None], theirs[None]), block)
            blind = (score == -torch.inf).all(-1, keepdim=True)
            z = score.masked_fill(blind, 0.0).logsumexp(-1, keepdim=True)
            each = torch.softmax(score.masked_fill(blind, 0.0), -1) @ v[b, h]
            out = (torch.softmax(z, 0) * each).sum(0)
            outs[b, h] = out.masked_fill(blind[0], 0.0)
    return outs


@pytest.mark.parametrize("length", [1, 8, 45])
def test_forward_and_gradients_equal_the_definition(length):
    single = Single("smyrf", causal=False)
    x, *heads = single.inputs(length, dtype=torch.float64)
    masks = padded_and_packed(length)
    assert_same_with_gradients(lambda *h: single(x, *h, **masks).out, lambda *h: dense(*h, *masks.values()), heads)


def test_rounds_and_draws():
    _, q, k, _ = Single("smyrf", causal=False).inputs(40)
    usual = lists(q, k)[0]
    assert usual.shape == (2, 2, 10, 8)
    more = lists(q, k, rng=dataclasses.replace(EVALUATION, rounds=3))[0]
    assert more.shape[2] == 15 and torch.equal(more[:, :, :10], usual)
    training = RngContext(0, 1, torch.arange(2), training=True)
    assert not torch.equal(lists(q, k, rng=training)[0], usual)
    shifted = lists(q[:, 1:], k[:, 1:], head_offset=1)[0]
    assert torch.equal(shifted[:, 0], usual[:, 1])
