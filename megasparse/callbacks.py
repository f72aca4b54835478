"""Callbacks that long work calls, and the defaults for callers that need neither progress nor a way to stop."""

from collections.abc import Callable

Progress = Callable[[str], None]
"""Called with what is being done now, each time that there is progress."""


def silent(doing: str) -> None:
    """A `Progress` that shows nothing."""


def never() -> bool:
    """A condition that is never true, such as a wish to stop."""
    return False
