"""gpu-check: stages that fail, hang or are wrong, and the table; every stage at a tiny size (`make kernels`)."""

import json
import os
import signal
import subprocess
import sys
import time
from multiprocessing.context import SpawnProcess
from pathlib import Path

import pytest
import torch

from megasparse.benchmarks.gpu_check.operators import EXACT, SMOOTH, Problem, check_exact, check_smooth
from megasparse.benchmarks.gpu_check.report import Report, Row, Skipped, table
from megasparse.benchmarks.gpu_check.runner import check
from megasparse.benchmarks.gpu_check.stages import STAGES
from megasparse.cli.main import main
from megasparse.errors import ConfigError
from megasparse.ops import normalize_kernels

TINY = Problem(7, 16, torch.device("cpu"))


def right(report):
    report.add(Row("one", right=True, seconds=0.001, flash=2.0, roofline=0.5, launches=3, counted_launches=4))


def fails(report):
    report.add(Row("before", right=True))
    raise RuntimeError("no such thing\nat all")


def dies(report):
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(report):
    report.add(Row("before", right=True))
    child = subprocess.Popen(["sleep", "1000"])
    report.about = {"child": child.pid}
    report.write()
    time.sleep(1000)


def absent(report):
    raise Skipped("not installed")


def wrong(report):
    report.attempt("a result", lambda: (False, 0.5, "it is off"))
    report.attempt("an exception", lambda: 1 / 0)


def test_no_stage_stops_another_and_each_is_reported(tmp_path):
    stages = {"fails": fails, "dies": dies, "absent": absent, "wrong": wrong, "right": right}
    said = []
    assert not check(tmp_path, {name: (600.0, run) for name, run in stages.items()}, said.append)
    reports = {name: Report.read(tmp_path / f"{name}.json") for name in stages}
    assert {name: report.state for name, report in reports.items()} == {
        "fails": "failed: RuntimeError: no such thing",
        "dies": "failed: its process ended with -9",
        "absent": "skipped: not installed",
        "wrong": "done",
        "right": "done",
    }
    assert [name for name, report in reports.items() if report.right] == ["absent", "right"]
    assert [row.note for row in reports["wrong"].rows] == ["it is off", "ZeroDivisionError: division by zero"]
    assert reports["fails"].rows == [Row("before", right=True)]
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert lines == list(table(list(reports.values())))
    assert "|  | one | right |  | 1 | 2 | 50 % |  | 3, 4 |  |  |" in lines
    assert check(tmp_path, {"right": (600.0, right)}, said.append)


def test_a_stage_is_ended_at_its_limit_with_what_it_started_and_keeps_what_it_found(tmp_path, monkeypatch):
    join, path = SpawnProcess.join, tmp_path / "hangs.json"

    def until_it_hangs(process, limit=None):
        while limit is not None and "child" not in Report.read(path).about:
            join(process, 0.05)
        return join(process, limit and 0)

    monkeypatch.setattr(SpawnProcess, "join", until_it_hangs)
    assert not check(tmp_path, {"hangs": (30.0, hangs)}, lambda line: None)
    report = Report.read(path)
    assert report.state == "over its limit of 30 s" and report.rows == [Row("before", right=True)]
    stat = Path(f"/proc/{report.about['child']}/stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def test_an_operator_is_right_and_a_wrong_or_unsteady_one_is_seen(monkeypatch):
    assert check_smooth("unit_keys", TINY, torch.float32)[0] and check_exact("random_bits", TINY) == (True, 0.0, "")
    launch = normalize_kernels.launch

    def without_gradients(kernel, *arguments, **settings):
        if kernel.__name__ != "unit_gradient":
            launch(kernel, *arguments, **settings)

    monkeypatch.setattr(normalize_kernels, "launch", without_gradients)
    found = check_smooth("unit_keys", TINY, torch.float32)
    assert not found[0] and found[2] == "two runs differ"  # NaN is not equal to itself
    make, least = EXACT["random_bits"]
    numbers = iter(range(9))
    monkeypatch.setitem(EXACT, "random_bits", (lambda p: lambda: make(p)() + next(numbers), least))
    assert check_exact("random_bits", TINY)[2] == "two runs differ"


def test_every_operator_with_kernels_is_checked():
    ops = Path(normalize_kernels.__file__).parent
    operators = {path.parent.name for path in ops.glob("*/gpu.py")}
    operators |= {path.stem.removesuffix("_kernels") for path in ops.glob("*_kernels.py")}
    known = {
        "hashing": "angular_hash",
        "normalize": "unit_keys",
        "random": "random_bits",
        "sketch": "sketched_attention",
        "local_attention": "relative_local_attention",
    }
    assert {known.get(name, name) for name in operators} <= SMOOTH.keys() | EXACT.keys()


def test_stages_take_ten_minutes_in_all():
    assert sum(stage.seconds for stage in STAGES.values()) <= 600


def test_what_cannot_run_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r'--stages: there is no "benhc".*bench'):
        main.__wrapped__(["gpu-check", "--small", "--stages", "benhc"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"torch sees no GPU here.*--small"):
        main.__wrapped__(["gpu-check", "--output", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


BLOCKED = """
import sys
for name in ("deepspeed", "fairscale", "tensorboard", "transformers", "webdataset", "sentencepiece"):
    sys.modules[name] = None
import megasparse.benchmarks.gpu_check.bench, megasparse.benchmarks.gpu_check.stages
"""


def test_nothing_that_a_gpu_machine_may_lack_is_imported():
    subprocess.run([sys.executable, "-c", BLOCKED], check=True)


@pytest.mark.kernels
def test_every_stage_runs_at_a_tiny_size(tmp_path):
    subprocess.run([sys.executable, "tools/gpu_check.py", "--small", "--output", str(tmp_path)], check=True)
    found = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in STAGES}
    assert all(report["state"] == "done" and report["rows"] for report in found.values())
