"""Pydantic's errors as one line that names the key, the value and a hint."""

import difflib
import json
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, get_args

from pydantic import BaseModel, PydanticUserError, TypeAdapter, ValidationError
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
    key, field = dotted(location, prefix), _field_at(model, location)
    is_key = first["loc"][-1:] == ("[key]",)
    if first["type"] == "extra_forbidden" or is_key:
        if field and not is_key:  # a key of DeepSpeed with an alias
            return ConfigError(key, f"{show(value)} is also given under the key's other name", f"Remove one{more}")
        hint = did_you_mean(str(location[-1]), _choices(field)) if field else _nearest(model, location, prefix)
        return ConfigError(key, f"unknown key (its value is {show(value)})", hint + more)
    if first["type"] in ("value_error", "assertion_error"):
        problem = re.sub(r"^(Value error|Assertion failed), ", "", first["msg"]).rstrip(".")
        return ConfigError(key or "configuration", problem, f"Change or remove one of these keys{more}")
    in_object = field is not None and isinstance(location[-1], str) and field is _field_at(model, location[:-1])
    choices = _choices(field) if isinstance(value, str) and not in_object else []
    near = difflib.get_close_matches(str(value), choices, n=1) if len(choices) > FEW and value not in choices else []
    hint = f'Did you mean "{near[0]}"?' if near else f"It must be {_describe_field(field, first['msg'], in_object)}"
    if first["type"] == "list_type" and isinstance(value, str) and not near:
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
    """Return the location without the names of union members that pydantic inserts: parts that exist in the values."""
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
    """Return the schema's field for a location, of list items the list's field; None for the model itself."""
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


def _describe_field(field: FieldInfo | None, message: str, in_object: bool) -> str:
    if field is None or any(_models_in(field.annotation)):
        return "an object {...}"
    schema = {} if in_object else _json_schema(field)
    return _describe(schema) if schema else message.removeprefix("Input should be ")


def _json_schema(field: FieldInfo) -> dict[str, Any]:
    """Return a field's JSON schema; empty for types of DeepSpeed without one."""
    try:
        kind: Any = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
        return TypeAdapter(kind).json_schema()
    except (PydanticUserError, TypeError, ValueError):
        return {}


def _choices(field: FieldInfo | None) -> list[str]:
    """Return the allowed texts of a field's values, items and keys, if they are enumerated."""
    choices: list[str] = []

    def walk(schema: object) -> None:
        if isinstance(schema, dict):
            choices.extend(value for value in schema.get("enum", []) if isinstance(value, str))
            schema = list(schema.values())
        if isinstance(schema, list):
            for part in schema:
                walk(part)

    walk(_json_schema(field) if field else {})
    return choices


def _describe(schema: dict[str, Any]) -> str:
    """Return a JSON schema in words: "a whole number >= 1", `"adamw" or "adafactor"`, "a list of texts"."""
    if "anyOf" in schema:
        return " or ".join(_describe(part) for part in schema["anyOf"])
    if "const" in schema:
        return show(schema["const"])
    if "enum" in schema:
        return " or ".join(show(value) for value in dict.fromkeys(schema["enum"]))
    kind = schema.get("type", "any value")
    if kind == "array":
        if items := schema.get("prefixItems"):
            return f"a list of {len(items)} values, each {_describe(items[0])}"
        least, most = schema.get("minItems"), schema.get("maxItems")
        length = "" if not least else f", at least {least} long" if not most else f", {least} to {most} of them"
        return f"a list whose values are {_describe(schema.get('items', {}))}{length}"
    names = {
        "integer": "a whole number",
        "number": "a number",
        "boolean": "true or false",
        "string": "a text in double quotes" + ", not empty" * ("minLength" in schema),
        "object": "an object {...}",
        "null": "null",
    }
    limits = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {schema[limit]:g}" for limit, sign in limits.items() if limit in schema]
    return " ".join([names.get(kind, kind), " and ".join(bounds)]).strip()
