"""Build the optimizer of a run, and read and write its state as checkpoints keep it."""

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
