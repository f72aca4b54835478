"""`compare`: a tiny comparison from end to end, and the messages for invalid requests."""

import itertools
import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from megasparse.cli.main import main
from megasparse.errors import ConfigError, UserError
from megasparse.runs.comparison import ArmRun, call, load, plot, runs_of, table
from tests.helpers.cases import together
from tests.helpers.commands import refusal

ROOT = Path(__file__).parents[2]
CALL = "megasparse.runs.comparison.call"


def small_comparison(folder):
    config = json.loads((ROOT / "configs/duplication_small.json").read_text())
    config["model"] |= {"d_model": 16, "max_length": 32, "score_from": 16}
    config["data"] = {"path": str(folder / "data"), "sequence_length": 32}
    config["training"] |= {"steps": 3}
    config["optimizer"] |= {"warmup_steps": 1}
    (folder / "config.json").write_text(json.dumps(config))
    comparison = {
        "prepare": ["duplication", "--length", "32", "--symbols", "7", "--sequences", "64"],
        "config": str(folder / "config.json"),
        "evaluate": {"two": ["--limit", "2"], "one": ["--limit", "1"]},
        "arms": {
            "full": ['model.attention.pattern=["full"]'],
            "local": ['model.attention.pattern=["local"]', "training.steps=2"],
            "chunk": ['model.attention.lsh.window="chunk"', "training.steps=2"],
        },
    }
    comparison["prepare"] += ["--output", str(folder / "data")]
    (folder / "small.json").write_text(json.dumps(comparison))
    return folder / "small.json"


class SameThread:
    """A pool of the caller's own thread, in which commands can handle signals."""

    map = staticmethod(map)


def test_arms_are_trained_and_evaluated_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("megasparse.runs.comparison.ThreadPoolExecutor", lambda jobs: nullcontext(SameThread()))
    monkeypatch.setattr(CALL, lambda *words, log: main([str(word) for word in words]))
    path, runs = small_comparison(tmp_path), tmp_path / "runs"

    def rows(*options):
        capsys.readouterr()
        main(["compare", str(path), "--output", str(runs), *options])
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
        return {line.split(" | ")[0].removeprefix("| ") for line in lines[1:]}

    labels = {f"{arm}; {given}" for arm in ("full", "local", "chunk") for given in ("two", "one")}
    assert rows() == {f"{label} (leaks: not a code length)" if "chunk" in label else label for label in labels}
    steps = {n: len((runs / f"{n}-0/metrics.jsonl").read_text().splitlines()) for n in ("full", "local", "chunk")}
    assert steps == {"full": 3, "local": 2, "chunk": 2}
    results = [json.loads((runs / f"full-0/evaluation-{name}.json").read_text()) for name in ("two", "one")]
    assert results[0]["dims"] == 2 * results[1]["dims"]
    again = []
    monkeypatch.setattr(CALL, lambda *words, log: again.append(words[0]))
    assert rows("--arms", "full") == {"full; two", "full; one"} and again == ["prepare-data"]


def test_the_failure_of_a_subcommand_is_one_line(tmp_path):
    call("configs", "quickstart", log=tmp_path / "logs" / "log")
    assert "quickstart" in (tmp_path / "logs" / "log").read_text()
    with pytest.raises(UserError, match=r"megasparse pretrain failed with exit code 2: error: none: .* \(full log: "):
        call("pretrain", "none", log=tmp_path / "log")


def test_each_corpus_has_its_data_its_settings_and_its_folder(tmp_path, capsys):
    comparison = json.loads(small_comparison(tmp_path).read_text())
    prepare = comparison.pop("prepare")
    comparison["corpora"] = {name: {"prepare": [*prepare, name], "set": [f"data.path={name}"]} for name in "ab"}
    (tmp_path / "two.json").write_text(json.dumps(comparison))
    parts = load(tmp_path / "two.json")
    assert [part["prepare"][-1] for part in parts.values()] == ["a", "b"]
    shared = f"data.path={prepare[-1]}"  # `prepare` ends with --output: a comparison trains on what it prepares
    assert load(small_comparison(tmp_path))[""]["arms"]["full"][0] == shared
    assert parts["b"]["arms"]["local"] == [shared, *comparison["arms"]["local"], "data.path=b"]
    main(["compare", str(tmp_path / "two.json"), "--dry-run", "--arms", "full", "--seeds", "0", "3", "--output", "out"])
    printed = capsys.readouterr().out
    for corpus, seed in itertools.product("ab", (0, 3)):
        assert f"run.directory=out/{corpus}/full-{seed} --set run.seed={seed} " in printed
    refusal(lambda: load(tmp_path / "two.json", ["c"]), ConfigError, '--corpora: unknown name "c"')
    refusal(lambda: load(small_comparison(tmp_path), ["c"]), ConfigError, "there is only one corpus")
    comparison["corpora"]["b"]["prepar"] = comparison["corpora"]["b"].pop("prepare")
    (tmp_path / "two.json").write_text(json.dumps(comparison))
    refusal(lambda: load(tmp_path / "two.json"), ConfigError, r"two\.json: b")


def test_wrong_requests(tmp_path, capsys):
    refusal(lambda: load(tmp_path / "missing.json"), ConfigError, "no such file")
    (tmp_path / "other.json").write_text('{"arms": {}}')
    refusal(lambda: load(tmp_path / "other.json"), ConfigError, "arms, config, evaluate, prepare")
    comparison = load(small_comparison(tmp_path))[""]
    refusal(lambda: runs_of(comparison, tmp_path / "runs", ["lsh"]), ConfigError, '--arms: unknown name "lsh"')
    refusal(lambda: runs_of(comparison, tmp_path / "runs", overrides=["training.stepz=1"]), ConfigError, "stepz")
    with pytest.raises(SystemExit):
        main(["compare", "quickstart", "--jobs", "0", "--dry-run"])
    assert "--jobs: 0 is not a whole number of 1 or more" in capsys.readouterr().err


@together("path", sorted((ROOT / "configs/comparisons").glob("*.json")))
def test_every_shipped_comparison_loads(path):
    for comparison in load(path).values():
        assert len(runs_of(comparison, Path("runs"))) == len(comparison["arms"])


def run_of(folder, arm, seed, curve, seconds=(0.5,)):
    folder /= f"{arm}-{seed}"
    folder.mkdir()
    lines = [{"step": step, "speed/step_seconds": seconds[step % len(seconds)]} for step in range(1, max(curve) + 1)]
    for step, value in curve.items():
        lines[step - 1]["evaluation/bits_per_dim"] = value
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return ArmRun(arm, folder, [], {})


def test_curves_are_means_over_the_steps_that_all_seeds_evaluate(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr("megasparse.evaluation.outputs.save_figure", lambda figure, path: figures.append(figure))
    plot(tmp_path, [ArmRun("missing", tmp_path / "missing", [], {})])
    assert not figures
    runs = [run_of(tmp_path, "far", 0, {2: 3.0, 40: 2.0}, seconds=(0.5, 9.0)), run_of(tmp_path, "far", 1, {2: 2.0})]
    plot(tmp_path, [*runs, run_of(tmp_path, "near", 0, {2: 9.0})])
    by_step, by_second = ([[*map(list, line.get_data())] for line in axes.lines] for axes in figures[0].axes)
    assert by_step == [[[2, 40], [3.0, 2.0]], [[2], [2.0]], [[2], [2.5]], [[2], [9.0]]]
    assert by_second == [[[1.0], [2.5]], [[1.0], [9.0]]], "slow steps of a busy machine do not count"


def test_the_table_has_means_and_deviations_best_accuracy_first():
    rows = [{"accuracy": 0.5, "loss": loss, "seconds": 9.0, "step_seconds": 0.25} for loss in (1.0, 3.0)]
    lines = table({"far": rows, "near": [{**rows[0], "accuracy": 0.75}]})
    assert "bits/token" in lines[0], "a token need not be a dim"
    assert lines[2:] == [
        "| near | 75.00 | 1.0000 | 1.443 | 0.25 | 9 |",
        "| far | 50.00 ± 0.00 | 2.0000 ± 1.4142 | 2.885 ± 2.040 | 0.25 | 9 |",
    ]
