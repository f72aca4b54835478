"""Prediction of a pretraining run on a number of GPUs: memory, FLOPs, seconds by part, longest sequence.

States are counted with ZeRO's table (states.py), activations in one pass without a device (passes.py). The seconds of a
step are a roofline of counted work, without communication and swap:

    attention                           the maximum of time for FLOPs and time for bytes moved by its kernels
    projections, feed-forward, head     FLOPs, including recomputation in the backward (flops.py)
    elementwise                         bytes moved by all other operations: norms, sums, rotations, codes, losses
    optimizer                           30 bytes per weight of AdamW: read gradient, fp32 weight and moments, write
                                        weights and moments
"""

import math
from bisect import bisect_left
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch

from megasparse.attention.heads import head_dim
from megasparse.config.schema import Config
from megasparse.errors import ConfigError
from megasparse.planning.flops import hardware_flops_by_part, model_flops_per_token, tiled_layers
from megasparse.planning.hardware import GPUS, Hardware, micro_batches
from megasparse.planning.passes import ConfiguredPass
from megasparse.planning.states import Memory, MemoryPool, Zero, building, gigabytes, memory
from megasparse.training.ranks import Ranks, local_ranks
from megasparse.training.reporting.memory import available_bytes

RESERVE = 1 << 30
"""Bytes of a GPU assumed for the CUDA context and libraries."""
STREAMED = 0.8
"""Assumed fraction of the memory bandwidth."""
OPTIMIZER_BYTES = 30
STEPS = 64
"""The longest sequence is searched in multiples of the configured length divided by this."""
TILES = 4096, 2048, 1024
"""Tokens of a tile that `Plan.fitted` tries. 1,024 rows reach most of a GPU's speed."""
LARGEST = 1 << 14
"""The search ends at this multiple of the configured length."""


class Plan:
    """Plan of a configuration on `gpus` GPUs, `per_node` per node, with `available` bytes per GPU."""

    def __init__(
        self, config: Config, gpu: Hardware, gpus: int = 1, per_node: int = 8, available: int | None = None
    ) -> None:
        """Raises ConfigError if the number of GPUs does not divide the batch, the sequence or the nodes."""
        self.config, self.gpu, self.gpus, self.per_node = config, gpu, gpus, per_node
        self.available = gpu.memory if available is None else available
        self.host: int | None = None
        """Bytes of a node's CPU memory, if `fitted` was given any."""
        self.micro_batches = micro_batches(config, gpus, per_node)
        self.zero = Zero.of(config.zero, gpus > 1)
        self.passes = ConfiguredPass(config)
        self.states = self.passes.states

    @cached_property
    def memory(self) -> Memory:
        """Peak memory per rank in a step."""
        part = self.config.data.sequence_length // self.config.parallel.sequence
        counted = self.passes.count(part)
        return self._memory(counted.peak(), counted.peak(0), part)

    def _memory(self, passing: int, again: int, part: int, together: int | None = None) -> Memory:
        """Return the memory of a rank for the bytes of a pass with (`passing`) and without (`again`) its gradients.
        part: tokens of this rank's part of the sequence. together: layers recomputed together, if not as configured.
        """
        model, training = self.config.model, self.config.training
        rank = memory(
            self.states, self.zero, self.gpus, passing=passing, again=again, accumulated=self.micro_batches > 1
        )
        tokens = training.micro_batch * part
        if self.config.parallel.sequence > 1:  # communication buffers for q, k, v and out
            groups = model.attention.head_groups
            # Groups: q, k, v received; of the next group, projected, sent and received; of the previous, with gradients
            exchanged = 4 if groups == 1 else max(4, 18 / groups)
            at_once = training.micro_batch * self.passes.tile if self.passes.short_tiles else tokens
            rank.device["all-to-all"] = int(exchanged * at_once * model.heads * head_dim(model) * self.states.size)
        rank.device["CUDA context, libraries (assumed)"] = RESERVE
        if model.activations == "checkpoint_cpu":
            together = together or model.checkpoint_layers
            stored = -(-model.layers // together) + together - 1
            rank.host["offloaded activations"] = stored * self._input(tokens)
        return rank

    def _input(self, tokens: float) -> int:
        model = self.config.model
        return int(tokens * model.d_model * (2 if model.residual_dtype == "bf16" else 4))

    @property
    def peak(self) -> int:
        """Peak bytes per GPU in a step."""
        return sum(self.memory.device.values())

    @property
    def building(self) -> tuple[int, int]:
        """Bytes of a GPU and of a rank's CPU memory before the first step."""
        device, host = building(self.states, self.zero, self.gpus)
        return RESERVE + device, host

    @property
    def pools(self) -> list[MemoryPool]:
        """GPU memory, at the peak of a step or while the model is built."""
        device, _ = self.building
        parts = self.memory.device if self.peak >= device else {"while the model is built": device}
        host = [] if self.host is None else [self.host_pool(self.host // min(self.gpus, self.per_node))]
        return [MemoryPool("GPU memory", parts, self.available), *host]

    def host_pool(self, available: int) -> MemoryPool:
        """Return a rank's CPU memory."""
        host = self.memory.host
        parts = host if sum(host.values()) >= self.building[1] else {"while the model is built": self.building[1]}
        return MemoryPool("CPU memory", parts, available)

    def fitted(self, host: int | None) -> "Plan":
        """Return the plan with the largest tiles that fit the GPU, and the fewest layers recomputed together whose
        inputs fit `host` bytes of a node's CPU memory, None for any; itself if layers are not recomputed tile by tile.
        """
        model, ranks, plan = self.config.model, self.config.parallel.sequence, self
        length = self.config.data.sequence_length // ranks
        tiled = all(tiled_layers(model.changed(feed_forward_tiles=2), ranks))
        for tile in TILES if tiled else ():
            tiles = {"feed_forward_tiles": max(2, -(-length // tile)), "loss_tiles": -(-length * 8 // tile)}
            plan = self._changed(tiles)
            if plan.fits:
                break
        on_node = min(self.gpus, self.per_node)
        for together in range(2, 1 + math.isqrt(model.layers)) if tiled else ():
            if host is None or on_node * sum(plan.memory.host.values()) <= host:
                break
            plan = plan._changed({"checkpoint_layers": together})
        plan.host = host
        return plan

    def _changed(self, changes: dict[str, int]) -> "Plan":
        return Plan(self.config.changed(model=changes), self.gpu, self.gpus, self.per_node, self.available)

    @property
    def settings(self) -> dict[str, int]:
        """Keys of `model` that `fitted` chooses."""
        model = self.config.model
        return {key: getattr(model, key) for key in ("feed_forward_tiles", "loss_tiles", "checkpoint_layers")}

    @property
    def fits(self) -> bool:
        return all(pool.peak <= pool.available for pool in self.pools)

    @cached_property
    def longest(self) -> int | None:
        """Longest sequence that fits, None if 1/64 of the configured length does not; extrapolated linearly from passes
        of half and of the whole configured length, unless layers run tile by tile. Longer sequences have more tiles of
        the same size, and as many layers recomputed together as `host` requires.
        """
        ranks, length = self.config.parallel.sequence, self.config.data.sequence_length
        part, unit = length // ranks, max(1, length // STEPS)
        half, full = self.passes.count(part // 2), self.passes.count(part)
        fewest, tiled = self.config.model.checkpoint_layers, self.passes.short_tiles is not None
        numbers = range(fewest, 1 + max(fewest, math.isqrt(self.config.model.layers) if tiled else 1))

        def fits(length: int) -> bool:
            if not tiled:
                times = (length / ranks - part) / (part - part // 2)
                passing = full.peak() + (full.peak() - half.peak()) * times
                again = full.peak(0) + (full.peak(0) - half.peak(0)) * times
            else:  # which phase needs most depends on the length
                counted = self.passes.count(length // ranks)
                passing, again = counted.peak(), counted.peak(0)
            sizes = max(0, int(passing)), max(0, int(again)), length // ranks
            memories = [self._memory(*sizes, together) for together in numbers]
            peak, host = sum(memories[0].device.values()), min(sum(each.host.values()) for each in memories)
            fits_host = self.host is None or max(host, self.building[1]) <= self.host // min(self.gpus, self.per_node)
            return fits_host and max(peak, self.building[0]) <= self.available

        count = bisect_left(range(1, STEPS * LARGEST + 1), True, key=lambda number: not fits(number * unit))
        return count * unit or None

    @property
    def tokens(self) -> int:
        """Tokens per step over all ranks."""
        return self.config.training.global_batch * self.config.data.sequence_length

    @cached_property
    def model_flops(self) -> float:
        """Model FLOPs per step over all ranks."""
        return self.tokens * model_flops_per_token(self.config.model, self.config.data.sequence_length)

    @cached_property
    def hardware_flops(self) -> float:
        """FLOPs per step over all ranks, including recomputation."""
        return self.tokens * sum(self._flops.values())

    @cached_property
    def _flops(self) -> dict[str, float]:
        config = self.config
        return hardware_flops_by_part(config.model, config.data.sequence_length, config.parallel.sequence)

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Seconds of computation per rank and step, by part."""
        training, gpu, ranks = self.config.training, self.gpu, self.config.parallel.sequence
        tokens = self.micro_batches * training.micro_batch * self.config.data.sequence_length / ranks
        seconds = {part: tokens * flops / (gpu.peak * gpu.reach) for part, flops in self._flops.items()}
        counted, bandwidth = self.passes.count(self.config.data.sequence_length // ranks), gpu.bandwidth * STREAMED
        seconds["attention"] = max(seconds["attention"], self.micro_batches * counted.by_attention / bandwidth)
        seconds["elementwise"] = self.micro_batches * counted.moved / bandwidth
        # The GPU waits if the host needs longer for launches than the GPU for the computation.
        seconds["launches"] = max(0.0, self.micro_batches * counted.host - sum(seconds.values()))
        if (model := self.config.model).activations == "checkpoint_cpu":  # written, read twice, in part once more
            crossings = model.layers * (3 + 2 * (1 - 1 / model.checkpoint_layers))
            seconds["transfers"] = crossings * self._input(tokens) / gpu.link
        weights = self.states.trained / (self.gpus if self.zero.stage > 0 else 1)
        host = gpu.host * STREAMED / min(self.gpus, self.per_node)
        seconds["optimizer"] = OPTIMIZER_BYTES * weights / (host if self.zero.optimizer_offload else bandwidth)
        return seconds

    @property
    def step_seconds(self) -> float:
        """Seconds of computation per step."""
        return sum(self.seconds.values())

    def as_json(self) -> dict[str, Any]:
        """Return the plan: sizes in bytes, times in seconds, speeds per second."""
        return {
            "gpus": self.gpus,
            "parameters": self.states.trained,
            "frozen": self.states.frozen,
            "memory": vars(self.memory),
            "building": dict(zip(("device", "host"), self.building, strict=True)),
            "peak": self.peak,
            "available": self.available,
            "fits": self.fits,
            "longest": self.longest,
            "micro_batches": self.micro_batches,
            "tokens_per_step": self.tokens,
            "model_flops_per_step": self.model_flops,
            "hardware_flops_per_step": self.hardware_flops,
            "seconds": self.seconds,
            "step_seconds": self.step_seconds,
            "settings": self.settings,
            "assumptions": {"gpus_per_node": self.per_node, "streamed": STREAMED, **vars(self.gpu)},
        }

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report."""
        config, states, gpu = self.config, self.states, self.gpu
        training, length = config.training, config.data.sequence_length
        yield (
            f"{self.gpus} × {gpu.name}, ZeRO {self.zero.stage}, parallel.sequence {config.parallel.sequence}, "
            f"{self.micro_batches} micro-batches of {training.micro_batch} × {length:,} tokens in {training.precision}"
        )
        rows = [("parameters", f"{states.trained:,}{f' trained, {states.frozen:,} frozen' if states.frozen else ''}")]
        rows += [(name, gigabytes(size)) for name, size in self.memory.device.items() if size]
        rows += [(f"CPU: {name}", gigabytes(size)) for name, size in self.memory.host.items() if size]
        device, host = self.building
        if device > self.peak:
            rows.append(("while the model is built", gigabytes(device)))
        rows.append(("CPU: while the model is built", gigabytes(host)))
        for pool, name in zip(self.pools, ("peak of a GPU", "peak of CPU memory, per GPU"), strict=False):
            verdict = "fits" if pool.peak <= pool.available else "DOES NOT FIT"
            rows.append((name, f"{gigabytes(pool.peak)} of {gigabytes(pool.available)}: {verdict}"))
        longest = "none" if self.longest is None else f"{self.longest:,} tokens"
        if self.longest and self.passes.short_tiles:
            longest += f", in tiles of {self.passes.tile:,}"
        rows.append(("longest sequence that fits", longest))
        rows.append(("planned with", " ".join(f"--set model.{key}={value}" for key, value in self.settings.items())))
        try:
            utilisation = self.model_flops / (self.step_seconds * gpu.peak * self.gpus)
            rows.append(("model FLOPs per step", f"{self.model_flops:.3g}"))
            rows.append(("hardware FLOPs, with recomputation", f"{self.hardware_flops:.3g}"))
            rows.append(("computing a step", f"{_seconds(self.step_seconds)}, {utilisation:.0%} MFU"))
            rows += [(f"  {part}", _seconds(seconds)) for part, seconds in self.seconds.items()]
            rows.append((f"{training.steps:,} steps", duration(self.step_seconds * training.steps)))
        except ConfigError as problem:
            rows.append(("seconds and FLOPs", str(problem)))
        yield from (f"{name:36} {value}" for name, value in rows)
        yield (
            f"assumed: arithmetic at {gpu.reach:.0%} of {gpu.peak / 1e12:g} TFLOP/s, memory at {STREAMED:.0%} of "
            f"{gpu.bandwidth / 1e12:g} TB/s; communication and swap are not in the seconds. Memory is counted from the "
            "GPU kernels' allocations without a device, not measured"
        )


def pretraining_pools(config: Config, ranks: Ranks) -> list[MemoryPool]:
    """Return the memory of a step on this rank's GPU and in its share of CPU memory."""
    local = local_ranks(ranks.world_size)
    plan = Plan(config, GPUS["A100"], ranks.world_size, local, available_bytes(ranks.device))
    return [*plan.pools, plan.host_pool(available_bytes(torch.device("cpu")) // local)]


def duration(seconds: float) -> str:
    return f"{seconds / 3600:,.1f} hours" if seconds >= 5400 else f"{seconds / 60:.2g} minutes"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 0.1 else f"{seconds * 1e3:.3g} ms"
