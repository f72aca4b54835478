"""The supervisor with toy scripts as ranks: what reaches them, what it leaves behind, when it starts them again."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from megasparse.errors import HANG, LOST_PEER, ConfigError
from megasparse.training.stopping import supervisor
from megasparse.training.stopping.supervisor import NodeLayout, Supervisor, checkpoints_folder

ROOT = Path(__file__).resolve().parents[3]
LIMIT = 60.0
"""Seconds after which a test has found a hang."""

WITH_CONSTANTS = """
import json, runpy, sys
from megasparse.training.stopping import supervisor
for name, value in json.loads(sys.argv[1]).items():
    getattr(supervisor, name)
    setattr(supervisor, name, value)
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""

TOY = """
import os, signal, subprocess, sys, time
from pathlib import Path
HERE, RANK = Path(__file__).parent, int(os.environ["RANK"])
CHECKPOINTS = HERE / "run" / "checkpoints"

def note(name, text=""):
    with open(HERE / f"{name}-{RANK}", "a") as file:
        file.write(f"{text}\\n")

def on_signals(act):
    def handle(signum, frame):
        note("signals", signal.Signals(signum).name)
        act(signum)
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(signum, handle)

def save_and_end(seconds):
    def act(signum):
        time.sleep(seconds)
        note("saved")
        sys.exit(0)
    on_signals(act)

def ready():
    note("started", os.getpid())

def sleep():
    while True:
        time.sleep(60)
"""


class Toy:
    """launch/supervise.py on a script that is TOY and a few lines. Whatever happens, nothing of it is left."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.config = folder / "config.json"
        self.config.write_text(json.dumps({"run": {"directory": str(folder / "run")}}))

    def start(self, lines: str, *options: str, ignore: int | None = None, **constants: float) -> None:
        (self.folder / "toy.py").write_text(TOY + lines)
        script = [str(self.folder / "toy.py"), "--config", str(self.config)]
        changed = [sys.executable, "-c", WITH_CONSTANTS, json.dumps(constants)]
        with open(self.folder / "output.txt", "wb") as output:
            self.process = subprocess.Popen(
                [*changed, str(ROOT / "launch" / "supervise.py"), *options, *script],
                env=os.environ | {"SUPERVISED_TOY": str(self.folder), "PYTHONPATH": str(ROOT)},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=None if ignore is None else lambda: signal.signal(ignore, signal.SIG_IGN),
            )

    def wait_for(self, name: str, ranks: int = 2) -> None:
        self.wait_until(lambda: all(self.notes(name, rank) for rank in range(ranks)))

    def wait_until(self, true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT
        while not true():
            assert time.monotonic() < deadline and self.process.poll() is None, self.said()
            time.sleep(0.01)

    def signal(self, signum: int) -> None:
        """As a terminal does it: to the whole process group of the supervisor."""
        os.killpg(self.process.pid, signum)

    def wait(self) -> int:
        return self.process.wait(LIMIT)

    def run(self, lines: str, *options: str, **constants: float) -> int:
        self.start(lines, *options, **constants)
        return self.wait()

    def said(self) -> str:
        return (self.folder / "output.txt").read_text()

    def cause(self) -> str:
        """What the last line says."""
        return self.said().splitlines()[-1]

    def notes(self, name: str, rank: int) -> list[str]:
        path = self.folder / f"{name}-{rank}"
        return path.read_text().splitlines() if path.exists() else []

    def leftovers(self) -> list[int]:
        """Processes, zombies not counted, that have inherited the environment."""
        mark = f"SUPERVISED_TOY={self.folder}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found

    def end(self) -> None:
        for pid in self.leftovers():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if hasattr(self, "process"):
            self.process.wait()


@pytest.fixture
def toy(tmp_path):
    toy = Toy(tmp_path)
    yield toy
    left = toy.leftovers()
    toy.end()
    assert not left, f"left behind: {left}"


# Signals


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_S1_a_signal_reaches_each_rank_once_and_a_save_may_take_longer_than_any_limit(toy, name):
    toy.start("save_and_end(0.1 + 0.6 * RANK); ready(); sleep()", "--ranks", "2", LAST_WORDS=0.1, NORMAL_END=0.1)
    toy.wait_for("started")
    toy.signal(signal.Signals[name])
    assert toy.wait() == 0
    for rank in range(2):
        assert toy.notes("signals", rank) == [name]
        assert toy.notes("saved", rank), "killed in its save"


def test_S1_two_signals_at_once_are_one_request(toy):
    toy.start("save_and_end(0.8); ready(); sleep()", "--ranks", "2", AT_ONCE=0.1)
    toy.wait_for("started")
    toy.signal(signal.SIGINT)
    time.sleep(0.1)  # as DeepSpeed's launcher does it
    toy.signal(signal.SIGTERM)
    assert toy.wait() == 0
    assert [toy.notes("signals", rank) for rank in range(2)] == [["SIGINT"]] * 2


def test_S1_SIGTERM_after_SIGUSR1_still_lets_them_save(toy):
    lines = "on_signals(lambda n: None if n == signal.SIGUSR1 else (time.sleep(0.4), note('saved'), sys.exit(0)))"
    toy.start(f"{lines}\nready(); sleep()", "--ranks", "2", AT_ONCE=0.1, AGAIN=0.2)
    toy.wait_for("started")
    toy.signal(signal.SIGUSR1)
    toy.wait_for("signals")
    time.sleep(0.3)
    toy.signal(signal.SIGTERM)
    assert toy.wait() == 0
    assert [toy.notes("signals", rank) for rank in range(2)] == [["SIGUSR1", "SIGTERM"]] * 2


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_S1_a_second_signal_ends_all_at_once(toy, name):
    """Rank 0 ends by itself; rank 1 does not even hear it."""
    lines = """
asked = []
on_signals(lambda n: os._exit(128 + n) if asked else asked.append(n))
if RANK == 1:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])
ready(); sleep()
"""
    toy.start(lines, "--ranks", "2", "--restarts", "3", AGAIN=0.2, AT_ONCE=0.4, LAST_WORDS=30)
    toy.wait_for("started")
    toy.signal(signal.Signals[name])
    toy.wait_for("signals", ranks=1)
    time.sleep(0.3)
    began = time.monotonic()
    toy.signal(signal.Signals[name])
    assert toy.wait() == 128 + signal.Signals[name]
    assert 0.3 < time.monotonic() - began < 2
    assert toy.notes("signals", 0) == [name, name] and len(toy.notes("started", 0)) == 1
    assert f"second {name}" in toy.cause()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_S1_before_a_rank_can_handle_it_a_signal_is_no_failure(toy, name):
    toy.start("ready(); sleep()", "--ranks", "2", "--restarts", "3")
    toy.wait_for("started")
    toy.signal(signal.Signals[name])
    assert toy.wait() == 0
    assert len(toy.notes("started", 0)) == 1
    assert f"supervisor: stopped by {name} before training had begun" in toy.said()


def test_S1_a_rank_that_waits_for_one_ended_in_its_start_is_ended_too(toy):
    toy.start("RANK and on_signals(lambda n: None)\nready(); sleep()", "--ranks", "2", LAST_WORDS=0.2)
    toy.wait_for("started")
    toy.signal(signal.SIGTERM)
    assert toy.wait() == 0
    assert toy.notes("signals", 1) == ["SIGTERM"]


def test_S1_a_save_that_fails_is_told_and_not_tried_again(toy):
    toy.start("on_signals(lambda n: sys.exit(3))\nready(); sleep()", "--ranks", "2", "--restarts", "3", FIRST_WAIT=0.01)
    toy.wait_for("started")
    toy.signal(signal.SIGTERM)
    assert toy.wait() == 3
    assert len(toy.notes("started", 0)) == 1
    assert "exit code 3 (a checkpoint could not be written)" in toy.cause()


def test_S1_a_signal_before_a_restart_ends_the_supervisor(toy):
    toy.start("ready(); sys.exit(5)", "--restarts", "3", FIRST_WAIT=60)
    toy.wait_until(lambda: "starting again" in toy.said())
    toy.signal(signal.SIGTERM)
    assert toy.wait() == HANG
    assert len(toy.notes("started", 0)) == 1


# Death


WAITING = "on_signals(lambda n: None)\nready()\n"


def test_S2_a_killed_rank_is_named_and_the_others_are_ended_stopped_ones_and_grandchildren_too(toy):
    lines = """
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
if RANK == 2:
    ready(); os.kill(os.getpid(), signal.SIGSTOP)
"""
    toy.start(lines + WAITING + "sleep()", "--ranks", "3", LAST_WORDS=0.3)
    toy.wait_for("started", ranks=3)
    assert len(toy.leftovers()) == 7
    pid = int(toy.notes("started", 1)[0])
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    assert toy.wait() == 128 + signal.SIGKILL
    assert 0.25 < time.monotonic() - began < 2
    assert f"rank 1 (pid {pid}) was killed by SIGKILL; was the machine out of memory?" in toy.cause()
    assert toy.leftovers() == []


def test_S2_all_is_over_within_5_seconds():
    assert supervisor.LAST_WORDS + supervisor.POLL <= 4 and supervisor.AT_ONCE <= 5


def test_S2_grandchildren_do_not_outlive_a_normal_end_either(toy):
    assert toy.run("subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])", "--ranks", "2") == 0
    assert toy.leftovers() == []


def test_S2_a_failed_start_leaves_no_rank_behind(toy, monkeypatch):
    started = []
    real = subprocess.Popen

    def popen(*args, **kwargs):
        if started:
            raise BlockingIOError("Resource temporarily unavailable")
        started.append(real(*args, **kwargs))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setenv("SUPERVISED_TOY", str(toy.folder))
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    with pytest.raises(BlockingIOError):
        Supervisor(command, NodeLayout(ranks=2), toy.folder)._run_once()
    assert started[0].returncode == -signal.SIGKILL


def test_S2_exit_codes_are_seen_where_SIGCHLD_is_ignored(toy):
    toy.start("sys.exit(3 * RANK)", "--ranks", "2", ignore=signal.SIGCHLD)
    assert toy.wait() == 3


def test_S2_a_rank_that_hangs_after_the_others_ended_well_is_named(toy):
    toy.start(f"{WAITING}\nif RANK == 1: sleep()", "--ranks", "2", NORMAL_END=0.3)
    assert toy.wait() == HANG
    assert f"rank 1 (pid {toy.notes('started', 1)[0]}) was still running 0.3 s after" in toy.cause()


def test_S2_a_rank_may_end_a_little_later_than_another(toy):
    assert toy.run("time.sleep(0.3 * RANK); note('done')", "--ranks", "2", LAST_WORDS=0.01) == 0
    assert toy.notes("done", 1)


def test_S5_the_traceback_of_a_rank_is_followed_by_one_line_that_names_it(toy):
    lines = f"{WAITING}\nif RANK == 1: raise RuntimeError('of rank 1')\nsleep()"
    assert toy.run(lines, "--ranks", "2", LAST_WORDS=0.2) == 1
    said = toy.said().splitlines()
    assert said[0].startswith("Traceback") and said[-2] == "RuntimeError: of rank 1"
    assert f"rank 1 (pid {toy.notes('started', 1)[0]}) ended with exit code 1 (an error of the program)" in said[-1]
    assert sum("supervisor:" in line for line in said) == 1


@pytest.mark.parametrize(
    "code, words",
    [
        (2, "a mistake to mend"),
        (4, "training diverged"),
        (5, "the run hung"),
        (6, "it lost another rank"),
        (77, "exit code 77"),
    ],
)
def test_S5_exit_codes_are_told_in_words(toy, code, words):
    assert toy.run(f"sys.exit({code})") == code
    assert words in toy.cause()


@pytest.mark.parametrize("end, code", [("sys.exit(1)", 1), ("os.kill(os.getpid(), signal.SIGSEGV)", 139)])
def test_S5_a_rank_that_lost_another_is_not_the_cause(toy, end, code):
    lines = f"RANK or sys.exit(6)\n{WAITING}\nRANK == 1 and sleep()\ntime.sleep(0.2)\n{end}"
    assert toy.run(lines, "--ranks", "3", LAST_WORDS=1) == code
    assert "rank 2 " in toy.cause()


def test_S5_a_lost_rank_of_another_node_is_the_cause_where_no_rank_here_has_another(toy):
    assert toy.run("time.sleep(0.2 * RANK); sys.exit(6)", "--ranks", "2") == LOST_PEER
    assert "rank 0 " in toy.cause()


def test_S5_the_others_have_time_for_their_last_words(toy):
    lines = "RANK or sys.exit(1)\ntime.sleep(0.4)\nprint('last words'); sys.exit(6)"
    assert toy.run(lines, "--ranks", "2", LAST_WORDS=1) == 1
    assert "last words" in toy.said()


# Restarts


def failing_once(end: str) -> str:
    return f"ready()\nlen((HERE / 'started-0').read_text().split()) == 1 and {end}"


@pytest.mark.parametrize("end", ["sys.exit(1)", "sys.exit(3)", "sys.exit(5)", "sys.exit(6)", "os.kill(os.getpid(), 9)"])
def test_S7_started_again_after_a_failure_that_this_may_mend(toy, end):
    assert toy.run(failing_once(end), "--restarts", "1", FIRST_WAIT=0.01) == 0
    assert len(toy.notes("started", 0)) == 2


@pytest.mark.parametrize("code", [2, 4])
def test_S7_not_started_again_after_a_mistake_or_divergence(toy, code):
    assert toy.run(failing_once(f"sys.exit({code})"), "--restarts", "3", FIRST_WAIT=0.01) == code
    assert len(toy.notes("started", 0)) == 1


def test_S7_not_started_again_unless_asked_to(toy):
    lines = "(CHECKPOINTS / '00000001').mkdir(parents=True); ready(); sys.exit(1)"
    assert toy.run(lines, FIRST_WAIT=0.01) == 1
    assert len(toy.notes("started", 0)) == 1
    assert "stopped" not in toy.said()


def test_S7_failing_at_the_same_checkpoint_ends_after_the_limit_with_a_clear_message(toy):
    (toy.folder / "run" / "checkpoints" / "00000010").mkdir(parents=True)
    assert toy.run("ready(); sys.exit(5)", "--restarts", "2", FIRST_WAIT=0.01) == 5
    pids = toy.notes("started", 0)
    assert len(pids) == 3
    assert toy.cause() == (
        "supervisor: stopped: ended 3 times at the same checkpoint 00000010 without getting further; "
        f"the last cause: rank 0 (pid {pids[2]}) ended with exit code 5 (the run hung)"
    )


def test_S7_failing_before_the_first_checkpoint_ends_after_the_limit(toy):
    assert toy.run("ready(); sys.exit(1)", "--restarts", "2", FIRST_WAIT=0.01) == 1
    assert len(toy.notes("started", 0)) == 3
    assert "stopped: ended 3 times before the first checkpoint" in toy.cause()


def test_S7_a_new_checkpoint_sets_the_limit_back(toy):
    lines = """
ready()
start = len((HERE / 'started-0').read_text().split())
start <= 3 and (CHECKPOINTS / f"{start:08d}").mkdir(parents=True)
sys.exit(1)
"""
    assert toy.run(lines, "--restarts", "1", FIRST_WAIT=0.01) == 1
    assert len(toy.notes("started", 0)) == 4
    assert "stopped: ended 2 times at the same checkpoint 00000003" in toy.cause()


def in_process(monkeypatch, restarts: int) -> list[float]:
    """The seconds waited before each restart of a run that never gets anywhere."""
    waits: list[float] = []
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(Supervisor, "_run_once", lambda self: (1, "a cause"))
    monkeypatch.setattr(Supervisor, "_wait", lambda self, seconds: waits.append(seconds))
    assert Supervisor([], NodeLayout(), Path("/nowhere"), restarts).run() == 1
    return waits


def test_S7_the_wait_before_a_restart_doubles_up_to_half_a_minute(monkeypatch):
    assert in_process(monkeypatch, 7) == [1, 2, 4, 8, 16, 30, 30]


def test_S7_storage_that_cannot_be_read_is_no_progress_and_no_crash(monkeypatch):
    def unreadable(directory):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(supervisor, "find_newest", unreadable)
    assert len(in_process(monkeypatch, 2)) == 2


def test_S7_a_checkpoint_chosen_by_hand_is_refused_with_restarts(toy):
    with pytest.raises(ConfigError, match=r"--resume never: every one of 3 restarts.* Leave out --restarts"):
        checkpoints_folder(["--config", str(toy.config), "--resume", "never"], restarts=3)
    checkpoints_folder(["--config", str(toy.config), "--resume", "never"])


# Where the ranks meet


@pytest.mark.parametrize("host", ["127.0.0.1", ""])
def test_S8_a_port_in_use_is_one_clear_line_and_no_rank_is_started(toy, host):
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind((host, 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert toy.run("ready()", "--address", f"127.0.0.1:{port}") == 2
        assert toy.said().count("\n") == 1
        assert f"error: --address 127.0.0.1:{port}: the port cannot be had (Address already in use). End " in toy.said()
        assert not toy.notes("started", 0)
        # The port of another node is not this node's to look at.
        assert toy.run("ready()", "--nodes", "2", "--node-rank", "1", "--address", f"127.0.0.1:{port}") == 0


def test_S8_each_start_has_a_port_of_its_own_that_only_rank_0_can_have(toy):
    lines = """
import socket
port = int(os.environ["MASTER_PORT"])
note("port", port)
with socket.socket() as other:
    try:
        other.bind(("127.0.0.1", port))
        sys.exit(2)
    except OSError:
        pass
store = socket.socket()
store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
store.bind(("", port))
store.listen()
socket.create_connection(("127.0.0.1", port)).close()
sys.exit(77)
"""
    assert toy.run(lines, "--restarts", "2", FIRST_WAIT=0.01) == 77
    assert len(set(toy.notes("port", 0))) == 3


def test_S8_a_port_just_left_by_the_last_start_can_be_had_again(toy):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    lines = f"""
import socket
ready()
store = socket.create_server(("127.0.0.1", {port}))  # sets SO_REUSEADDR, as torch does
there = socket.create_connection(("127.0.0.1", {port}))
here, _ = store.accept()
here.close()  # first to close: this end keeps the port in TIME_WAIT
sys.exit(77)
"""
    assert toy.run(lines, "--restarts", "1", "--address", f"127.0.0.1:{port}", FIRST_WAIT=0.01) == 77
    assert len(toy.notes("started", 0)) == 2


# What a rank is given


NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
SHOW = f"import json; note('given', json.dumps([[os.environ.get(n) for n in {NAMES}], sys.argv[1:]]))"


def test_S1_environment_and_arguments_of_the_ranks(toy):
    assert toy.run(SHOW, "--ranks", "2") == 0
    ports = set()
    for rank in range(2):
        environment, arguments = json.loads(toy.notes("given", rank)[0])
        assert environment[:-1] == [str(rank), str(rank), "2", "2", "2", "127.0.0.1"]
        assert arguments == ["--config", str(toy.config)]
        ports.add(environment[-1])
    assert len(ports) == 1


def test_S1_ranks_of_the_second_of_two_nodes(toy):
    options = ["--ranks", "2", "--nodes", "2", "--node-rank", "1", "--address", "node0:29500"]
    assert toy.run(SHOW, *options) == 0
    for local in range(2):
        environment, _ = json.loads(toy.notes("given", 2 + local)[0])
        assert environment == [str(2 + local), str(local), "4", "2", "2", "node0", "29500"]


# The command


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, str(ROOT / "launch" / "supervise.py"), *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=LIMIT)


def test_help_shows_examples_and_every_option():
    shown = command("--help")
    assert shown.returncode == 0
    assert "python launch/supervise.py --ranks 2 launch/pretrain.py --config configs/quickstart.json" in shown.stdout
    for option in ("--ranks", "--restarts", "--nodes", "--node-rank", "--address"):
        assert option in shown.stdout


def test_neither_torch_nor_deepspeed_is_imported(tmp_path):
    script = tmp_path / "script.py"
    script.touch()
    code = (
        "import runpy, sys\n"
        "try:\n    runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "finally:\n    print([name for name in ('torch', 'deepspeed', 'numpy') if name in sys.modules])"
    )
    config = str(ROOT / "configs" / "quickstart.json")  # which has a `deepspeed` section
    arguments = [str(ROOT / "launch" / "supervise.py"), str(script), "--config", config]
    line = [sys.executable, "-c", f"import sys; sys.argv = {arguments}\n{code}"]
    ended = subprocess.run(line, capture_output=True, text=True, timeout=LIMIT)
    assert (ended.returncode, ended.stdout.strip()) == (0, "[]"), ended.stderr


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["no/script.py"], "error: no/script.py: no such script. Name the one to run"),
        (["SCRIPT"], "error: --config: is not given. Add the run's JSON file to the arguments of the script"),
        (["SCRIPT", "--config", "no.json"], "error: no.json: cannot be read"),
        (["SCRIPT", "--config", "CONFIG", "--set", "run.directry=x"], 'Did you mean "directory"?'),
        (["--nodes", "2", "--node-rank", "2", "SCRIPT"], "error: --node-rank 2: nodes are counted from 0"),
        (["--nodes", "2", "SCRIPT"], "error: --address: is not given, and --nodes is 2"),
    ],
)
def test_a_mistake_is_one_line_before_any_rank_is_started(toy, arguments, said):
    script = toy.folder / "toy.py"
    script.write_text(TOY + "ready()")
    names = {"SCRIPT": str(script), "CONFIG": str(toy.config)}
    ended = command(*[names.get(argument, argument) for argument in arguments])
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1
    assert said in ended.stderr
    assert not toy.notes("started", 0)


@pytest.mark.parametrize(
    "arguments", [["--ranks", "0"], ["--ranks", "two"], ["--restarts", "-1"], ["--address", "29500"]]
)
def test_an_option_of_the_wrong_kind_is_refused(arguments):
    ended = command(*arguments, "script.py")
    assert ended.returncode == 2 and f"argument {arguments[0]}: " in ended.stderr


def test_broken_json_is_one_line(toy):
    toy.config.write_text('{"run": {"directory": "x",}}')
    assert toy.run("ready()", "--ranks", "2") == 2
    assert toy.said() == f"error: {toy.config} line 1: not JSON: " + toy.said().partition("not JSON: ")[2]
    assert "Remove the comma" in toy.said() and toy.said().count("\n") == 1
    assert not toy.notes("started", 0)


def test_the_folder_that_shows_progress_is_the_runs_own(tmp_path):
    config = tmp_path / "config.json"
    config.write_text("{}")
    given = ["--config", str(config), "--stop-at", "3"]
    assert checkpoints_folder(given) == Path("runs/default/checkpoints")
    config.write_text('{"run": {"directory": "a"}, "deepspeed": {"zero_optimization": {"stage": 2}}}')
    assert checkpoints_folder(given) == Path("a/checkpoints")
    assert checkpoints_folder([f"--config={config}"]) == Path("a/checkpoints")
    twice = ["--set", "run.directory=b", "--set", "run.directory=c"]
    assert checkpoints_folder([*twice, *given]) == Path("c/checkpoints")
    assert checkpoints_folder([*given, "--set", 'run={"directory": "d"}']) == Path("d/checkpoints")
