"""docs/first-hour.md: its commands, whole, one after another in an empty folder. An hour; a network for the text."""

import os
import shlex
import subprocess
import sys

import pytest

from tests.helpers.documents import commands
from tests.test_docs import ROOT

PAGE = (ROOT / "docs/first-hour.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("first_hour")


@pytest.mark.soak
@pytest.mark.parametrize("words", commands(PAGE), ids=lambda words: shlex.join(words)[:60])
def test_a_command_of_the_first_hour_ends_well(words, folder):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "megasparse", *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_every_command_needs_only_what_an_earlier_one_makes():
    made = {"runs/first", "runs/reviews"}
    for words in commands(PAGE):
        if words[0] == "quickstart":
            made.add("runs/quickstart_small" if "--small" in words else "runs/quickstart")
        named = {word for word in words if word.startswith("runs/")}
        assert named <= made, shlex.join(words)
