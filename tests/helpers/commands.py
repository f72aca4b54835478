"""Commands run inside the test's own process, as a user types them."""

from typing import Any

import pytest


def run(program: Any, *arguments: object) -> None:
    getattr(program, "main", program)([str(argument) for argument in arguments])


def refused(capsys: pytest.CaptureFixture[str], program: Any, *arguments: object) -> str:
    """The one line by which a command refuses its arguments."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        run(program, *arguments)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    return error
