"""JSON without surprises. What Python's parser would let pass in silence (a key given twice, NaN) is an error here."""

import json
import re
from typing import Any

from megasparse.errors import ConfigError

# Strings (a key where a colon follows), braces, and the constants that JSON does not have.
_TOKEN = re.compile(r'(?P<string>"(?:[^"\\]|\\.)*")(?P<colon>\s*:)?|[{}]|(?P<constant>-?(?:NaN|Infinity))')


def parse(text: str, name: str) -> Any:
    """Parse `text`. `name` (a file, or a command line argument) and the line go into the ConfigError of anything that
    is not strict JSON: syntax, comments, trailing commas, duplicate keys, NaN and infinities."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        hint, position = _hint(text, error.pos)
        raise ConfigError(_where(name, text, position), f"not JSON: {error.msg}", hint) from None
    except RecursionError:
        raise ConfigError(name, "nested too deeply", "Remove the superfluous brackets") from None
    except ValueError as error:  # an integer of thousands of digits
        raise ConfigError(name, str(error).split(";")[0], "Write a smaller number") from None
    _refuse_what_python_lets_pass(text, name)
    return value


def _where(name: str, text: str, position: int) -> str:
    return f"{name} line {text.count(chr(10), 0, position) + 1}"


def _hint(text: str, position: int) -> tuple[str, int]:
    """What to do about a syntax error found at `position`, and the position of the culprit."""
    before, after = text[:position].rstrip(), text[position:].lstrip()
    if before.endswith(",") and after.startswith(("}", "]")):
        return "Remove the comma before the closing bracket", len(before) - 1
    if re.match(r",\s*[}\]]", after):  # where Python 3.13 finds the same
        return "Remove the comma before the closing bracket", position
    if after.startswith(("//", "#", "/*")):
        return "JSON has no comments: remove it", position
    if after.startswith("'"):
        return "Write texts and keys in double quotes", position
    if not after:
        return "The text ends too early: close the brackets and quotes", position
    return "Compare with the files in configs/", position


def _refuse_what_python_lets_pass(text: str, name: str) -> None:
    keys: list[set[str]] = []
    for match in _TOKEN.finditer(text):
        where = _where(name, text, match.start())
        if match["constant"]:
            raise ConfigError(where, f"{match['constant']} is not JSON", "Write a number")
        if match["colon"]:
            key = json.loads(match["string"])
            if key in keys[-1]:
                raise ConfigError(where, f"the key {match['string']} is given twice", "Remove one of the two")
            keys[-1].add(key)
        elif match[0] == "{":
            keys.append(set())
        elif match[0] == "}":
            keys.pop()
