"""A supervisor whose ranks are toys."""

import pytest

from tests.helpers.supervised import Toy


@pytest.fixture
def toy(tmp_path):
    toy = Toy(tmp_path)
    yield toy
    left = toy.leftovers()
    toy.end()
    assert not left, f"left behind: {left}"
