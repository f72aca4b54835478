"""Commands run inside the test's own process, as a user types them."""

import sys
from types import ModuleType

import pytest


def run(launcher: ModuleType, *arguments: object) -> None:
    """Run a launcher's `main` with arguments."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["launcher", *map(str, arguments)])
        launcher.main()


def refused(capsys: pytest.CaptureFixture[str], launcher: ModuleType, *arguments: object) -> str:
    """The one line by which a launcher refuses its arguments."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        run(launcher, *arguments)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    return error
