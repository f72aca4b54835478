"""Mutated configurations: each loads or is one clear line; no other exception ever."""

import copy
import random
from collections.abc import Callable
from pathlib import Path

from megasparse.config.files import read_values
from megasparse.config.schema import Config
from megasparse.errors import ConfigError
from megasparse.settings.load import build_config, load_config
from tests.helpers.cases import together

ROOT = Path(__file__).parents[2]
ODD_VALUES = [
    *(None, True, False, 0, 1, -1, 2, 3, 7, 128, 10**9, 10**30, 10**400, 0.5, -0.0, 1e308, float("inf")),
    *("", "x", "auto", "cpu", "\ud800", "\n", [], [1], [0, 0], [2, 3, 5], ["lsh"], [[]]),
    *({}, {"x": 1}, {"": {}}, {"device": "cpu"}, {"stage": 3}),
]
ODD_KEYS = ["", "x", "stage", "a.b", "run", "model", "enabled", "é", "\ud800", "zero_optimization", "self", "__class__"]


def places(values: dict | list, found: list) -> list:
    """Every (container, key) below `values`."""
    for key in list(values) if isinstance(values, dict) else range(len(values)):
        found.append((values, key))
        if isinstance(values[key], dict | list):
            places(values[key], found)
    return found


def mutate(values: dict, draw: random.Random) -> dict:
    values = copy.deepcopy(values)
    for _ in range(draw.randint(1, 3)):
        container, key = draw.choice(places(values, []))
        action = draw.choice(["replace", "replace", "replace", "remove", "add"])
        if action == "replace":
            container[key] = copy.deepcopy(draw.choice(ODD_VALUES))
        elif action == "remove":
            del container[key]
        elif isinstance(container, dict):
            container[draw.choice(ODD_KEYS)] = copy.deepcopy(draw.choice(ODD_VALUES))
        if not values:
            return values
    return values


def loads(load: Callable[..., object], *given: object) -> bool:
    """True if it loads; otherwise the error must be one megasparse line."""
    try:
        load(*given)
    except ConfigError as error:
        assert "\n" not in str(error) and "Input should" not in str(error), given
        return False
    return True


@together("name", ["quickstart.json", "reformer_64k.json", None])
def test_a_mutated_configuration_loads_or_is_rejected_in_one_line(name):
    base = Config().model_dump(mode="json") if name is None else read_values(ROOT / "configs" / name)
    draw = random.Random(f"fuzz {name}")
    assert 5 < sum(loads(build_config, mutate(base, draw)) for _ in range(200)) < 195  # both ways are tried


def test_mutilated_text_loads_or_is_rejected(tmp_path):
    text = (ROOT / "configs" / "quickstart.json").read_text()
    draw, path = random.Random("text"), tmp_path / "run.json"
    for _ in range(300):
        at = draw.randrange(len(text))
        piece = draw.choice([*'{}[,:"-\\\0\u2028', "", "NaN", "1e999", "//", '"run": {},'])
        path.write_text(text[:at] + piece + text[at + draw.choice([0, 1, 5]) :], encoding="utf-8")
        loads(load_config, path)


def test_any_override_is_taken_or_rejected():
    draw = random.Random("overrides")
    keys = ["run.seed", "model.attention.lsh.buckets", "deepspeed.zero_optimization.stage"]
    texts = ["", " ", "{", "[1,", "nul", "null", "1e5", "--", "=", "{}", "[[2]]", '"\\ud800"', "\udcff"]
    texts += ["[" * 5000, "1" * 5000]
    for _ in range(200):
        key = draw.choice([*keys, "", ".", "x", "run", "run.seed.", " run.seed ", "\n"])
        loads(build_config, {}, [key + draw.choice(["=", "=", "=", ""]) + draw.choice(texts)])
