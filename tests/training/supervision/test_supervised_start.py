"""The start of supervised ranks: where they meet, what each is given, and which commands are refused."""

import json
import socket
import subprocess
import sys

import pytest

from megasparse.training.supervisor import supervised_config
from tests.helpers.supervised import LIMIT, ROOT, TOY

# Where the ranks meet


@pytest.mark.slow
@pytest.mark.parametrize("host", ["127.0.0.1", ""])
def test_a_port_in_use_is_one_clear_line_and_no_rank_is_started(toy, host):
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


@pytest.mark.slow
def test_each_start_has_a_port_of_its_own_that_only_rank_0_can_have(toy):
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
    assert toy.run(lines, "--restarts", "2") == 77
    assert len(set(toy.notes("port", 0))) == 3


@pytest.mark.slow
def test_a_port_just_left_by_the_last_start_can_be_had_again(toy):
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
    assert toy.run(lines, "--restarts", "1", "--address", f"127.0.0.1:{port}") == 77
    assert len(toy.notes("started", 0)) == 2


# What a rank is given


NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
SHOW = f"import json; note('given', json.dumps([[os.environ.get(n) for n in {NAMES}], sys.argv[1:]]))"


def test_environment_and_arguments_of_the_ranks(toy):
    assert toy.run(SHOW, "--ranks", "2") == 0
    ports = set()
    for rank in range(2):
        environment, arguments = json.loads(toy.notes("given", rank)[0])
        assert environment[:-1] == [str(rank), str(rank), "2", "2", "2", "127.0.0.1"]
        assert arguments == ["--config", str(toy.config)]
        ports.add(environment[-1])
    assert len(ports) == 1


@pytest.mark.slow
def test_ranks_of_the_second_of_two_nodes(toy):
    options = ["--ranks", "2", "--nodes", "2", "--node-rank", "1", "--address", "node0:29500"]
    assert toy.run(SHOW, *options) == 0
    for local in range(2):
        environment, _ = json.loads(toy.notes("given", 2 + local)[0])
        assert environment == [str(2 + local), str(local), "4", "2", "2", "node0", "29500"]


# The command


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, str(ROOT / "launch" / "supervise.py"), *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=LIMIT)


@pytest.mark.slow
def test_deepspeed_is_not_imported(tmp_path):
    script = tmp_path / "script.py"
    script.touch()
    code = (
        "import runpy, sys\n"
        "try:\n    runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "finally:\n    print([name for name in ('deepspeed', 'triton') if name in sys.modules])"
    )
    config = str(ROOT / "configs" / "quickstart.json")  # which has a `deepspeed` section
    arguments = [str(ROOT / "launch" / "supervise.py"), str(script), "--config", config]
    line = [sys.executable, "-c", f"import sys; sys.argv = {arguments}\n{code}"]
    ended = subprocess.run(line, capture_output=True, text=True, timeout=LIMIT)
    assert (ended.returncode, ended.stdout.strip()) == (0, "[]"), ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments, said",
    [
        (["no/script.py"], "error: no/script.py: no such script. Give pretrain, evaluate, generate, or the path"),
        (["--restarts", "2", "evaluate"], "error: --restarts 2: evaluate saves nothing that another start could go on"),
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [["--ranks", "0"], ["--ranks", "two"], ["--restarts", "-1"], ["--address", "29500"]]
)
def test_an_option_of_the_wrong_kind_is_refused(arguments):
    ended = command(*arguments, "script.py")
    assert ended.returncode == 2 and f"argument {arguments[0]}: " in ended.stderr


@pytest.mark.slow
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
    assert supervised_config(given).run.directory == "runs/default"
    config.write_text('{"run": {"directory": "a"}, "deepspeed": {"zero_optimization": {"stage": 2}}}')
    assert supervised_config(given).run.directory == "a"
    assert supervised_config([f"--config={config}"]).run.directory == "a"
    twice = ["--set", "run.directory=b", "--set", "run.directory=c"]
    assert supervised_config([*twice, *given]).run.directory == "c"
    assert supervised_config([*given, "--set", 'run={"directory": "d"}']).run.directory == "d"
