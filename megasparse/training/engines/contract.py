"""Interface of engines: forward and backward passes, the optimizer step, and the state that checkpoints store.

deepspeed.py trains with DeepSpeed ZeRO on any number of ranks, plain.py with plain PyTorch in one process. Their losses
are the same.
"""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megasparse.config.schema import RunSettings
from megasparse.data.batches import Batch
from megasparse.files import Progress, silent
from megasparse.ops.quantised import Quantised
from megasparse.optimizers import create_state, set_steps_done, state_tensors, steps_done
from megasparse.training.checkpoints.checkpoint import Checkpoint, Fragment, persistent_buffers
from megasparse.training.ranks import Ranks
from megasparse.training.reporting.memory import bytes_of

MakeRng = Callable[[int, Tensor], Any]
"""Map (optimizer step, global sample numbers (B,)) to the model's random number generator."""


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step, the same on every rank."""

    loss: float
    """Mean nats per scored token over the global batch."""
    statistics: dict[str, float]
    """Other scalars of the model, averaged over micro-batches and ranks. A vector NAME/layers becomes NAME/layer_0 and
    so on, for the layers with a value.
    """
    tokens: int
    grad_norm: float
    """L2 norm before clipping."""
    applied: bool
    """False if any rank's loss or gradient was not finite; the weights are then unchanged on all ranks."""
    held: dict[str, tuple[int, int]]
    """Bytes of this rank's weights, gradients and optimizer state, on its device and elsewhere."""


class Engine(ABC):
    """Owner of the device, gradient accumulation, averaging over ranks, clipping, precision and the optimizer."""

    replicated = True
    """True if every rank stores the whole state; the ranks then share the parameters when they save."""
    totals_before_backward = True
    """True if the last backward pass needs to know whether to apply the step; else totals are read with the norm."""

    def __init__(self, model: nn.Module, config: RunSettings, make_rng: MakeRng, ranks: Ranks):
        self.module, self.ranks, self._make_rng = model, ranks, make_rng
        self._forward: Callable[..., tuple[Tensor, dict[str, Tensor]]] = model
        self._optimizer_name = config.optimizer.name
        self._clipping = config.training.gradient_clipping
        self._shared: dict[str, Any] = {} if ranks.sequence is None else {"sequence": ranks.sequence}
        """Extra arguments of the model's forward with sequence parallelism."""
        self._varying = getattr(model, "varying_token_counts", False)
        """True if the number of scored tokens can differ between micro-batches."""
        self._fixed_divisors: dict[Any, float] = {}
        """`_mean_scored` by micro-batch shapes, if it depends on nothing else."""
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        """Weights that the optimizer updates and checkpoints store."""
        self._shapes = {name: tuple(p.shape) for name, p in self._trained.items()}
        self.optimizer: torch.optim.Optimizer

    def train_step(
        self, micro_batches: Sequence[Batch], step: int, learning_rate: float, progress: Progress = silent
    ) -> StepResult:
        """Run one optimizer step: forward and backward of every micro-batch, all-reduce, clipping, update. All ranks
        call it. All scored tokens of the global batch are weighted equally. If any rank's loss or gradient is not
        finite, no rank updates. micro_batches: this rank's, or its parts of shared ones; of equal size on all ranks.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        sums: dict[str, Tensor] = {}
        inputs = [(self._moved(batch.tokens), self._moved(batch.samples)) for batch in micro_batches]
        divisor = self._divisor(micro_batches)
        options = self._shared | ({} if divisor is None else {"divisor": divisor})
        totals: tuple[float, bool, dict[str, float]] | None = None
        for number, (tokens, samples) in enumerate(inputs, start=1):
            progress(f"step {step}, micro-batch {number}")
            last = number == len(micro_batches)
            rng = self._make_rng(step, samples)
            objective, statistics = self._forward(tokens, rng, **options)
            progress(f"step {step}, micro-batch {number}, backward")  # the backward pass waits for the other ranks
            for name, value in {**statistics, "objective": objective}.items():
                sums[name] = sums.get(name, torch.zeros((), dtype=torch.float64)) + value.detach().double()
            if last and self.totals_before_backward:  # the last backward pass can still make the gradient not finite
                totals = self._totals(sums)
            poison_gradient = totals is not None and not totals[1]
            self._backward(objective, len(micro_batches), last, poison_gradient)
        gradients = bytes_of(self.gradients(), self.ranks.device)
        if totals is None:
            totals = self._totals(sums | self._gradient_norm())
        loss, apply_update, total = totals
        grad_norm, applied = self._update(apply_update, total.pop("grad_norm", None))
        for module in self.module.modules():  # update state that the optimizer does not own
            if (after_step := getattr(module, "after_step", None)) is not None:
                after_step(applied, self.ranks.sum)
        share = len(micro_batches) * self.ranks.world_size
        means = {name: value / share for name, value in total.items()}
        read = sum(batch.tokens.numel() for batch in micro_batches) * self.ranks.world_size
        held = {"gradients": gradients, **self.held()}
        return StepResult(loss, means, read, grad_norm, applied, held)

    def _moved(self, x: Any) -> Any:
        """Move inputs to the device, from pinned memory, so that a copy to a GPU does not block the host."""
        device = self.ranks.device
        if not isinstance(x, Tensor):  # a task's batch of several tensors
            return x.to(device)
        return (x.pin_memory() if device.type == "cuda" and not x.is_cuda else x).to(device, non_blocking=True)

    def gradients(self) -> Iterable[Tensor]:
        """Return the gradients that the update reads."""
        return [p.grad for p in self._state_owners() if p.grad is not None]

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's part of every parameter and buffer between steps, with its name."""
        yield from itertools.chain(self.module.named_parameters(), self.module.named_buffers())

    def held(self) -> dict[str, tuple[int, int]]:
        """Return the bytes of this rank's weights and optimizer state, on its device and elsewhere."""
        weights, masters = [weight for _, weight in self.weights()], self._state_owners()
        addresses = {weight.untyped_storage().data_ptr() for weight in weights}
        rounded = [master for master in masters if master.untyped_storage().data_ptr() not in addresses]
        moments = [x for state in self.optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
        device = self.ranks.device
        return {"weights": bytes_of(weights, device), "optimizer": bytes_of([*moments, *rounded], device)}

    def _totals(self, sums: dict[str, Tensor]) -> tuple[float, bool, dict[str, float]]:
        """Sum over all ranks in one all-reduce, the only host synchronisation in a step. Returns the mean nats per
        scored token; True if the objective is finite; and the other sums by name, of a vector one for each layer.
        """
        names = sorted(sums)
        values = self.ranks.sum(torch.cat([sums[name].reshape(-1).to(self.ranks.device) for name in names])).tolist()
        total: dict[str, float] = {}
        for name in names:
            entry, values = values[: sums[name].numel()], values[sums[name].numel() :]
            if sums[name].dim() == 0:
                total[name] = entry[0]
                continue
            prefix = name.removesuffix("layers")
            total |= {f"{prefix}layer_{layer}": value for layer, value in enumerate(entry) if not math.isnan(value)}
        loss = total.pop("nats") / (total.pop("tokens") or 1.0)
        return loss, math.isfinite(total["objective"]), total

    def _divisor(self, micro_batches: Sequence[Batch]) -> float | None:
        """Return the divisor of the sums of nats; None for the scored tokens of each micro-batch."""
        if self._varying:
            return self._mean_scored(micro_batches)
        if not self._shared:
            return None
        shapes = tuple(batch.tokens.shape for batch in micro_batches)
        if shapes not in self._fixed_divisors:
            self._fixed_divisors[shapes] = self._mean_scored(micro_batches)
        return self._fixed_divisors[shapes]

    def _mean_scored(self, micro_batches: Sequence[Batch]) -> float:
        model: Any = self.module
        device = self.ranks.device if self._shared else torch.device("cpu")  # count_scored may all-reduce
        tokens = (batch.tokens.to(device) for batch in micro_batches)
        scored = sum(int(model.count_scored(x, **self._shared)) for x in tokens)
        total = self.ranks.sum(torch.tensor(scored, dtype=torch.float64, device=self.ranks.device)).item()
        return total / (len(micro_batches) * self.ranks.world_size) or 1.0

    def evaluate(self, tokens: Tensor, rng: Any, *padding: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the model's objective and statistics without gradients. Every rank calls it equally often. padding:
        extra arguments of the model.
        """
        with torch.no_grad():
            return self._forward(tokens, rng, *padding)

    @abstractmethod
    def _backward(self, objective: Tensor, micro_batches: int, last: bool, poison_gradient: bool) -> None:
        """Accumulate the gradient of one of `micro_batches`, which are averaged; not finite if `poison_gradient`."""

    @abstractmethod
    def _update(self, apply_update: bool, norm: float | None) -> tuple[float, bool]:
        """Apply the accumulated gradient if it is finite and `apply_update`. Return its norm, `norm` if known, and True
        if applied.
        """

    def _gradient_norm(self) -> dict[str, Tensor]:
        """Return the gradient's norm, on the device, if it is read together with the totals."""
        return {}

    @abstractmethod
    def _state(self) -> Iterator[Fragment]:
        """Yield this rank's pieces of the weights (fp32) and optimizer state."""

    @abstractmethod
    def _state_owners(self) -> Iterator[Tensor]:
        """Yield the tensors that the optimizer updates."""

    def _replicated_state(self) -> Iterator[Fragment]:
        """Yield optimizer state that is replicated although the weights are partitioned."""
        yield from ()

    def fragments(self) -> list[Fragment]:
        """Return the fragments that this rank saves; over all ranks, every number exactly once."""
        buffers = [
            Fragment("weight", name, tuple(buffer.shape), 0, buffer.view(-1))
            for name, buffer in persistent_buffers(self.module).items()
            if self.ranks.rank == 0  # replicated on all ranks
        ]
        state, shared = self._state(), self._replicated_state()
        if self.replicated:
            state, shared = iter(()), itertools.chain(state, shared)
        turns = {name: i % self.ranks.world_size for i, name in enumerate(self._shapes)}
        return [*state, *(fragment for fragment in shared if turns[fragment.name] == self.ranks.rank), *buffers]

    def steps_done(self) -> int:
        return steps_done(self.optimizer)

    def load(self, checkpoint: Checkpoint) -> None:
        if checkpoint.optimizer_steps:
            for weight in self._state_owners():
                create_state(self.optimizer, self._optimizer_name, weight)
            set_steps_done(self.optimizer, checkpoint.optimizer_steps)
        for fragment in itertools.chain(self._state(), self._replicated_state()):
            fragment.memory.copy_(checkpoint.read(fragment.kind, fragment.name, fragment.start, fragment.numel))

    def close(self) -> None:  # noqa: B027  (plain torch holds nothing)
        """Release resources outside the model."""


def whole_fragments(masters: dict[str, Tensor], optimizer: torch.optim.Optimizer) -> Iterator[Fragment]:
    """Yield the fragments of weights that are not partitioned. masters: fp32 weights by name."""
    for name, weight in masters.items():
        for kind, tensor in {"weight": weight, **state_tensors(optimizer.state.get(weight, {}))}.items():
            yield Fragment(kind, name, tuple(tensor.shape), 0, tensor.detach().view(-1))


Initial = Callable[[str, Sequence[int], int, int], Tensor]
"""Map (name, shape, start, numel) to elements of a flattened initial weight, fp32."""


class Weights:
    """Source of a model's weights: the checkpoint, if any, for trained ones; else `initial` for those on the meta
    device; else the model itself.
    """

    def __init__(self, model: nn.Module, initial: Initial | None = None, checkpoint: Checkpoint | None = None):
        self.model, self._initial, self._checkpoint = model, initial, checkpoint

    def read(self, name: str, weight: Tensor, start: int, numel: int) -> Tensor:
        """Return elements [start, start + numel) of a flattened weight."""
        if self._checkpoint is not None and weight.requires_grad:
            return self._checkpoint.read("weight", name, start, numel)
        if not weight.is_meta:
            return weight.detach().reshape(-1)[start : start + numel]
        assert self._initial is not None, f"{name} is on the meta device without an initial value"
        return self._initial(name, weight.shape, start, numel)

    def fill(self, device: torch.device) -> None:
        """Load every weight, one after another, on `device`, and move the buffers there."""
        for name, weight in self.model.named_parameters():
            if isinstance(weight, Quantised):  # on the device since it was quantised
                continue
            put(weight, self.read(name, weight, 0, weight.numel()).view(weight.shape).to(device, weight.dtype))
        move_buffers(self.model, device)


def put(weight: Tensor, values: Tensor) -> None:
    """Set a weight, possibly on the meta device, to `values` without copying. It stays the same object."""
    if weight.is_meta:
        torch.utils.swap_tensors(weight, nn.Parameter(values, requires_grad=weight.requires_grad))
    else:
        weight.data = values


def move_buffers(model: nn.Module, device: torch.device) -> None:
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
