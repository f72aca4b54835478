"""How a pretraining run can go further: the longest sequence that fits, and what each key would save."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from megasparse.config.model_checks import check_model
from megasparse.config.pattern import kinds, section
from megasparse.config.schema import Config, ModelConfig
from megasparse.errors import ConfigError
from megasparse.planning.plan import Plan
from megasparse.planning.planner import Hint, hints, longest_multiple, training_changes, with_changes, zero_change

STEPS = 64
"""Lengths are searched in multiples of the configured one divided by this."""
LARGEST = 1 << 14
"""The search ends at this many times the configured length."""


@dataclass(frozen=True)
class Longest:
    """The longest sequence that fits, and the other keys of the configuration that it changes."""

    length: int
    changed: dict[str, Any]


def longest_that_fits(plan: Plan) -> Longest | None:
    """The longest sequence by the curve of activations; None where not even a 64th of the configured length fits. What
    depends on the length is scaled with it, and the weights of positions are counted anew.
    """
    unit = max(1, plan.config.data.sequence_length // STEPS)
    length = longest_multiple(lambda length: _fits(plan, length), unit, STEPS * LARGEST)
    return None if length is None else Longest(length, scaled(plan.config, length)[1])


def _fits(plan: Plan, length: int) -> bool:
    config = plan.config
    longer = plan.at_length(length)
    if config.model.positions.kind != "learned" or plan.on.available is None:
        return longer <= (plan.on.available or 0)
    rows = max(0, length - config.model.max_length) * config.model.d_model
    return longer + 16 * rows <= plan.on.available  # weight, gradient and moments in fp32


def scaled(config: Config, length: int) -> tuple[Config, dict[str, Any]]:
    """The configuration for sequences of this length, and the keys that changed: model.max_length, and with it the
    grid of axial positions, given numbers of buckets and an encoder–decoder's source.
    """
    model = config.model
    changed: dict[str, Any] = {"data.sequence_length": length}
    share = length / config.data.sequence_length
    update: dict[str, Any] = {}
    own = length
    if model.source is not None:
        source = max(1, round(model.source.length * share))
        own, changed["model.source.length"] = length - source, source
        update["source"] = model.source.model_copy(update={"length": source})
    if own > model.max_length:
        update["max_length"] = changed["model.max_length"] = own
        shape = model.positions.axial_shape
        if shape and math.prod(shape) < own:
            grid = [-(-own // math.prod(shape[1:])), *shape[1:]]
            changed["model.positions.axial_shape"] = grid
            update["positions"] = model.positions.model_copy(update={"axial_shape": grid})
        if isinstance(model.attention.lsh.buckets, int):
            _scale_buckets(model, own / model.max_length, update, changed)
    data = config.data.model_copy(update={"sequence_length": length})
    return config.model_copy(update={"model": model.model_copy(update=update), "data": data}), changed


def _scale_buckets(model: ModelConfig, share: float, update: dict[str, Any], changed: dict[str, Any]) -> None:
    """Scale the number of buckets, where the new one is valid; otherwise it stays as it is."""
    assert isinstance(model.attention.lsh.buckets, int)
    buckets = 4 * max(1, round(model.attention.lsh.buckets * share / 4))
    attention = model.attention.model_copy(update={"lsh": model.attention.lsh.model_copy(update={"buckets": buckets})})
    try:
        check_model(model.model_copy(update={**update, "attention": attention}))
    except ConfigError:
        return
    update["attention"], changed["model.attention.lsh.buckets"] = attention, buckets


def pretraining_hints(plan: Plan) -> list[Hint]:
    """The changes of keys that lower the peak, the most effective one first; each alone."""
    return hints(plan.peak, pretraining_changes(plan))


def pretraining_changes(plan: Plan) -> Iterator[tuple[str, Callable[[], int]]]:
    """Yield what to write into the configuration, the mildest change first, and a function that predicts the
    peak after this change alone, see `hints`.
    """

    def predict(config: Config) -> int:
        check_model(config.model)
        same = all(getattr(config, key) == getattr(plan.config, key) for key in ("model", "training", "parallel"))
        return Plan(config, plan.on, plan.passes if same else None).peak

    for change, config in _changes(plan):
        yield change, partial(predict, config)


def _changes(plan: Plan) -> Iterator[tuple[str, Config]]:
    config, zero = plan.config, plan.zero
    model = config.model
    for key in ("feed_forward_tiles", "loss_tiles"):
        if (tiles := 4 * getattr(model, key)) <= config.data.sequence_length:
            yield f"model.{key}={tiles}", with_changes(config, "model", **{key: tiles})
    if model.activations == "stored":
        kind = "reversible" if model.blocks == "reversible" else "checkpoint"
        yield f'model.activations="{kind}"', with_changes(config, "model", activations=kind)
    if model.activations == "checkpoint":
        yield 'model.activations="checkpoint_cpu"', with_changes(config, "model", activations="checkpoint_cpu")
    yield from training_changes(config)
    for kind in kinds(model):
        own = section(model, kind)
        if own.rounds_key is not None and (number := getattr(own, own.rounds_key)) > 1:
            fewer = own.model_copy(update={own.rounds_key: number // 2})
            attention = model.attention.model_copy(update={kind: fewer})
            change = f"model.attention.{kind}.{own.rounds_key}={number // 2}"
            yield change, with_changes(config, "model", attention=attention)
    sequence = 2 * config.parallel.sequence
    if model.heads % sequence == 0 and plan.on.gpus % sequence == 0 and not model.source:
        yield f"parallel.sequence={sequence}", with_changes(config, "parallel", sequence=sequence)
    for stage, *offloaded in ((1,), (2,), (2, "optimizer"), (3,), (3, "optimizer", "param")):
        if stage > zero.stage or (stage == zero.stage and offloaded and zero.optimizer == "none"):
            yield zero_change(config, stage, *offloaded)
    if zero.stage > 0 and (bucket := zero.bucket // 10) > 10**6:
        smaller = {**config.deepspeed.get("zero_optimization", {}), "reduce_bucket_size": bucket}
        update = {"deepspeed": {**config.deepspeed, "zero_optimization": smaller}}
        yield f"deepspeed.zero_optimization.reduce_bucket_size={bucket}", config.model_copy(update=update)
