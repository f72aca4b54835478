"""The optimizers of `optimizer.name`, their learning rate, and their state in checkpoints.

To add one, subclass OptimizerSpec and add an entry to OPTIMIZERS.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Adafactor, AdamW, Optimizer

from megasparse.errors import ConfigError
from megasparse.optimizers.muon import TABLES, Muon, is_hidden, scratch_bytes
from megasparse.optimizers.partitioned_adafactor import PartitionedAdafactor


class Settings(Protocol):
    """The configuration section `optimizer`."""

    name: Any
    learning_rate: float
    schedule: Any
    warmup_steps: int
    final_fraction: float
    decay_fraction: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float


class OptimizerSpec(ABC):
    """An optimizer: its construction, initial state and memory use."""

    bytes_per_weight: int
    """Bytes of state per number in a matrix; 0 if the state is far smaller than the matrix."""
    state_per_number: bool = True
    """True if a weight's state contains a number per weight number, so that ZeRO 1 to 3 partition it like the weights.
    If False, each rank stores all of it."""
    separates_hidden: bool = False
    """True if hidden matrices and n-gram tables are updated differently: each parameter group then contains the keys
    "hidden" and "tables"."""

    @abstractmethod
    def build(self, groups: list[dict[str, Any]], settings: Settings) -> Optimizer:
        """Build the optimizer over parameter groups, each with its weight decay, at learning rate 0."""

    def build_partitioned(self, groups: list[dict[str, Any]], settings: Settings) -> Optimizer:
        """Build the optimizer for flat vectors that contain pieces of the weights, as in ZeRO 1 to 3. The default is
        right for an elementwise optimizer.
        """
        return self.build(groups, settings)

    @abstractmethod
    def initial_state(self, weight: Tensor) -> dict[str, Tensor]:
        """Return the state that the optimizer would create for `weight` at its first step. Checkpoints store every
        tensor except the counter "step" under its name.
        """

    def state_bytes(self, name: str, shape: Sequence[int]) -> int:
        """Bytes of state for a weight of this name and shape, excluding its counter."""
        return self.bytes_per_weight * math.prod(shape)

    def scratch_bytes(self, shapes: Mapping[str, Sequence[int]]) -> int:
        """Peak bytes of temporaries of an update. shapes: of the weights, by name."""
        return 0


class AdamWSpec(OptimizerSpec):
    """AdamW (Loshchilov and Hutter 2017) with two fp32 moments per weight."""

    bytes_per_weight = 8

    def build(self, groups: list[dict[str, Any]], settings: Settings) -> Optimizer:
        # fused: one pass over memory and no temporaries as large as the weights, on CPUs and GPUs
        return AdamW(groups, lr=0.0, betas=settings.betas, eps=settings.eps, fused=True)

    def initial_state(self, weight: Tensor) -> dict[str, Tensor]:
        first, second = (torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) for _ in range(2))
        step = torch.zeros((), dtype=torch.float32, device=weight.device)
        return {"step": step, "exp_avg": first, "exp_avg_sq": second}


class AdafactorSpec(OptimizerSpec):
    """Adafactor (Shazeer and Stern 2018), with a factored second moment and updates scaled by the RMS of the weight."""

    bytes_per_weight = 0
    state_per_number = False

    def build(self, groups: list[dict[str, Any]], settings: Settings) -> Optimizer:
        return Adafactor(groups, lr=0.0)

    def build_partitioned(self, groups: list[dict[str, Any]], settings: Settings) -> Optimizer:
        return PartitionedAdafactor(groups)

    def initial_state(self, weight: Tensor) -> dict[str, Tensor]:
        state = {"step": torch.zeros(())}
        for name, shape in _state_shapes(weight.shape).items():
            state[name] = torch.zeros(shape, dtype=torch.float32, device=weight.device)
        return state

    def state_bytes(self, name: str, shape: Sequence[int]) -> int:
        return 4 * sum(math.prod(part) for part in _state_shapes(shape).values())

    def scratch_bytes(self, shapes: Mapping[str, Sequence[int]]) -> int:
        return 4 * max(map(math.prod, shapes.values()))  # the update of one weight


class MuonSpec(AdamWSpec):
    """Muon for hidden matrices, with an fp32 momentum, AdamW without momentum for n-gram tables, and AdamW for the
    others.
    """

    separates_hidden = True

    def build(self, groups: list[dict[str, Any]], settings: Settings) -> Optimizer:
        return Muon(groups, settings.betas, settings.eps)

    def state_bytes(self, name: str, shape: Sequence[int]) -> int:
        return (4 if is_hidden(name, shape) or TABLES in name else self.bytes_per_weight) * math.prod(shape)

    def scratch_bytes(self, shapes: Mapping[str, Sequence[int]]) -> int:
        return scratch_bytes([shape for name, shape in shapes.items() if is_hidden(name, shape)])


def _state_shapes(shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
    if len(shape) < 2:
        return {"variance": tuple(shape)}
    return {"row_var": (*shape[:-1], 1), "col_var": (*shape[:-2], 1, shape[-1])}


OPTIMIZERS: dict[str, OptimizerSpec] = {"adamw": AdamWSpec(), "adafactor": AdafactorSpec(), "muon": MuonSpec()}


def build_optimizer(
    parameters: Mapping[str, Tensor], config: Settings, partitioned: bool = False,
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> Optimizer:  # fmt: skip
    """Build an optimizer over `parameters`, by name. Matrices decay, vectors (norms, biases) do not.

    partitioned: True if it will update vectors that contain pieces of them, as under ZeRO 1 to 3. shapes: of the whole
    parameters, if these are already pieces. Raises ConfigError if the optimizer needs hidden matrices and finds none.

    Its learning rate is 0 until the engine sets it: an engine that steps once to create its state (as DeepSpeed does)
    changes no weight.
    """
    spec = OPTIMIZERS[config.name]
    members: dict[str, list[Tensor]] = {"hidden": [], "tables": [], "matrices": [], "vectors": []}
    for name, parameter in parameters.items():
        shape = parameter.shape if shapes is None else shapes[name]
        kind = "matrices" if len(shape) >= 2 else "vectors"
        if spec.separates_hidden and (is_hidden(name, shape) or TABLES in name):
            kind = "hidden" if is_hidden(name, shape) else "tables"
        members[kind].append(parameter)
    if spec.separates_hidden and not members["hidden"]:
        problem = f'"{config.name}" updates the matrices of megasparse\'s blocks, and none is trained'
        raise ConfigError("optimizer.name", problem, 'Set it to "adamw"')
    groups: list[dict[str, Any]] = []
    for kind, weights in members.items():
        flags = {"hidden": kind == "hidden", "tables": kind == "tables"} if spec.separates_hidden else {}
        decay = 0.0 if kind == "vectors" else config.weight_decay
        groups += [{"params": weights, "weight_decay": decay, **flags}] if weights else []
    return (spec.build_partitioned if partitioned else spec.build)(groups, config)


def learning_rate(step: int, steps: int, config: Settings) -> float:
    """Return the learning rate of optimizer step `step` (1 is the first) of a run of `steps` steps, a pure function.

    Linear from 0 at step 0 to the peak at `warmup_steps`; after that
    constant:      peak
    cosine:        peak·(f + (1 − f)·(1 + cos(π·t))/2), f = `final_fraction`, t from 0 after the warm-up to 1 at the end
    linear:        peak·(1 − (1 − f)·t), with the same f and t
    wsd:           peak (stable), then linear to f·peak over the last `decay_fraction` of all steps (Hu et al. 2024)
    inverse_sqrt:  peak·√(warm-up/step), with a warm-up of at least 1.
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    if step < warmup:
        return peak * step / warmup
    if config.schedule == "constant":
        return peak
    if config.schedule == "inverse_sqrt":
        return peak * math.sqrt(max(1, warmup) / max(1, step))
    start = max(warmup, decay_start(steps, config)) if config.schedule == "wsd" else warmup
    progress = min(1.0, max(0, step - start) / max(1, steps - start))
    share = (1 + math.cos(math.pi * progress)) / 2 if config.schedule == "cosine" else 1 - progress
    return peak * (config.final_fraction + (1 - config.final_fraction) * share)


def decay_start(steps: int, config: Settings) -> int:
    """Return the last step of schedule "wsd" at the peak: steps up to it are the same for every longer run."""
    return steps - round(config.decay_fraction * steps)


def state_tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a weight's state that checkpoints store: all except the counter."""
    return {kind: state[kind] for kind in sorted(state) if kind != "step"}


def steps_done(optimizer: Optimizer) -> int:
    """Return the number of updates applied so far, the same for every weight."""
    counts = {int(state["step"]) for state in optimizer.state.values() if "step" in state}
    assert len(counts) <= 1, f"weights differ in their number of updates: {sorted(counts)}"
    return counts.pop() if counts else 0


def create_state(optimizer: Optimizer, name: str, weight: Tensor) -> None:
    """Give `weight` the initial state of the optimizer `name`, for a checkpoint to fill."""
    spec = optimizer if isinstance(optimizer, PartitionedAdafactor | Muon) else OPTIMIZERS[name]
    optimizer.state[weight] = spec.initial_state(weight)


def set_steps_done(optimizer: Optimizer, steps: int) -> None:
    """Set the counter of every weight's state."""
    for state in optimizer.state.values():
        state["step"].fill_(steps)
