import hashlib
import subprocess

import pytest

from megasparse.data import wheels
from megasparse.errors import DataError

SHA256 = hashlib.sha256(b"wheel").hexdigest()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(wheels, "FOLDER", tmp_path)
    return tmp_path


def pip(monkeypatch, code, write=None):
    """In pip's place a command that writes a file, or none, and ends with the code. Returns what it was given."""
    given = []

    def run(command, check):
        given.append(command)
        if write is not None:
            write.write_bytes(b"wheel")
        return subprocess.CompletedProcess(command, code)

    monkeypatch.setattr(wheels.subprocess, "run", run)
    return given


def test_a_wheel_is_downloaded_once_and_never_installed(folder, monkeypatch):
    given = pip(monkeypatch, 0, folder / "a.whl")
    for _ in range(2):
        assert wheels.fetch_wheel("a==1", "a.whl", SHA256, ["--python-version", "3.11"]) == folder / "a.whl"
    (command,) = given
    assert command[2:4] == ["pip", "download"] and "--no-deps" in command and command[-1] == "a==1"
    assert "--python-version" in command


def test_another_content_is_refused(folder):
    (folder / "a.whl").write_bytes(b"other")
    with pytest.raises(DataError, match=r"a\.whl: its sha256 is .*Delete it"):
        wheels.fetch_wheel("a==1", "a.whl", SHA256)


@pytest.mark.parametrize("code", [0, 1])
def test_a_wheel_that_cannot_be_had_is_named(folder, monkeypatch, code):
    pip(monkeypatch, code)
    with pytest.raises(DataError, match=r"a\.whl: pip could not download a==1"):
        wheels.fetch_wheel("a==1", "a.whl", SHA256)
