"""The wheel, built without a network: it holds the command and the shipped configurations, and works anywhere."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from megasparse.settings.load import load_config

ROOT = Path(__file__).parents[2]
ENTRY = "from megasparse.cli.main import main; main()"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a build leaves folders behind, and would take old ones along
    for name in ("megasparse", "configs"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    subprocess.run([*build, "--wheel-dir", str(folder), str(source)], check=True)
    (found,) = folder.glob("*.whl")
    return found


def test_it_holds_the_command_the_package_and_every_configuration(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entries = archive.read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
    assert "megasparse = megasparse.cli.main:main" in entries
    expected = {path.relative_to(ROOT).as_posix() for path in (ROOT / "megasparse").rglob("*.py")}
    expected.add("megasparse/tasks/catalog.json")
    shipped = [*(ROOT / "configs").rglob("*.json"), *(ROOT / "configs").rglob("*.csv")]
    expected |= {f"megasparse/{path.relative_to(ROOT).as_posix()}" for path in shipped}
    assert {name for name in names if ".dist-info/" not in name} == expected


@pytest.mark.slow
def test_it_works_from_an_empty_folder(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    (tmp_path / "empty").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    command = [sys.executable, "-P", "-c", ENTRY] if sys.version_info >= (3, 11) else [sys.executable, "-c", ENTRY]

    def megasparse(*words):
        options = {"cwd": tmp_path / "empty", "env": environment, "text": True}
        return subprocess.run([*command, *words], **options, capture_output=True, check=True).stdout

    assert "quickstart" in megasparse("configs").split()
    printed = json.loads(megasparse("pretrain", "quickstart", "--print-config"))
    assert printed == json.loads(load_config("quickstart").model_dump_json())
    fits = megasparse("finetune", "finetune/quick", "--set", "run.device=cpu", "--dry-run")
    assert "GB measured" in fits and not list((tmp_path / "empty").iterdir())
