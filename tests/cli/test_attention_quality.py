"""The command itself, on a model of two steps."""

import json

import pytest
from PIL import Image

from megasparse.cli.main import door
from megasparse.data.index import Index
from megasparse.data.reader import EvaluationStream
from megasparse.runs import attention_quality
from tests.data.folders import ramp, write_folder
from tests.helpers.commands import refused, run
from tests.helpers.trained import prepared, trained

main = door("attention-quality")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quality")
    trained(prepared(folder), folder / "run", ["full", "lsh"], 2)
    return folder


def measured(folder, *arguments):
    basics = ["--checkpoint", folder / "run", "--windows", 3, "--length", 32, "--hash-steps", 3, "--top", 4]
    run(main, *basics, *arguments)


def test_it_measures_every_layer_and_writes_what_it_says(folder, capsys):
    measured(folder, "--json", folder / "out" / "quality.json", "--picture", folder / "maps")
    table = capsys.readouterr().out
    result = json.loads((folder / "out" / "quality.json").read_text())
    assert [layer["name"] for layer in result["layers"]] == ["layer 0 full", "layer 1 lsh"]
    assert result["protocol"]["windows"] == 3 and result["protocol"]["split"] == "validation"
    assert result["paper_imbalance"] == {"ratio": 0.613, "size": 0.359}
    assert len(result["hash_divergence"]) == 3
    for row in [*result["layers"], result["all"]]:
        assert row["name"] in table
        assert set(row["utility"]) == {"chunks", "random", "smyrf", "lsh", "lha", "bound", "floor"}
        for number in row["utility"].values():
            assert number["mean"] <= row["utility"]["bound"]["mean"] + 1e-6
            assert len(number["windows"]) == 3 and number["mean"] == pytest.approx(sum(number["windows"]) / 3)
        assert row["utility"]["floor"]["mean"] == 0.25
        assert set(row["recall"]) == {"chunks", "random", "smyrf", "lsh", "lha"}
        assert set(row["imbalance"]) == {"lsh", "lha"}
        errors = [row["output_error"]["yoso"][hashes]["mean"] for hashes in ("8", "128")]
        assert errors[0] > errors[1] > 0
    utilities = [layer["utility"]["lsh"]["windows"] for layer in result["layers"]]
    assert result["all"]["utility"]["lsh"]["windows"] == pytest.approx(
        [sum(x) / 2 for x in zip(*utilities, strict=True)]
    )
    pictures = sorted((folder / "maps").iterdir())
    assert [path.name for path in pictures] == ["00_layer0_full.png", "01_layer1_lsh.png"]
    assert Image.open(pictures[0]).size == (48 + 4 + 9 * (128 + 4), 16 + 4 + 4 * (128 + 4) + 2 * 16), (
        "with labels, headings, legend"
    )


def test_the_same_command_gives_the_same_numbers(folder):
    for name in ("a", "b"):
        measured(folder, "--json", folder / f"{name}.json")
    assert (folder / "a.json").read_text() == (folder / "b.json").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--split", "train"], "error: --split: "),
        (["--split", "validaton"], "validation"),
        (["--length", 65], "error: --length: 65"),
        (["--buckets", 3], "error: --buckets: 3"),
        (["--windows", 1], "error: --windows: "),
        (["--windows", 20], "error: --windows: 20 windows of 32 tokens do not fit"),
        (["--top", 0], "error: --top: "),
        (["--hash-steps", 0], "error: --hash-steps: "),
        (["--data", "nowhere"], "there is no data here"),
    ],
)
def test_mistakes_are_told_in_a_line(folder, capsys, arguments, message):
    assert message in refused(capsys, lambda words: measured(folder, *words), *arguments)


@pytest.mark.parametrize("record", [1, 30])
def test_windows_are_spread_over_a_split_and_begin_where_a_record_does(tmp_path, record):
    stream = EvaluationStream(Index.load(write_folder(tmp_path / "data", [ramp(210, 0)])), "train")
    rows = [attention_quality.window(stream, number, 5, 20, record)[0].tolist() for number in range(5)]
    starts = [0, 47, 95, 142, 190] if record == 1 else [0, 30, 90, 120, 180]
    assert rows == [list(range(start, start + 20)) for start in starts]
