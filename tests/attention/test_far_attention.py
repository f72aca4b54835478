"""Attention beyond window and sinks, and the losses that teach a choice of keys, against their definitions."""

import math

import pytest
import torch

from megasparse.attention.contract import AttentionInputs
from megasparse.attention.far_attention import (
    collision_loss,
    drawn_positions,
    far_attention,
    far_pairs,
    sketch_divergence,
)

LENGTH = 12


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def heads(masked, causal=True):
    q, k, v = (draw(2, 3, LENGTH, 4, seed=i) for i in range(3))
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[1, :3] = False
    documents = torch.tensor([0] * 7 + [1] * 5).expand(2, -1)
    return AttentionInputs(q, k, v, mask if masked else None, documents if masked else None, causal)


def far_by_definition(inputs, row, query, key, sinks, window):
    """One pair, by counting real tokens of its document."""
    real = [True] * LENGTH if inputs.key_mask is None else inputs.key_mask[row].tolist()
    document = [0] * LENGTH if inputs.segments is None else inputs.segments[row].tolist()
    own = [at for at in range(LENGTH) if real[at] and document[at] == document[query]]
    if query not in own or key not in own or (inputs.causal and key > query):
        return False
    return own.index(key) >= sinks and (window is None or abs(own.index(query) - own.index(key)) >= window)


@pytest.mark.parametrize(
    "masked,causal,window",
    [
        *[(False, False, None), (False, True, 3), (True, False, 3), (True, True, None)],  # every pair of values
        *[pytest.param(*rest, marks=pytest.mark.slow) for rest in [(False, True, None), (True, True, 3)]],
    ],
)
def test_far_pairs_and_their_shares(masked, causal, window):
    inputs, queries = heads(masked, causal), torch.tensor([11, 0, 6, 8])
    near = None if window is None else lambda q, k: (q - k).abs() < window
    far = far_pairs(inputs, queries, 2, near).expand(2, -1, -1)
    shares = far_attention(inputs._replace(q=inputs.q.clone().requires_grad_()), queries, far, 0.5)
    assert not shares.requires_grad, "attention is a target of the choice, which does not train it"
    for row in range(2):
        for at, query in enumerate(queries.tolist()):
            expected = [far_by_definition(inputs, row, query, key, 2, window) for key in range(LENGTH)]
            assert far[row, at].tolist() == expected
            seen = [key for key in range(LENGTH) if far_by_definition(inputs, row, query, key, 0, None)]
            for head in range(3):
                weight = {
                    key: math.exp(0.5 * float(inputs.q[row, head, query] @ inputs.k[row, head, key])) for key in seen
                }
                share = [weight[key] / sum(weight.values()) if far[row, at, key] else 0.0 for key in range(LENGTH)]
                assert shares[row, head, at].tolist() == pytest.approx(share)


def test_the_divergence_of_a_sketch_is_0_for_the_attention_and_equals_the_definition():
    inputs, queries = heads(False), torch.tensor([5, 11])
    far = far_pairs(inputs, queries, 1, None)
    share = far_attention(inputs, queries, far, 0.5)[:, 0]
    q, k = inputs.q[:, 0, queries], inputs.k[:, 0]
    assert abs(sketch_divergence(q, k, share, far, None)) < 1e-12  # √d is 2
    other = draw(2, LENGTH, 4, seed=9).requires_grad_()
    expected = torch.zeros((), dtype=torch.float64)
    for row in range(2):
        for at in range(2):
            seen = far[0, at].nonzero().flatten()
            log_p = torch.log_softmax(other[row, seen] @ q[row, at] / 2, dim=0)
            mass = share[row, at].sum()
            expected = expected + (share[row, at, seen] * ((share[row, at, seen] / mass).log() - log_p)).sum() / 4
    found = sketch_divergence(q, other, share, far, None)
    assert torch.allclose(found, expected, atol=1e-12)
    for mine, theirs in zip(torch.autograd.grad(found, other), torch.autograd.grad(expected, other), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-12)


def test_collisions_by_their_definition_and_even_buckets():
    queries, keys, best = draw(2, 3, 5, 4), draw(2, 3, 5, 4, seed=1), draw(2, 3, 5, 6, 4, seed=2)
    share = draw(2, 3, 5, 6, seed=3).abs()
    p, other, drawn = (torch.softmax(x, -1) for x in (queries, keys, best))
    missed, total = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for b, h, i in torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(5)):
        mass = share[b, h, i].sum()
        hit = sum(share[b, h, i, j] * (p[b, h, i] * drawn[b, h, i, j]).sum() for j in range(6)) / mass
        missed[h] -= mass * torch.log(hit + 1e-4)
        total[h] += mass
    uneven = sum((m * (4 * m).log()).sum() for x in (p, other) for m in x.mean((0, 2))) / 3
    assert torch.allclose(
        collision_loss(queries, keys, share, best, None), (missed / total).mean() + uneven, atol=1e-10
    )
    level = torch.zeros(2, 3, 5, 4, dtype=torch.float64)
    even = collision_loss(level, level, share, torch.zeros_like(best), None)
    assert torch.allclose(even, -torch.log(torch.tensor(0.2501).double()), atol=1e-10)


def test_positions_are_drawn_by_key_once_each():
    first, again, other = (drawn_positions(key, 50, 20, torch.device("cpu")).tolist() for key in (1, 1, 2))
    assert first == again != other and len({*first}) == 20
    assert sorted(drawn_positions(1, 50, 80, torch.device("cpu")).tolist()) == list(range(50))
