import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megasparse.data import workers as workers_module
from megasparse.data.workers import Workers
from megasparse.errors import ConfigError, DataError
from tests.helpers.commands import refusal
from tests.helpers.encoders import Doubling

ROOT = Path(__file__).parents[2]


def test_results_come_in_order_and_errors_are_the_users(monkeypatch):
    monkeypatch.setattr(workers_module, "BATCH_BYTES", 1000)
    draw = random.Random(0)
    pieces = [draw.randbytes(draw.choice([0, 1, 10, 2000])) for _ in range(300)]
    with Workers(Doubling().encode, 1) as here:
        want = [(one.tokens.tolist(), one.raw_bytes, one.words) for one in here.map(pieces)]
        refusal(lambda: list(here.map([b"refuse"])), match=r"book\.txt: byte 3 is strange\. Fix it")
    taken = 0

    def counted() -> Iterator[bytes]:
        nonlocal taken
        for piece in pieces:
            taken += 1
            yield piece

    with Workers(Doubling().encode, 2) as two:
        found = []
        for one in two.map(counted()):
            found.append((one.tokens.tolist(), one.raw_bytes, one.words))
            assert sum(map(len, pieces[len(found) : taken])) <= 5 * 1000 + 5 * 2000  # 4 tasks, and what begins the next
        assert found == want
        before = iter(two.map([b"a", *[b"x" * 1000] * 5, b"refuse", b"b"]))
        assert [next(before).raw_bytes for _ in range(5)] == [1, *[1000] * 4]
        with pytest.raises(DataError, match=r"^book\.txt: byte 3 is strange\. Fix it$") as caught:
            list(before)
        assert caught.value.path == "book.txt"
        assert len(list(two.map(pieces))) == 300
        with pytest.raises(ConfigError, match=r"--workers: a worker process was killed\. Run the command again"):
            list(two.map([b"die"]))


RUNS = """
import multiprocessing, signal, threading, time
from megasparse.data.workers import Workers
from tests.helpers.encoders import Doubling
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background inherit that it is ignored
    def release():
        while len(multiprocessing.active_children()) < 2:
            time.sleep(0.05)
        time.sleep(1)
        print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    threading.Thread(target=release, daemon=True).start()
    def pieces():
        yield from [b"x" * 1_000_000] * 4
        time.sleep(60)
    with Workers(Doubling().encode, 2) as workers:
        list(workers.map(pieces()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_process_stays(tmp_path, how):
    """Ctrl-C reaches every process of the terminal's group; a kill only the one."""
    (tmp_path / "script.py").write_text(RUNS)
    with (tmp_path / "stderr").open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, str(tmp_path / "script.py")],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            start_new_session=True,
        )
    assert process.stdout is not None
    workers = [int(pid) for pid in process.stdout.readline().split()]
    assert len(workers) == 2 and all(map(alive, workers))
    if how == signal.SIGINT:
        os.killpg(process.pid, how)
    else:
        process.kill()
    assert process.wait(120) != 0
    stop = time.monotonic() + 60
    while any(map(alive, workers)) and time.monotonic() < stop:
        time.sleep(0.05)
    stayed = list(filter(alive, workers))
    for pid in stayed:
        os.kill(pid, signal.SIGKILL)
    assert not stayed
    assert (tmp_path / "stderr").read_text().count("Traceback") == (how == signal.SIGINT)


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
