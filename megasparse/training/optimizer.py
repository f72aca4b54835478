"""The optimizer of a run, its learning rate, and its state as checkpoints keep it."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from megasparse.config.schema import OptimizerConfig
from megasparse.optimizers import OPTIMIZERS
from megasparse.optimizers.partitioned_adafactor import PartitionedAdafactor


def build_optimizer(
    parameters: Iterable[Tensor], config: OptimizerConfig, partitioned: bool = False,
    shapes: Iterable[Sequence[int]] | None = None,
) -> Optimizer:  # fmt: skip
    """Build an optimizer over `parameters`. Matrices decay, vectors (norms, biases) do not.

    partitioned: it will update vectors that hold pieces of them, as under ZeRO 1 to 3. shapes: of the whole parameters,
    where these are pieces already.

    Its learning rate is 0: the engine sets it before every step. An engine that steps once to create its state
    (as DeepSpeed does in some settings) thereby changes no weight.
    """
    parameters = list(parameters)
    dims = [p.ndim for p in parameters] if shapes is None else [len(shape) for shape in shapes]
    pairs = list(zip(parameters, dims, strict=True))
    groups = [
        {"params": [p for p, dim in pairs if dim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p, dim in pairs if dim < 2], "weight_decay": 0.0},
    ]
    spec = OPTIMIZERS[config.name]
    build = spec.build_partitioned if partitioned else spec.build
    return build([group for group in groups if group["params"]], config)


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """Return the learning rate of optimizer step `step` (1 is the first) of a run of `steps` steps, a pure function.

    Linear from 0 at step 0 to the peak at `warmup_steps`; after that
    constant:      peak
    cosine:        peak·(f + (1 − f)·(1 + cos(π·t))/2), f = `final_fraction`, t from 0 after the warm-up to 1 at the end
    linear:        peak·(1 − (1 − f)·t), with the same f and t
    inverse_sqrt:  peak·√(warm-up/step), a warm-up of 0 counting as 1.
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    if step < warmup:
        return peak * step / warmup
    if config.schedule == "constant":
        return peak
    if config.schedule == "inverse_sqrt":
        return peak * math.sqrt(max(1, warmup) / max(1, step))
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    left = 1 - done if config.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return peak * (config.final_fraction + (1 - config.final_fraction) * left)


def state_tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    """One weight's state that a checkpoint keeps: all but the counter, which is one number for all weights."""
    return {kind: state[kind] for kind in sorted(state) if kind != "step"}


def steps_done(optimizer: Optimizer) -> int:
    """Number of updates applied so far, the same for every weight."""
    counts = {int(state["step"]) for state in optimizer.state.values() if "step" in state}
    assert len(counts) <= 1, f"weights differ in their number of updates: {sorted(counts)}"
    return counts.pop() if counts else 0


def create_state(optimizer: Optimizer, name: str, weight: Tensor) -> None:
    """Give `weight` the initial state of the optimizer `name`, for a checkpoint to fill."""
    if isinstance(optimizer, PartitionedAdafactor):
        optimizer.state[weight] = optimizer.initial_state(weight)
    else:
        optimizer.state[weight] = OPTIMIZERS[name].initial_state(weight)


def set_steps_done(optimizer: Optimizer, steps: int) -> None:
    """Set the counter of every weight's state."""
    for state in optimizer.state.values():
        state["step"].fill_(steps)
