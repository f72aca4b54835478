"""The page of a run: whole, harmless, and of whatever state the run is in."""

import json
import math
import re
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from torch.utils.tensorboard import SummaryWriter

import megasparse.attention  # noqa: F401  (registers the mechanisms)
from megasparse.cli.main import door
from megasparse.config.schema import Config
from megasparse.runs.report import page, read_board, read_run, read_series, thinned, ticks
from tests.helpers.commands import refused

main = door("report")
EVIL = "<script>alert(1)</script><img src=x onerror=\"alert('2')\"> $\\frac{"


class Page(HTMLParser):
    """A page taken apart; every element must be closed by its own tag."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.text = [], [], ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += f" {data}" if self.open and self.open[-1] != "style" else ""

    def charts(self):
        return [attributes["aria-label"] for tag, attributes in self.tags if tag == "svg"]


def page_of(*runs):
    """The page of runs, taken apart and as it is: small, without script, fetching nothing."""
    text = page([read_run(run) for run in runs])
    assert len(text) < 8_000_000
    parsed = Page(text)
    assert not any(tag == "script" for tag, _ in parsed.tags)
    for _, attributes in parsed.tags:
        assert not any(name.startswith("on") for name in attributes)
        assert attributes.get("src", "data:").startswith("data:") and "href" not in attributes
    return parsed, text


def folder(path, lines, **config):
    path.mkdir()
    values = Config.model_validate({"training": {"steps": 40}, **config}).model_dump(mode="json")
    (path / "config.json").write_text(json.dumps(values))
    write_lines(path / "metrics.jsonl", lines)
    return path


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def line(step, **more):
    return {"step": step, "train/loss": 5.0 / step, "speed/tokens_per_second": 1000.0, **more}


def test_a_run_in_full(tmp_path):
    lines = [line(step, **({"evaluation/bits_per_dim": 8.0 / step} if step % 10 == 0 else {})) for step in range(1, 41)]
    for values in lines:
        values |= {f"model/attention/lha/kl_keys/layer_{layer}": 0.1 * layer for layer in (2, 10)}
    run = folder(tmp_path / "run", lines, optimizer={"learning_rate": 0.125})
    write_lines(run / "events.jsonl", [{"step": 12, "time": "2026", "message": "STEP 12 SKIPPED"}])
    (run / "best.json").write_text(json.dumps({"metric": "evaluation/f1", "step": 20, "value": 0.3}))
    (run / "checkpoints" / "00000020").mkdir(parents=True)
    (run / "checkpoints" / "00000020" / "rank-00000.safetensors").write_bytes(bytes(2000))
    result, text = page_of(run)
    for shown in ("40 of 40", "STEP 12 SKIPPED", "best validation f1 0.3, step 20", "2 kB", "1,000 in all steps"):
        assert shown in result.text, shown
    assert result.charts() == ["loss, nats/token", "evaluation/bits_per_dim", "model/attention/lha/kl_keys"]
    assert "2 of " in result.text and re.search(r"00000020.*best</td>", text)
    assert re.search(r"learning_rate</td><td>0.125</td><td>0.0", text)
    assert ticks(0.3, 2.1) == [0.5, 1.0, 1.5, 2.0] and ticks(950, 1400) == [1000, 1100, 1200, 1300, 1400]


@pytest.mark.parametrize("missing", ["metrics", "config", "steps"])
def test_a_run_of_which_there_is_little(tmp_path, missing):
    run = folder(tmp_path / "run", [] if missing == "steps" else [line(1)])
    if missing != "steps":
        (run / {"metrics": "metrics.jsonl", "config": "config.json"}[missing]).unlink()
    result, _ = page_of(run)
    assert ("No step has been logged yet" in result.text) == (missing != "config")
    assert f"megasparse evaluate --checkpoint {run} --json {run}/evaluation.json" in result.text


def write_result(run, name, value, step, dims, **more):
    protocol = {"split": "test", "checkpoint_step": step, "split_dims": 3000}
    (run / name).write_text(json.dumps({"bits_per_dim": value, "dims": dims, "protocol": protocol, **more}))


def test_the_first_screen_is_the_held_out_result_of_the_last_checkpoint_next_to_compressors(tmp_path):
    loss = {"evaluation/loss": 2.0, "train/bits_per_dim": 5.0 / math.log(2), "memory/optimizer_bytes": 5_361_080}
    run = folder(tmp_path / "run", [line(1, **loss), line(2)])
    write_result(run, "evaluation.json", 2.0871, 2, 3000)
    write_result(run, "few.json", 1.1111, 2, 10)
    write_result(run, "old.json", 2.2222, 1, 3000)
    (run / "broken.json").write_text('{"bits_per_dim": 1, "protocol": []}')
    (run / "summary.json").write_text(json.dumps({"gzip_bits_per_dim": 2.844, "bits_per_dim": 2.0871, EVIL: 1.0}))
    result, text = page_of(run)
    first, rest = text.split("<details>", 1)
    shown = [first.index(part) for part in ("run</td><td><b>2.087", "gzip -9</td><td><b>2.844", "3,000 tokens", "<svg")]
    assert shown == sorted(shown) and "1.111" not in text and "2.222" not in text and "bars" not in rest
    lengths = {float(share) for share in re.findall(r'style="--share:([.0-9]+)"', first)}  # also on a phone
    assert lengths == {1.0, round(2.0871 / 2.844, 3)} and "max-width:40vw" not in text
    assert first.count("<svg") == 1 and "validation" in first and "tokens per second" in first
    assert "color-scheme:light dark" in text and "memory/optimizer_bytes: 5.36 MB in all steps" in result.text
    (run / "summary.json").write_text(json.dumps({"gzip_bits_per_dim": 2.844, "bits_per_dim": 2.1}))
    assert "gzip" not in page_of(run)[1], "of other bytes than the result"


def test_the_result_of_a_task_is_shown_with_its_interval(tmp_path):
    run = folder(tmp_path / "run", [line(1)])
    metrics = {"accuracy": {"value": 0.875, "low": 0.8, "high": 0.9}, "f1": {"value": 0.5, "low": None}, "bad": [1]}
    (run / "test.json").write_text(json.dumps({"task": "rte", "examples": 40, "metrics": metrics}))
    shown = page_of(run)[0].text
    assert "run: rte, 40 held-out examples: accuracy 0.8750 (0.8000 to 0.9000), f1 0.5000" in shown
    assert "No held-out result" not in shown


def test_a_multiple_of_a_curve_is_not_drawn_again(tmp_path):
    lines = [
        {"step": step, "train/loss": 5.0 / step, "train/bits_per_dim": 5.0 / step / math.log(2)} for step in (1, 2, 3)
    ]
    result, _ = page_of(folder(tmp_path / "run", lines))
    assert result.charts() == ["loss, nats/token"]
    assert "train/bits_per_dim: the curve of train/loss in another unit" in result.text


def test_broken_files_lose_only_their_own_part(tmp_path):
    run = folder(tmp_path / "run", [line(1), line(2, **{"train/loss": None}), line(3)])
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'[5]\n{"step": "7", "a": 1}\n{"a": 2}\n\xff\xfe\n' + b"[" * 200_000 + b"\n")
        file.write(json.dumps({"step": 4, "train/loss": 10**400, "b": "text", "c": [1], "d": True}).encode() + b"\n")
        file.write(json.dumps(line(2, **{"train/loss": 0.25})).encode() + b'\n{"step": 5, "train/lo')
    for name in ("config.json", "best.json"):
        (run / name).write_bytes(b'{"a": [1, 2')
    (run / "events.jsonl").write_text('{"step": "no", "message": 5}\n{"message": "SKIPPED"}\n[]\nxx')
    (run / "tensorboard").mkdir()
    (run / "tensorboard/events.out.tfevents.1").write_bytes(b"\x05" + bytes(40))
    scalars = read_series(run / "metrics.jsonl")
    assert not scalars.keys() & {"a", "b", "c", "d"}
    steps, values = scalars["train/loss"]
    assert steps.tolist() == [1, 2, 3] and values[1] == 0.25, "of a step that comes twice, the last"
    assert "config.json is missing or damaged" in page_of(run)[0].text


def test_file_contents_are_escaped_as_text(tmp_path):
    lines = [line(step, **{f"evil/{EVIL}": 1.0, f"model/attention/{EVIL}/layer_1": 2.0}) for step in range(1, 4)]
    run = folder(tmp_path / EVIL.replace("/", "⁄")[:60], lines, data={"path": EVIL})
    write_lines(run / "events.jsonl", [{"step": 2, "time": EVIL, "message": EVIL}, {"step": EVIL}])
    (run / "best.json").write_text(json.dumps({"metric": EVIL, "step": EVIL, "value": 1.0}))
    with SummaryWriter(str(run / "tensorboard")) as board:
        board.add_text("evaluation/sample", EVIL, 1)
        board.add_image(f"{EVIL}/y", torch.zeros(3, 4, 4), 1)
    result, text = page_of(run)
    assert "<script>" not in text and "<img src=x" not in text
    assert result.text.count("<script>alert(1)") >= 7, "all of it is there, as text"
    assert "default-src 'none'" in text


def test_a_long_run_keeps_its_extremes_and_several_runs_share_charts(tmp_path):
    values = np.random.default_rng(0).normal(10.0, 1.0, 20_000).round(3).tolist()
    runs = [folder(tmp_path / "a", [{"step": step, "train/loss": value} for step, value in enumerate(values, 1)])]
    write_lines(runs[0] / "events.jsonl", ({"step": step, "message": "SKIPPED"} for step in range(0, 20_000, 20)))
    runs.append(folder(tmp_path / "b", [line(1), line(2)]))
    result, _ = page_of(*runs)
    assert len(result.charts()) == 1 and "800 earlier incidents" in result.text
    series = read_run(runs[0]).series["train/loss"][1]
    drawn = series[thinned(series)]
    assert len(series) == 20_000 and len(drawn) <= 400
    assert (drawn.min(), drawn.max()) == (min(values), max(values))


def test_texts_and_pictures_are_read_from_tensorboards_files(tmp_path):
    for start in (0, 2):  # two processes, the second of which does step 2 again
        with SummaryWriter(str(tmp_path), filename_suffix=str(start)) as board:
            for step in range(start, start + 3):
                board.add_scalar("train/loss", 1.0, step)
                board.add_text("evaluation/sample", f"```\ntext {start} {step}\n```", step)
                board.add_image("quality/lsh/maps", torch.rand(3, 8, 8), step)
    board = read_board(tmp_path)
    assert [*board["quality/lsh/maps"]] == [0, 1, 2, 3, 4] and all(
        x[1:4] == b"PNG" for x in board["quality/lsh/maps"].values()
    )
    texts = [f"text {start} {step}" for start, step in zip("00222", range(5), strict=True)]
    assert board["evaluation/sample"] == dict(enumerate(texts))


def test_the_command_writes_the_page_or_one_line(tmp_path, capsys):
    run = folder(tmp_path / "run", [line(1)])
    main([str(run)])
    main([str(run), "--output", str(tmp_path / "other.html")])
    assert all("nats/token" in path.read_text() for path in (run / "report.html", tmp_path / "other.html"))
    for path, reason in ((tmp_path, "neither config.json nor metrics.jsonl"), (tmp_path / "none", "is not a folder")):
        assert reason in refused(capsys, main, path)
