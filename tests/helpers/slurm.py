"""A small Slurm on hosts of tests/helpers/hosts.py. Needs root, and Debian's slurm-wlm and munge."""

import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from tests.helpers.hosts import Host

CONFIGURATION = """
ClusterName=tests
SlurmctldHost={first}
SlurmUser=root
SlurmdUser=root
AuthInfo=cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={nodes} CPUs={cpus}
PartitionName=usual Nodes={nodes} Default=YES PriorityTier=1 MaxTime=INFINITE
PartitionName=urgent Nodes={nodes} PriorityTier=2 PreemptMode=OFF MaxTime=INFINITE
"""
"""Requeued jobs wait for `cred_expire` (5 s here, usually 120 s) before they start again."""


class Slurm:
    """A Slurm: slurmctld on the first of the hosts, slurmd and munged on each."""

    def __init__(self, folder: Path, hosts: list[Host]):
        self.folder, self.first = folder, hosts[0]
        (folder / "etc").mkdir()
        (folder / "state").mkdir()
        names = ",".join(host.name for host in hosts)
        cpus = len(os.sched_getaffinity(0))
        text = CONFIGURATION.format(first=hosts[0].name, folder=folder, nodes=names, cpus=cpus)
        (folder / "etc" / "slurm.conf").write_text(text)
        key = folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        for host in hosts:
            host.do("mount", "--bind", str(folder / "etc"), "/etc/slurm")
            host.do("mkdir", "-m", "755", "/run/munge")
            files = [f"--log-file=/run/munge/log-{host.name}", "--seed-file=/run/munge/seed"]
            host.do("/usr/sbin/munged", "--force", f"--key-file={key}", *files)
        hosts[0].do("/usr/sbin/slurmctld")
        for host in hosts:
            host.do("/usr/sbin/slurmd", "-N", host.name)
        self.wait_until(lambda: self.idle() == len(hosts))

    def idle(self) -> int:
        return int(self.first.do("sinfo", "-h", "-p", "usual", "-t", "idle", "-o", "%D") or 0)

    def submit(self, *arguments: str, folder: Path, environment: dict[str, str]) -> str:
        variables = [f"{name}={value}" for name, value in environment.items()]
        return self.first.do("env", *variables, "sbatch", "--parsable", *arguments, folder=folder).strip()

    def state(self, job: str) -> dict[str, str]:
        """Fields of scontrol for a job: JobState, ExitCode, Restarts, ..."""
        words = self.first.do("scontrol", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, job: str, *states: str, limit: float = 120.0) -> dict[str, str]:
        self.wait_until(lambda: self.state(job)["JobState"] in states, limit)
        return self.state(job)

    def wait_until(self, true: Callable[[], bool], limit: float = 120.0) -> None:
        deadline = time.monotonic() + limit
        while not true():
            assert time.monotonic() < deadline, self.reported()
            time.sleep(0.2)

    def reported(self) -> str:
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"{log.name}:\n{log.read_text(errors='replace')[-3000:]}" for log in logs)
