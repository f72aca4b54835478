"""Linear, Synthesizer, Sinkhorn and clustered attention: their definitions, token by token and document by document."""

import pytest
import torch

from megasparse.ops.random import RngContext, normal
from tests.helpers.comparing import assert_same_with_gradients
from tests.helpers.models import Single

LENGTH = 21
RNG = RngContext.evaluation(0, 2)


def masks(case):
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    segments = torch.zeros(2, LENGTH, dtype=torch.int64)
    if case != "plain":
        mask[0, 18:] = False
    if case == "packed":
        segments[:, 10:] = 1
    given = {"plain": {}, "padded": {"key_mask": mask}, "packed": {"key_mask": mask, "segments": segments}}[case]
    return mask, segments, given


def linear(mechanism, q, k, v, head):
    if mechanism.config.features == "elu":
        q, k = (torch.where(x > 0, x + 1, x.exp()) for x in (q, k))
    else:
        rows = torch.tensor([head * (1 << 16) + p for p in range(mechanism.config.projections)])
        lines = normal(RNG.key(0, "linear features"), rows, q.shape[1]).double()
        angles = [x / x.norm(dim=-1, keepdim=True) @ lines.T for x in (q, k)]
        q, k = (torch.cat([x.sin(), x.cos()], 1) / mechanism.config.projections**0.5 for x in angles)
    weights = q @ k.T
    return weights @ v / weights.sum(1, keepdim=True).clamp_min(1e-3 * len(k))


def synthesizer(mechanism, q, k, v, head):
    return torch.softmax(q.clamp_min(0) @ mechanism.positions[head][:, : len(q)], 1) @ v


def sinkhorn(mechanism, q, k, v, head):
    size = mechanism.config.chunk
    blocks = [range(first, min(first + size, len(q))) for first in range(0, len(q), size)]
    scores = torch.stack([k[list(block)].sum(0) @ mechanism.places[head][:, : len(blocks)] for block in blocks])
    order = scores.exp()
    for _ in range(mechanism.config.iterations):
        order = order / order.sum(1, keepdim=True)
        order = order / order.sum(0, keepdim=True)
    rows = []
    for i in range(len(q)):
        place = i // size
        keys, values = [k[j] for j in blocks[place]], [v[j] for j in blocks[place]]
        for slot in range(min(size, len(q))):
            filled = [(order[place, b], block[slot]) for b, block in enumerate(blocks) if slot < len(block)]
            keys.append(sum(share * k[j] for share, j in filled))
            values.append(sum(share * v[j] for share, j in filled))
        rows.append(torch.softmax(torch.stack(keys) @ q[i] / 4, 0) @ torch.stack(values))
    return torch.stack(rows)


def clustered(mechanism, q, k, v, head):
    config = mechanism.config
    rows = torch.tensor([head * (1 << 16) + bit for bit in range(config.bits)])
    signs = (q @ normal(RNG.key(0, "clustered signs"), rows, q.shape[1]).double().T).sign()
    count = min(config.clusters, len(q))
    centres = torch.stack([signs[c * len(q) // count] for c in range(count)])

    def nearest():
        return [max(range(count), key=lambda c: (signs[i] @ centres[c]).item()) for i in range(len(q))]

    for _ in range(config.iterations):
        own = nearest()
        sums = [sum((signs[i] for i in range(len(q)) if own[i] == c), torch.zeros(config.bits)) for c in range(count)]
        centres = torch.stack(sums).double().sign()
    own = nearest()
    rows = []
    for i in range(len(q)):
        centre = torch.stack([q[j] for j in range(len(q)) if own[j] == own[i]]).mean(0)
        weights = torch.softmax(k @ centre / 4, 0)
        if config.keys:
            best = weights.topk(min(config.keys, len(k))).indices
            weights = weights.scatter(0, best, weights[best].sum() * torch.softmax(k[best] @ q[i] / 4, 0))
        rows.append(weights @ v)
    return torch.stack(rows)


@pytest.mark.parametrize("case", ["plain", "padded", "packed"])
@pytest.mark.parametrize(
    ("kind", "settings", "definition"),
    [
        ("linear", {}, linear),
        ("linear", {"features": "fourier"}, linear),
        ("synthesizer", {}, synthesizer),
        ("sinkhorn", {}, sinkhorn),
        ("clustered", {}, clustered),
        ("clustered", {"keys": 0}, clustered),
    ],
    ids=["linear", "random features", "synthesizer", "sinkhorn", "i-FCA", "FCA"],
)
def test_outputs_and_gradients_equal_the_definition(kind, settings, definition, case):
    single = Single(kind, False, settings=settings)
    single.mechanism.double()
    x, *heads = single.inputs(LENGTH, dtype=torch.float64)
    mask, segments, given = masks(case)

    def by_hand(q, k, v):
        out = torch.zeros_like(q)
        for b in range(2):
            for number in segments[b].unique():
                own = (mask[b] & (segments[b] == number)).nonzero()[:, 0]
                for h in range(q.shape[1]):
                    part = definition(single.mechanism, q[b, h, own], k[b, h, own], v[b, h, own], h)
                    out = out.index_put((torch.tensor(b), torch.tensor(h), own), part)
        return out

    weights = list(single.mechanism.parameters())
    ours = lambda *h: single(x, *h, **given).out  # noqa: E731
    assert_same_with_gradients(ours, by_hand, heads, weights, unread=[1] if kind == "synthesizer" else [])
