"""Sizes and locations of weights, gradients and optimizer state under ZeRO (Rajbhandari et al. 2019), and the check
that a run fits.

N trained weights, n ranks that partition the states, s bytes per weight (2 in bf16, else 4). Frozen weights are
additional.

    stage   weights   fp32 weights, moments   gradients read by the optimizer
    0       s·N       4·N in bf16, 8·N        4·N
    1       s·N       (4 + 8)·N/n             4·N in bf16, else 4·N/n
    2       s·N       (4 + 8)·N/n             4·N/n
    3       s·N/n     (4 + 8)·N/n             4·N/n, and gathered weights of the current layers
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megasparse.config.deepspeed_section import overlaps_communication
from megasparse.errors import UserError
from megasparse.training.ranks import Ranks

LIVE_PARAMETERS = 10**9
"""DeepSpeed's default of stage3_max_live_parameters."""
BUCKET = 5 * 10**8
"""DeepSpeed's default of reduce_bucket_size, the size of a separate buffer."""
ERROR = 0.15
"""Fraction by which a prediction may be too high: a run that fits within it gets only a warning."""


@dataclass(frozen=True)
class Zero:
    """The ZeRO settings of a configuration; stage 0 on plain torch."""

    stage: int = 0
    optimizer_offload: bool = False
    weight_offload: bool = False
    bucket: int = BUCKET
    overlap: bool = False
    live: int = LIVE_PARAMETERS

    @staticmethod
    def of(zero: dict[str, Any], several_gpus: bool) -> "Zero":
        weights, optimizer = (
            (zero.get(f"offload_{kind}") or {}).get("device", "none") != "none" for kind in ("param", "optimizer")
        )
        return Zero(
            int(zero.get("stage", 0)),
            optimizer or weights,
            weights,
            int(zero.get("reduce_bucket_size", BUCKET)),
            overlaps_communication(zero, several_gpus),
            int(zero.get("stage3_max_live_parameters", LIVE_PARAMETERS)),
        )


@dataclass(frozen=True)
class States:
    """Weights of a run. largest, frozen_largest: numbers of the largest weight. moments: bytes of the optimizer's state
    that ZeRO divides among ranks; factors: of the rest. rounded: True if the model's weights are bf16. scratch: bytes
    of its update.
    """

    trained: int
    frozen: int
    largest: int
    moments: int
    rounded: bool
    scratch: int = 0
    factors: int = 0
    frozen_bytes: int = 0
    frozen_largest: int = 0

    @property
    def size(self) -> int:
        return 2 if self.rounded else 4


@dataclass(frozen=True)
class Memory:
    """Kind -> bytes per rank: on its device, and in its share of CPU memory."""

    device: dict[str, int]
    host: dict[str, int] = field(default_factory=dict)


def building(states: States, zero: Zero, ranks: int) -> tuple[int, int]:
    """Return the peak bytes of a rank's device and of its share of CPU memory while the model and engine are built.

    Below ZeRO 3 the device stores all trained weights in fp32; frozen weights are rounded or quantised one at a time.
    Under ZeRO 3 they are rounded in CPU memory, and the device stores this rank's partition and one complete weight.
    Then DeepSpeed allocates fp32 weights and gradients, but not moments; with offloading it allocates gradients twice.
    """
    frozen = states.frozen_bytes + 4 * states.frozen_largest
    if zero.stage < 3:
        return 4 * states.trained + frozen, 4 * max(states.largest, states.frozen_largest)
    pieces = (states.trained + states.frozen) * states.size // ranks
    masters = gradients = 4 * states.trained // ranks
    device = states.size * (states.largest + zero.bucket)
    host = 0
    if not zero.weight_offload:
        device += pieces
        host = pieces  # copied into one vector via the CPU
    if not zero.optimizer_offload:
        device += masters + gradients
    offloaded = (pieces if zero.weight_offload else 0) + (masters + 2 * gradients if zero.optimizer_offload else 0)
    return device, max(offloaded, host + 4 * states.largest // ranks, frozen)


def memory(states: States, zero: Zero, ranks: int, *, passing: int, again: int, accumulated: bool) -> Memory:
    """Return the memory at the peak of a step on each of `ranks` ranks. passing, again: peak bytes of the pass of a
    micro-batch, with gradients and without. accumulated: True if a step consists of several micro-batches.
    """
    number, shared = states.trained, ranks if zero.stage > 0 else 1
    has_masters, offloads = states.rounded or zero.stage > 0, zero.optimizer_offload
    # fp32 weights if the model's are rounded, or flat partitions of them, and moments.
    masters, moments = (4 * number // shared if has_masters else 0), states.moments // shared + states.factors
    # In bf16 under stage 1 each rank stores the fp32 gradients of all weights, not only of its partition.
    every_gradient = states.rounded and zero.stage == 1 and not offloads
    full, whole = (4 * number if every_gradient else 4 * number // shared), number * states.size
    if zero.stage >= 2:  # each gradient is copied to the bucket at once and reduced to its owner's rank
        whole = states.largest * states.size
        passing = min(passing, again + whole)
    if has_masters:
        # After each micro-batch, gradients are converted to fp32 weight by weight. If the fp32 gradients are persistent
        # vectors, they exist during every pass.
        lasting = every_gradient or zero.stage == 3
        persistent = full if (accumulated or lasting) and not offloads else 0
        update = full + (whole if zero.stage > 0 else 8 * min(states.largest, number))
        step = max(persistent + passing, 0 if offloads else max(update, full + states.scratch))
    else:
        step = max(passing, whole + again if accumulated else 0, whole + states.scratch)
    gradients = min(step, max(whole, full if has_masters and not offloads else 0))
    buffers = 0
    if zero.stage > 0:
        buffers = zero.bucket * states.size * (2 if zero.overlap and zero.stage < 3 else 1)
    weights = (number * states.size + states.frozen_bytes) // (shared if zero.stage == 3 else 1)
    device = {
        "weights": 0 if zero.weight_offload else weights,
        "gathered weights": min(number + states.frozen, zero.live) * states.size if zero.stage == 3 else 0,
        **({} if offloads else {"fp32 weights": masters, "optimizer": moments}),
        "gradients": gradients,
        "activations": step - gradients,
        "ZeRO's buffers": buffers,
    }
    host = {"offloaded weights": weights} if zero.weight_offload else {}
    if offloads:
        host |= {"offloaded optimizer": masters + moments, "offloaded gradients": full}
    return Memory(device, host)


@dataclass(frozen=True)
class MemoryPool:
    """One kind of memory: peak use of a run in bytes by kind, and available bytes."""

    name: str
    parts: dict[str, int]
    available: int

    @property
    def peak(self) -> int:
        return sum(self.parts.values())


def require_fit(pools: Sequence[MemoryPool], ranks: Ranks, hint: str) -> None:
    """Raise UserError on all ranks if a step does not fit on one. Print a warning if it is close to the limit."""
    pool = max(pools, key=lambda pool: pool.peak / max(1, pool.available))
    too_large = ranks.any(pool.peak * (1 - ERROR) > pool.available)
    if pool.peak <= pool.available:
        if too_large:
            raise UserError("this run cannot fit on another rank; see the message of that rank for the reason")
        return
    problem = f"a step needs about {gigabytes(pool.peak)} of {pool.name}, {gigabytes(pool.available)} are available"
    if too_large:
        raise UserError(f"this run cannot fit: {problem}. {hint}")
    ranks.say(f"this run may not fit: {problem}. {hint}")


def gigabytes(size: float) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 1e7 else f"{size / 1e6:,.3f} MB"
