"""Random configurations of a tiny run: each trains a step or is rejected in one line that names a key."""

import copy
import math
import random
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
import torch
from pydantic import BaseModel

from megasparse.config.attention import MECHANISMS
from megasparse.config.schema import Config
from megasparse.errors import ConfigError, UserError
from megasparse.model.build import build_model
from megasparse.ops.random import RngContext
from megasparse.planning.dry_run import dry_run
from megasparse.settings.load import build_config
from tests.helpers.models import SMALL

KINDS = list(MECHANISMS)
ODD = [None, True, -1, 0, 10**9, 10**30, 0.5, 1e308, "", "x", "\n", [], [1], [[]], {}, {"x": 1}]
WHOLE = [1, 1, 2, 2, 3, 4, 5, 7, 8, 16, 31, 32, 33, 40, 64]
LARGEST_TO_BUILD = 600
"""Sizes above this are only checked."""
MAY_BE_LARGE = {"run.seed", "training.steps", "optimizer.warmup_steps", "evaluation.every", "checkpoint.every"}


def tiny() -> dict[str, Any]:
    """Every key of the schema, with the settings of every mechanism, as a run of a second."""
    values = Config().model_dump(mode="json")
    values["run"] |= {"engine": "torch", "device": "cpu"}
    values["model"] |= {"max_length": 32, "layers": 2, "d_model": 16, "d_ff": 32, "heads": 2}
    for kind, settings in SMALL.items():
        values["model"]["attention"][kind] |= settings
    values["model"]["attention"]["pattern"] = ["local", "lsh"]
    values["data"]["sequence_length"] = 32
    values["training"] |= {"global_batch": 2, "micro_batch": 2}
    return values


def leaves(model: type[BaseModel], prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(path, type) of every key of the schema."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from leaves(field.annotation, (*prefix, name))
        elif name != "deepspeed":
            yield (*prefix, name), field.annotation


LEAVES = list(leaves(Config))
OF_MODEL = [leaf for leaf in LEAVES if leaf[0][0] == "model"]


def fitting(kind: Any, draw: random.Random) -> Any:
    """A value of this type, which may break a rule all the same."""
    origin = get_origin(kind)
    if origin is Annotated:
        return fitting(get_args(kind)[0], draw)
    if origin is Literal:
        return draw.choice(get_args(kind))
    if origin in (list, tuple):
        return [fitting(get_args(kind)[0], draw) for _ in range(draw.randint(1, 3))]
    if origin is types.UnionType or len(get_args(kind)) > 1:
        return fitting(draw.choice(get_args(kind)), draw)
    simple = {
        type(None): lambda: None,
        bool: lambda: draw.random() < 0.5,
        int: lambda: draw.choice(WHOLE),
        float: lambda: draw.choice([0.0, 1e-8, 1e-3, 0.1, 0.5, 0.9, 0.999, 1.0, 2.0]),
    }
    return simple[kind]() if kind in simple else "x"


def pattern(draw: random.Random, heads: int) -> list[Any]:
    entries: list[Any] = []
    for _ in range(draw.randint(1, 2)):
        if draw.random() < 0.7 or heads < 2:
            entries.append(draw.choice(KINDS))
        else:
            first = draw.randint(1, heads - 1)
            entries.append(dict(zip(draw.sample(KINDS, 2), (first, heads - first), strict=True)))
    return entries


def put(values: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for name in path[:-1]:
        values = values[name]
    values[path[-1]] = value


def mutated(draw: random.Random) -> dict[str, Any]:
    values = copy.deepcopy(tiny())
    model = values["model"]
    if draw.random() < 0.4:
        model |= {"kind": "encoder", "vocabulary": 257}
    if draw.random() < 0.3:
        model |= {"blocks": "ordinary", "activations": draw.choice(["stored", "checkpoint", "checkpoint_cpu"])}
    if draw.random() < 0.3:
        model["positions"]["kind"] = draw.choice(["rotary", "learned", "none", "axial"])
    if model["positions"]["kind"] == "axial":
        model["positions"] |= {"axial_shape": draw.choice([[4, 8], [8, 4], [5, 7], [2, 2, 8]]), "axial_dims": [8, 8]}
    model["heads"] = draw.choice([1, 1, 2, 2, 2, 4, 4, 8, 8, 3])
    model["attention"]["pattern"] = pattern(draw, model["heads"])
    used = {kind for entry in model["attention"]["pattern"] for kind in ([entry] if isinstance(entry, str) else entry)}
    of_mechanism = [leaf for leaf in OF_MODEL if leaf[0][1] == "attention" and leaf[0][2] in used]
    for _ in range(draw.randint(0, 4)):
        path, kind = draw.choice(draw.choice([of_mechanism or OF_MODEL, OF_MODEL, LEAVES]))
        if path[-1] != "pattern" and path != ("run", "device"):
            put(values, path, fitting(kind, draw))
    if draw.random() < 0.1:
        put(values, draw.choice(LEAVES)[0], copy.deepcopy(draw.choice(ODD)))
    return values


def too_large(config: Config) -> bool:
    def largest(key: str, value: Any) -> int:
        if isinstance(value, dict):
            return max((largest(f"{key}.{name}" if key else name, part) for name, part in value.items()), default=0)
        if isinstance(value, list | tuple):
            return max((largest(key, part) for part in value), default=0)
        return value if isinstance(value, int) and key not in MAY_BE_LARGE else 0

    return largest("", config.model_dump(include={"model", "data", "training"})) > LARGEST_TO_BUILD


def step_of(config: Config) -> None:
    """A step of training and one forward pass of evaluation, both finite."""
    assert math.isfinite(dry_run(config).loss)
    model: Any = build_model(config.model, config.run.seed)
    if config.model.kind == "encoder" and config.model.masking.whole_words:
        model.set_word_starts(torch.ones(config.model.vocabulary, dtype=torch.bool))
    model.eval()
    tokens = torch.randint(256, (2, config.data.sequence_length), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert model(tokens, RngContext.evaluation(config.run.seed, 2))[0].isfinite()


def try_all(name: str, count: int) -> tuple[int, int, list[str]]:
    """(trained, rejected, configurations with another outcome)."""
    trained, refused, wrong = 0, 0, []
    for number in range(count):
        values = mutated(random.Random(f"{name} {number}"))
        try:
            config = build_config(values)
            if not too_large(config):
                step_of(config)
                trained += 1
        except UserError as error:
            refused += 1
            if "\n" in str(error) or not isinstance(error, ConfigError) or not error.key:
                wrong.append(f"{number}: {error}")
        except Exception as error:
            wrong.append(f"{number}: {type(error).__name__}: {error}")
    return trained, refused, wrong


@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_a_random_configuration_trains_a_step_or_is_rejected_by_key(count):
    trained, refused, wrong = try_all("fuzz", count)
    assert not wrong, wrong
    assert trained > 0.2 * count and refused > 0.15 * count, "both ways are tried"


@pytest.mark.soak
def test_two_thousand_random_configurations(figures):
    trained, _, wrong = try_all("soak", 2000)
    figures(configurations_tried=2000, configurations_trained=trained, tracebacks=len(wrong))
    assert not wrong, wrong
