"""`"extends": "NAME"`: a configuration file that holds only what differs from another one.

NAME is a file beside the one that extends it, or a shipped configuration (shipped.py). Objects are merged key by key;
any other value replaces the base's, and null removes it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megasparse.config import strict_json
from megasparse.config.messages import show
from megasparse.config.shipped import SUFFIX, find_config
from megasparse.errors import ConfigError

KEY = "extends"
LONGEST_CHAIN = 8
"""Files that may extend one another."""


@dataclass(frozen=True)
class ConfigFile:
    path: Path
    values: dict[str, Any]
    """The file's own keys, without `extends`."""


def read_values(name_or_path: str | Path) -> dict[str, Any]:
    """The whole values of a configuration file, with what it extends; see `read_files` for the errors."""
    return merge(read_files(name_or_path))


def read_files(name_or_path: str | Path) -> list[ConfigFile]:
    """A configuration file and those that it extends, the nearest first.

    Raises ConfigError for a file that cannot be read or holds no JSON object, and for files that extend one another
    in a circle or more than LONGEST_CHAIN deep.
    """
    path = find_config(name_or_path)
    files: list[ConfigFile] = []
    while True:
        values = _read_object(path)
        base = values.pop(KEY, None)
        files.append(ConfigFile(path, values))
        if base is None:
            return files
        path = _find_base(path, base)
        if any(path.resolve() == file.path.resolve() for file in files):
            circle = " -> ".join(file.path.name for file in [*files, ConfigFile(path, {})])
            raise ConfigError(f"{files[-1].path} {KEY}", f"ends in a circle, {circle}", "Remove one of these `extends`")
        if len(files) == LONGEST_CHAIN:
            problem = f"{files[0].path} extends more than {LONGEST_CHAIN - 1} files, one by another"
            raise ConfigError(f"{files[-1].path} {KEY}", problem, "Extend a configuration nearer to the first one")


def merge(files: list[ConfigFile]) -> dict[str, Any]:
    """The values of files that extend one another, the nearest first."""
    values: dict[str, Any] = {}
    for file in reversed(files):
        values = _merged(values, file.values)
    return values


def _merged(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in own.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            result[key] = _merged(base[key], value)
        elif value is None and key in base:
            del result[key]
        else:
            result[key] = value
    return result


def _find_base(path: Path, base: object) -> Path:
    """The file that `path` extends. A file may have the name of the shipped one that it extends."""
    where = f"{path} {KEY}"
    if not isinstance(base, str) or not base:
        raise ConfigError(where, f"{show(base)} is no configuration's name", 'Write a name, such as "reformer_64k"')
    for name in (base, base + SUFFIX):
        beside = path.parent / name
        if beside.is_file() and beside.resolve() != path.resolve():
            return beside
    try:
        return find_config(base)
    except ConfigError as error:
        raise ConfigError(where, f"{show(base)} {error.problem}", error.hint) from None


def _read_object(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or a path with a null character
        reason = getattr(error, "strerror", None) or str(error)
        hint = "Give a JSON file, or the name of one in configs/"
        raise ConfigError(str(path), f"cannot be read ({reason})", hint) from None
    values = strict_json.parse(text, str(path))
    if not isinstance(values, dict):
        raise ConfigError(str(path), f"{show(values)} is not a configuration", "Write an object of sections: {...}")
    return values
