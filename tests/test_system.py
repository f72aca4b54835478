"""Training, evaluation, generation and export in one process without what only Linux or POSIX has."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.trained import prepared

LACKING = """
import faulthandler, os, select, signal, sys, types
import torch, transformers.modeling_utils  # these know systems by sys.platform
for name in ("fcntl", "resource", "pwd", "grp", "termios", "deepspeed", "fairscale", "triton"):
    sys.modules[name] = None
locks = []
sys.modules["msvcrt"] = types.SimpleNamespace(LK_NBLCK=2, locking=lambda *words: locks.append(words))
for name in (
    "fork", "register_at_fork", "pwrite", "preadv", "sched_getaffinity", "set_blocking", "O_NOFOLLOW", "O_NONBLOCK",
    "O_CLOEXEC", "geteuid", "getuid", "killpg", "mkfifo", "setsid", "sysconf", "uname",
):
    delattr(os, name)
for name in ("SIGUSR1", "SIGUSR2", "SIGKILL", "SIGSTOP", "pthread_sigmask", "setitimer"):
    delattr(signal, name)
del faulthandler.register, select.poll

from megasparse.cli.main import main
from megasparse.errors import report_user_errors
from megasparse.hub.export import to_hf
from megasparse.runs.api import evaluate, generate

def lose_connection():
    raise BrokenPipeError

config, run = sys.argv[1:]
main(["pretrain", "--config", config])
assert locks, "the folder of the run was not locked"
evaluate(run)
generate(run, "a", 2)
to_hf(run, run + "-exported")
try:
    report_user_errors(lose_connection)()
except BrokenPipeError:
    pass
"""


@pytest.mark.slow
def test_one_process_needs_nothing_of_posix(tmp_path):
    run, config = tmp_path / "run", tmp_path / "config.json"
    attention = {"pattern": ["lsh"], "lsh": {"chunk": 16, "buckets": 4}}
    settings = {
        "run": {"directory": str(run), "engine": "torch", "device": "cpu"},
        "model": {"max_length": 64, "layers": 1, "d_model": 16, "d_ff": 32, "heads": 2, "attention": attention},
        "data": {"path": str(prepared(tmp_path)), "sequence_length": 64},
        "training": {"steps": 2, "global_batch": 2, "micro_batch": 2},
    }
    config.write_text(json.dumps(settings))
    command = [sys.executable, "-c", LACKING, str(config), str(run)]
    result = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
