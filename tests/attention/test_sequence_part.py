"""Copies and messages of shared sequences, counted with a process group that sends nothing."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from megasparse.attention.full import FullAttention
from megasparse.attention.sequence_part import SequencePart
from megasparse.model.build import build_model
from tests.helpers.models import attention, random_tokens, small, training_draws
from tests.helpers.peak_memory import PeakMemory

RANKS, LENGTH, DIM = 4, 6, 8


class Allocations(PeakMemory):
    """Also `made`, the bytes of all storages made."""

    made = 0

    def _made(self, size: int) -> None:
        super()._made(size)
        self.made += size


@pytest.fixture
def part():
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield SequencePart.of(torch.distributed.group.WORLD)
    torch.distributed.destroy_process_group()


def projected(heads: int) -> torch.Tensor:
    """Heads as a projection leaves them, (1, H, L/S, D)."""
    return torch.randn(1, LENGTH, heads, DIM).transpose(1, 2).requires_grad_()


@pytest.mark.parametrize(("heads", "copies"), [(8, 1), (2, 2)])
def test_an_exchange_of_heads_copies_once_before_and_not_after(part, heads, copies):
    """Forward: send and receive buffers; all tokens are a view of the latter. Backward: the same, and the gradient."""
    tensors = [projected(heads) for _ in range(3)]
    sent = sum(x.numel() for x in tensors) * 4 * copies
    with Allocations() as forward:
        moved = part.of_heads(heads).to_heads(*tensors)
    assert {x.shape for x in moved} == {(1, heads * copies // RANKS, LENGTH * RANKS, DIM)}
    assert forward.made == 2 * sent
    gradients = [torch.randn_like(x) for x in moved]
    with Allocations() as backward:
        torch.autograd.grad(moved, tensors, gradients)
    assert backward.made == 2 * sent + sent // copies


def test_a_gather_allocates_only_its_result(part):
    x = torch.randn(1, LENGTH, DIM)
    with Allocations() as memory:
        whole = part.gather(x, 1)
    assert whole.shape == (1, LENGTH * RANKS, DIM)
    assert memory.made == whole.numel() * 4


@pytest.mark.parametrize("activations", ["stored", "reversible"])
def test_groups_of_heads_are_exchanged_while_another_attends(part, monkeypatch, activations):
    events, exchange, attend = [], torch.distributed.all_to_all_single, FullAttention.forward

    def recorded(*args, **options):
        events.append("send")
        work = exchange(*args, **options)
        return SimpleNamespace(wait=lambda: events.append("wait") or work.wait())

    monkeypatch.setattr(torch.distributed, "all_to_all_single", recorded)
    monkeypatch.setattr(FullAttention, "forward", lambda *a: events.append("attend") or attend(*a))
    heads = attention("full").model_copy(update={"head_groups": 3})
    blocks = {"activations": activations, "blocks": "reversible" if activations == "reversible" else "ordinary"}
    model = build_model(small(heads=12, d_model=36, layers=1, attention=heads, positions={"kind": "none"}, **blocks), 0)
    objective, _ = model(random_tokens(1, LENGTH), training_draws(1), divisor=1.0, sequence=part.group)
    attended = ["wait", "attend", "send"]  # heads arrive, outputs leave
    assert events == ["send", "send", *attended, "send", *attended, "wait", *attended, "wait", "wait"]
    events.clear()
    objective.backward()
    gradients = [
        "wait",
        "send",
        "wait",
        "send",
    ]  # outputs arrive, their gradients leave and arrive, those of heads leave
    first = ["send", "send", *attended, *gradients]
    assert events == [*first, "send", *attended, "wait", *gradients, *attended, "wait", *gradients, "wait"]
