"""Configuration files: strict JSON, shipped configurations, and `extends`.

A file with `"extends": "NAME"` contains only its differences from another one: a file in the same folder, or a shipped
configuration. Objects are merged key by key; any other value replaces the base's, and null removes it.
"""

import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megasparse.config.messages import show
from megasparse.errors import ConfigError
from megasparse.files import read_file, strict_json, syntax_hint

KEY = "extends"
COMPARE = "Compare with the files in configs/"


@dataclass(frozen=True)
class ConfigFile:
    path: Path
    values: dict[str, Any]
    """Keys of this file only, without `extends`."""


def read_values(name_or_path: str | Path) -> dict[str, Any]:
    """Return the merged values of a configuration file and the files that it extends; see `read_files` for errors."""
    return merge(read_files(name_or_path))


def read_files(name_or_path: str | Path) -> list[ConfigFile]:
    """Return a configuration file and the files that it extends, the nearest first.

    Raises ConfigError for a file that cannot be read or does not contain a JSON object, and for a cycle of `extends`.
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
            raise ConfigError(f"{files[-1].path} {KEY}", f"forms a cycle, {circle}", "Remove one of these `extends`")


def merge(files: list[ConfigFile]) -> dict[str, Any]:
    """Return the merged values of a chain of files, the nearest first."""
    values: dict[str, Any] = {}
    for file in reversed(files):
        values = _merged(values, file.values)
    return values


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            result[key] = _merged(base[key], value)
        elif value is None and key in base:
            del result[key]
        else:
            result[key] = value
    return result


def _find_base(path: Path, base: object) -> Path:
    """Return the file that `path` extends. A file may extend the shipped configuration of the same name."""
    key = f"{path} {KEY}"
    if not isinstance(base, str) or not base:
        raise ConfigError(key, f"{show(base)} is not a configuration's name", 'Write a name, such as "reformer_64k"')
    for name in (base, base + SUFFIX):
        candidate = path.parent / name
        if candidate.is_file() and candidate.resolve() != path.resolve():
            return candidate
    try:
        return find_config(base)
    except ConfigError as error:
        raise ConfigError(key, f"{show(base)} {error.problem}", error.hint) from None


def _read_object(path: Path) -> dict[str, Any]:
    try:
        text = read_file(path).decode()
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a path with a null character
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(str(path), f"cannot be read ({reason})", "Give a JSON file, or a name in configs/") from None
    values = parse_json(text, str(path))
    if not isinstance(values, dict):
        raise ConfigError(str(path), f"{show(values)} is not a configuration", "Write an object of sections: {...}")
    return values


PACKAGE = Path(__file__).parents[1]
SUFFIX = ".json"


def shipped_configs() -> dict[str, Path]:
    """Return name -> file of each shipped configuration. A name is the path in configs/, e.g. "finetune/glue_rte"."""
    # The folder is inside an installed package, and next to the package in a checkout.
    folder = next((path for path in (PACKAGE / "configs", PACKAGE.parent / "configs") if path.is_dir()), None)
    files = sorted(folder.rglob(f"*{SUFFIX}")) if folder else []
    return {file.relative_to(folder).as_posix().removesuffix(SUFFIX): file for file in files if folder}


def find_file(name_or_path: str | Path) -> Path:
    """Return the path itself if it exists, or else the shipped file with this name."""
    path, name = Path(name_or_path), str(name_or_path)
    shipped = PACKAGE / name
    return shipped if name.startswith("configs/") and not path.exists() and shipped.is_file() else path


def find_config(name_or_path: str | Path) -> Path:
    """Return the file of a path or of a shipped configuration ("reformer_64k", "finetune/glue_rte", or "glue_rte" if
    this short name is unique). Raises ConfigError if there is neither.
    """
    path, name = Path(name_or_path), str(name_or_path)
    if path.is_file():
        return path
    shipped = shipped_configs()
    short = name.removeprefix("configs/").removesuffix(SUFFIX)
    matching = [short] if short in shipped else [other for other in shipped if other.endswith(f"/{short}")]
    if len(matching) == 1:
        return shipped[matching[0]]
    if path.exists():  # a device or a folder: reading it raises the error
        return path
    names = {other.rpartition("/")[2]: other for other in shipped} | {other: other for other in shipped}
    near = matching or [names[other] for other in difflib.get_close_matches(short, names, n=1)]
    hint = f'Did you mean "{near[0]}"?' if near else "Give a JSON file, or the name of one in configs/"
    raise ConfigError(name, "cannot be read (no such file, and no such shipped configuration)", hint)


def parse_json(text: str, name: str) -> Any:
    """Parse strict JSON. Raises ConfigError with `name`, and the line of syntax errors."""
    try:
        return strict_json(text)
    except json.JSONDecodeError as error:
        hint = syntax_hint(text, error.pos) or COMPARE
        raise ConfigError(f"{name} line {error.lineno}", f"not JSON: {error.msg}", hint) from None
    except ValueError as error:  # among them an integer of thousands of digits
        raise ConfigError(name, str(error).split(";")[0], COMPARE) from None
