"""Changing one value in the text of a JSON file, the rest of which stays as somebody wrote it."""

import json
from collections.abc import Sequence
from typing import Any

_DECODER = json.JSONDecoder()


def with_value(text: str, keys: Sequence[str], value: Any) -> str:
    """The text of a JSON object with `value` at the path `keys`; what is missing on the way is added, first of its
    object. ValueError where something on the way is no object.
    """
    start = _skip(text, 0)
    for depth, key in enumerate(keys):
        if text[start] != "{":
            raise ValueError(f"{'.'.join(keys[:depth]) or 'the text'} is no object")
        place = _member(text, start, key)
        if place is None:
            return _added(text, start + 1, keys[depth:], value)
        start, end = place
    return text[:start] + json.dumps(value) + text[end:]


def _added(text: str, start: int, keys: Sequence[str], value: Any) -> str:
    for key in reversed(keys):
        value = {key: value}
    after = _skip(text, start)
    space = text[start:after]
    if text[after] != "}":  # in the manner of the members that there are
        return f"{text[:start]}{space}{json.dumps(value)[1:-1]},{space or ' '}{text[after:]}"
    return f"{text[:start]}{json.dumps(value)[1:-1]}{text[after:]}"


def _member(text: str, start: int, wanted: str) -> tuple[int, int] | None:
    """The first and last place of a key's value in the object that begins at `start`; None where it has no such key."""
    at = _skip(text, start + 1)
    while text[at] != "}":
        key, at = _DECODER.raw_decode(text, at)
        first = _skip(text, _skip(text, at) + 1)  # behind the colon
        _, at = _DECODER.raw_decode(text, first)
        if key == wanted:
            return first, at
        at = _skip(text, at)
        if text[at] == ",":
            at = _skip(text, at + 1)
    return None


def _skip(text: str, start: int) -> int:
    """The place of the next character that is no white space."""
    return len(text) - len(text[start:].lstrip())
