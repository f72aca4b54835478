"""Error messages as users see them."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from megasparse.errors import DataError, UserError


def refusal(action: Callable[[], Any], kind: type[UserError] = DataError, match: str = "") -> str:
    """The one-line message of the error that an action raises, or the iteration over its result: a pattern is in it."""
    with pytest.raises(UserError) as caught:
        found = action()
        if isinstance(found, Iterable):
            list(found)
    assert type(caught.value) is kind and "\n" not in str(caught.value)
    assert re.search(match, str(caught.value)), str(caught.value)
    return str(caught.value)
