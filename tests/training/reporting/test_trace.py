"""Traces on demand: valid, of the steps that were asked for, and without a trace in the numbers."""

import gzip
import json
import re
import tempfile
from pathlib import Path

from megasparse.config.schema import Config
from megasparse.training.loop import train
from megasparse.training.ranks import RunHooks
from megasparse.training.reporting.trace import TRACED_STEPS
from tests.helpers.tiny import metrics, tiny_config, tiny_run


def losses(config: Config, hooks: RunHooks | None = None) -> list[float]:
    with tiny_run(config, hooks=hooks) as run:
        train(run)
    return [line["train/loss"] for line in metrics(config)]


def updates(path: Path) -> int:
    """Optimizer steps in a trace."""
    trace = json.loads(gzip.decompress(path.read_bytes()))
    return sum(event.get("name", "").startswith("Optimizer.step#") for event in trace["traceEvents"])


def traces(folder: Path) -> dict[str, int]:
    return {path.name: updates(path) for path in sorted((folder / "traces").iterdir())}


def at(step: int) -> RunHooks:
    """Hooks that ask for a trace before one step."""
    asked = iter([False] * (step - 1) + [True])
    return RunHooks(trace_wanted=lambda: next(asked, False))


def test_a_trace_that_the_run_ends_in_goes_up_to_there(tmp_path):
    losses(tiny_config(tmp_path), at(19))
    assert traces(tmp_path) == {"step-00000019-rank-00000.json.gz": 2}


def test_each_request_traces_the_next_steps_and_changes_no_loss(tmp_path):
    reported: list[str] = []

    def wanted() -> bool:
        return reported[-1:] in ([f"step {step}, micro-batch 4, backward"] for step in (3, 11))

    plain = losses(tiny_config(tmp_path / "plain"))
    assert not (tmp_path / "plain" / "traces").exists()
    assert losses(tiny_config(tmp_path), RunHooks(progress=reported.append, trace_wanted=wanted)) == plain
    assert traces(tmp_path) == {f"step-{step:08d}-rank-00000.json.gz": TRACED_STEPS for step in (4, 12)}


def test_failing_storage_loses_only_the_trace(tmp_path, capfd):
    plain = losses(tiny_config(tmp_path / "plain"))
    run = tmp_path / "run"
    run.mkdir()
    (run / "traces").write_text("in the way")
    assert losses(tiny_config(run), at(3)) == plain
    said = capfd.readouterr().err
    assert re.search(r"rank 0: .*step-00000003-rank-00000.json.gz cannot be written \(.*File exists", said)


def test_an_unfinished_trace_is_discarded(tmp_path, monkeypatch, capfd):
    """Torch's exporter may not report a full disk."""

    def torn(self: object, path: str) -> None:
        Path(path).write_text('{"traceEvents": [{"name": "aten')

    monkeypatch.setattr("torch.profiler.profile.export_chrome_trace", torn)
    losses(tiny_config(tmp_path), at(3))
    assert f"not enough space in {tempfile.gettempdir()}" in capfd.readouterr()[1]
    assert list((tmp_path / "traces").iterdir()) == []
