"""Plan of a pretraining run on a number of GPUs before it runs: memory, traffic, FLOPs, time and cost.

Assumed, and printed with every plan: the model FLOPs utilisation of computing alone; bandwidths (planning/hardware.py);
that ZeRO's communication and the swap to the CPU go on while the device computes, and that all-to-alls do not. The
optimizer's arithmetic on the CPU is not in the time. Beside that time stands another one, of counted work
(`Plan.time`), which assumes no utilisation of the whole.
"""

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property

from megasparse.attention.heads import head_dim, ranks_with_the_same_heads
from megasparse.config.messages import show
from megasparse.config.schema import Config
from megasparse.errors import ConfigError
from megasparse.planning.flops import hardware_flops_per_token, mechanisms_of, model_flops_per_token
from megasparse.planning.hardware import Hardware
from megasparse.planning.pass_memory import PassMemory, Path
from megasparse.planning.states import Memory, Zero, building, memory
from megasparse.planning.step_time import StepTime, bytes_a_token, step_time
from megasparse.planning.traffic import Cluster, Communication, Offload, communication, offload

RESERVE = 1 << 30
"""Bytes of a GPU assumed for the CUDA context, cuBLAS and NCCL."""
MFU = 0.3
"""Model FLOPs utilisation of computing alone, where none is given: an assumption, not a measurement."""


@dataclass(frozen=True)
class Assumptions:
    """Assumptions of a plan. available: bytes of a GPU, or None where nothing has to fit. price: of a GPU and hour, or
    None. path: how memory is found, see `PassMemory`.
    """

    gpu: Hardware
    gpus: int = 1
    per_node: int = 8
    available: int | None = None
    mfu: float = MFU
    price: float | None = None
    path: Path = "counted"


class Plan:
    """The plan of a configuration. Raises ConfigError where GPUs divide not the batch, the sequence or the nodes."""

    def __init__(self, config: Config, on: Assumptions, passes: PassMemory | None = None):
        """Plan a configuration on assumed hardware. passes: of the same model, precision and length, if at hand."""
        self.config, self.on = config, on
        self.micro_batches = _micro_batches(config, on)
        self.zero = Zero.of(config.run.engine, config.deepspeed, on.gpus > 1 and on.path == "counted")
        self.cluster = Cluster(on.gpus, on.per_node, config.parallel.sequence)
        self.passes = passes or PassMemory(config, on.path)

    @cached_property
    def memory(self) -> Memory:
        """Memory of a rank at the peak of a step."""
        return self._memory(self.config.data.sequence_length)

    def at_length(self, length: int) -> int:
        """The peak with sequences of another length, all else the same, or what the start takes if that is more."""
        return max(self._sum(self._memory(length)), self.starting)

    def _memory(self, length: int) -> Memory:
        model, training, sequence = self.config.model, self.config.training, self.config.parallel.sequence
        curve, part = self.passes.curve.shared_among(sequence, self.copies), length / sequence
        states, on_gpu = self.passes.states, self.on.path == "counted"
        found = memory(
            states,
            self.zero,
            self.on.gpus,
            passing=curve.bytes(training.micro_batch, part),
            again=curve.bytes(training.micro_batch, part, gradients=0),
            accumulated=self.micro_batches > 1,
            on_gpu=on_gpu,
        )
        tokens = training.micro_batch * part
        if sequence > 1:  # q, k, v and out, once more as they are sent
            found.device["all-to-all"] = int(4 * tokens * model.heads * head_dim(model) * states.size * self.copies)
        if on_gpu:
            found.device["CUDA context, libraries (assumed)"] = RESERVE
            if model.activations == "checkpoint_cpu":
                found.host["offloaded activations"] = int(tokens * model.layers * model.d_model * 4)
        return found

    @cached_property
    def copies(self) -> int:
        """The most ranks that have the same heads, of all mechanisms."""
        model, ranks = self.config.model, self.config.parallel.sequence
        return max(ranks_with_the_same_heads(each, model, ranks) for each in mechanisms_of(model))

    def _sum(self, found: Memory) -> int:
        return sum((found.device | ({} if self.on.path == "counted" else found.host)).values())

    @property
    def peak(self) -> int:
        """Bytes of a GPU; of a measured path all bytes of the process, what is offloaded included."""
        return self._sum(self.memory)

    @property
    def starting(self) -> int:
        """Bytes of a GPU at the most before the first step. 0 of a measured path."""
        return RESERVE + self.building()[0] if self.on.path == "counted" else 0

    def building(self, on_gpu: bool = True) -> tuple[int, int]:
        """Bytes of a GPU, without the reserve, and of a rank's CPU memory while its model is built. Frozen weights are
        read whole before they are rounded.
        """
        device, host = building(self.passes.states, self.zero, self.on.gpus, on_gpu)
        return device, max(host, 4 * self.passes.states.frozen)

    @property
    def fits(self) -> bool:
        return self.on.available is None or max(self.peak, self.starting) <= self.on.available

    @cached_property
    def activations(self) -> dict[str, int]:
        """The most bytes of a pass, beside gradients, while each part of the model is at work."""
        sequence = self.config.parallel.sequence
        curve = self.passes.curve.shared_among(sequence, self.copies)
        length = self.config.data.sequence_length / sequence
        return curve.by_part(self.config.training.micro_batch, length, _part)

    @property
    def tokens(self) -> int:
        """Number of tokens of a step, over all ranks."""
        return self.config.training.global_batch * self.config.data.sequence_length

    @cached_property
    def model_flops(self) -> float:
        """Model FLOPs of a step, over all ranks."""
        return self.tokens * model_flops_per_token(self.config.model, self.config.data.sequence_length)

    @cached_property
    def hardware_flops(self) -> float:
        length, ranks = self.config.data.sequence_length, self.config.parallel.sequence
        return self.tokens * hardware_flops_per_token(self.config.model, length, ranks)

    @property
    def compute_seconds(self) -> float:
        """Seconds to compute a step at the assumed utilisation, waiting for nothing. What ranks with the same heads
        repeat takes its time, and is no use.
        """
        seconds = self.model_flops / (self.on.mfu * self.on.gpu.peak * self.on.gpus)
        if self.copies == 1:
            return seconds
        alone = self.tokens * hardware_flops_per_token(self.config.model, self.config.data.sequence_length)
        return seconds * self.hardware_flops / alone

    @cached_property
    def communication(self) -> Communication:
        return communication(self.config, self.passes.states, self.zero, self.cluster, self.micro_batches, self.on.gpu)

    @cached_property
    def offload(self) -> Offload:
        return offload(self.passes.states, self.zero, self.cluster, self.micro_batches, self.on.gpu)

    @property
    def step_seconds(self) -> float:
        found = self.communication
        return max(self.compute_seconds, found.zero_seconds, self.offload.seconds) + found.sequence_seconds

    @cached_property
    def time(self) -> StepTime:
        """Seconds that a rank computes in a step, by part: counted work at the speed of its arithmetic or memory.
        Raises ConfigError for an encoder–decoder, and for a mechanism that does not count its FLOPs.
        """
        states, moved = self.passes.states, self.moved
        return step_time(self.config, moved, states, self.zero, self.cluster, self.micro_batches, self.on.gpu)

    @cached_property
    def moved(self) -> dict[str, float]:
        """Bytes that each token moves, see `bytes_a_token`."""
        return bytes_a_token(self.config)

    @property
    def counted_seconds(self) -> float:
        """Seconds of a step by these parts, in place of an assumed utilisation; the optimizer hides nothing."""
        found = self.communication
        passes = max(self.time.passes, found.zero_seconds, self.offload.seconds)
        return passes + found.sequence_seconds + self.time.optimizer

    @property
    def exposed(self) -> float:
        """The share of `counted_seconds` in which a rank waits for communication or swap."""
        return 1 - self.time.total / self.counted_seconds

    @property
    def run_seconds(self) -> float:
        return self.step_seconds * self.config.training.steps

    @property
    def cost(self) -> float | None:
        return None if self.on.price is None else self.on.price * self.on.gpus * self.run_seconds / 3600

    def hides_from(self, seconds: float) -> int | None:
        """The shortest sequence that takes a step so many seconds of computing; None where no possible one does."""
        model = self.config.model
        before = model.source.length if model.source else 0
        scale = self.config.training.global_batch / (self.on.mfu * self.on.gpu.peak * self.on.gpus)

        def takes(length: int) -> float:
            return scale * length * model_flops_per_token(model, length)

        lengths = range(before + 1, before + model.max_length + 1)
        shortest = bisect_left(lengths, True, key=lambda length: takes(length) >= seconds)
        return lengths[shortest] if shortest < len(lengths) else None


def _part(weight: str) -> str:
    """The part of the model that a weight belongs to, by its name."""
    for word, part in (
        ("attention", "attention"),
        ("feed_forward", "feed-forward"),
        ("head.", "forward, output, loss"),
    ):
        if word in weight:
            return part
    return "embedding"


def _micro_batches(config: Config, on: Assumptions) -> int:
    """Number of micro-batches of a rank in a step."""
    training, sequence = config.training, config.parallel.sequence
    if on.gpus > on.per_node and on.gpus % on.per_node:
        hint = "Give a multiple of it, or another --gpus-per-node"
        raise ConfigError("--gpus", f"{on.gpus} is no multiple of --gpus-per-node = {on.per_node}", hint)
    if on.gpus % sequence:
        problem = f"{on.gpus} is no multiple of parallel.sequence = {sequence}"
        raise ConfigError("--gpus", problem, "Give a multiple of it, or change parallel.sequence")
    share = training.micro_batch * (on.gpus // sequence)
    if training.global_batch % share:
        problem = f"{show(on.gpus)} GPUs take {share} sequences at once, and training.global_batch = "
        problem += f"{training.global_batch} is no multiple of that"
        most = training.global_batch // training.micro_batch * sequence
        hint = f"At most {most} GPUs have work in a step; raise training.global_batch or parallel.sequence for more"
        raise ConfigError("--gpus", problem, hint)
    return training.global_batch // share
