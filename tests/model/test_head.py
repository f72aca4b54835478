import pytest
import torch

from megasparse.model.head import OutputHead
from tests.helpers.models import small
from tests.helpers.peak_memory import PeakMemory


def head_and_streams(length=37, **changes):
    embedding = torch.nn.Parameter(torch.empty(256, 32))
    head = OutputHead(small(**changes), embedding)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    count = 2 if head.norm_weight.numel() == 64 or changes.get("tied_embeddings") else 1
    streams = tuple(torch.randn(2, length, 32, generator=generator, requires_grad=True) for _ in range(count))
    targets = torch.randint(0, 256, (2, length), generator=generator)
    assert (head.weight is embedding) == head.tied and (head.bias is not None) == changes.get("output_bias", False)
    return head, streams, targets


def defined(head, streams, targets):
    """−ln softmax(W·norm(x) + b) in float64, by the formulas, and where the target's is the largest."""
    x = sum(s.double() for s in streams) / len(streams) if head.tied else torch.cat(streams, -1).double()
    x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()
    x = x * head.norm_weight.double() + head.norm_bias.double()
    weight = head.weight.double() / 32**0.5 if head.tied else head.weight.double()
    p = torch.softmax(x @ weight.T + (0.0 if head.bias is None else head.bias.double()), -1)
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
    ],
)
def test_nats_and_gradients_are_those_of_the_formula(changes, tiles):
    head, streams, targets = head_and_streams(loss_tiles=tiles, **changes)
    with torch.no_grad():  # the likeliest token in half of the places, that there is something to be right about
        likeliest = torch.stack([defined(head, streams, torch.full_like(targets, t))[1] for t in range(256)])
        targets[:, ::2] = likeliest.int().argmax(0)[:, ::2]
    leaves = [*streams, *head.parameters()]
    (ours, correct), (exact, right) = head(streams, targets), defined(head, streams, targets)
    torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-4)
    assert right[:, ::2].all() and not right.all()
    assert torch.equal(correct, right)
    for a, b in zip(torch.autograd.grad(ours.sum(), leaves), torch.autograd.grad(exact.sum(), leaves), strict=True):
        assert (a - b).norm() / b.norm() < 1e-4


def test_no_tensor_of_all_logits_exists():
    head, streams, targets = head_and_streams(length=512, loss_tiles=16)
    with PeakMemory() as memory:
        head(streams, targets)[0].sum().backward()
    assert memory.largest <= 2 * 512 * 256 * 4 / 4, "the gradient of a stream is the largest"
