"""The page of a run: whole, self-contained, harmless, and of whatever state the run is in."""

import json
import re
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.tensorboard import SummaryWriter

from megasparse.config.schema import Config
from megasparse.report.page import page
from megasparse.report.run import read_run
from megasparse.report.series import decimated, read_series

EVIL = "<script>alert(1)</script><img src=x onerror=\"alert('2')\">"
VOID = {"meta", "img", "br", "link", "input"}


class Page(HTMLParser):
    """A page taken apart; every element must be closed by its own tag."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text.append(data)

    @property
    def text_shown(self) -> str:
        return " ".join(self.text)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def page_of(*runs: Path) -> tuple[Page, str]:
    """The page of runs, taken apart and as it is; it must be small, hold our script alone, and fetch nothing."""
    text = page([read_run(run) for run in runs])
    assert len(text) < 5_000_000
    parsed = Page(text)
    assert len(parsed.all("script")) == 1, "ours"
    for _, attributes in parsed.tags:
        assert not any(name.startswith("on") for name in attributes), "no handler of events"
        for name in ("src", "href", "xlink:href", "action", "data"):
            assert (attributes.get(name) or "data:").startswith("data:image/png;base64,"[: len("data:")])
    bare = re.sub(r'content="default-src[^"]*"', "", text)
    assert not re.search(r"https?:|//[a-z]|url\(|@import|fetch\(|XMLHttp", bare.replace("data:image", "")), "no network"
    return parsed, text


def folder(path: Path, lines: list[dict[str, Any]], **config: Any) -> Path:
    path.mkdir()
    values = Config.model_validate({"training": {"steps": 40}, **config}).model_dump(mode="json")
    (path / "config.json").write_text(json.dumps(values))
    write_lines(path / "metrics.jsonl", lines)
    return path


def write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def heartbeat(run: Path, number: int, /, **beat: Any) -> Path:
    file = run / "heartbeats" / f"rank-{number:05d}.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps({"crc32": 0, "heartbeat": beat}))
    return file


def line(step: int, **more: float | None) -> dict[str, Any]:
    return {
        "step": step,
        "train/loss": 5.0 / step,
        "train/bits_per_dim": 7.0 / step,
        "train/skipped_steps": 0,
        "optimizer/learning_rate": 1e-3,
        "speed/tokens_per_second": 1000.0,
        "speed/step_seconds": 0.5,
        "speed/data_wait_seconds": 0.05,
        **more,
    }


def test_a_run_in_full(tmp_path):
    lines = [line(step, **({"evaluation/bits_per_dim": 8.0 / step} if step % 10 == 0 else {})) for step in range(1, 41)]
    for each in lines:
        each |= {f"model/attention/lha/kl_keys/layer_{layer}": 0.1 * layer for layer in (2, 10)}
        each |= {"model/attention/lha/kl_keys": 0.6, "quality/lsh/recall_top": 0.5, "quality/lha/recall_top": 0.7}
        each |= {"speed/model_flops_utilisation": 0.25, "speed/hardware_flops_utilisation": 0.5, "my/own": 1.0}
    run = folder(tmp_path / "run", lines, optimizer={"learning_rate": 0.125})
    messages = [
        "STEP 12 SKIPPED on all ranks (not finite)",
        "rank 1 is a straggler: 2.00",
        "started again, after step 20",
    ]
    events = [{"step": 12 + 4 * n, "time": "2026-01-01T00:00:00+00:00", "message": m} for n, m in enumerate(messages)]
    write_lines(run / "events.jsonl", events)
    spent = [{"rank": rank, "data": 0.0, "forward": 1.0 + rank, "communication": 0.5} for rank in (0, 1)]
    (run / "ranks.json").write_text(json.dumps({"step": 40, "steps": 16, "ranks": spent}))
    for name in ("00000020", "00000040"):
        (run / "checkpoints" / name).mkdir(parents=True)
        (run / "checkpoints" / name / "rank-00000.safetensors").write_bytes(bytes(2000))
    (run / "traces").mkdir()
    (run / "traces" / "step-00000030-rank-00000.json.gz").write_bytes(b"")
    found, text = page_of(run)

    shown = ("40 of 40", "held-out bits/dim", "0.2", "25.0% / 50.0%", "10.0%", "0:00:20", "1 restarts, 1 stragglers")
    assert all(text in found.text_shown for text in shown), found.text_shown
    titles = [figure["aria-label"] for figure in found.all("svg")]
    assert titles[:2] == ["Loss", "Bits per dim"] and {"lha/kl_keys", "recall_top", "my/own"} <= set(titles)
    labels = [path["data-label"] for path in found.all("path") if "data-label" in path]
    first = labels.index("mean")
    assert labels[first : first + 3] == ["mean", "layer 2", "layer 10"], "by number, not by letter"
    assert {"lsh", "lha", "held-out", "training"} <= set(labels)
    marks = [path["class"] for path in found.all("path") if (path.get("class") or "").startswith("m ")]
    assert set(marks) == {"m skipped", "m straggler", "m restart"}
    assert all(message in found.text_shown for message in messages)
    assert all(text in found.text_shown for text in ("00000040", "2000B", "step-00000030-rank-00000.json.gz"))
    assert "2 settings differ from the defaults" in found.text_shown and "0.125" in found.text_shown
    assert text.count('<tr class="changed">') == 2 and "0 in every step: train/skipped_steps" in found.text_shown
    assert "2.00" in found.text_shown, "rank 1 against rank 0"


@pytest.mark.parametrize("missing", ["nothing", "metrics", "everything but metrics", "steps"])
def test_a_run_of_which_there_is_little(tmp_path, missing):
    run = folder(tmp_path / "run", [] if missing == "steps" else [line(1)])
    if missing == "metrics":
        (run / "metrics.jsonl").unlink()
    if missing == "everything but metrics":
        (run / "config.json").unlink()
    found, _ = page_of(run)
    assert bool(found.all("svg")) == (missing in ("nothing", "everything but metrics"))
    assert ("No step has been logged yet" in found.text_shown) == (missing in ("metrics", "steps"))


def test_broken_files_cost_what_is_broken(tmp_path):
    run = folder(tmp_path / "run", [line(1), line(2, **{"train/loss": None}), line(3)])
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'[5]\n{"step": "7", "a": 1}\n{"a": 2}\n\xff\xfe\n' + b"[" * 200_000 + b"\n")
        file.write(json.dumps({"step": 4, "train/loss": 10**400, "b": "text", "c": [1], "d": True}).encode() + b"\n")
        file.write(json.dumps(line(2, **{"train/loss": 0.25})).encode() + b'\n{"step": 5, "train/lo')
    for name in ("config.json", "events.jsonl", "ranks.json", "best.json"):
        (run / name).write_bytes(b'{"a": [1, 2')
    (run / "ranks.json").write_text('{"ranks": [{"rank": 0}, 5, {"rank": "x", "data": "y"}]}')
    (run / "events.jsonl").write_text('{"step": "no", "message": 5}\n{"message": "SKIPPED"}\n[]\nxx')
    for name, content in (
        ("tensorboard/events.out.tfevents.1", b"\x05" + bytes(40)),
        ("heartbeats/rank-00000.json", b'{"heartbeat": 5}'),
    ):
        (run / name).parent.mkdir()
        (run / name).write_bytes(content)
    scalars = read_series(run / "metrics.jsonl")
    assert not scalars.keys() & {"a", "b", "c", "d"}
    series = scalars["train/loss"]
    assert series.steps.tolist() == [1, 2, 3] and series.values[1] == 0.25, "of a step that comes twice, the last"
    found, _ = page_of(run)
    assert "config.json is missing or broken" in found.text_shown


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("ranks.json", {"ranks": 5}),
        ("ranks.json", {"ranks": [{"rank": [1], "data": 1, "forward": 1, "communication": 1}]}),
        ("ranks.json", {"ranks": [{"rank": 0, "data": float("nan"), "forward": 10**400, "communication": 1}]}),
        ("heartbeats/rank-00000.json", {"heartbeat": {"rank": [1], "launch": "a"}}),
        ("best.json", {"value": 10**400}),
        ("metrics.jsonl", {"step": 1, "speed/tokens_per_second": 1.0, "speed/step_seconds": 1e200}),
    ],
    ids=["no list", "rank", "numbers", "rank of a heartbeat", "best", "seconds"],
)
def test_values_of_another_kind_cost_what_they_show(tmp_path, file, content):
    run = folder(tmp_path / "run", [line(1)])
    (run / file).parent.mkdir(exist_ok=True)
    (run / file).write_text(json.dumps(content) + "\n")
    assert "Configuration" in page_of(run)[0].text_shown


def test_nothing_that_a_file_says_becomes_more_than_text(tmp_path):
    lines = [line(step, **{f"evil/{EVIL}": 1.0, f"model/attention/{EVIL}/layer_1": 2.0}) for step in range(1, 4)]
    run = folder(tmp_path / EVIL.replace("/", "⁄")[:60], lines, data={"path": EVIL})
    evil = {"step": 2, "time": EVIL, "message": f"SKIPPED {EVIL}"}
    write_lines(run / "events.jsonl", [evil, {**evil, "step": EVIL}])
    spent = {"rank": EVIL, "data": 1.0, "forward": 1.0, "communication": 1.0}
    (run / "ranks.json").write_text(json.dumps({"step": EVIL, "steps": EVIL, "ranks": [spent]}))
    (run / "best.json").write_text(json.dumps({"metric": EVIL, "step": EVIL, "value": 1.0}))
    heartbeat(run, 0, rank=EVIL, host=EVIL, pid=EVIL, doing=EVIL, launch=1)
    (run / "traces").mkdir()
    (run / "traces" / (EVIL.replace("/", "") + ".json.gz")).write_bytes(b"")
    with SummaryWriter(str(run / "tensorboard")) as board:
        board.add_text("evaluation/sample", EVIL, 1)
        board.add_text(f"{EVIL}/x", EVIL, 1)
        board.add_image(f"{EVIL}/y", torch.zeros(3, 4, 4), 1)
    found, text = page_of(run)
    assert "<script>alert" not in text and "<img src=x" not in text
    assert found.text_shown.count("<script>alert(1)") >= 10, "all of it is there, as text"
    assert len(found.all("img")) == 1
    policy = next(meta["content"] for meta in found.all("meta") if meta.get("http-equiv"))
    assert policy is not None and "default-src 'none'" in policy and "script-src 'sha256-" in policy


def test_a_long_run_is_a_short_page_and_keeps_its_extremes(tmp_path):
    """100,000 steps of 60 scalars would be some 100 MB of points."""
    steps, names = 100_000, [f"model/attention/lha/name_{n}/layer_{layer}" for n in range(12) for layer in range(5)]
    run = folder(tmp_path / "run", [], training={"steps": steps})
    values = np.random.default_rng(0).normal(10.0, 1.0, steps).round(3)
    values[77_777], values[12_345] = 99.0, -99.0
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            file.write(f'{{"step": {step}, "train/loss": {values[step - 1]}')
            file.write("".join(f', "{name}": 0.{step}' for name in names) if step % 100 == 0 else "")
            file.write("}\n")
    events = ({"step": step, "time": "", "message": "STEP SKIPPED"} for step in range(0, steps, 20))
    write_lines(run / "events.jsonl", events)
    found, _ = page_of(run)
    assert "100,000 of 100,000" in found.text_shown and "4,800 earlier ones" in found.text_shown
    kept = decimated(read_series(run / "metrics.jsonl")["train/loss"], 1000)
    assert len(kept.steps) <= 1000 and kept.values.max() == 99.0 and kept.values.min() == -99.0
    assert {1, 12_346, 77_778, steps} <= set(kept.steps.tolist()) and (np.diff(kept.steps) > 0).all()


def test_several_runs_share_their_charts(tmp_path):
    (tmp_path / "other").mkdir()
    runs = [folder(tmp_path / "run", [line(1), line(2)]), folder(tmp_path / "other" / "run", [line(1), line(3)])]
    found, _ = page_of(*runs)
    assert len([figure for figure in found.all("svg") if figure["aria-label"] == "Loss"]) == 1
    labels = {path.get("data-label") for path in found.all("path")} - {None}
    assert {str(run) for run in runs} <= labels, "paths, where names are the same"


def test_a_fine_tuning_run_shows_its_metrics_and_its_best_checkpoint(tmp_path):
    lines = [line(step, **{"evaluation/f1": 0.1 * step, "evaluation/loss": 1.0}) for step in range(1, 5)]
    run = folder(tmp_path / "run", lines)
    values = {"task": {"name": "table"}, "model": {"layers": 3, "heads": 8}, "training": {"steps": 4}}
    (run / "config.json").write_text(json.dumps(values))
    (run / "best.json").write_text(json.dumps({"metric": "evaluation/f1", "step": 3, "value": 0.3}))
    (run / "checkpoints" / "00000003").mkdir(parents=True)
    found, text = page_of(run)
    assert all(text in found.text_shown for text in ("best f1", "mean of an example", "held-out loss"))
    assert "f1" in [figure["aria-label"] for figure in found.all("svg")]
    assert re.search(r"00000003.*good.*best", text)
    changed = re.findall(r'<tr class="changed"><td><code>([^<]*)', text)
    assert "model.layers" in changed and "model.heads" not in changed, "against the model's own defaults"


def test_a_run_is_held_to_be_alive_by_its_heartbeats(tmp_path):
    run = folder(tmp_path / "run", [line(1)])
    for rank, (launch, ended) in enumerate([("old", False), ("new", True), ("new", False)]):
        file = heartbeat(run, rank, rank=rank, host="h", pid=1, doing="step 2", launch=launch, ended=ended)
    found, _ = page_of(run)
    assert "running" in found.text_shown
    file.unlink()
    assert not read_run(run).alive(), "the newest launch has ended"
