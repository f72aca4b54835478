"""A run's JSON file and its `--set section.key=value` overrides, to a checked Config."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from megasparse.config.checks import check
from megasparse.config.files import ConfigFile, merge, parse_json, read_files
from megasparse.config.finetuning import FinetuneConfig
from megasparse.config.messages import as_config_error, dotted, show
from megasparse.config.schema import Config, RunSettings
from megasparse.errors import ConfigError

Settings = TypeVar("Settings", bound=RunSettings)


def load_config(path: str | Path, overrides: Sequence[str] = (), base: Mapping[str, Any] | None = None) -> Config:
    """Read, override and check the configuration of a pretraining run.

    Args:
        path: Name of a shipped configuration, or a JSON file.
        overrides: `section.key=value` each, the value in JSON.
        base: Values that the file extends.

    Raises:
        ConfigError: A key is unknown or its value does not fit.

    Examples:
        >>> config = megasparse.load_config("quickstart", ["training.steps=10"])
        >>> config.training.steps
        10
    """
    return load_settings(path, overrides, Config, base)


def load_settings(
    path: str | Path, overrides: Sequence[str], kind: type[Settings], base: Mapping[str, Any] | None = None
) -> Settings:
    """Read, override and check one run's configuration of a kind.

    path: a JSON file whose keys are those of the schema, none of them required, or a shipped configuration's name. The
    key `extends` names a configuration of the same kind, whose values hold where the file has none (files.py).
    base: values that hold where neither file nor bases have any, such as those of the model that a run starts from.
    overrides: `section.key=value`, in order; the value is JSON, and a bare word that is no JSON is taken as a text.
    Raises ConfigError (one line: the key, the value, the hint) for everything that is wrong with either.
    """
    files = read_files(path)
    for file in files[1:]:
        _check_kind(files[0], file, kind)
    try:
        values = merge(files if base is None else [*files, ConfigFile(files[-1].path, dict(base))])
        return build_settings(values, overrides, kind)
    except ConfigError as error:
        raise _with_file(error, files, overrides) from None


def _check_kind(file: ConfigFile, base: ConfigFile, kind: type[RunSettings]) -> None:
    """Raise ConfigError where `file`, of a kind of run, extends a configuration of another kind."""
    kinds: dict[type[RunSettings], str] = {Config: "pretraining", FinetuneConfig: "fine-tuning"}
    for other, name in kinds.items():
        foreign = sorted(base.values.keys() & other.model_fields.keys() - kind.model_fields.keys())
        if foreign:
            problem = f"{base.path} is of {name} (it has the section {show(foreign[0])}), not of {kinds[kind]}"
            raise ConfigError(f"{file.path} extends", problem, "Extend a configuration of the same kind of run")


def _with_file(error: ConfigError, files: Sequence[ConfigFile], overrides: Sequence[str]) -> ConfigError:
    """The error with the file that gives its key, where several could."""
    key = error.key.partition("[")[0]
    if len(files) == 1 or any(key.startswith(override.partition("=")[0].strip()) for override in overrides):
        return error
    given_by = next((file.path for file in files if key in _keys(file.values)), None)
    return ConfigError(f"{given_by} {error.key}", error.problem, error.hint) if given_by else error


def _keys(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """The dotted key of each value and section."""
    for name, value in values.items():
        key = dotted([name], prefix)
        yield key
        if isinstance(value, dict):
            yield from _keys(value, key)


def build_config(values: dict[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Check a pretraining run's configuration from values already parsed; see `build_settings`."""
    return build_settings(values, overrides, Config)


def build_settings(values: dict[str, Any], overrides: Sequence[str], kind: type[Settings]) -> Settings:
    """Override and check a configuration from values already parsed, such as a checkpoint's manifest, which are not
    changed; see `load_settings` for the errors."""
    values = json.loads(json.dumps(values))
    for override in overrides:
        _set(values, override)
    try:
        config = kind.model_validate(values)
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
    try:
        values[parts[-1]] = parse_json(text, f"--set {key}")
    except ConfigError:
        if text.lstrip()[:1] in ("{", "[", '"'):  # meant as JSON: an error in it must not become a text
            raise
        values[parts[-1]] = text
