"""Adafactor on weights that are partitioned among ranks, as by ZeRO 1 to 3.

A weight (A, R, C) is A matrices of R rows and C columns; A is 1 for a matrix. A rank's piece is any range of its
numbers. Sums over rows, columns and whole weights are all-reduced; every rank stores all row and column factors.
Vectors store one second moment per number with their piece.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

EPS_WEIGHT, BETA2_DECAY = 1e-3, -0.8
"""Defaults of torch.optim.Adafactor, like the clipping threshold 1."""
FACTORS = ("row_var", "col_var")
"""State that every rank stores in full."""


@dataclass(frozen=True)
class Piece:
    """Numbers [start, start + numel) of one weight, stored in a vector from `offset` on. numel may be 0."""

    name: str
    shape: tuple[int, ...]
    start: int = 0
    numel: int = 0
    offset: int = 0

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def factor_sizes(self) -> tuple[int, int]:
        """Number of elements of the row and of the column factor."""
        return self.size // self.shape[-1], self.size // self.shape[-2]

    def of(self, vector: Tensor) -> Tensor:
        return vector.narrow(0, self.offset, self.numel)

    def rows(self, vector: Tensor) -> Tensor:
        """Return the rows (n, C) that the piece overlaps, zero outside the piece."""
        columns, part = self.shape[-1], self.of(vector)
        before, after = self.start % columns, -(self.start + self.numel) % columns
        if before or after:
            part = torch.nn.functional.pad(part, (before, after))
        return part.view(-1, columns)

    def matrices(self) -> Iterator[tuple[int, slice, slice]]:
        """Yield (number, rows within `rows`, rows among all A·R) for each matrix that the piece overlaps."""
        if not self.numel:
            return
        rows, columns = self.shape[-2:]
        first, last = self.start // columns, -(-(self.start + self.numel) // columns)
        for number in range(first // rows, (last - 1) // rows + 1):
            begin, end = max(first, number * rows), min(last, (number + 1) * rows)
            yield number, slice(begin - first, end - first), slice(begin, end)


class PartitionedAdafactor(torch.optim.Optimizer):
    """Update of torch.optim.Adafactor for vectors that contain pieces of weights. All ranks step together."""

    def __init__(self, groups: Iterable[dict[str, Any]]):
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0})
        self.pieces: Mapping[Tensor, Sequence[Piece]] = {}
        self._total: Callable[[Tensor], Tensor] = lambda values: values

    def attach(self, pieces: Mapping[Tensor, Sequence[Piece]], total: Callable[[Tensor], Tensor]) -> None:
        """Set the contents of the vectors. Before this call, a step does nothing.

        pieces: pieces in each vector, the same weights in the same order on every rank. total: all-reduces a sum.
        """
        self.pieces, self._total = pieces, total

    def initial_state(self, vector: Tensor) -> dict[str, Tensor]:
        """Return the state before a vector's first step."""
        state, pieces = {"step": torch.zeros(())}, self.pieces[vector]
        if not _factored(pieces):
            return {**state, "variance": torch.zeros_like(vector, dtype=torch.float32)}
        sizes = zip(*(piece.factor_sizes for piece in pieces), strict=True)
        return state | {
            kind: torch.zeros(sum(lengths), dtype=torch.float32, device=vector.device)
            for kind, lengths in zip(FACTORS, sizes, strict=True)
        }

    def factors(self) -> Iterator[tuple[str, Piece, tuple[int, ...], Tensor]]:
        """Yield every factor: its kind, its weight's piece, its shape and its numbers."""
        for vector, pieces in self.pieces.items():
            state = self.state.get(vector, {})
            if FACTORS[0] not in state:
                continue
            for piece, row, column in _factors(state, pieces):
                yield "row_var", piece, (*piece.shape[:-1], 1), row
                yield "col_var", piece, (*piece.shape[:-2], 1, piece.shape[-1]), column

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for vector in group["params"]:
                if vector in self.pieces and vector.grad is not None:
                    self._step(vector, vector.grad, group["lr"], group["weight_decay"])

    def _step(self, vector: Tensor, gradient: Tensor, rate: float, weight_decay: float) -> None:
        if not self.state[vector]:
            self.state[vector] = self.initial_state(vector)
        state, pieces = self.state[vector], self.pieces[vector]
        state["step"] += 1
        step = float(state["step"])
        sizes = torch.tensor([piece.size for piece in pieces], dtype=torch.float32, device=vector.device)
        weights = torch.stack([piece.of(vector).square().sum() for piece in pieces])
        weights = self._update_moments(state, pieces, gradient, weights, step**BETA2_DECAY)
        # Computed twice, here for its length, because storing it would take as much memory as the weights.
        lengths = self._total(torch.stack([u.square().sum() for u in self._updates(state, pieces, gradient)]))
        scales = (weights / sizes).sqrt().clamp(min=EPS_WEIGHT) * min(rate, step**-0.5)
        scales /= (lengths / sizes).sqrt().clamp(min=1.0)
        for piece, update, scale in zip(pieces, self._updates(state, pieces, gradient), scales.tolist(), strict=True):
            piece.of(vector).mul_(1 - rate * weight_decay).add_(update, alpha=-scale)

    def _update_moments(
        self, state: dict[str, Tensor], pieces: Sequence[Piece], gradient: Tensor, weights: Tensor, share: float
    ) -> Tensor:
        """Update the second moments by a share of the squared gradient. Returns the weights' sums of squares,
        all-reduced together with the sums of rows and columns. weights: (pieces,) local sums.
        """
        if not _factored(pieces):
            state["variance"].lerp_(gradient.float().square(), share)
            return self._total(weights)
        sizes = [size for piece in pieces for size in piece.factor_sizes]
        sums = torch.zeros(len(pieces) + sum(sizes), dtype=torch.float32, device=gradient.device)
        weight_sums, *parts = sums.split([len(pieces), *sizes])
        weight_sums.copy_(weights)
        for piece, row, column in zip(pieces, parts[::2], parts[1::2], strict=True):
            squares = piece.rows(gradient).float().square()
            for number, inside, among in piece.matrices():
                row[among] = squares[inside].sum(1)
                column.view(-1, piece.shape[-1])[number] += squares[inside].sum(0)
        weight_sums, *parts = self._total(sums).split([len(pieces), *sizes])
        rows = torch.cat([part / piece.shape[-1] for piece, part in zip(pieces, parts[::2], strict=True)])
        columns = torch.cat([part / piece.shape[-2] for piece, part in zip(pieces, parts[1::2], strict=True)])
        state["row_var"].lerp_(rows, share)
        state["col_var"].lerp_(columns, share)
        return weight_sums

    def _updates(self, state: dict[str, Tensor], pieces: Sequence[Piece], gradient: Tensor) -> Iterator[Tensor]:
        """Yield each piece's gradient divided by the root of its second moment."""
        epsilon = torch.finfo(torch.float32).eps
        if not _factored(pieces):
            for piece in pieces:
                yield piece.of(gradient) * piece.of(state["variance"]).clamp(min=epsilon**2).rsqrt()
            return
        for piece, row, column in _factors(state, pieces):
            if not piece.numel:
                yield piece.of(gradient)
                continue
            means = row.view(-1, piece.shape[-2]).mean(1).clamp(min=epsilon)
            rows = piece.rows(gradient).float()
            update = torch.empty_like(rows)
            for number, inside, among in piece.matrices():
                variance = torch.outer(row[among], column.view(-1, piece.shape[-1])[number]).div_(means[number])
                update[inside] = variance.clamp_(min=epsilon**2).rsqrt_().mul_(rows[inside])
            yield update.view(-1).narrow(0, piece.start % piece.shape[-1], piece.numel)


def _factored(pieces: Sequence[Piece]) -> bool:
    """True if the pieces are of matrices; a vector in DeepSpeed contains no others then."""
    return any(len(piece.shape) > 1 for piece in pieces)


def _factors(state: dict[str, Tensor], pieces: Sequence[Piece]) -> Iterator[tuple[Piece, Tensor, Tensor]]:
    """Return each piece with the row and the column factor of its weight."""
    sizes = zip(*(piece.factor_sizes for piece in pieces), strict=True)
    rows, columns = (state[kind].split(list(lengths)) for kind, lengths in zip(FACTORS, sizes, strict=True))
    return zip(pieces, rows, columns, strict=True)
