"""The launchers' arguments, in a process as a user starts it: exit codes, one line on stderr, no traceback."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megasparse.config.command_line import checkpoint_parser, config_from, config_parser
from megasparse.config.load import load_config
from megasparse.config.schema import Config
from megasparse.errors import report_user_errors

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "configs" / "quickstart.json")
PROGRAM = """
from megasparse.config.command_line import config_from, config_parser
from megasparse.config.schema import Config
from megasparse.errors import report_user_errors

@report_user_errors
def main():
    print(config_from(config_parser("A launcher.").parse_args(), Config).training.steps)

main()
"""


def start(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=120, check=False
    )


def test_the_configuration_comes_with_its_overrides():
    found = start("--config", QUICKSTART, "--set", "training.steps=3", "--set", "run.seed=2", "--local_rank=1")
    assert (found.returncode, found.stdout, found.stderr) == (0, "3\n", "")


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["--set", "training.steps=x"], "training.steps"),
        (["--set", "training.stepz=1"], "training.stepz"),
        (["--set", "deepspeed.zero_optimization.stge=1"], "deepspeed.zero_optimization.stge"),
        (["--set", "model.heads=5"], "model.heads"),
        (["--config", "no/such.json"], "no/such.json"),
    ],
)
def test_a_mistake_is_exit_code_2_and_one_line(arguments, key):
    found = start("--config", QUICKSTART, *arguments)
    assert found.returncode == 2
    assert found.stdout == ""
    assert found.stderr.startswith(f"error: {key}: ")
    assert found.stderr.count("\n") == 1


@pytest.mark.parametrize("override", ["model.layers=0", "model.heads=5", "deepspeed.zero_optimization.stge=1"])
def test_F1_pretraining_tells_a_mistake_before_the_imports_that_take_seconds(override):
    code = """
import runpy, sys
try:
    runpy.run_path("launch/pretrain.py", run_name="__main__")
except SystemExit as end:
    print(end.code, sorted({"torch", "deepspeed"} & {*sys.modules}))
"""
    found = subprocess.run(
        [sys.executable, "-c", code, "--config", QUICKSTART, "--set", override],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True,
    )  # fmt: skip
    assert found.stdout == "2 []\n", found.stderr


def test_print_config_prints_all_defaults_and_stops(capsys):
    with pytest.raises(SystemExit) as caught:
        config_from(
            config_parser("x").parse_args(["--config", QUICKSTART, "--set", "run.seed=5", "--print-config"]), Config
        )
    assert caught.value.code == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(load_config(QUICKSTART, ["run.seed=5"]).model_dump_json())
    assert printed["checkpoint"]["keep"] == 2  # a default that the file does not name


def test_help_and_unknown_arguments(capsys):
    for arguments, code in (
        (["--help"], 0),
        ([], 2),
        (["--config", "x", "--conf", "y"], 2),
        (["--config", "x", "--stes"], 2),
    ):
        with pytest.raises(SystemExit) as caught:
            config_parser("Story.").parse_args(arguments)
        assert caught.value.code == code
    assert "Story." in capsys.readouterr().out


def test_the_other_launchers_take_a_checkpoint():
    found = checkpoint_parser("x").parse_args(
        ["--checkpoint", "runs/a", "--set", "run.device=cpu", "--local-rank", "3"]
    )
    assert (found.checkpoint, found.set) == ("runs/a", ["run.device=cpu"])


def test_an_interrupted_command_is_one_line_and_no_traceback(capsys):
    @report_user_errors
    def main():
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130 and capsys.readouterr().err == "interrupted\n"
