"""Load a run's JSON file with its `--set section.key=value` overrides into a checked Config."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from megasparse.config.files import ConfigFile, merge, parse_json, read_files
from megasparse.config.messages import as_config_error, dotted, show
from megasparse.config.schema import Config, ModelConfig, RunSettings
from megasparse.errors import ConfigError
from megasparse.settings.checks import check, check_model, check_run

Settings = TypeVar("Settings", bound=RunSettings)


def load_config(path: str | Path, overrides: Sequence[str] = (), base: Mapping[str, Any] | None = None) -> Config:
    """Read, override and check the configuration of a pretraining run.

    Args:
        path: Name of a shipped configuration, or path of a JSON file.
        overrides: Texts of the form `section.key=value`, the value in JSON.
        base: Values that apply to keys missing in the file and the files that it extends.

    Raises:
        ConfigError: A key is unknown or its value does not fit.

    Examples:
        >>> config = megasparse.load_config("quickstart", ["training.steps=10"])
        >>> config.training.steps
        10
    """
    return load_settings(path, overrides, Config, base)


def load_settings(
    path: str | Path,
    overrides: Sequence[str],
    kind: type[Settings],
    base: Mapping[str, Any] | None = None,
    mechanisms: bool = True,
) -> Settings:
    """Read, override and check the configuration of a run.

    path: a JSON file, or name of a shipped configuration. overrides: texts of the form `section.key=value`, applied in
    order; the value is JSON or an unquoted text. kind: `Config` or `FinetuneConfig`. base: values that apply to keys
    missing in all files, such as the model that a run starts from. mechanisms: False returns the default attention and
    checks only the rules of `check_run`, without the slow import of the mechanisms.

    Raises ConfigError for an invalid file, key, value or override. One line: the key, the value, the hint.
    """
    files = read_files(path)
    try:
        values = merge(files if base is None else [*files, ConfigFile(files[-1].path, dict(base))])
        return build_settings(values, overrides, kind, mechanisms)
    except ConfigError as error:
        raise _with_file(error, files, overrides) from None


def _with_file(error: ConfigError, files: Sequence[ConfigFile], overrides: Sequence[str]) -> ConfigError:
    """Return the error with the file that sets its key, if there are several files."""
    key = error.key.partition("[")[0]
    if len(files) == 1 or any(key.startswith(override.partition("=")[0].strip()) for override in overrides):
        return error
    given_by = next((file.path for file in files if key in _keys(file.values)), None)
    return ConfigError(f"{given_by} {error.key}", error.problem, error.hint) if given_by else error


def _keys(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        key = dotted([name], prefix)
        yield key
        if isinstance(value, dict):
            yield from _keys(value, key)


def build_config(values: dict[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Check parsed values of a pretraining run's configuration; see `build_settings`."""
    return build_settings(values, overrides, Config)


def build_settings(
    values: dict[str, Any], overrides: Sequence[str], kind: type[Settings], mechanisms: bool = True
) -> Settings:
    """Override and check parsed values, such as those in a checkpoint's manifest, without changing them; see
    `load_settings` for the errors."""
    values = json.loads(json.dumps(values))
    for override in overrides:
        _set(values, override)
    try:
        config = validated(values, kind) if mechanisms else kind.model_validate(_without_attention(values))
    except ValidationError as error:
        raise as_config_error(error, kind, values) from None
    (check if mechanisms else check_run)(config)
    return config


def build_model_config(values: dict[str, Any]) -> ModelConfig:
    """Check parsed values of a section `model`. Raises ConfigError."""
    try:
        config = ModelConfig.model_validate(values)
    except ValidationError as error:
        raise as_config_error(error, ModelConfig, values, prefix="model") from None
    check_model(config)
    return config


def validated(values: dict[str, Any], kind: type[Settings]) -> Settings:
    """Return the configuration of the values, with a section for each mechanism. Raises pydantic's ValidationError."""
    import megasparse.attention  # noqa: F401  (registers the mechanisms)

    return kind.model_validate(values)


def _without_attention(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: _without_attention(part) for key, part in value.items() if key != "attention"}


def _set(values: dict[str, Any], override: str) -> None:
    """Apply one `section.key=value`, creating missing sections."""
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
            raise ConfigError(f"--set {key}", f"{path} is {show(values)}, which is not a section", f"Set {path} itself")
    if text.strip() == "null" and values.pop(parts[-1], None) is not None:
        return  # null removes a value, as in a file with `extends`
    try:
        values[parts[-1]] = parse_json(text, f"--set {key}")
    except ConfigError:
        if text.lstrip()[:1] in ("{", "[", '"'):  # meant as JSON: report the error instead of storing a text
            raise
        values[parts[-1]] = text
