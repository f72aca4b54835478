"""The planner of pretraining and fine-tuning: the longest length that fits, and what each change of a setting saves."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from megasparse.config.finetuning import FinetuneConfig
from megasparse.config.schema import Config
from megasparse.errors import ConfigError

AnyConfig = TypeVar("AnyConfig", Config, FinetuneConfig)


@dataclass(frozen=True)
class Hint:
    """A change of the configuration, and the peak in bytes after it."""

    change: str
    peak: int


def hints(peak: int, changes: Iterable[tuple[str, Callable[[], int]]]) -> list[Hint]:
    """The changes that lower the peak, the most effective one first.

    changes: what to write into the configuration, and a function that predicts the peak after this change alone. It
    raises ConfigError where the changed configuration is not valid; such a change is left out.
    """
    found = []
    for change, predict in changes:
        try:
            found.append(Hint(change, predict()))
        except ConfigError:
            continue
    return sorted((hint for hint in found if hint.peak < peak), key=lambda hint: hint.peak)


def longest_multiple(fits: Callable[[int], bool], unit: int, most: int) -> int | None:
    """The largest multiple of `unit`, at most `most` of them, that fits, by bisection; None where not even one does."""
    count = bisect_left(range(1, most + 1), True, key=lambda number: not fits(number * unit))
    return count * unit or None


def with_changes(config: AnyConfig, section: str, **changes: Any) -> AnyConfig:
    """The configuration with other values in one section."""
    return config.model_copy(update={section: getattr(config, section).model_copy(update=changes)})


def training_changes(config: AnyConfig) -> Iterator[tuple[str, AnyConfig]]:
    """Lower precision, and a micro-batch of one sequence."""
    training = config.training
    if training.precision == "fp32":
        yield 'training.precision="bf16"', with_changes(config, "training", precision="bf16")
    if training.micro_batch > 1 and getattr(training, "batch_unit", "examples") == "examples":
        yield "training.micro_batch=1", with_changes(config, "training", micro_batch=1)


def zero_change(config: AnyConfig, stage: int, *offloaded: str) -> tuple[str, AnyConfig]:
    """ZeRO of this stage. offloaded: what moves to CPU memory, "optimizer" or "param"."""
    offloads: dict[str, Any] = {f"offload_{what}": {"device": "cpu"} for what in offloaded}
    section = {**config.deepspeed.get("zero_optimization", {}), "stage": stage, **offloads}
    keys = [f"stage={stage}", *(f'{key}={{"device": "cpu"}}' for key in offloads)]
    engine = "" if config.run.engine == "deepspeed" else 'run.engine="deepspeed", '
    changed = with_changes(config, "run", engine="deepspeed")
    changed = changed.model_copy(update={"deepspeed": {**config.deepspeed, "zero_optimization": section}})
    return f"{engine}deepspeed.zero_optimization: {', '.join(keys)}", changed
