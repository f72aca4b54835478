"""Seconds that a rank computes in a step, by part: a roofline of counted work.

    attention       the longer of its FLOPs and of the bytes that its kernels move
    hashing         FLOPs of the codes, in fp32 outside of the tensor cores
    projections, feed-forward, head     their FLOPs
    elementwise     the bytes of all other operations: norms, sums, rotations, activations, losses
    optimizer       30 bytes a weight of AdamW: gradient, fp32 weight and moments read, weights and moments written

FLOPs are counted by formula, with what the backward computes again (planning/flops.py), and run at the share of the
peak that the hardware states (`reach`). Bytes are counted on the meta device (planning/launches.py), and move at
STREAMED of the memory's bandwidth, those of an offloaded optimizer at that of the CPU's. Parts follow one another.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from megasparse.attention.heads import ranks_with_the_same_heads
from megasparse.config.schema import Config
from megasparse.errors import ConfigError
from megasparse.planning.flops import hardware_flops_by_part, mechanisms_of
from megasparse.planning.hardware import Hardware
from megasparse.planning.launches import count_step, total
from megasparse.planning.planner import with_changes
from megasparse.planning.states import States, Zero
from megasparse.planning.traffic import Cluster

STREAMED = 0.8
"""Share of a memory's bandwidth that operations which stream through it are assumed to reach."""
OPTIMIZER_BYTES = 30
"""AdamW, a weight: fp32 gradient, weight and two moments read, these three and the bf16 weight written."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a rank and step."""

    attention: float
    hashing: float
    projections: float
    feed_forward: float
    head: float
    elementwise: float
    optimizer: float

    @property
    def passes(self) -> float:
        """What communication and swap can hide behind."""
        return self.total - self.optimizer

    @property
    def total(self) -> float:
        return sum(getattr(self, part.name) for part in fields(self))


def step_time(
    config: Config, moved: Mapping[str, float], states: States, zero: Zero, cluster: Cluster, micro_batches: int,
    gpu: Hardware,
) -> StepTime:  # fmt: skip
    """moved: as `bytes_a_token` has it. Raises ConfigError for a mechanism that does not count its FLOPs."""
    length = config.data.sequence_length
    tokens = micro_batches * config.training.micro_batch * length / config.parallel.sequence
    speed, bandwidth = gpu.peak * gpu.reach, gpu.bandwidth * STREAMED
    by_part = hardware_flops_by_part(config.model, length, config.parallel.sequence)
    seconds = {name: tokens * n / speed for name, n in by_part.items()}
    own = states.trained / (cluster.gpus if zero.stage > 0 else 1)
    update = bandwidth if zero.optimizer == "none" else gpu.host * STREAMED / cluster.local
    return StepTime(
        max(seconds["attention"], tokens * moved["attention"] * _repeated(config, states.size) / bandwidth),
        seconds["hashing"] * gpu.peak / gpu.single,
        seconds["projections"],
        seconds["feed-forward"],
        seconds["head"],
        tokens * moved["elementwise"] / bandwidth,
        OPTIMIZER_BYTES * own / update,
    )


def _repeated(config: Config, size: int) -> float:
    """How many times the bytes of attention move where ranks have the same heads: those of the softmax once, if they
    share out its pairs, by the formulas of the mechanisms' operators. size: bytes of a number.
    """
    once = all_ = 0.0
    for mechanism in mechanisms_of(config.model):
        copies = ranks_with_the_same_heads(mechanism, config.model, config.parallel.sequence)
        found = mechanism.operators(config.data.sequence_length, size) or {}
        moved = {name: work.moved.both for name, work in found.items()} or {"": mechanism.traffic(size).row}
        divided = sum(moved.get(name, 0.0) for name in ("attention", "window")) if mechanism.shares_pairs else 0.0
        once += sum(moved.values())
        all_ += divided + copies * (sum(moved.values()) - divided)
    return all_ / once


def bytes_a_token(config: Config) -> dict[str, float]:
    """Bytes moved by attention and by what is elementwise, both passes, by each token of a rank's micro-batch.

    Counted in passes of one and of two periods of the pattern, and of what is left of it, over two and four tiles of
    the size that they have in the run, and continued to the run's depth and length by lines. Raises ConfigError for an
    encoder–decoder.
    """
    model = config.model
    if model.source is not None:
        raise ConfigError("model.kind", '"encoder_decoder" has no seconds by part', "Plan its two stacks one by one")
    length, period = config.data.sequence_length // config.parallel.sequence, len(model.attention.pattern)
    tiles = [number for number in (model.feed_forward_tiles, model.loss_tiles) if number > 1]
    few = min(tiles, default=4)
    shares = [2 / few, 4 / few] if few > 4 else [1.0]  # work in tiles begins with two of them
    rest = model.layers % period
    depths = [period + rest, 2 * period + rest] if model.layers > 2 * period + rest else [model.layers]
    found: dict[str, float] = {}
    counted = [[_bytes(config, layers, length, share) for share in shares] for layers in depths]
    for work in ("attention", "elementwise"):
        by_depth = [_line(shares, [each[work] for each in row], 1.0) for row in counted]
        found[work] = _line(depths, by_depth, model.layers) / (length * config.training.micro_batch)
    return found


def _bytes(config: Config, layers: int, length: int, share: float) -> dict[str, float]:
    """Bytes by kind of work of one micro-batch of so many layers, of this share of a rank's tokens, in tiles as large
    as the run's."""
    model = config.model
    tiles = {key: max(1, round(getattr(model, key) * share)) for key in ("feed_forward_tiles", "loss_tiles")}
    config = with_changes(config, "model", layers=layers, **tiles)
    config = with_changes(config, "data", sequence_length=max(1, round(length * share)))
    by_work = total(count_step(config)).by_work
    return {work: float(by_work.get(work, 0)) for work in ("attention", "elementwise")}


def _line(places: Sequence[float], values: Sequence[float], at: float) -> float:
    """The value of a line through two points; of one point its own."""
    if len(places) == 1:
        return values[0]
    (a, b), (low, high) = places, values
    return low + (high - low) * (at - a) / (b - a)
