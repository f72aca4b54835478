"""A whole run over http, on a server that fails: to the last bit the run on the same folder."""

import random
from pathlib import Path
from typing import Any

import pytest

from megasparse.data import urls
from megasparse.data.corpora.source import Source
from megasparse.data.prepare import prepare
from tests.helpers.shard_server import serving
from tests.helpers.trained import trained

STEPS = 40
"""Two sequences of 64 bytes each: more than an epoch."""


@pytest.fixture
def folder(tmp_path):
    """Thirteen shards to train on, of four sequences each."""
    (tmp_path / "source.txt").write_bytes(random.Random(0).randbytes(4000))
    source, output = Source.open([str(tmp_path / "source.txt")], None, tmp_path / "download"), tmp_path / "data"
    cut = {"sample_bytes": 64, "shard_bytes": 256}
    prepare("text", source, output, options={"split": "80,10,10"}, command="a test", **cut)
    assert len(list(output.glob("train-*.tar"))) == 13
    return output


@pytest.fixture
def server(folder):
    with serving(folder) as server:
        yield server


def run(path: Path | str, tmp_path: Path, name: str, **changes: Any) -> list[str]:
    """The loss of each step, and of each evaluation, to the last bit."""
    data = {"path": str(path), "sequence_length": 64, "shuffle_shards": 2, "cache": str(tmp_path / "cache"), **changes}
    training, evaluation = {"steps": STEPS, "global_batch": 2, "micro_batch": 2}, {"every": 10, "sequences": 4}
    sections = {"data": data, "training": training, "evaluation": evaluation, "checkpoint": {"every": 3}}
    lines = trained("", tmp_path / name, ["local"], STEPS, **sections)  # type: ignore[arg-type]
    return [
        f"{line['step']} {line['train/loss'].hex()} {line.get('evaluation/loss', 0.0).hex()}"
        for line in {line["step"]: line for line in lines}.values()
    ]


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(urls, "STALL_SECONDS", 0.3)
    monkeypatch.setattr(urls, "LONGEST_PAUSE", 0.01)


@pytest.mark.usefixtures("impatient")
def test_a_run_over_http_with_faults_is_the_run_on_the_folder(folder, server, tmp_path, capsys):
    want = run(folder, tmp_path, "local")
    faults: list[int | str] = ["refuse", 500, "stall", "cut", "wrong", "longer", 503]
    for number, path in enumerate(sorted(folder.glob("*.tar"))):
        fault = faults[number % len(faults)]
        server.faults[path.name].extend([fault, "cut", 500])
    server.faults["index.json"].append("cut")
    limit = 5 * max(path.stat().st_size for path in folder.glob("*.tar"))
    assert run(server.url, tmp_path, "remote", cache_gb=limit / 1e9) == want and len(want) == STEPS
    assert sum(path.stat().st_size for path in (tmp_path / "cache").iterdir()) <= limit
    assert capsys.readouterr().err.count("again in") >= 13, "the faults happened"


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
def test_a_run_that_loses_its_server_resumes_exactly(folder, server, tmp_path, capsys):
    want = run(folder, tmp_path, "local")
    lost, hidden = sorted(folder.glob("train-*.tar"))[4], tmp_path / "hidden"
    lost.rename(hidden)
    for _ in range(2):
        with pytest.raises(SystemExit) as ended:
            run(server.url, tmp_path, "remote")
        assert ended.value.code == 2
        errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1 and f"{server.url}/{lost.name}: fetching failed" in errors[0], errors
    hidden.rename(lost)
    assert run(server.url, tmp_path, "remote") == want
    with serving(folder) as mirror:  # the same content at another place is the same run
        assert run(mirror.url, tmp_path, "remote") == want == run(folder, tmp_path, "remote")
