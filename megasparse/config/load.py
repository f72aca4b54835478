"""A run's JSON file and its `--set section.key=value` overrides, to a checked Config."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from megasparse.config import strict_json
from megasparse.config.checks import check
from megasparse.config.messages import as_config_error, show
from megasparse.config.schema import Config, RunSettings
from megasparse.errors import ConfigError

Settings = TypeVar("Settings", bound=RunSettings)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read, override and check a pretraining run's configuration; see `load_settings`."""
    return load_settings(path, overrides, Config)


def load_settings(path: str | Path, overrides: Sequence[str], kind: type[Settings]) -> Settings:
    """Read, override and check one run's configuration of a kind.

    path: a JSON file whose keys are those of the schema, none of them required.
    overrides: `section.key=value`, in order; the value is JSON, and a bare word that is no JSON is taken as a text.
    Raises ConfigError (one line: the key, the value, the hint) for everything that is wrong with either.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or a path with a null character
        reason = getattr(error, "strerror", None) or str(error)
        hint = "Give a JSON file, such as those in configs/"
        raise ConfigError(str(path), f"cannot be read ({reason})", hint) from None
    values = strict_json.parse(text, str(path))
    if not isinstance(values, dict):
        raise ConfigError(str(path), f"{show(values)} is not a configuration", "Write an object of sections: {...}")
    return build_settings(values, overrides, kind)


def build_config(values: dict[str, Any], overrides: Sequence[str] = ()) -> Config:
    """A pretraining run's from values already parsed; see `build_settings`."""
    return build_settings(values, overrides, Config)


def build_settings(values: dict[str, Any], overrides: Sequence[str], kind: type[Settings]) -> Settings:
    """The same from values already parsed (a checkpoint's manifest, a test); `values` itself is not changed."""
    values = json.loads(json.dumps(values))
    for override in overrides:
        _set(values, override)
    try:
        # Through JSON, because there a list is a tuple's notation; in Python mode a strict schema refuses it.
        config = kind.model_validate_json(json.dumps(values))
    except ValidationError as error:
        raise as_config_error(error, kind, values) from None
    check(config)
    return config


def _set(values: dict[str, Any], override: str) -> None:
    """Apply one `section.key=value`; sections on the way are created, a value that is no section is an error."""
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError("--set", f"{show(override)} is not of the form section.key=value", "Write training.steps=100")
    for depth, part in enumerate(parts[:-1]):
        if values.get(part) is None:
            values[part] = {}
        values = values[part]
        if not isinstance(values, dict):
            path = ".".join(parts[: depth + 1])
            raise ConfigError(f"--set {key}", f"{path} is {show(values)}, which has no keys", f"Set {path} itself")
    values[parts[-1]] = _override_value(key, text)


def _override_value(key: str, text: str) -> Any:
    try:
        json.loads(text, parse_constant=_refuse)
    except ValueError:
        if text.lstrip()[:1] in ("{", "[", '"'):  # meant as JSON: an error in it must not become a text
            return strict_json.parse(text, f"--set {key}")
        return text
    except RecursionError:
        pass
    return strict_json.parse(text, f"--set {key}")


def _refuse(constant: str) -> None:
    raise ValueError(constant)
