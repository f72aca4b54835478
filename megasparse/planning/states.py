"""Locations and sizes of weights, gradients and optimizer state under ZeRO (Rajbhandari et al. 2019).

N trained weights, n ranks that share the states, s bytes of a weight (2 in bf16, else 4).

    stage   weights   fp32 weights, moments   gradients as the optimizer reads them
    0       s·N       4·N in bf16, 8·N        4·N
    1       s·N       (4 + 8)·N/n             4·N in bf16, else 4·N/n
    2       s·N       (4 + 8)·N/n             4·N/n
    3       s·N/n     (4 + 8)·N/n             4·N/n, and weights gathered for the layers at work
"""

from dataclasses import dataclass, field
from typing import Any

from megasparse.config.deepspeed_section import overlaps_communication

LIVE_PARAMETERS = 10**9
"""DeepSpeed's default of zero_optimization.stage3_max_live_parameters."""
BUCKET = 5 * 10**8
"""DeepSpeed's default of zero_optimization.reduce_bucket_size, which is a buffer of its own."""


@dataclass(frozen=True)
class Zero:
    """The ZeRO settings of a configuration; stage 0 on plain torch. Offload targets are "none", "cpu" or "nvme"."""

    stage: int = 0
    optimizer: str = "none"
    weights: str = "none"
    bucket: int = BUCKET
    overlap: bool = False
    live: int = LIVE_PARAMETERS

    @staticmethod
    def of(engine: str, section: dict[str, Any], several_gpus: bool) -> "Zero":
        """Read the ZeRO settings. engine: `run.engine`. section: its `deepspeed`."""
        zero = section.get("zero_optimization", {}) if engine == "deepspeed" else {}
        weights = (zero.get("offload_param") or {}).get("device", "none")
        optimizer = (zero.get("offload_optimizer") or {}).get("device", "none")
        if weights != "none" and optimizer == "none":
            optimizer = "cpu"
        return Zero(
            int(zero.get("stage", 0)),
            optimizer,
            weights,
            int(zero.get("reduce_bucket_size", BUCKET)),
            overlaps_communication(zero, several_gpus),
            int(zero.get("stage3_max_live_parameters", LIVE_PARAMETERS)),
        )


@dataclass(frozen=True)
class States:
    """The weights of a run. moments: bytes of the optimizer's state of all trained ones. scratch: of its update."""

    trained: int
    frozen: int
    largest: int
    """Number of elements of the largest trained weight."""
    moments: int
    rounded: bool
    """Whether weights are bf16 and the optimizer's fp32."""
    scratch: int = 0
    divided: bool = True
    """Whether ZeRO divides `moments` among ranks."""

    @property
    def size(self) -> int:
        return 2 if self.rounded else 4


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank by what they are: on its device, in its share of CPU memory, on its share of NVMe."""

    device: dict[str, int]
    host: dict[str, int] = field(default_factory=dict)
    nvme: dict[str, int] = field(default_factory=dict)


def building(states: States, zero: Zero, ranks: int, on_gpu: bool = True) -> tuple[int, int]:
    """The most bytes of a rank's device and of its share of CPU memory while its model and its engine are built.

    Below ZeRO 3 the device gets each weight whole in fp32, read or drawn one at a time. Under it it gets this rank's
    piece of it, and has one whole weight at a time, also where DeepSpeed gathers each once to put a hook on it. Then
    DeepSpeed makes fp32 weights and gradients, but no moments; where it offloads them, gradients twice.
    """
    if zero.stage < 3:
        return 4 * states.trained + states.size * states.frozen, 4 * states.largest
    pieces = (states.trained + states.frozen) * states.size // ranks
    masters = gradients = 4 * states.trained // ranks
    device = states.size * (states.largest + zero.bucket)
    host, read = 0, 4 * states.largest // ranks
    if zero.weights == "none":
        device += pieces
        host = pieces if on_gpu else 0  # they are moved into one vector by way of the CPU
    if zero.optimizer == "none":
        device += masters + gradients
    kept = (pieces if zero.weights == "cpu" else 0) + (masters + 2 * gradients if zero.optimizer == "cpu" else 0)
    return device, max(kept, host + read)


def memory(
    states: States, zero: Zero, ranks: int, *, passing: int, again: int, accumulated: bool, other: int = 0,
    on_gpu: bool = True,
) -> Memory:  # fmt: skip
    """The memory at the peak of a step on each of `ranks` ranks.

    passing: bytes of a micro-batch's pass with its gradients, and `again` without. accumulated: several micro-batches a
    step. other: bytes of what else runs, such as a pass without gradients. on_gpu: ZeRO's buffers are whole; on the CPU
    they are never larger than what goes through them.
    """
    number, shared = states.trained, ranks if zero.stage > 0 else 1
    own_copy = states.rounded or zero.stage > 0
    offloads = zero.optimizer != "none"
    # The optimizer's own: fp32 weights where the model's are rounded, or flat pieces of them, and moments.
    masters, moments = (4 * number // shared if own_copy else 0), states.moments // (shared if states.divided else 1)
    # In bf16 under stage 1 each rank has the fp32 gradients of all weights, not of its part alone.
    every_gradient = states.rounded and zero.stage == 1 and not offloads
    full, whole = (4 * number if every_gradient else 4 * number // shared), number * states.size
    if zero.stage >= 2:  # a gradient goes into the bucket as soon as it exists, from there to the rank that owns it
        whole = states.largest * states.size
        passing = min(passing, again + whole)
    if own_copy:
        # Low-precision gradients become fp32 ones after each micro-batch, weight by weight. Where they are vectors that
        # last from step to step, they are there in every pass.
        lasting = every_gradient or zero.stage == 3
        held = full if (accumulated or lasting) and not offloads else 0
        update = full + (whole if zero.stage > 0 else 8 * min(states.largest, number))
        step = max(held + passing, 0 if offloads else max(update, full + states.scratch))
    else:
        step = max(passing, whole + again if accumulated else 0, whole + states.scratch)
    gradients = min(step, max(whole, full if own_copy and not offloads else 0))
    buffers = 0
    if zero.stage > 0:
        buffers = zero.bucket * states.size * (2 if zero.overlap and zero.stage < 3 else 1)
        buffers = buffers if on_gpu else min(buffers, number * states.size)
    weights = (number + states.frozen) * states.size
    kept = weights // (shared if zero.stage == 3 else 1)
    gathered = min(number + states.frozen, zero.live) * states.size if zero.stage == 3 else 0
    optimizer = {"fp32 weights": masters, "optimizer": moments}
    device = {
        "weights": kept if zero.weights == "none" else 0,
        "gathered weights": gathered,
        **({} if offloads else optimizer),
        "gradients": gradients,
        "activations": max(step, other) - gradients,
        "ZeRO's buffers": buffers,
    }
    host: dict[str, int] = {}
    nvme: dict[str, int] = {}
    if zero.weights != "none":
        (host if zero.weights == "cpu" else nvme)["offloaded weights"] = kept
    if offloads:
        (host if zero.optimizer == "cpu" else nvme)["offloaded optimizer"] = masters + moments
        (host if zero.optimizer == "cpu" else nvme)["offloaded gradients"] = full
    return Memory(device, host, nvme)
