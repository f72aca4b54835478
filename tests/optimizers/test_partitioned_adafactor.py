"""Adafactor on pieces of weights against torch's on whole weights, the ranks being threads."""

import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from torch import Tensor

from megasparse.config.schema import OptimizerConfig
from megasparse.optimizers import build_optimizer
from megasparse.optimizers.partitioned_adafactor import PartitionedAdafactor, Piece

SHAPES = {"matrix": (7, 5), "stack": (3, 4, 6), "row": (1, 9), "column": (8, 1), "four": (2, 2, 3, 2)}
VECTORS = {"bias": (11,), "norm": (4,)}
STEPS, RANKS = 5, 3


class Total:
    """Sums of tensors over threads."""

    def __init__(self) -> None:
        self.barrier, self.given = Barrier(RANKS), [torch.zeros(0)] * RANKS

    def __call__(self, rank: int, values: Tensor) -> Tensor:
        self.given[rank] = values.clone()
        self.barrier.wait()
        total = torch.stack(list(self.given)).sum(0)
        self.barrier.wait()
        return total


def drawn(shapes: dict[str, tuple[int, ...]], seed: int, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(shape, generator=generator) for shape in shapes.values()]


def cut(shapes: dict[str, tuple[int, ...]], ends: list[int], rank: int) -> tuple[int, int, list[Piece]]:
    """A rank's slice of the weights laid one behind the other, as ZeRO 1 and 2 have it, with its pieces."""
    begin, end, before, pieces = [0, *ends][rank], ends[rank], 0, []
    for name, shape in shapes.items():
        size = torch.Size(shape).numel()
        first, last = max(begin, before), min(end, before + size)
        inside = first < last
        place = (first - before, last - first, first - begin) if inside else (0, 0, 0)
        pieces.append(Piece(name, shape, *place))
        before += size
    return begin, end, pieces


def by_torch(shapes: dict[str, tuple[int, ...]], decay: float) -> tuple[Tensor, torch.optim.Optimizer, list[Tensor]]:
    weights = [weight.requires_grad_() for weight in drawn(shapes, 0)]
    optimizer = torch.optim.Adafactor(weights, lr=0.0, weight_decay=decay)
    for step, rate in rates():
        optimizer.param_groups[0]["lr"] = rate
        for weight, gradient in zip(weights, drawn(shapes, step, 3.0 / step), strict=True):
            weight.grad = gradient
        optimizer.step()
    return torch.cat([weight.detach().flatten() for weight in weights]), optimizer, weights


def rates() -> Iterator[tuple[int, float]]:
    """A step's number and learning rate, below and above 1/√step."""
    return ((step, 0.1 * step) for step in range(1, STEPS + 1))


def by_pieces(shapes: dict[str, tuple[int, ...]], ends: list[int], decay: float) -> list[PartitionedAdafactor]:
    total = Total()

    def train(rank: int) -> PartitionedAdafactor:
        begin, end, pieces = cut(shapes, ends, rank)
        vector = torch.cat([w.flatten() for w in drawn(shapes, 0)])[begin:end].clone().requires_grad_()
        optimizer = PartitionedAdafactor([{"params": [vector], "weight_decay": decay}])
        optimizer.step()  # not attached yet: nothing to do
        optimizer.attach({vector: pieces}, lambda values: total(rank, values))
        for step, rate in rates():
            optimizer.param_groups[0]["lr"] = rate
            vector.grad = torch.cat([g.flatten() for g in drawn(shapes, step, 3.0 / step)])[begin:end].clone()
            optimizer.step()
        return optimizer

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(train, range(RANKS)))


@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("ends", [[40, 83, 148], [3, 4, 148], [35, 107, 148], [148, 148, 148]])
def test_matrices_in_pieces_are_trained_as_whole_ones(ends, decay):
    whole, torchs, weights = by_torch(SHAPES, decay)
    assert len(whole) == ends[-1]
    optimizers = by_pieces(SHAPES, ends, decay)
    found = torch.cat([optimizer.param_groups[0]["params"][0].detach() for optimizer in optimizers])
    torch.testing.assert_close(found, whole, rtol=2e-6, atol=2e-6)
    for optimizer in optimizers:  # every rank has all factors
        factors = {(kind, piece.name): numbers.view(shape) for kind, piece, shape, numbers in optimizer.factors()}
        for name, weight in zip(SHAPES, weights, strict=True):
            for kind in ("row_var", "col_var"):
                expected = torchs.state[weight][kind]
                torch.testing.assert_close(factors[kind, name], expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("ends", [[5, 12, 15], [15, 15, 15]])
def test_vectors_in_pieces_are_trained_as_whole_ones(ends):
    whole, _, _ = by_torch(VECTORS, 0.0)
    optimizers = by_pieces(VECTORS, ends, 0.0)
    found = torch.cat([optimizer.param_groups[0]["params"][0].detach() for optimizer in optimizers])
    torch.testing.assert_close(found, whole, rtol=2e-6, atol=2e-6)
    assert not [factor for optimizer in optimizers for factor in optimizer.factors()]


def test_state_is_a_row_and_a_column_of_each_matrix():
    """A hundredth of Adam's two moments for a matrix of 400 × 400."""
    config = OptimizerConfig(name="adafactor")
    weight = torch.randn(400, 400).requires_grad_()
    optimizer = build_optimizer({"weight": weight}, config, partitioned=True)
    assert isinstance(optimizer, PartitionedAdafactor)
    vector = copy.deepcopy(weight.detach().flatten()[:80_000]).requires_grad_()
    optimizer.attach({vector: [Piece("weight", (400, 400), 0, 80_000, 0)]}, lambda values: values)
    assert sum(tensor.numel() for tensor in optimizer.initial_state(vector).values()) == 400 + 400 + 1
