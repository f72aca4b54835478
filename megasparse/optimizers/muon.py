"""Muon (Jordan et al. 2024) for hidden matrices, AdamW for all other weights, at one learning rate.

An update of a hidden matrix (n, m) is orthogonalised and scaled by 0.2·√max(n, m), the size of AdamW's updates, so that
learning rate and weight decay suit both (Liu et al. 2025, arXiv:2502.16982). torch.optim.Muon with
`adjust_lr_fn="match_rms_adamw"` is the definition.
"""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

MOMENTUM, ITERATIONS, EPS = 0.95, 5, 1e-7
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Defaults of torch.optim.Muon."""
BATCH = 1 << 24
"""Numbers that are orthogonalised at a time; bounds the temporaries."""


def is_hidden(name: str, shape: Sequence[int]) -> bool:
    """Return True for hidden matrices: projections from activations to activations in attention and feed-forward.

    Embeddings, n-gram tables and output heads are outside of blocks. A mechanism's own weights are excluded: hashes,
    biases, convolutions and matrices over positions do not project activations, and those that do (sketches) stack
    unrelated heads and learn from their own losses.
    """
    return len(shape) == 2 and "mechanisms." not in name and re.search(r"(^|\.)blocks\.\d+\.", name) is not None


class Muon(AdamW):
    """Update of torch.optim.Muon for groups with `hidden` True, of torch.optim.AdamW for the others."""

    def __init__(self, groups: Iterable[dict[str, Any]], betas: tuple[float, float], eps: float):
        super().__init__(groups, lr=0.0, betas=betas, eps=eps, fused=True)

    def initial_state(self, weight: Tensor) -> dict[str, Tensor]:
        """Return the state before a weight's first step."""
        hidden = any(weight is other for group in self.param_groups if group["hidden"] for other in group["params"])
        kinds = ("momentum_buffer",) if hidden else ("exp_avg", "exp_avg_sq")
        step = torch.zeros((), dtype=torch.float32, device=weight.device)
        return {"step": step} | {kind: torch.zeros_like(weight, dtype=torch.float32) for kind in kinds}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        groups = self.param_groups
        for group in groups:
            if group["hidden"]:
                self._step_matrices(group)
        self.param_groups = [group for group in groups if not group["hidden"]]
        try:
            super().step()
        finally:
            self.param_groups = groups

    def _step_matrices(self, group: dict[str, Any]) -> None:
        rate, decay = group["lr"], group["weight_decay"]
        stacks: dict[tuple[int, ...], list[Tensor]] = {}
        for weight in group["params"]:
            if weight.grad is not None:
                stacks.setdefault(tuple(sorted(weight.shape)), []).append(weight)
        for shape, weights in stacks.items():
            count = max(1, BATCH // math.prod(shape))
            for first in range(0, len(weights), count):
                batch = weights[first : first + count]
                updates = orthogonalise(torch.stack([_wide(self._nesterov(weight)) for weight in batch]))
                for weight, update in zip(batch, updates, strict=True):
                    update = update if weight.shape == update.shape else update.T
                    weight.mul_(1 - rate * decay).add_(update, alpha=-rate * 0.2 * math.sqrt(shape[1]))

    def _nesterov(self, weight: Tensor) -> Tensor:
        """Add the gradient to the momentum, and return the update before its orthogonalisation."""
        if not self.state[weight]:
            self.state[weight] = self.initial_state(weight)
        state, gradient = self.state[weight], weight.grad
        state["step"] += 1
        return gradient.lerp(state["momentum_buffer"].lerp_(gradient, 1 - MOMENTUM), MOMENTUM)


def _wide(matrix: Tensor) -> Tensor:
    return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T


def orthogonalise(matrices: Tensor) -> Tensor:
    """Move the singular values of matrices (K, n, m), n ≤ m, towards 1 by Newton–Schulz iterations.

    In bf16 on a GPU, as torch does. On a CPU in fp32, which few CPUs multiply more slowly than bf16 and which makes the
    update independent of the order of sums in the gradient.
    """
    a, b, c = COEFFICIENTS
    x = matrices.to(torch.float32 if matrices.device.type == "cpu" else torch.bfloat16)
    x = x / x.flatten(1).norm(dim=1).clamp_(min=EPS).view(-1, 1, 1)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.to(matrices.dtype)
