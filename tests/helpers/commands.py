"""Commands run inside the test's own process, as a user types them."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from megasparse.errors import DataError, UserError


def run(program: Any, *arguments: object) -> None:
    getattr(program, "main", program)([str(argument) for argument in arguments])


def refused(capsys: pytest.CaptureFixture[str], program: Any, *arguments: object) -> str:
    """The one-line error of a command for its arguments."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        run(program, *arguments)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    return error


def refusal(action: Callable[[], Any], kind: type[UserError] = DataError, match: str = "") -> str:
    """The one-line message of the error that an action raises, or the iteration over its result: a pattern is in it."""
    with pytest.raises(UserError) as caught:
        result = action()
        if isinstance(result, Iterable):
            list(result)
    assert type(caught.value) is kind and "\n" not in str(caught.value)
    assert re.search(match, str(caught.value)), str(caught.value)
    return str(caught.value)
