import pytest
import torch
import torch.nn.functional as F

from megasparse.model.build import build_model
from megasparse.model.stack import OutputHead
from megasparse.ops.random import RngContext
from tests.helpers.cases import together
from tests.helpers.comparing import decoded_nats
from tests.helpers.models import random_tokens, randomise, small
from tests.helpers.peak_memory import PeakMemory

CUTOFFS = [40, 90, 200]


def head_and_streams(length=37, **changes):
    embedding = torch.nn.Parameter(torch.empty(256, 32))
    head = OutputHead(small(**changes), embedding)
    generator = randomise(head)
    count = 2 if head.norm_weight.numel() == 64 or changes.get("tied_embeddings") else 1
    streams = tuple(torch.randn(2, length, 32, generator=generator, requires_grad=True) for _ in range(count))
    targets = torch.randint(0, 256, (2, length), generator=generator)
    assert (head.weight is embedding) == head.tied and (head.bias is not None) == changes.get("output_bias", False)
    return head, streams, targets


def probabilities(head, streams):
    """Return softmax(W·norm(x) + b), or the adaptive softmax with W, in float64 by the formulas."""
    x = sum(s.double() for s in streams) / len(streams) if head.tied else torch.cat(streams, -1).double()
    if head.norm_bias is None:
        x = x / ((x * x).mean(-1, keepdim=True) + 1e-5).sqrt() * head.norm_weight.double() * 0.7  # its logit_scale
        weight = head.weight.double()
    else:
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()
        x = x * head.norm_weight.double() + head.norm_bias.double()
        weight = head.weight.double() / 32**0.5 if head.tied else head.weight.double()
    scores = x @ weight.T + (0.0 if head.bias is None else head.bias.double())
    if not head.cutoffs:
        return torch.softmax(scores, -1)
    scale = 32**-0.5 if head.tied else 1.0
    first, *ends = [*head.cutoffs, 256]
    slots = torch.softmax(torch.cat([scores[..., :first], scale * x @ head.clusters.double().T], -1), -1)
    parts = [slots[..., :first]]
    for number, (start, end) in enumerate(zip(head.cutoffs, ends, strict=True)):
        parts.append(slots[..., first + number, None] * torch.softmax(scores[..., start:end], -1))
    return torch.cat(parts, -1)


def defined(head, streams, targets):
    p = probabilities(head, streams)
    target = p.gather(-1, targets[..., None]).squeeze(-1)
    return -target.log(), target == p.max(-1).values


@pytest.mark.parametrize("tiles", [1, 5])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tied_embeddings": True},
        {"blocks": "ordinary", "activations": "stored"},
        {"output_bias": True},
        {"output_bias": True, "tied_embeddings": True},
        {"norm": "rms", "logit_scale": 0.7},
        {"norm": "rms", "logit_scale": 0.7, "tied_embeddings": True},
        {"adaptive_cutoffs": CUTOFFS},
        {"adaptive_cutoffs": CUTOFFS, "tied_embeddings": True},
        {"adaptive_cutoffs": CUTOFFS, "blocks": "ordinary", "activations": "stored"},
    ],
)
def test_nats_and_gradients_equal_the_formula(changes, tiles):
    head, streams, targets = head_and_streams(loss_tiles=tiles, **changes)
    # the likeliest token in half of the places, that there is something to be right about
    targets[:, ::2] = probabilities(head, streams).argmax(-1)[:, ::2]
    leaves = [*streams, *head.parameters()]
    (ours, correct, cost), (exact, right) = head.score(streams, targets, training=True), defined(head, streams, targets)
    torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-4)
    assert right[:, ::2].all() and not right.all()
    assert torch.equal(correct, right) and torch.equal(cost, ours)
    for a, b in zip(torch.autograd.grad(ours.sum(), leaves), torch.autograd.grad(exact.sum(), leaves), strict=True):
        assert (a - b).norm() / b.norm() < 1e-4


@pytest.mark.parametrize("changes", [{}, {"tied_embeddings": True}, {"adaptive_cutoffs": CUTOFFS}])
def test_logits_of_the_last_position_have_its_probabilities(changes):
    head, streams, _ = head_and_streams(**changes)
    p = torch.softmax(head.logits([x[:, -1] for x in streams]).double(), -1)
    torch.testing.assert_close(p, probabilities(head, streams)[:, -1], rtol=1e-4, atol=1e-7)


@together("tiles", [1, 5])
@together("tied", [False, True])
def test_label_smoothing_is_torchs_and_leaves_the_nats_as_they_are(tiles, tied):
    changes = {"label_smoothing": 0.1, "tied_embeddings": tied, "loss_tiles": tiles}
    head, streams, targets = head_and_streams(**changes)
    leaves = [*streams, *head.parameters()]
    nats, correct, cost = head.score(streams, targets, training=True)
    log_p, sizes = probabilities(head, streams).log().flatten(0, 1), targets.shape
    exact = F.cross_entropy(log_p, targets.flatten(), label_smoothing=0.1, reduction="none").view(sizes)
    torch.testing.assert_close(cost.double(), exact, rtol=1e-5, atol=1e-4)
    for a, b in zip(torch.autograd.grad(cost.sum(), leaves), torch.autograd.grad(exact.sum(), leaves), strict=True):
        assert (a - b).norm() / b.norm() < 1e-4
    plain, right, own = head.score(streams, targets, training=False)  # evaluation
    assert torch.equal(plain, nats) and torch.equal(right, correct) and torch.equal(own, plain)
    torch.testing.assert_close(nats.double(), defined(head, streams, targets)[0], rtol=1e-5, atol=1e-4)


def test_a_decoder_writes_by_the_probabilities_that_it_is_scored_by():
    model = build_model(small(("local",), layers=1, adaptive_cutoffs=CUTOFFS, tied_embeddings=True), 0).eval()
    tokens = random_tokens(2, 12)
    nats = model.token_scores(tokens, RngContext.evaluation(0, 2)).nats
    found = decoded_nats(model, tokens, 5, model.new_cache(2, 0))
    torch.testing.assert_close(found, nats[:, 5:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("changes", [{}, {"label_smoothing": 0.1}, {"adaptive_cutoffs": CUTOFFS}])
def test_no_tensor_of_all_logits_exists(changes):
    head, streams, targets = head_and_streams(length=512, loss_tiles=16, **changes)
    with PeakMemory() as memory:
        head.score(streams, targets, training=True)[2].sum().backward()
    assert memory.largest <= 2 * 512 * 256 * 4 / 4, "the gradient of a stream is the largest"
