"""Forward, backward and optimizer step: on DeepSpeed's ZeRO over any number of ranks, or on plain torch in one process.

Both engines share one interface and give the same losses. Only this file knows DeepSpeed, and imports it only when a
run asks for it.
"""

import itertools
import math
import shutil
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megasparse.config.schema import RunSettings
from megasparse.data.batches import Batch, check_shares
from megasparse.errors import ConfigError
from megasparse.training.checkpoint import (
    MEMORY,
    Checkpoint,
    Fragment,
    Home,
    load_weights,
    persistent_buffers,
    present,
    silent,
)
from megasparse.training.exposed import Exposed
from megasparse.training.memory import bytes_of
from megasparse.training.optimizer import build_optimizer, create_state, set_steps_done, state_tensors, steps_done
from megasparse.training.ranks import Ranks
from megasparse.training.stopwatch import Stopwatch
from megasparse.training.swapping import SubGroup, Swap, swapped_sections

MakeDraws = Callable[[int, Tensor], Any]
"""(optimizer step, global sample numbers (B,)) -> what the model's random draws depend on."""


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did, the same on every rank."""

    loss: float
    """Mean nats per scored token over the global batch."""
    statistics: dict[str, float]
    """The model's other scalars, mean over micro-batches and ranks; of NAME/layers, a value a layer, those of NAME as
    NAME/layer_0 and so on of the layers that have it."""
    tokens: int
    """Tokens read, over all ranks."""
    grad_norm: float
    """L2 norm of the gradient before clipping."""
    applied: bool
    """False where the loss or the gradient of any rank was not finite, or the loss not accepted: then no weight of any
    rank has changed."""
    forward_seconds: float
    """This rank's own time in the model's forward passes, which wait for no other rank (but under ZeRO 3, and for those
    that share its sequences)."""
    communication_seconds: float
    """This rank's time on, or waiting for, the others that no computation hides, see `Exposed`."""
    held: dict[str, tuple[int, int]]
    """Bytes of this rank's weights, gradients and optimizer state, on its device and elsewhere."""


def _always(loss: float) -> bool:
    return True


class Engine(ABC):
    """Owns the device, gradient accumulation, averaging over ranks, clipping, precision and the optimizer."""

    replicated = True
    """Every rank holds all of the state, so the ranks share out the parameters among them when they save."""

    def __init__(self, model: nn.Module, config: RunSettings, make_draws: MakeDraws, ranks: Ranks):
        self.module, self.ranks, self._make_draws = model, ranks, make_draws
        self._forward_time = Stopwatch(ranks.device)
        self._exposed: Exposed | None = None
        self._clipping = config.training.gradient_clipping
        self._shared: dict[str, Any] = {} if ranks.sequence is None else {"sequence": ranks.sequence}
        """What the model must be told where ranks share sequences."""
        self._uneven = bool(self._shared) or getattr(model, "uneven", False)
        """Whether micro-batches, or the ranks' parts of them, can have unequally many tokens to tell."""
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        """What the optimizer updates and a checkpoint keeps; frozen weights are neither."""
        self._shapes = {name: tuple(p.shape) for name, p in self._trained.items()}
        self.optimizer: torch.optim.Optimizer

    def train_step(
        self,
        micro_batches: Sequence[Batch],
        step: int,
        learning_rate: float,
        accept: Callable[[float], bool] = _always,
        progress: Callable[[str], None] = silent,
    ) -> StepResult:
        """One optimizer step on this rank's micro-batches, or its parts of those that it shares; all of them, on all
        ranks, have equally many tokens.

        Every scored token of the global batch weighs the same. Without padding and separators all micro-batches have
        equally many; with them, or where ranks share sequences, they are counted first.

        accept: whether to apply a step of this loss (nats a token, the same on all ranks). progress: told of each
        micro-batch's two passes.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        sums: dict[str, Tensor] = {}
        with self._meeting():
            divisor = self._mean_scored(micro_batches) if self._uneven else None
        for number, batch in enumerate(micro_batches, start=1):
            progress(f"step {step}, micro-batch {number}")
            last = number == len(micro_batches)
            draws = self._make_draws(step, batch.samples.to(self.ranks.device))
            with self._forward_time.running():
                objective, statistics = self._forward(batch.tokens.to(self.ranks.device), draws, divisor)
            progress(f"step {step}, micro-batch {number}, backward")  # which waits for the others
            for name, value in {**statistics, "objective": objective}.items():
                sums[name] = sums.get(name, torch.zeros((), dtype=torch.float64)) + value.detach().double()
            if last:  # known before the last backward, which can still spoil the gradient of a step not to be applied
                with self._meeting():
                    total = self._total(sums)
                loss = total.pop("nats") / total.pop("tokens")
                wanted = math.isfinite(total["objective"]) and accept(loss)
            self._backward(objective, len(micro_batches), last, spoilt=last and not wanted)
        gradients = bytes_of(self._gradients(), self.ranks.device)
        grad_norm, applied = self._update(wanted)
        waited = self._exposed.seconds() if self._exposed else 0.0
        for module in self.module.modules():  # what moves once a step, and by no gradient
            if (after_step := getattr(module, "after_step", None)) is not None:
                after_step(applied, self.ranks.sum)
        share = len(micro_batches) * self.ranks.world_size
        means = {name: value / share for name, value in total.items()}
        read = sum(batch.tokens.numel() for batch in micro_batches) * self.ranks.world_size
        held = {"gradients": gradients, **self._held()}
        return StepResult(loss, means, read, grad_norm, applied, self._forward_time.seconds(), waited, held)

    def _meeting(self) -> AbstractContextManager[None]:
        """Around what waits for all ranks."""
        return self._exposed.meeting.running() if self._exposed else nullcontext()

    def _gradients(self) -> Iterable[Tensor]:
        """The gradients that the update reads."""
        return [p.grad for p in self._state_owners() if p.grad is not None]

    def _weights(self) -> Iterable[Tensor]:
        """What this rank holds of the model between two steps."""
        return itertools.chain(self.module.parameters(), self.module.buffers())

    def _masters_here(self) -> Iterable[Tensor]:
        """The tensors that the optimizer updates, as they are: what lies on a disk is empty, and stays there."""
        return self._state_owners()

    def _held(self) -> dict[str, tuple[int, int]]:
        weights, masters = list(self._weights()), self._masters_here()
        own = {weight.untyped_storage().data_ptr() for weight in weights}
        rounded = [master for master in masters if master.untyped_storage().data_ptr() not in own]
        moments = [x for state in self.optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
        device = self.ranks.device
        return {"weights": bytes_of(weights, device), "optimizer": bytes_of([*moments, *rounded], device)}

    def _total(self, sums: dict[str, Tensor]) -> dict[str, float]:
        """Of all ranks, in one all-reduce. What a vector has of each layer gets a name of its own."""
        names = sorted(sums)
        values = self.ranks.sum(torch.cat([sums[name].reshape(-1).to(self.ranks.device) for name in names])).tolist()
        total: dict[str, float] = {}
        for name in names:
            own, values = values[: sums[name].numel()], values[sums[name].numel() :]
            if sums[name].dim() == 0:
                total[name] = own[0]
                continue
            place = name.removesuffix("layers")
            total |= {f"{place}layer_{layer}": value for layer, value in enumerate(own) if not math.isnan(value)}
        return total

    def _mean_scored(self, micro_batches: Sequence[Batch]) -> float:
        """Scored tokens a micro-batch of this step, mean over all ranks."""
        model: Any = self.module
        device = self.ranks.device if self._shared else torch.device("cpu")  # where the ranks that share count together
        tokens = (batch.tokens.to(device) for batch in micro_batches)
        own = sum(int(model.count_scored(each, **self._shared)) for each in tokens)
        total = self.ranks.sum(torch.tensor(own, dtype=torch.float64, device=self.ranks.device)).item()
        return total / (len(micro_batches) * self.ranks.world_size) or 1.0

    @abstractmethod
    def evaluate(self, tokens: Tensor, draws: Any, *padding: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The model's objective and statistics without gradients. Every rank calls it equally often.

        padding: for the model, where it says more than the tokens, such as that they are a part of shared sequences.
        """

    @abstractmethod
    def _forward(self, tokens: Tensor, draws: Any, divisor: float | None) -> tuple[Tensor, dict[str, Tensor]]:
        """A micro-batch's objective and statistics. divisor: of its sum of nats, or None for its own scored tokens."""

    @abstractmethod
    def _backward(self, objective: Tensor, micro_batches: int, last: bool, spoilt: bool) -> None:
        """Add the gradient of one of `micro_batches`, which are averaged. `spoilt`: make the step's gradient not
        finite, if that is what it takes to have the step not applied."""

    @abstractmethod
    def _update(self, wanted: bool) -> tuple[float, bool]:
        """Apply the accumulated gradient, if it is finite and `wanted`: (gradient norm, whether it was applied)."""

    @abstractmethod
    def _state(self) -> Iterator[Fragment]:
        """What this rank holds: pieces of fp32 weights and of the optimizer's state, those of one home together."""

    @abstractmethod
    def _state_owners(self) -> Iterator[Tensor]:
        """The tensors that the optimizer updates, each while it is in memory."""

    def fragments(self) -> list[Fragment]:
        """What this rank must save: over all ranks, every number exactly once."""
        buffers = [
            Fragment.of("weight", name, tuple(buffer.shape), 0, buffer.view(-1))
            for name, buffer in persistent_buffers(self.module).items()
            if self.ranks.rank == 0  # whole and the same on every rank
        ]
        if not self.replicated:
            return [*self._state(), *buffers]
        turns = {name: i % self.ranks.world_size for i, name in enumerate(self._shapes)}
        return [fragment for fragment in self._state() if turns[fragment.name] == self.ranks.rank] + buffers

    def steps_done(self) -> int:
        """Optimizer updates applied so far; a skipped step is none."""
        return steps_done(self.optimizer)

    def load(self, checkpoint: Checkpoint) -> None:
        """Fill fp32 weights and optimizer state, whatever number of ranks and ZeRO stage wrote them."""
        if checkpoint.optimizer_steps:
            for weight in self._state_owners():
                create_state(self.optimizer, weight)
            set_steps_done(self.optimizer, checkpoint.optimizer_steps)
        for fragment in present(self._state(), changing=True):
            fragment.write(checkpoint.read(fragment.kind, fragment.name, fragment.start, fragment.numel))

    def close(self) -> None:  # noqa: B027  (plain torch holds nothing)
        """Let go of what the engine holds outside the model."""


def build_engine(
    model: nn.Module, config: RunSettings, make_draws: MakeDraws, ranks: Ranks, checkpoint: Checkpoint | None = None
) -> Engine:
    """The engine that `config.run.engine` names, with `model`'s weights or with those of `checkpoint`.

    Raises ConfigError where the settings do not go together, CheckpointError where the checkpoint is of another model.
    """
    model.to(ranks.device)
    if checkpoint is not None:
        load_weights(model, checkpoint)  # before the engine makes its low-precision and partitioned copies
    kind = TorchEngine if config.run.engine == "torch" else DeepSpeedEngine
    engine = kind(model, config, make_draws, ranks)
    if checkpoint is not None:
        engine.load(checkpoint)
    return engine


def _whole(masters: dict[str, Tensor], optimizer: torch.optim.Optimizer) -> Iterator[Fragment]:
    """Fragments of weights that are not cut: name -> fp32 weight that the optimizer updates."""
    for name, weight in masters.items():
        for kind, tensor in {"weight": weight, **state_tensors(optimizer.state.get(weight, {}))}.items():
            yield Fragment.of(kind, name, tuple(tensor.shape), 0, tensor.detach().view(-1))


class TorchEngine(Engine):
    """Plain torch in one process. In bf16 the model is a rounded copy of fp32 weights, as under DeepSpeed."""

    def __init__(self, model: nn.Module, config: RunSettings, make_draws: MakeDraws, ranks: Ranks):
        super().__init__(model, config, make_draws, ranks)
        self._masters: dict[str, Tensor] = dict(self._trained)
        self._rounded = config.training.precision == "bf16"
        if self._rounded:
            self._masters = {name: p.detach().clone() for name, p in self._masters.items()}
            for p in model.parameters():
                p.data = p.data.bfloat16()
        self.optimizer = build_optimizer(self._masters.values(), config.optimizer)

    def evaluate(self, tokens: Tensor, draws: Any, *padding: Any) -> tuple[Tensor, dict[str, Tensor]]:
        with torch.no_grad():
            return self.module(tokens, draws, *padding)

    def _forward(self, tokens: Tensor, draws: Any, divisor: float | None) -> tuple[Tensor, dict[str, Tensor]]:
        return self.module(tokens, draws, **_given(divisor), **self._shared)

    def _backward(self, objective: Tensor, micro_batches: int, last: bool, spoilt: bool) -> None:
        (objective / micro_batches).backward()
        if self._rounded:  # accumulate in fp32
            for name, p in self._trained.items():
                if p.grad is not None:
                    master, grad = self._masters[name], p.grad.float()
                    master.grad = grad if master.grad is None else master.grad + grad
                    p.grad = None

    def _update(self, wanted: bool) -> tuple[float, bool]:
        masters = self._masters.values()
        norm = torch.nn.utils.get_total_norm([p.grad for p in masters if p.grad is not None])
        applied = wanted and math.isfinite(norm)
        if applied:
            if self._clipping > 0:
                torch.nn.utils.clip_grads_with_norm_(masters, self._clipping, norm)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._round()
        return norm.item(), applied

    @torch.no_grad()
    def _round(self) -> None:
        if self._rounded:
            for name, p in self._trained.items():
                p.copy_(self._masters[name])

    def _state(self) -> Iterator[Fragment]:
        return _whole(self._masters, self.optimizer)

    def _state_owners(self) -> Iterator[Tensor]:
        yield from self._masters.values()


class DeepSpeedEngine(Engine):
    """ZeRO stage 0 to 3 on any number of ranks, optimizer and weights on the device, in CPU memory or on a disk."""

    def __init__(self, model: nn.Module, config: RunSettings, make_draws: MakeDraws, ranks: Ranks):
        super().__init__(model, config, make_draws, ranks)
        zero = config.deepspeed.get("zero_optimization", {})
        self._stage = int(zero.get("stage", 0))
        self._rounded = config.training.precision == "bf16"
        deepspeed = _import_deepspeed(ranks)
        self._check(config)
        self.replicated = self._stage == 0
        self._names = {id(p): name for name, p in self._trained.items()}
        self.optimizer = build_optimizer(self._trained.values(), config.optimizer)
        if ranks.world_size > 1:
            self._exposed = Exposed(ranks.device, self._trained.values(), self.optimizer)
        self._swap = Swap(zero, model, ranks)
        section = config.deepspeed | ({"zero_optimization": self._swap.section()} if zero else {})
        settings = _deepspeed_config(config, section, self._stage, ranks)
        self._engine = deepspeed.initialize(model=model, optimizer=self.optimizer, config=settings)[0]
        self._swap.attach(self._engine.optimizer)
        self.optimizer.state.clear()  # ZeRO 0 in bf16 made one with a step of zeros, which would count as an update

    def _check(self, config: RunSettings) -> None:
        if config.optimizer.name == "adafactor" and (self._stage > 0 or self._rounded):
            problem = "adafactor needs each weight's own shape, and ZeRO hands the optimizer flat pieces"
            mend = 'Use "adamw", or fp32 with deepspeed.zero_optimization.stage 0, or run.engine="torch"'
            raise ConfigError("optimizer.name", problem, mend)
        swapped = swapped_sections(config.deepspeed.get("zero_optimization", {}))
        if "offload_param" in swapped and not self._rounded and self.ranks.device.type == "cpu":
            # _set_dtype reads `dtype or float16 if fp16 is supported else bfloat16` (0.19.8): bf16, whatever the dtype
            problem = '"fp32" with offload_param.device "nvme" on the CPU: DeepSpeed would swap bf16 there'
            raise ConfigError("training.precision", problem, 'Use "bf16", or a GPU, or offload_param.device "cpu"')
        if swapped:
            _check_async_io(f"deepspeed.zero_optimization.{swapped[0]}.device")

    def evaluate(self, tokens: Tensor, draws: Any, *padding: Any) -> tuple[Tensor, dict[str, Tensor]]:
        with torch.no_grad():
            return self._engine(tokens, draws, *padding)

    def _forward(self, tokens: Tensor, draws: Any, divisor: float | None) -> tuple[Tensor, dict[str, Tensor]]:
        return self._engine(tokens, draws, **_given(divisor), **self._shared)

    def _backward(self, objective: Tensor, micro_batches: int, last: bool, spoilt: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed leaves a step out if its gradient is not finite, and then on every rank
        self._engine.backward(objective * torch.nan if spoilt else objective)

    def _update(self, wanted: bool) -> tuple[float, bool]:
        if self._stage == 0 and not self._rounded:  # here DeepSpeed would apply a gradient of NaN
            gradients = [p.grad for p in self._trained.values() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients).item()
            if not (wanted and math.isfinite(norm)):
                self._engine.zero_grad()
                return norm, False
            self._engine.step()
            return norm, True
        self._swap.verify()
        self._engine.step()
        self._swap.verify()
        return float(self._engine.get_global_grad_norm()), bool(self._engine.was_step_applied())

    def _gradients(self) -> Iterable[Tensor]:
        averaged = getattr(self._engine.optimizer, "averaged_gradients", {})  # ZeRO's own, this rank's part
        own = (gradient for group in averaged.values() for gradient in group or ())
        return itertools.chain((p.grad for p in self._trained.values() if p.grad is not None), own)

    def _weights(self) -> Iterable[Tensor]:
        whole = super()._weights()
        return whole if self._stage < 3 else (getattr(weight, "ds_tensor", weight) for weight in whole)

    def _masters_here(self) -> Iterable[Tensor]:
        return super()._masters_here() if self._stage < 3 else self._engine.optimizer.fp32_partitioned_groups_flat

    def _state(self) -> Iterator[Fragment]:
        if self._stage == 0:
            return _whole(self._masters(), self.optimizer)
        return self._partitioned() if self._stage == 3 else self._flattened()

    def _state_owners(self) -> Iterator[Tensor]:
        if self._stage < 3:
            yield from (weight for group in self.optimizer.param_groups for weight in group["params"])
            return
        for number, flat in enumerate(self._engine.optimizer.fp32_partitioned_groups_flat):
            with self._home(number).present(changing=True):
                yield flat

    def _home(self, number: int) -> Home:
        """Of the vector that ZeRO 3 makes of sub-group `number`."""
        zero = self._engine.optimizer
        return SubGroup(zero, number) if zero._swappable_optimizer_subgroup(number) else MEMORY

    def _masters(self) -> dict[str, Tensor]:
        """ZeRO 0: parameter name -> fp32 weight."""
        if not self._rounded:
            return dict(self._trained)
        wrapper = self._engine.optimizer
        groups = zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True)
        return {self._names[id(p)]: master for pair in groups for p, master in zip(*pair, strict=True)}

    def _flattened(self) -> Iterator[Fragment]:
        """ZeRO 1 and 2: a parameter group is one vector, of which each rank updates a slice."""
        p: Any
        for p in self._trained.values():
            mapping = p._hp_mapping
            if mapping is None:  # all of it is in another rank's slice
                continue
            flat = self.optimizer.param_groups[mapping.param_group_index]["params"][0]
            here, name = mapping.hp_fragment_address, self._names[id(p)]
            for kind, tensor in {"weight": flat, **state_tensors(self.optimizer.state.get(flat, {}))}.items():
                piece = tensor.detach().narrow(0, here.start, here.numel)
                yield Fragment.of(kind, name, self._shapes[name], mapping.lp_fragment_address.start, piece)

    def _partitioned(self) -> Iterator[Fragment]:
        """ZeRO 3: each parameter is cut evenly among the ranks, the last piece padded. The pieces of a sub-group are
        one vector."""
        zero = self._engine.optimizer
        p: Any
        for number, group in enumerate(zero.fp16_groups):
            flat, home = zero.fp32_partitioned_groups_flat[number], self._home(number)
            for p in group:
                name, size = self._names[id(p)], p.ds_tensor.ds_numel
                start = self.ranks.rank * size
                numel = min(size, p.ds_numel - start)
                if numel <= 0:
                    continue
                offset = zero.grad_position[zero.get_param_id(p)][1]
                for kind, tensor in {"weight": flat, **state_tensors(self.optimizer.state.get(flat, {}))}.items():
                    yield Fragment(kind, name, self._shapes[name], start, numel, tensor, offset, home)

    def close(self) -> None:
        self._engine.destroy()
        self._swap.close()


def _given(divisor: float | None) -> dict[str, float]:
    return {} if divisor is None else {"divisor": divisor}


def _import_deepspeed(ranks: Ranks) -> Any:
    # DeepSpeed calls collectives by names that torch will rename: nothing a user can act on
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    import deepspeed
    from deepspeed.accelerator import get_accelerator, set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    if ranks.device.type == "cpu" and get_accelerator().device_name() != "cpu":
        set_accelerator(CPU_Accelerator())
    # A C++ all-reduce that only inference uses. It would take g++, minutes of compiling, and 69 MB of /dev/shm a rank.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def _check_async_io(key: str) -> None:
    """What swaps to a disk is compiled where it is first used: say before that what is missing."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if shutil.which("c++") is None:
        problem = '"nvme" compiles DeepSpeed\'s async_io, and there is no c++'
        raise ConfigError(key, problem, "Install Debian's g++ on every node (apt-get install g++)")
    if not AsyncIOBuilder().is_compatible(verbose=False):
        problem = '"nvme" needs libaio, which the linker does not find'
        raise ConfigError(key, problem, "Install Debian's libaio-dev on every node (apt-get install libaio-dev)")


def _deepspeed_config(config: RunSettings, section: dict[str, Any], stage: int, ranks: Ranks) -> dict[str, Any]:
    """DeepSpeed's configuration: the user's `section`, and what our own sections decide."""
    training = config.training
    share = training.micro_batch * ranks.data_ranks
    check_shares(training.global_batch, training.micro_batch, ranks.world_size, ranks.sequence_size)
    generated: dict[str, Any] = {
        "train_batch_size": training.global_batch * ranks.sequence_size,  # as if each had sequences of its own
        "train_micro_batch_size_per_gpu": training.micro_batch,
        "gradient_accumulation_steps": training.global_batch // share,
        "gradient_clipping": training.gradient_clipping,
        "bf16": {"enabled": training.precision == "bf16"},
        "zero_force_ds_cpu_optimizer": False,  # torch's fused AdamW serves the CPU too, with the same numbers
    }
    if training.precision == "bf16" and stage > 0:  # ZeRO 0 accumulates in bf16 only
        generated["data_types"] = {"grad_accum_dtype": "fp32"}
    return {**section, **generated}
