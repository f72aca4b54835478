"""Checkpoints made to run code, to do harm, or that claim to be huge: rejected by name before their use.

Each is honestly sealed: sizes, digests and the manifest's own digest are right, as an attacker would have them. Nothing
is timed: forbidden actions raise an error instead."""

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from launch import evaluate, finetune, generate, pretrain
from megasparse.errors import CheckpointError
from megasparse.evaluation.results import restore
from megasparse.files import LARGEST
from megasparse.hub.export import to_hf
from megasparse.model import build, stack
from megasparse.tasks.run import restore_task
from megasparse.training.checkpoints import checkpoint, manifest
from megasparse.training.checkpoints.checkpoint import Checkpoint
from megasparse.training.checkpoints.manifest import MANIFEST, find_checkpoint, seal
from megasparse.training.checkpoints.resume import find_start
from megasparse.training.ranks import Ranks
from tests.helpers.commands import refused
from tests.helpers.finetuning import ENCODER, launch, reviews, settings
from tests.helpers.tiny import identity_of, tiny_config
from tests.helpers.trained import prepared, trained
from tests.training.checkpoints.test_saving import prepare

FILE = "rank-00000.safetensors"


class Touch:
    """Unpickling it creates the marker."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


@pytest.fixture
def saved(tmp_path):
    return prepare(tmp_path / "run", 2)[0].directory / "00000002"


def reseal(path: Path, *more: str) -> None:
    """Update sizes and digests to the present files, and to `more` of them."""
    manifest = json.loads((path / MANIFEST).read_text())
    for name in {*manifest["files"], *more}:
        contents = (path / name).read_bytes()
        manifest["files"][name] = {"bytes": len(contents), "sha256": hashlib.sha256(contents).hexdigest()}
    (path / MANIFEST).write_text(seal(manifest))


def zipped(payload: Touch, file: Path) -> None:
    with file.open("wb") as stream:  # torch refuses some names
        torch.save({"model": payload}, stream)


def pickled(payload: Touch, file: Path) -> None:
    file.write_bytes(pickle.dumps(payload))


PAYLOADS = [zipped, pickled]


def assert_refused(path: Path, marker: Path, match: str) -> None:
    """By all that opens checkpoints."""
    config = tiny_config(path.parent.parent)
    for opens in (
        lambda: Checkpoint.open(path),
        lambda: restore(path),
        lambda: find_start(identity_of(config), Ranks()),
        lambda: find_start(identity_of(config), Ranks(), resume=str(path)),
    ):
        with pytest.raises(CheckpointError, match=match):
            opens()
        assert not marker.exists(), "its code was run"


@pytest.mark.parametrize("payload", PAYLOADS)
def test_the_payloads_are_live(tmp_path, payload):
    file = tmp_path / "payload"
    payload(Touch(tmp_path / "marker"), file)
    try:
        torch.load(file, weights_only=False)
    except Exception:
        pickle.loads(file.read_bytes())
    assert (tmp_path / "marker").exists()


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize(
    ("name", "message"),
    [(name, rf"{name}: not a safetensors file") for name in (FILE, "rank-00001.safetensors")]
    + [
        (name, rf"{MANIFEST}: invalid manifest: files\.{name}\.\[key\]: String should match")
        for name in ("optimizer.pt", "scheduler.pkl", "rng_state.pth", ".metadata", "data.pyd")
    ],
)
def test_pickles_in_a_checkpoint_are_never_loaded(saved, tmp_path, payload, name, message):
    payload(Touch(tmp_path / "marker"), saved / name)
    if name != FILE:
        assert_refused(saved, tmp_path / "marker", rf"{name}: not part of this checkpoint")
    reseal(saved, name)
    assert_refused(saved, tmp_path / "marker", message)


@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_pickle_as_the_manifest(saved, tmp_path, payload):
    payload(Touch(tmp_path / "marker"), saved / MANIFEST)
    assert_refused(saved, tmp_path / "marker", rf"{MANIFEST}: changed since it was written")


def rewrite(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the header of a safetensors file."""
    contents = file.read_bytes()
    length = int.from_bytes(contents[:8], "little")
    header = json.loads(contents[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + contents[8 + length :])


def offsets(begin: int, end: int) -> Callable[[dict[str, Any]], Any]:
    return lambda header: header["1"].update(data_offsets=[begin, end])


def another_dtype(header: dict[str, Any]) -> None:
    """The same bytes, read as half as many numbers."""
    header["1"].update(dtype="F64", shape=[header["1"]["shape"][0] // 2])


HEADERS = {
    "unknown dtype": lambda header: header["1"].update(dtype="PICKLE"),
    "another dtype": another_dtype,
    "dtype of the same size": lambda header: header["1"].update(dtype="I32"),
    "another shape": lambda header: header["1"].update(shape=[1, *header["1"]["shape"]]),
    "a shape beyond the file": lambda header: header["1"].update(shape=[1 << 60]),
    "a shape that overflows": lambda header: header["1"].update(shape=[1 << 33, 1 << 33]),
    "out of range": offsets(0, 1 << 40),
    "overlapping": offsets(0, 52),
    "backwards": offsets(52, 0),
    "negative": offsets(-4, 48),
    "nested bytes": lambda header: header.update(__metadata__={"format": "pt", "code": "cos\nsystem\n(S'true'\ntR."}),
    "an unlisted tensor": lambda header: header.update(x={"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}),
    "a tensor less": lambda header: header.pop("1"),
    "a header that is a list": lambda header: header.update({"1": []}),
}


@pytest.mark.parametrize("change", HEADERS)
def test_a_header_that_contradicts_the_file(saved, tmp_path, change):
    rewrite(saved / FILE, HEADERS[change])
    reseal(saved)
    assert_refused(saved, tmp_path / "marker", rf"{FILE}: ")


@pytest.mark.parametrize("length", [0, 1, 1 << 30, 1 << 60, (1 << 64) - 1])
def test_a_header_that_claims_another_length(saved, tmp_path, length):
    contents = (saved / FILE).read_bytes()
    (saved / FILE).write_bytes(length.to_bytes(8, "little") + contents[8:])
    reseal(saved)
    assert_refused(saved, tmp_path / "marker", rf"{FILE}: not a safetensors file")


def test_a_manifest_that_nests_too_deeply(saved, tmp_path):
    (saved / MANIFEST).write_text("[\n" * 100_000 + "}\n")
    assert_refused(saved, tmp_path / "marker", rf"{MANIFEST}: changed since it was written")


def test_an_honest_reseal_opens(saved):
    rewrite(saved / FILE, lambda header: None)
    reseal(saved)
    assert Checkpoint.open(saved).step == 2


HUGE = 10**9


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A folder of data/, and run/ with a checkpoint of one step."""
    folder = tmp_path_factory.mktemp("forged")
    trained(prepared(folder), folder / "run", ["local", "lsh"], 1)
    return folder


@pytest.fixture
def run(whole, tmp_path):
    return Path(shutil.copytree(whole / "run", tmp_path / "run"))


def forge(run: Path, edit: Callable[[dict[str, Any]], Any]) -> Path:
    path = find_checkpoint(run)
    forged = json.loads((path / MANIFEST).read_text())
    edit(forged)
    (path / MANIFEST).write_text(seal(forged))
    return path


def forbid(monkeypatch: pytest.MonkeyPatch, *names: tuple[Any, str]) -> None:
    def called(*_: Any, **__: Any) -> None:
        raise AssertionError("it went on")

    for place, name in names:
        monkeypatch.setattr(place, name, called)


@pytest.fixture
def nothing_made(monkeypatch):
    """No weight gets its initial value, and no file is hashed."""
    forbid(monkeypatch, (build, "initialise"), (checkpoint, "file_sha256"))


def claim(**values: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda forged: forged["config"]["model"].update(values)


def source(forged: dict[str, Any]) -> None:
    """The same forged number of layers, in an encoder."""
    forged["config"]["model"].update(kind="encoder_decoder", source={"length": 32, "layers": HUGE})


CLAIMS = {
    "layers": (claim(layers=HUGE), rf"{HUGE} layers, more than its \d+ weights"),
    "source": (source, rf"{HUGE} layers, more than its \d+ weights"),
    "width": (claim(d_model=HUGE), rf"has shape \[.*, in the model \[.*{HUGE}"),
    "feed-forward": (claim(d_ff=HUGE), rf"has shape \[.*, in the model \[.*{HUGE}"),
    "vocabulary": (claim(vocabulary=HUGE), rf"has shape \[.*, in the model \[.*{HUGE}"),
    "beyond 64 bits": (claim(d_model=4 * 10**30), "model.d_model: Input should be less"),
    "heads": (claim(heads=3), "its configuration: model"),
}


@pytest.mark.parametrize("what", CLAIMS)
def test_a_configuration_of_a_huge_model(run, what, nothing_made, monkeypatch):
    edit, said = CLAIMS[what]
    path = forge(run, edit)
    if "layers" in said:
        forbid(monkeypatch, (build, "Decoder"), (build, "EncoderDecoder"))
    with pytest.raises(CheckpointError, match=said) as caught:
        restore(run)
    assert caught.value.path == str(path)


def test_a_file_of_holes(run, nothing_made):
    path = find_checkpoint(run)
    os.truncate(path / FILE, 10**12)
    with pytest.raises(CheckpointError, match=rf"{FILE}: {10**12} bytes instead of"):
        Checkpoint.open(path)
    forge(run, lambda forged: forged["files"][FILE].update(bytes=10**12))
    with pytest.raises(CheckpointError, match=rf"{FILE}: not a safetensors file"):
        Checkpoint.open(path)


def test_a_tensor_of_holes(run, nothing_made):
    """Listed, and in the file's header: only the model has none such."""
    path, numel = find_checkpoint(run), 1 << 24

    def add(header: dict[str, Any]) -> None:
        end = max(tensor["data_offsets"][1] for tensor in header.values())
        header["more"] = {"dtype": "F32", "shape": [numel], "data_offsets": [end, end + 4 * numel]}

    rewrite(path / FILE, add)
    size = (path / FILE).stat().st_size + 4 * numel
    os.truncate(path / FILE, size)

    def edit(forged: dict[str, Any]) -> None:
        piece = {"file": FILE, "key": "more", "start": 0, "numel": numel}
        forged["tensors"]["weight"]["more"] = {"shape": [numel], "pieces": [piece]}
        forged["files"][FILE]["bytes"] = size

    forge(run, edit)
    with pytest.raises(CheckpointError, match="contains a weight more, unknown to the model"):
        restore(run)


WRONG = ["x", -1.5, 10**4000, 10**30, True, [["x"]], [None], [1]]
"""Values of which none is a count or an object."""


@pytest.mark.parametrize("path", ["step", "optimizer_steps", "files", "tensors", "state", "state.skipped_in_a_row",
                                  "state.selection"])  # fmt: skip
def test_a_value_of_another_type_is_named(run, path):
    *sections, key = path.split(".")
    for value in [{"x": 1}] * (key == "step") + WRONG:

        def edit(forged: dict[str, Any], value: Any = value) -> None:
            for section in sections:
                forged = forged[section]
            forged[key] = value

        with pytest.raises(CheckpointError, match=rf"{MANIFEST}: invalid manifest: {path}"):
            Checkpoint.open(forge(run, edit))


def test_a_manifest_without_end(run, monkeypatch):
    path = find_checkpoint(run)
    os.truncate(path / MANIFEST, LARGEST + 1)
    forbid(monkeypatch, (manifest, "parse_manifest"))
    with pytest.raises(CheckpointError, match=rf"{MANIFEST}: cannot be read \({LARGEST + 1:,} bytes"):
        Checkpoint.open(path)


def test_a_finetuned_models_record(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    launch(folder, reviews(tmp_path / "reviews.csv", 40), model=ENCODER, task={"max_length": 128})
    restore_task(folder)
    empty, layers = torch.empty, stack.Block

    def on_meta(*sizes: Any, **options: Any) -> torch.Tensor:
        made = empty(*sizes, **options)
        assert made.is_meta, "a weight was made"
        return made

    def one(config: Any, layer: int) -> Any:
        assert config.layers < HUGE, "a layer was made"
        return layers(config, layer)

    monkeypatch.setattr(torch, "empty", on_meta)
    monkeypatch.setattr(stack, "Block", one)
    record = folder / "start" / "body.json"
    honest = json.loads(record.read_text())
    for values, said in (({"layers": HUGE}, "layers, more than"), ({"d_model": HUGE}, "in the run's record")):
        record.write_text(json.dumps({**honest, "model": {**honest["model"], **values}}))
        with pytest.raises(CheckpointError, match=said):
            restore_task(folder)


def test_one_line_of_every_command(whole, run, capsys, tmp_path, monkeypatch):
    forge(run, claim(layers=HUGE))
    forbid(monkeypatch, (build, "initialise"), (build, "Decoder"))
    said = f"{HUGE} layers"
    assert said in refused(capsys, evaluate, "--checkpoint", run, "--data", whole / "data")
    assert said in refused(capsys, generate, "--checkpoint", run, "--prompt", "a")
    values = settings(tmp_path / "tuned", reviews(tmp_path / "reviews.csv", 40), start={"checkpoint": str(run)})
    (tmp_path / "tuned.json").write_text(json.dumps(values))
    assert said in refused(capsys, finetune, "--config", tmp_path / "tuned.json")
    with pytest.raises(CheckpointError, match=said):
        to_hf(run, tmp_path / "exported")
    elsewhere = f"run.directory={json.dumps(str(run))}"
    resumed = refused(capsys, pretrain, "--config", whole / "run" / "config.json", "--set", elsewhere)
    assert f"model.layers: {HUGE} -> 2" in resumed
