"""Run the rows of a table as one case."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def together(arguments: str | tuple[str, ...], rows: Iterable[Any]) -> Callable[..., Any]:
    """Call a test with each row of a table, as `parametrize` would, in one case: for rows of milliseconds that reach
    different branches of one function. A failure names its row.

    tmp_path is a new folder for each row, and monkeypatch is undone after it; other fixtures are shared by all rows.
    """
    names = arguments.replace(" ", "").split(",") if isinstance(arguments, str) else list(arguments)
    table = [row if len(names) > 1 else (row,) for row in rows]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(test)

        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            for number, row in enumerate(table):
                values = fixtures | dict(zip(names, row, strict=True))
                with pytest.MonkeyPatch.context() as patch:
                    if "monkeypatch" in fixtures:
                        values["monkeypatch"] = patch
                    if "tmp_path" in fixtures:
                        values["tmp_path"] = fixtures["tmp_path"] / f"row{number}"
                        values["tmp_path"].mkdir()
                    try:
                        test(**values)
                    except BaseException as error:
                        error.add_note(f"row {number}: {row!r:.500}")
                        raise

        parameters = [p for p in signature.parameters.values() if p.name not in names]
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return run

    return decorate
