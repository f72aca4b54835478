"""Whether a fine-tuning run fits into memory, before its first step: states by count, activations by short passes (see
memory_curves.py).
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megasparse.config.finetuning import FinetuneConfig, FinetuneTrainingConfig, LoRAConfig
from megasparse.errors import ConfigError, UserError
from megasparse.planning.states import ADAMW_MOMENTS, States, Zero, memory
from megasparse.tasks.activations import count_layers
from megasparse.tasks.adapters import adapter_size
from megasparse.tasks.backbones import HuggingFaceBody
from megasparse.tasks.batches import MULTIPLE
from megasparse.tasks.memory_curves import Curves
from megasparse.tasks.run import TaskRun
from megasparse.training.ranks import Ranks

ERROR = 0.15
"""By how much a prediction may be too high: a run is refused only where it does not fit even so."""


@dataclass(frozen=True)
class MemoryPool:
    """Memory: where it is, what the run will hold there at its peak by what it is, and what there is for it."""

    name: str
    parts: dict[str, int]
    available: int

    @property
    def peak(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class MemoryEstimate:
    """A prediction. `mends`: what to change, with the largest peak of any place after it; where it fits, none."""

    config: FinetuneConfig
    trained: int
    frozen: int
    length: int
    places: list[MemoryPool]
    device: str
    hints: list[tuple[str, int]] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        return all(place.peak <= place.available for place in self.places)

    @property
    def cannot(self) -> bool:
        """Whether it does not even fit if the prediction is too high by `ERROR`."""
        return any(place.peak * (1 - ERROR) > place.available for place in self.places)

    def lines(self) -> str:
        """The report that --dry-run prints."""
        training, length = self.config.training, f"{self.length:,}"
        at_once = _at_once(training, self.length)
        found = [
            f"parameters       {self.trained:,} trained, {self.frozen:,} frozen",
            f"micro-batch      {at_once} × {length} tokens in {training.precision} on {self.device}",
        ]
        for place in self.places:
            found += [f"{name:16} {_gigabytes(size)}" for name, size in place.parts.items() if size]
            short = " (does not fit)" if place.peak > place.available else ""
            title = f"peak of {place.name}"
            found.append(f"{title:16} {_gigabytes(place.peak)}, available {_gigabytes(place.available)}{short}")
        found.append("fits" if self.fits else "DOES NOT FIT" if self.cannot else "MAY NOT FIT: too near to the limit")
        if self.hints:
            found += ["what to change, and the peak after it:"]
            found += [f"  {_gigabytes(peak):10} {hint}" for hint, peak in self.hints]
        return "\n".join(found)


def require_fit(run: TaskRun, ranks: Ranks, say: Callable[[str], None]) -> None:
    """Raise UserError on every rank where some rank cannot take its first step, naming what to change. say: told where
    a run may just not fit.
    """
    found = predict(run, ranks)
    refused = ranks.any(found.cannot)
    if found.fits and not refused:
        return
    place = max(found.places, key=lambda each: each.peak - each.available)
    best = "; ".join(f"{hint}: {_gigabytes(peak)}" for hint, peak in found.hints[:4])
    predicted = (
        f"a step takes about {_gigabytes(place.peak)} of {place.name}, {_gigabytes(place.available)} are available"
    )
    hint = f"What helps, with the peak after it: {best or 'a smaller model'}"
    if found.fits:
        raise UserError("this run cannot fit on another rank, whose own message says why")
    if refused:
        raise UserError(f"this run cannot fit: {predicted}. {hint}")
    say(f"this run may not fit: {predicted}. {hint}")


def predict(run: TaskRun, ranks: Ranks) -> MemoryEstimate:
    """The peak memory of a run's steps and validations, from a few short passes of its model, which is left as it was,
    on the ranks' device. Raises UserError where not even those fit.
    """
    return _Predictor(run, ranks).predict()


class _Predictor:
    def __init__(self, run: TaskRun, ranks: Ranks):
        self.run, self.ranks, self.model = run, ranks, run.model.to(ranks.device)
        weights = list(self.model.parameters())
        self.trained = sum(p.numel() for p in weights if p.requires_grad)
        self.largest = max(p.numel() for p in weights if p.requires_grad)
        self.frozen = sum(p.numel() for p in weights) - self.trained
        self.held = sum(p.nbytes for p in weights)
        longest = max(example.length for example in run.train)
        self.length = min(run.config.task.max_length, -(-max(longest, 1) // MULTIPLE) * MULTIPLE)
        self.curves = Curves(run, ranks, self.length, self.activations)

    @property
    def activations(self) -> str:
        config = self.run.config
        if config.model is not None:
            return config.model.activations
        own = getattr(self.model.body, "stack", None)
        return config.start.activations or (own.config.activations if own is not None else "stored")

    def predict(self) -> MemoryEstimate:
        found = self._fit(self.run.config)
        if found.fits:
            return found
        hints = {}
        for text, changed in self._changes():
            peak = max(place.peak for place in changed.places)
            if peak < max(place.peak for place in found.places):
                hints[text] = peak
        return replace(found, hints=sorted(hints.items(), key=lambda each: each[1]))

    def _changes(self) -> Iterator[tuple[str, MemoryEstimate]]:
        """What can be changed, each with the prediction for it."""
        config, place = self.run.config, "start" if self.run.config.model is None else "model"
        training, gpu = config.training, self.ranks.device.type == "cuda"
        if training.micro_batch > 1 and training.batch_unit == "examples":
            yield "training.micro_batch=1", self._fit(_with(config, "training", micro_batch=1))
        if training.batch_unit == "tokens" and (half := training.micro_batch // 2) >= self.length:
            yield f"training.micro_batch={half}", self._fit(_with(config, "training", micro_batch=half))
        if config.evaluation.batch > 1:
            yield "evaluation.batch=1", self._fit(_with(config, "evaluation", batch=1))
        kinds = {"stored": ["checkpoint", "checkpoint_cpu"], "checkpoint": ["checkpoint_cpu"]}
        for kind in kinds.get(self.activations, []):
            if gpu or kind == "checkpoint":
                yield f'{place}.activations="{kind}"', self._fit(config, activations=kind)
        if training.precision != "bf16":
            yield 'training.precision="bf16"', self._fit(_with(config, "training", precision="bf16"))
        if config.lora is None and (adapters := _adapters(self.model)):
            yield 'lora={"rank": 8}', self._fit(config, trained=adapters)
        if gpu:
            engine = "" if config.run.engine == "deepspeed" else 'run.engine="deepspeed", '
            cpu = {"device": "cpu"}
            for stage, offloads in ((2, ("optimizer",)), (3, ("optimizer", "param"))):
                zero = {"stage": stage, **{f"offload_{what}": cpu for what in offloads}}
                changed = _with(config, "run", engine="deepspeed").model_copy(
                    update={"deepspeed": {**config.deepspeed, "zero_optimization": zero}}
                )
                keys = ", ".join(f'offload_{what}={{"device": "cpu"}}' for what in offloads)
                yield f"{engine}deepspeed.zero_optimization: stage={stage}, {keys}", self._fit(changed)
        if shorter := self._longest_that_fits():
            yield f"task.max_length={shorter}", self._fit(config, length=shorter)
        grows = self.curves.of(self.activations, training.precision).square.any()
        if grows and isinstance(self.model.body, HuggingFaceBody):
            yield 'start.attention={"pattern": ["lha"]} or another hashed one', self._fit(config, hashed=True)

    def _longest_that_fits(self) -> int | None:
        low, high = 0, self.length // 64
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._fit(self.run.config, length=middle * 64).fits else (low, middle - 1)
        return low * 64 or None

    def _fit(
        self,
        config: FinetuneConfig,
        *,
        activations: str | None = None,
        length: int | None = None,
        trained: int | None = None,
        hashed: bool = False,
    ) -> MemoryEstimate:
        """The prediction for a configuration. trained: weights of adapters, all others frozen."""
        length, kind = length or self.length, activations or self.activations
        training, world = config.training, self.ranks.world_size
        number = self.trained if trained is None else trained
        frozen = self.frozen + (0 if trained is None else self.trained)
        rounded = training.precision == "bf16"
        size = 2 if rounded else 4
        curve = self.curves.of(kind, training.precision)
        if trained is not None:
            curve = replace(curve, gradients=np.full_like(curve.gradients, number * size))
        at_once = _at_once(training, length)
        moments = 0 if config.optimizer.name == "adafactor" else ADAMW_MOMENTS
        needed = memory(
            States(number, frozen, self.largest, moments * number, rounded),
            Zero.of(config.run.engine, config.deepspeed),
            world,
            passing=curve.bytes(at_once, length, hashed=hashed),
            again=curve.bytes(at_once, length, gradients=0, hashed=hashed),
            accumulated=training.global_batch > training.micro_batch * world,
            other=self.curves.of("scored", training.precision).bytes(config.evaluation.batch, length, 0, hashed),
            on_gpu=self.ranks.device.type == "cuda",
        )
        device, host = needed.device, dict(needed.host)
        cuda = self.ranks.device.type == "cuda"
        if cuda and kind == "checkpoint_cpu":
            states = at_once * length * self.model.body.width * size
            host["offloaded activations"] = states * count_layers(self.model.body)
        own = available_bytes(self.ranks.device)
        if cuda:
            places = [MemoryPool("GPU memory", device, own + self.held)]
            if any(host.values()):
                places.append(MemoryPool("CPU memory", host, available_bytes(torch.device("cpu")) // _local(world)))
        else:
            parts = device | {name: size for name, size in host.items() if size}
            places = [MemoryPool("memory", parts, own // _local(world) + self.held)]
        return MemoryEstimate(config, number, frozen, length, places, str(self.ranks.device))


def available_bytes(device: torch.device) -> int:
    """Free memory of a GPU, with what torch keeps for itself; of the CPU what the system can give, and the control
    group's limit leaves.
    """
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    table = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    found = [int(table["MemAvailable"].split()[0]) * 1024]
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            texts = [(Path("/sys/fs/cgroup") / name).read_text().strip() for name in (limit, used)]
        except OSError:
            continue
        if texts[0].isdigit():
            found.append(max(0, int(texts[0]) - int(texts[1])))
    return min(found)


def _local(world: int) -> int:
    """Ranks on this machine, which share its memory."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", world)))


def _adapters(model: Any) -> int | None:
    """Weights that would be trained with adapters; None where the default ones match no layer."""
    try:
        size = adapter_size(model.body, LoRAConfig())
    except ConfigError:
        return None
    return size + sum(weight.numel() for name, weight in model.named_parameters() if not name.startswith("body."))


def _at_once(training: FinetuneTrainingConfig, length: int) -> int:
    """Examples of a micro-batch whose inputs have this length."""
    return training.micro_batch if training.batch_unit == "examples" else max(1, training.micro_batch // length)


def _with(config: FinetuneConfig, section: str, **changes: Any) -> FinetuneConfig:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=changes)})


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:.2f} GB"
