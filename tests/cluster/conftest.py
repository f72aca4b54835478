"""Two hosts with a cable between them, the data that both see, and the run that nothing happens to."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.faults import LIMIT, Run, running
from tests.helpers.hosts import Host, hosts, require
from tests.helpers.slurm import Slurm
from tests.helpers.trained import prepared

ROOT = Path(__file__).resolve().parents[2]
PRETRAIN = ROOT / "launch" / "pretrain.py"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
NOBODY = "10.77.0.9"
"""An address of the same network that no host has."""
STEPS = 120
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GOMP_SPINCOUNT": "0",
    "GLOO_SOCKET_IFNAME": "eth0",
    "PYTHONPATH": str(ROOT),
    "TORCH_EXTENSIONS_DIR": os.environ.get("TORCH_EXTENSIONS_DIR", str(Path.home() / ".cache" / "torch_extensions")),
}
"""Arguments of every rank, on every node."""
SETTINGS = [f"{name}={value}" for name, value in ENVIRONMENT.items()]


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("data"))


def cluster_run(folder: Path, data: Path, **sections: dict[str, Any]) -> Run:
    """A run of 120 steps that saves every tenth."""
    own = {"training": {"steps": STEPS}, "checkpoint": {"every": 10}, "run": {"hang_timeout": 5.0}}
    return Run(folder, data, **(own | sections))


@dataclass
class TwoNodes:
    """Two hosts that know each other as node-a and node-b; everything is started on node-a."""

    a: Host
    b: Host

    def start(self, run: Run, hostfile: str, *options: str, stop_at: int = STEPS) -> None:
        """`deepspeed --hostfile` with these lines and further options."""
        path = run.folder / "hostfile"
        path.write_text(hostfile)
        (run.folder / ".deepspeed_env").write_text("\n".join(SETTINGS))
        script = [str(PRETRAIN), "--config", str(run.folder / "config.json"), "--stop-at", str(stop_at)]
        deepspeed = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", str(path), *options]
        self._launch(run, [*deepspeed, *script])

    def _launch(self, run: Run, command: list[str]) -> None:
        run.launch(self.a.command(*command, folder=run.folder), **ENVIRONMENT)

    def clear(self) -> None:
        """End the processes that a test left on both nodes."""
        for host in (self.a, self.b):
            for pid in host.processes(str(PRETRAIN)):
                subprocess.run(["kill", "-9", str(pid)], stderr=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two hosts, node-a and node-b, joined."""
    require("ip", "unshare", "nsenter", "setpriv")
    names = tmp_path_factory.mktemp("names") / "hosts"
    known = [f"{address} {name}" for address, name in zip(ADDRESSES, ("node-a", "node-b"), strict=True)]
    names.write_text("\n".join(["127.0.0.1 localhost", *known, f"{NOBODY} node-c", ""]))
    with hosts(["node-a", "node-b"]) as (a, b):
        a.join(b, ADDRESSES)
        for host in (a, b):
            host.know(names)
        yield [a, b]


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory, pair):
    require("ssh-keygen", "sshd", "pdsh")
    folder = tmp_path_factory.mktemp("ssh")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key")], check=True)
    for host in pair:
        host.serve_ssh(folder)
    return TwoNodes(*pair)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory, pair):
    require("munged", "slurmctld", "slurmd", "sbatch")
    return Slurm(tmp_path_factory.mktemp("slurm"), pair)


@pytest.fixture(scope="session")
def clean(tmp_path_factory, data):
    """The same on two ranks of one machine, undisturbed."""
    run = cluster_run(tmp_path_factory.mktemp("clean"), data)
    with running(run):
        run.start()
        ended = run.wait(limit=3 * LIMIT)
    assert ended.code == 0, ended.said
    assert sorted(run.losses()) == list(range(1, STEPS + 1))
    return run
