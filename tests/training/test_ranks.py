"""Ranks that cannot meet, or lack a device, print the cause and exit."""

import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from megasparse.config.schema import RunConfig
from megasparse.errors import HANG, ConfigError, StorageError, UserError
from megasparse.training import ranks
from megasparse.training.ranks import start_ranks
from tests.helpers.cases import together
from tests.helpers.ranks_in_threads import run_in_threads
from tests.helpers.run_ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
MEET = """
from megasparse.config.schema import RunConfig
from megasparse.training import ranks
ranks.MEETING_REPORT = 0.5
ranks.start_ranks(RunConfig(directory="unused", device="cpu", hang_timeout=0.1))
"""


LAUNCHED = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1], ids=["the first waits", "the first is not there"])
def test_a_failed_rendezvous_is_reported_and_exits_as_a_hang(rank):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environment = os.environ | {name: str(value) for name, value in place.items()} | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run([sys.executable, "-c", MEET], env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == HANG, ended.stderr
    where = f"rank {rank} on {socket.gethostname()}"
    assert f"{where} has waited 0.5 s for the 2 ranks to meet at 127.0.0.1:{port}. Have all" in ended.stderr
    assert ended.stderr.splitlines()[-1].startswith(f"HANG: {where} waited 1 s for the 2 ranks to meet at")


def test_more_ranks_than_gpus_are_rejected(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    for name, value in {**LAUNCHED, "LOCAL_RANK": "8", "WORLD_SIZE": "9"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"^LOCAL_RANK: rank 8 of \S+ needs a GPU, but PyTorch finds only 8\."):
        start_ranks(RunConfig(directory="unused"))


LEFT_OVER = {
    "WORLD_SIZE=2": "WORLD_SIZE: of the launcher.s variables only WORLD_SIZE",
    "WORLD_SIZE=abc": "WORLD_SIZE: 'abc' in the environment is not a number",
    "WORLD_SIZE=0": "RANK: 0 is not below WORLD_SIZE=0",
    "WORLD_SIZE=-1": "WORLD_SIZE: '-1' in",
    "RANK=0": "RANK: of the launcher.s variables only RANK is set",
    "RANK=1 WORLD_SIZE=2": "RANK: of the launcher.s variables only RANK, WORLD_SIZE is set",
    "RANK=5 WORLD_SIZE=2": "RANK: 5 is not below WORLD_SIZE=2",
    "LOCAL_RANK=3": "LOCAL_RANK: 3 is not below WORLD_SIZE=1",
    "LOCAL_RANK=x RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=0": "LOCAL_RANK: 'x' in",
    "RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=abc": "MASTER_PORT: 'abc' in",
    "RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=99999": "MASTER_ADDR:MASTER_PORT: the rendezvous at",
    "RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=0 LOCAL_SIZE=\n": "LOCAL_SIZE: '\\\\n' in",
}


@together("variables", LEFT_OVER)
def test_a_stale_launcher_environment_is_rejected_in_one_line(variables, monkeypatch):
    for assignment in variables.split(" "):
        monkeypatch.setenv(*assignment.split("=", 1))
    with pytest.raises(ConfigError, match=f"^{LEFT_OVER[variables]}") as refused:
        start_ranks(RunConfig(directory="unused", device="cpu"))
    assert "unset" in str(refused.value) or "port" in str(refused.value)


def listening() -> list[str]:
    start_ranks(RunConfig(directory="unused", device="cpu"))
    open_files = [Path(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    inodes = {file.stat().st_ino for file in open_files if file.exists()}
    rows = [line.split() for file in ("tcp", "tcp6") for line in Path("/proc/self/net", file).read_text().splitlines()]
    return [row[1].rpartition(":")[0] for row in rows if row[3] == "0A" and int(row[9]) in inodes]


def test_ranks_of_one_machine_use_the_loopback_interface():
    assert set().union(*run_ranks(listening, 2)) == {"0100007F"}


def names_of_a_start(store: torch.distributed.Store, size: int) -> list[str]:
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: ranks._name_of_this_start(store, rank, size), reversed(range(size))))


def test_each_start_of_torchrun_has_a_separate_name_in_the_store():
    """Also after a start that was killed in between, and on another number of ranks."""
    store = torch.distributed.HashStore()
    store.set("start", "of a start whose ranks died")
    result = [names_of_a_start(store, size) for size in (3, 3, 2, 4)]
    assert all(len(set(names)) == 1 for names in result)
    assert len({names[0] for names in result}) == 4


def messages_of_three() -> list[list[object]]:
    process = start_ranks(RunConfig(directory="unused", device="cpu"))
    message = {"rank": process.rank, "text": "\u00fc" * 1000 * process.rank}
    to_first = [process.gather(value, first_only=True) for value in (message, None)]
    return [process.gather(message), *to_first, process.gather(process.rank)]


def test_messages_reach_every_rank_or_only_the_first():
    messages = [{"rank": rank, "text": "\u00fc" * 1000 * rank} for rank in range(3)]
    result = run_ranks(messages_of_three, 3)
    assert result[0] == [messages, messages, [None] * 3, [0, 1, 2]]
    assert result[1:] == [[messages, [], [], [0, 1, 2]]] * 2


@together("error", [ConfigError("a.b", "no", "Do"), StorageError("c", "full", "Do"), UserError("x")])
def test_an_error_of_rank_0_is_raised_on_every_rank_with_its_type_and_values(error):
    def work() -> None:
        raise error

    for copy in run_in_threads(lambda ranks: ranks.on_first_rank(work), 3):
        assert (type(copy), copy.args, vars(copy)) == (type(error), error.args, vars(error))
    assert run_in_threads(lambda ranks: ranks.on_first_rank(lambda: ranks.rank), 3) == [0, 0, 0]
