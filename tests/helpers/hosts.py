"""Hosts to try a cluster with: each a separate set of Linux namespaces (network, processes, mounts, name) with its
own sshd, joined by a cable that can be cut. Nothing has a name or an address outside, and all of it is gone when its
first process is, which the kernel kills with the tests. Needs root, and Debian's openssh-server."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

FIRST_PROCESS = "mount -t tmpfs none /run && mkdir /run/sshd && ip link set lo up && echo up; while sleep 1; do :; done"
"""A shell that adopts orphans, as a host's init does."""
SSH = """
IdentityFile {folder}/key
UserKnownHostsFile /dev/null
StrictHostKeyChecking no
LogLevel ERROR
ConnectTimeout 5
ServerAliveInterval 5
ServerAliveCountMax 2
"""
SSHD = """
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
PidFile none
"""


def require(*programs: str) -> None:
    """Fails, as a test that is asked for and cannot run must, where these programs or root's rights are missing."""
    path = os.environ["PATH"] + ":/usr/sbin:/sbin"
    missing = [program for program in programs if shutil.which(program, path=path) is None]
    if missing:
        message = f"{', '.join(missing)}: not installed; docs/lab/reliability.md names the Debian packages"
        pytest.fail(message, pytrace=False)
    if os.geteuid() != 0:
        pytest.fail("these tests make namespaces and start daemons in them: run them as root", pytrace=False)


class Host:
    """One host. It has no network but itself until `join`."""

    def __init__(self, name: str):
        namespaces = ["--net", "--pid", "--mount", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc"]
        command = ["setpriv", "--pdeathsig", "KILL", "unshare", *namespaces, "bash", "-c", FIRST_PROCESS]
        self.name = name
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
        assert self._process.stdout is not None and self._process.stdout.readline() == b"up\n"
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        self.pid = int(children.read_text().split()[0])
        self.do("hostname", name)

    def command(self, *command: str, folder: Path = Path("/")) -> list[str]:
        """Return the command line that runs `command` on this host, in `folder`."""
        own = ["--net", "--pid", "--mount", "--uts", "--ipc", f"--wd={folder}"]
        return ["nsenter", "-t", str(self.pid), *own, *command]

    def do(self, *command: str, folder: Path = Path("/")) -> str:
        """Run a command to its end and return its output."""
        done = subprocess.run(self.command(*command, folder=folder), capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, f"{self.name}: {command}: {done.stderr or done.stdout}"
        return done.stdout

    def join(self, other: "Host", addresses: tuple[str, str]) -> None:
        """Lay a cable to the other host: eth0 on both sides."""
        ends = ["ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", str(other.pid)]
        subprocess.run(["nsenter", "-t", str(self.pid), "--net", *ends], check=True, timeout=30)
        for host, address in zip((self, other), addresses, strict=True):
            host.do("ip", "address", "add", f"{address}/24", "dev", "eth0")
            host.do("ip", "link", "set", "eth0", "up")

    def know(self, names: Path) -> None:
        self.do("mount", "--bind", str(names), "/etc/hosts")

    def serve_ssh(self, folder: Path) -> None:
        """Let root in by the key in `folder`, and log in elsewhere by it."""
        (folder / "ssh_config").write_text(SSH.format(folder=folder))
        (folder / "sshd_config").write_text(SSHD.format(folder=folder))
        self.do("mount", "--bind", str(folder / "ssh_config"), "/etc/ssh/ssh_config")
        self.do("/usr/sbin/sshd", "-f", str(folder / "sshd_config"))

    def processes(self, *parts: str) -> list[int]:
        """Numbers, as seen from outside, of this host's processes whose command line has all these parts."""
        found = []
        own = os.readlink(f"/proc/{self.pid}/ns/pid")
        for entry in Path("/proc").iterdir():
            try:
                if not entry.name.isdigit() or os.readlink(entry / "ns/pid") != own:
                    continue
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if all(part in line for part in parts):
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def hosts(names: Sequence[str]) -> Iterator[list[Host]]:
    made: list[Host] = []
    try:
        for name in names:
            made.append(Host(name))
        yield made
    finally:
        for host in made:
            host.end()
