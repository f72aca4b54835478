"""Muon (Jordan et al. 2024) for hidden matrices, AdamW for all other weights, at one learning rate.

N-gram tables are updated without momentum (β1 = 0): a sparse gradient then costs time only for the rows in use.

The update of a hidden matrix (n, m) is orthogonalised and scaled by 0.2·√max(n, m), as large as an update of AdamW, so
one learning rate and weight decay suit both (Liu et al. 2025, arXiv:2502.16982). torch.optim.Muon with
`adjust_lr_fn="match_rms_adamw"` is the definition.

Under ZeRO 1 to 3, the owner of a matrix receives the pieces of its update, orthogonalises the whole and returns the
pieces. The momentum stays with the pieces.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, groupby
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

from megasparse.optimizers.partitioned_adafactor import Piece

MOMENTUM, ITERATIONS, EPS = 0.95, 5, 1e-7
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Defaults of torch.optim.Muon."""
BATCH = 1 << 22
"""Numbers that a rank orthogonalises at a time, or one matrix if it is larger, and numbers of tables updated at a time;
bounds the temporaries."""

TABLES = "embedding.ngrams.tables."
"""Part of the names of n-gram tables."""

Span = tuple[int, int]
"""First number and length of a rank's piece of a matrix."""
Exchange = Callable[[list[Tensor], list[int]], list[Tensor]]
"""Send one vector to each rank, and return the vectors of these lengths that the ranks sent."""


def is_hidden(name: str, shape: Sequence[int]) -> bool:
    """Return True for hidden matrices: projections from activations to activations in attention and feed-forward.

    A mechanism's own weights are excluded: hashes, biases, convolutions and matrices over positions do not project
    activations, and sketches stack unrelated heads and learn from their own losses.
    """
    return len(shape) == 2 and "mechanisms." not in name and re.search(r"(^|\.)blocks\.\d+\.", name) is not None


@dataclass(frozen=True)
class _Matrix:
    """A hidden matrix: this rank's piece, all ranks' spans, and the vectors that contain the piece."""

    piece: Piece
    spans: Sequence[Span]
    weight: Tensor
    gradient: Tensor
    momentum: Tensor

    @property
    def cost(self) -> int:
        """Multiplications of its iterations, up to a factor."""
        return self.piece.size * min(self.piece.shape)

    def update(self) -> Tensor:
        """Return this rank's piece of the Nesterov update."""
        return self.piece.of(self.gradient).lerp(self.piece.of(self.momentum), MOMENTUM)


class Muon(AdamW):
    """Update of torch.optim.Muon for groups with `hidden` True, of torch.optim.AdamW for the others, with β1 = 0 for
    groups with `tables` True. All ranks step together.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], betas: tuple[float, float], eps: float):
        super().__init__(groups, lr=0.0, betas=betas, eps=eps, fused=True)
        self.pieces: Mapping[Tensor, Sequence[Piece]] = {}
        self._spans: Mapping[str, Sequence[Span]] = {}
        self._rank = 0
        self._exchange: Exchange = lambda vectors, lengths: vectors

    def attach(
        self, pieces: Mapping[Tensor, Sequence[Piece]], spans: Mapping[str, Sequence[Span]], rank: int,
        exchange: Exchange,
    ) -> None:  # fmt: skip
        """Set the contents of vectors that contain pieces of weights. Before this call, Muon does not update them.

        pieces: pieces in each vector, the same weights in the same order on every rank. spans: of each weight on every
        rank, by name. rank: this rank.
        """
        self.pieces, self._spans, self._rank, self._exchange = pieces, spans, rank, exchange

    def initial_state(self, weight: Tensor) -> dict[str, Tensor]:
        """Return the state before the first step of a weight or a vector."""
        if self.pieces:  # ZeRO 3 removes vectors from the groups between steps
            hidden = any(is_hidden(piece.name, piece.shape) for piece in self.pieces[weight])
            tables = any(TABLES in piece.name for piece in self.pieces[weight])
        else:
            group = next(group for group in self.param_groups if any(weight is other for other in group["params"]))
            hidden, tables = group["hidden"], group.get("tables", False)
        kinds = ("momentum_buffer",) if hidden else ("scaled_squares",) if tables else ("exp_avg", "exp_avg_sq")
        step = torch.zeros((), dtype=torch.float32, device=weight.device)
        return {"step": step} | {kind: torch.zeros_like(weight, dtype=torch.float32) for kind in kinds}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        groups = self.param_groups
        for group in groups:
            if group["hidden"]:
                self._step_matrices(group)
            elif group.get("tables"):
                self._step_tables(group)
        self.param_groups = [group for group in groups if not (group["hidden"] or group.get("tables"))]
        try:
            super().step()
        finally:
            self.param_groups = groups

    def _step_matrices(self, group: dict[str, Any]) -> None:
        matrices: list[_Matrix] = []
        for weight in group["params"]:
            whole = Piece("", tuple(weight.shape), 0, weight.numel())
            pieces = self.pieces.get(weight, [whole] if weight.dim() == 2 else [])
            if weight.grad is None or not pieces:
                continue
            if not self.state[weight]:
                self.state[weight] = self.initial_state(weight)
            state, gradient = self.state[weight], weight.grad.reshape(-1)
            state["step"] += 1
            momentum = state["momentum_buffer"].view(-1).lerp_(gradient, 1 - MOMENTUM)
            for piece in pieces:
                spans = self._spans.get(piece.name, [(piece.start, piece.numel)])
                matrices.append(_Matrix(piece, spans, weight.view(-1), gradient, momentum))
        for owned in _rounds(matrices):
            for matrix, update in zip(chain.from_iterable(owned), self._orthogonalised(owned), strict=True):
                weight, scale = matrix.piece.of(matrix.weight), 0.2 * math.sqrt(max(matrix.piece.shape))
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(update.to(weight.device), alpha=-group["lr"] * scale)

    def _step_tables(self, group: dict[str, Any]) -> None:
        """Update tables. The mean squared gradient v is stored as v·β^−(step mod `period`), so that rows without a
        gradient do not have to be decayed in every step.
        """
        beta, eps, rate = group["betas"][1], group["eps"], group["lr"]
        period = max(1, int(40 * math.log(2) / -math.log(beta))) if beta else 1
        for weight in group["params"]:
            if weight.grad is None:
                continue
            if not self.state[weight]:
                self.state[weight] = self.initial_state(weight)
            state, gradient = self.state[weight], weight.grad
            state["step"] += 1
            step = int(state["step"])
            power = step % period
            whole = state["scaled_squares"]
            if power == 0:
                whole.mul_(beta**period)
            if group["weight_decay"]:
                weight.mul_(1 - rate * group["weight_decay"])
            values, squares, rows = weight, whole, None
            if gradient.is_sparse:
                gradient = gradient.coalesce()
                rows, gradient = gradient.indices()[0], gradient.values()
                values, squares = weight[rows], whole[rows]
            for value, square, part in zip(
                *(x.view(-1).split(BATCH) for x in (values, squares, gradient)), strict=True
            ):
                square.addcmul_(part, part, value=(1 - beta) * beta**-power)
                root = (square * (beta**power / (1 - beta**step))).sqrt_().add_(eps)
                value.addcdiv_(part, root, value=-rate)
            if rows is not None:
                weight.index_copy_(0, rows, values)
                whole.index_copy_(0, rows, squares)

    def _orthogonalised(self, owned: Sequence[Sequence[_Matrix]]) -> list[Tensor]:
        """Return this rank's pieces of the updates of a round. owned: the matrices of each owner."""
        own, empty = owned[self._rank], next(chain.from_iterable(owned)).gradient.new_empty(0)
        whole = _assembled(  # no other name refers to the sent vectors, which are freed before the iterations
            own,
            self._exchange(
                [torch.cat([empty, *(matrix.update() for matrix in matrices)]) for matrices in owned],
                [sum(matrix.spans[rank][1] for matrix in own) for rank in range(len(owned))],
            ),
        )
        first = 0
        for shape, group in groupby(matrix.piece.shape for matrix in own):
            stack = whole[first:].narrow(0, 0, len(list(group)) * math.prod(shape)).view(-1, *shape)
            stack.copy_(orthogonalise(stack))
            first += stack.numel()
        pairs = list(zip(own, whole.split([matrix.piece.size for matrix in own]), strict=True))
        parts = [
            torch.cat([whole[:0], *(update.narrow(0, *matrix.spans[rank]) for matrix, update in pairs)])
            for rank in range(len(owned))
        ]
        lengths = [[matrix.piece.numel for matrix in matrices] for matrices in owned]
        parts = self._exchange(parts, [sum(numbers) for numbers in lengths])
        return [update for part, numbers in zip(parts, lengths, strict=True) for update in part.split(numbers)]


def _assembled(matrices: Sequence[_Matrix], parts: Sequence[Tensor]) -> Tensor:
    """Return the updates of whole matrices, one after the other. parts: of each rank, its pieces of them."""
    whole = parts[0].new_empty(sum(matrix.piece.size for matrix in matrices))
    updates = whole.split([matrix.piece.size for matrix in matrices])
    for rank, part in enumerate(parts):
        pieces = part.split([matrix.spans[rank][1] for matrix in matrices])
        for matrix, update, piece in zip(matrices, updates, pieces, strict=True):
            update.narrow(0, *matrix.spans[rank]).copy_(piece)
    return whole


def _rounds(matrices: Sequence[_Matrix]) -> Iterator[list[list[_Matrix]]]:
    """Yield the matrices of each owner, of one shape next to each other, a batch of every owner at a time.

    The owner is the least loaded of the ranks that store at least half of an even share of the matrix: under ZeRO 3 any
    rank, under ZeRO 1 and 2 one that stores most of it.
    """
    ranks = len(matrices[0].spans) if matrices else 0
    loads, queues = [0] * ranks, [list[_Matrix]() for _ in range(ranks)]
    for matrix in sorted(matrices, key=lambda matrix: (matrix.cost, matrix.piece.shape), reverse=True):
        holders = [rank for rank, (_, numel) in enumerate(matrix.spans) if 2 * ranks * numel >= matrix.piece.size]
        owner = min(holders, key=lambda rank: loads[rank])
        loads[owner] += matrix.cost
        queues[owner].append(matrix)
    while any(queues):
        batches: list[list[_Matrix]] = []
        for queue in queues:
            totals = accumulate(matrix.piece.size for matrix in queue)
            count = max(1, sum(total <= BATCH for total in totals))
            batches.append(queue[:count])
            del queue[:count]
        yield batches


def orthogonalise(matrices: Tensor) -> Tensor:
    """Move the singular values of matrices (K, n, m) towards 1 by Newton–Schulz iterations.

    GPUs run them in bf16, as in torch; CPUs in fp32, because few multiply bf16 fast, and the update would depend on the
    order in which ranks sum gradients.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = (matrices.mT if tall else matrices).to(torch.float32 if matrices.device.type == "cpu" else torch.bfloat16)
    x = x / x.flatten(1).norm(dim=1).clamp_(min=EPS).view(-1, 1, 1)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def scratch_bytes(shapes: Sequence[Sequence[int]]) -> int:
    """Return the peak bytes of temporaries: a batch, and two iterates and two Gram matrices of its largest stack."""
    sizes = [math.prod(shape) for shape in shapes]
    stacks = [
        min(count, max(1, BATCH // math.prod(shape))) * (math.prod(shape) + min(shape) ** 2)
        for shape, count in Counter(map(tuple, shapes)).items()
    ]
    return 4 * (max(*sizes, min(BATCH, sum(sizes))) + 2 * max(stacks))
