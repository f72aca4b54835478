"""Traces on demand: valid, of the steps that were asked for, and without a trace in the numbers."""

import gzip
import json
import re
import tempfile
from pathlib import Path

import pytest

from megasparse.config.load import build_config
from megasparse.config.schema import Config
from megasparse.errors import ConfigError
from megasparse.training.loop import train
from megasparse.training.ranks import RunHooks
from megasparse.training.reporting.tracing import STEPS
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


def test_a_range_of_steps_is_traced_and_changes_no_loss(tmp_path):
    plain = losses(tiny_config(tmp_path / "plain"))
    traced = losses(tiny_config(tmp_path / "traced", logging={"profile_steps": (7, 9)}))
    assert traced == plain
    assert traces(tmp_path / "traced") == {"step-00000007-rank-00000.json.gz": 3}
    assert not (tmp_path / "plain" / "traces").exists()


def test_a_range_that_the_run_ends_in_is_traced_up_to_there(tmp_path):
    losses(tiny_config(tmp_path, logging={"profile_steps": (19, 25)}))
    assert traces(tmp_path) == {"step-00000019-rank-00000.json.gz": 2}


def test_each_request_traces_the_next_steps(tmp_path):
    reported: list[str] = []

    def wanted() -> bool:
        return bool(reported) and reported[-1] in {
            "step 3, micro-batch 4, backward",
            "step 11, micro-batch 4, backward",
        }

    losses(tiny_config(tmp_path), RunHooks(progress=reported.append, trace_wanted=wanted))
    assert traces(tmp_path) == {f"step-{step:08d}-rank-00000.json.gz": STEPS for step in (4, 12)}


def test_storage_that_fails_costs_the_trace_alone(tmp_path, capfd):
    plain = losses(tiny_config(tmp_path / "plain"))
    run = tmp_path / "run"
    run.mkdir()
    (run / "traces").write_text("in the way")
    assert losses(tiny_config(run, logging={"profile_steps": (3, 3)})) == plain
    assert re.search(
        r"rank 0: .*step-00000003-rank-00000.json.gz cannot be written \(.*File exists", capfd.readouterr()[1]
    )


def test_a_trace_that_the_exporter_could_not_finish_is_none(tmp_path, monkeypatch, capfd):
    """Torch's exporter may not report a full disk."""

    def torn(self: object, path: str) -> None:
        Path(path).write_text('{"traceEvents": [{"name": "aten')

    monkeypatch.setattr("torch.profiler.profile.export_chrome_trace", torn)
    losses(tiny_config(tmp_path, logging={"profile_steps": (3, 3)}))
    assert f"{tempfile.gettempdir()} has no room for it" in capfd.readouterr()[1]
    assert list((tmp_path / "traces").iterdir()) == []


@pytest.mark.parametrize("steps", [[5, 4], [1, 11]])
def test_a_range_that_is_none_or_too_long_is_refused(steps):
    with pytest.raises(ConfigError, match=r"logging.profile_steps: .* is no range of 1 to 10 steps"):
        build_config({"logging": {"profile_steps": steps}})
