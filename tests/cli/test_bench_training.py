"""The benchmark of training steps: which models it compares, and one tiny run of each."""

import json

import pytest

from megasparse.benchmarks import training as bench_training
from megasparse.cli.main import door
from megasparse.config.load import build_config
from megasparse.planning.measure import MeasurementError
from tests.helpers.commands import refused
from tests.planning.test_dry_run import VALUES as SMALL

main = door("bench training")

PATTERN = ["local", {"local": 1, "lsh": 3}, "lsh", "local"]
ATTENTION = SMALL["model"]["attention"] | {"pattern": PATTERN}
VALUES = {**SMALL, "model": {**SMALL["model"], "layers": 4, "attention": ATTENTION}}
SOURCE = '{"length": 16, "attention": {"pattern": ["local"]}}'


def patterns(values):
    return {name: made["model"]["attention"]["pattern"] for name, made in bench_training.models(values).items()}


def test_the_models_differ_in_what_their_names_say():
    config = build_config(VALUES)
    assert patterns(config) == {
        "as configured": config.model.attention.pattern,
        "full, checkpointed": ["full"],
        "hashed layers full": [{"local": 4}, {"local": 1, "full": 3}, {"full": 4}, {"local": 4}],
        "2 layers": ["local", "lsh"],
        "20 layers": config.model.attention.pattern,
    }
    made = {name: build_config(values) for name, values in bench_training.models(config).items()}
    assert made["as configured"] == config
    checkpointed = made["full, checkpointed"].model
    assert (checkpointed.blocks, checkpointed.activations, checkpointed.layers) == ("ordinary", "checkpoint", 4)
    assert made["hashed layers full"].model.activations == "reversible"
    assert [made[f"{depth} layers"].model.layers for depth in (2, 20)] == [2, 20]


def test_a_run_writes_a_table_and_all_its_figures(tmp_path, capsys, monkeypatch):
    def here(function, *arguments):
        """In this process: figures of memory mean nothing then."""
        if arguments and arguments[0] == bench_training.models(build_config(VALUES))["hashed layers full"]:
            raise MeasurementError("out of memory")
        return function(*arguments)

    monkeypatch.setattr(bench_training, "alone", here)
    path, out = tmp_path / "config.json", tmp_path / "deep" / "training.json"
    path.write_text(json.dumps(VALUES))
    main(["--config", str(path), "--steps", "2", "--json", str(out)])
    shown = capsys.readouterr().out
    found = json.loads(out.read_text())
    rows = {row.pop("model"): row for row in found["rows"]}
    assert rows["hashed layers full"] == {"error": "out of memory"} and "| out of memory |" in shown
    own = rows["as configured"]
    assert len(own["seconds"]) == 2 and own["tokens_a_second"] == pytest.approx(2 * 128 / sum(own["seconds"]))
    assert rows["20 layers"]["parameters"] > 4 * rows["2 layers"]["parameters"]
    assert len({line.count("|") for line in shown.splitlines() if line.startswith("|")}) == 1
    assert set(tmp_path.iterdir()) == {path, out.parent}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--steps", "0"], "--steps: 0 is too few"),
        (["--set", "model.heads=5"], "model.heads"),
        (["--set", "model.kind=encoder_decoder", "--set", f"model.source={SOURCE}"], "encoder_decoder"),
    ],
)
def test_a_wrong_request_is_one_line(given, words, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(VALUES))
    assert words in refused(capsys, main, "--config", tmp_path / "config.json", *given)
