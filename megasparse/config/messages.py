"""Pydantic's errors as one line that names the key, the value and a hint."""

import difflib
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from megasparse.errors import ConfigError, did_you_mean

Location = Sequence[int | str]
FEW = 5
"""Most choices that the message of a wrong value lists; of longer lists it suggests only the nearest."""


def as_config_error(error: ValidationError, model: type[BaseModel], values: object, prefix: str = "") -> ConfigError:
    """Return the first problem of `error`, with the number of further problems.

    model: the class that rejected `values`. prefix: the dotted key of the values in the run's file.
    """
    problems = [(_real_location(details["loc"], values), details) for details in error.errors(include_url=False)]
    top = problems[0][0]
    # Each alternative of a union reports an error: take the one with the deepest location.
    location, first = max(
        (problem_ for problem_ in problems if problem_[0][: len(top)] == top), key=lambda problem_: len(problem_[0])
    )
    further = len({str(problem_) for problem_, _ in problems if problem_[: len(top)] != top})
    more = f" ({further} more such problem{'s' if further > 1 else ''})" if further else ""
    value: Any = values
    for part in location:
        value = value[part]
    key, field, kind = dotted(location, prefix), _field_at(model, location), first["type"]
    choices = re.findall("'([^']*)'", first.get("ctx", {}).get("expected", ""))
    is_key = first["loc"][-1:] == ("[key]",)
    if kind == "extra_forbidden" or is_key:
        if field and not is_key:  # a key of DeepSpeed with an alias
            return ConfigError(key, f"{show(value)} is also given under the key's other name", f"Remove one{more}")
        hint = did_you_mean(str(location[-1]), choices) if is_key else _nearest(model, location, prefix)
        return ConfigError(key, f"unknown key (its value is {show(value)})", hint + more)
    if kind in ("value_error", "assertion_error"):
        problem = re.sub(r"^(Value error|Assertion failed), ", "", first["msg"]).rstrip(".")
        return ConfigError(key or "configuration", problem, f"Change or remove one of these keys{more}")
    near = difflib.get_close_matches(str(value), choices, n=1) if len(choices) > FEW else []
    hint = f'Did you mean "{near[0]}"?' if near else first["msg"].replace("Input should", "It must").replace("'", '"')
    if kind in ("model_type", "dict_type"):
        hint = "It must be an object {...}"
    if kind == "list_type" and isinstance(value, str):
        hint += f". Write {show([value])}"
    return ConfigError(key or "configuration", f"{show(value)} does not fit", hint + more)


def show(value: object) -> str:
    """Return a value in JSON, shortened."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    text = "".join(mark if mark.isprintable() else json.dumps(mark)[1:-1] for mark in text)
    return text if len(text) <= 80 else f"{text[:76]} ..."


def dotted(location: Location, prefix: str = "") -> str:
    """Return `("model", "betas", 1)` as `model.betas[1]`; unusual names are quoted."""
    key = prefix
    for part in location:
        if isinstance(part, int):
            key += f"[{part}]"
        else:
            name = part if re.fullmatch(r"[\w-]+", part, re.ASCII) else json.dumps(part)
            key += f".{name}" if key else name
    return key


def _fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return key -> field for all keys that `model` accepts, aliases included."""
    return {name: field for key, field in model.model_fields.items() for name in (key, field.alias) if name}


def _real_location(location: Location, values: Any) -> list[int | str]:
    """Return the parts of a location that exist in the values: pydantic inserts names of union members."""
    real: list[int | str] = []
    for part in location:
        try:
            values = values[part]
        except (KeyError, IndexError, TypeError):
            continue
        real.append(part)
    return real


def _models_in(annotation: object) -> Iterator[type[BaseModel]]:
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type(BaseModel)) and issubclass(kind, BaseModel):
            yield kind


def _field_at(model: type[BaseModel], location: Location) -> FieldInfo | None:
    """Return the field at a location, of list items the list's; None for the model itself."""
    field: FieldInfo | None = None
    current: type[BaseModel] | None = model
    for part in location:
        if isinstance(part, int) or current is None:
            break
        field = _fields(current).get(part)
        current = next(_models_in(field.annotation), None) if field else None
    return field


def _nearest(model: type[BaseModel], location: Location, prefix: str) -> str:
    field = _field_at(model, location[:-1])
    parent = next(_models_in(field.annotation)) if field else model
    unknown = str(location[-1])
    elsewhere = [key for key in all_keys(model) if key.split(".")[-1] == unknown]
    if elsewhere and not prefix:
        return f'Did you mean "{elsewhere[0]}"?'
    return did_you_mean(unknown, list(_fields(parent)))


def all_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Return every dotted key of a schema, sections included."""
    keys = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        for section in _models_in(field.annotation):
            keys += all_keys(section, f"{prefix}{name}.")
    return keys
