"""AdamW and Adafactor, and their state as a checkpoint sees it."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adafactor, AdamW, Optimizer

from megasparse.config.schema import OptimizerConfig


def build_optimizer(parameters: Iterable[Tensor], config: OptimizerConfig) -> Optimizer:
    """An optimizer over `parameters`. Matrices decay, vectors (norms, biases) do not.

    Its learning rate is 0: the engine sets it before every step. An engine that steps once to create its state
    (as DeepSpeed does in some settings) thereby changes no weight.
    """
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.name == "adafactor":
        return Adafactor(groups, lr=0.0)
    # fused: one pass over memory and no temporaries as large as the weights, on the CPU as on a GPU
    return AdamW(groups, lr=0.0, betas=config.betas, eps=config.eps, fused=True)


def create_state(optimizer: Optimizer, weight: Tensor) -> None:
    """Give `weight` the state that the optimizer would create at its first step, so that a checkpoint can fill it."""

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float32, device=weight.device)

    if isinstance(optimizer, Adafactor):
        state = {"step": torch.zeros(())}
        if weight.ndim >= 2:
            state["row_var"] = zeros(*weight.shape[:-1], 1)
            state["col_var"] = zeros(*weight.shape[:-2], 1, weight.shape[-1])
        else:
            state["variance"] = zeros(*weight.shape)
    else:
        state = {"step": zeros(), "exp_avg": zeros(*weight.shape), "exp_avg_sq": zeros(*weight.shape)}
    optimizer.state[weight] = state


def state_tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    """What of one weight's state a checkpoint keeps: all but the counter, which is one number for all weights."""
    return {kind: state[kind] for kind in sorted(state) if kind != "step"}


def steps_done(optimizer: Optimizer) -> int:
    """Updates applied so far; every weight has had the same number of them."""
    counts = {int(state["step"]) for state in optimizer.state.values() if "step" in state}
    assert len(counts) <= 1, f"weights differ in their number of updates: {sorted(counts)}"
    return counts.pop() if counts else 0


def set_steps_done(optimizer: Optimizer, steps: int) -> None:
    """Set the counter of every weight's state."""
    for state in optimizer.state.values():
        state["step"].fill_(steps)
