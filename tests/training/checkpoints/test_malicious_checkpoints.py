"""Checkpoints made to run code or to hurt: refused by name before anything of them is used.

Each is honestly sealed: sizes, digests and the manifest's own digest are right, as an attacker would have them.
"""

import hashlib
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megasparse.errors import CheckpointError
from megasparse.evaluation.restore import restore
from megasparse.training.checkpoints.checkpoint import Checkpoint
from megasparse.training.checkpoints.manifest import MANIFEST, seal
from megasparse.training.checkpoints.resume import find_start
from megasparse.training.ranks import Ranks
from tests.helpers.tiny import identity_of, tiny_config
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


def reseal(path: Path, edit: Callable[[dict[str, Any]], Any] = lambda manifest: None) -> None:
    """Make sizes and digests those of the files that are there."""
    manifest = json.loads((path / MANIFEST).read_text())
    for name in manifest["files"]:
        contents = (path / name).read_bytes()
        manifest["files"][name] = {"bytes": len(contents), "sha256": hashlib.sha256(contents).hexdigest()}
    edit(manifest)
    (path / MANIFEST).write_text(seal(manifest))


def zipped(payload: Touch, file: Path) -> None:
    with file.open("wb") as stream:  # torch refuses some names
        torch.save({"model": payload}, stream)


def pickled(payload: Touch, file: Path) -> None:
    file.write_bytes(pickle.dumps(payload))


PAYLOADS = [zipped, pickled]


def refused(path: Path, marker: Path, match: str) -> None:
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
def test_a_pickle_in_place_of_the_tensors(saved, tmp_path, payload):
    payload(Touch(tmp_path / "marker"), saved / FILE)
    reseal(saved)
    refused(saved, tmp_path / "marker", rf"{FILE}: is no safetensors file")


@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_pickle_as_the_manifest(saved, tmp_path, payload):
    payload(Touch(tmp_path / "marker"), saved / MANIFEST)
    refused(saved, tmp_path / "marker", rf"{MANIFEST}: cannot be read")


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pkl", "rng_state.pth", ".metadata", "data.pyd"])
@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_pickle_beside_the_files(saved, tmp_path, payload, name):
    payload(Touch(tmp_path / "marker"), saved / name)
    refused(saved, tmp_path / "marker", rf"{name}: not part of this checkpoint")

    def listed(manifest: dict[str, Any]) -> None:
        contents = (saved / name).read_bytes()
        manifest["files"][name] = {"bytes": len(contents), "sha256": hashlib.sha256(contents).hexdigest()}

    reseal(saved, listed)
    refused(saved, tmp_path / "marker", rf"{MANIFEST}: names a file '{name}'")


@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_pickle_named_as_another_ranks_file(saved, tmp_path, payload):
    payload(Touch(tmp_path / "marker"), saved / "rank-00001.safetensors")
    reseal(saved, lambda manifest: manifest["files"].update({"rank-00001.safetensors": {"bytes": 0, "sha256": ""}}))
    reseal(saved)  # now with its digest
    refused(saved, tmp_path / "marker", r"rank-00001.safetensors: is no safetensors file")


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
def test_a_header_that_says_something_else(saved, tmp_path, change):
    rewrite(saved / FILE, HEADERS[change])
    reseal(saved)
    refused(saved, tmp_path / "marker", rf"{FILE}: ")


@pytest.mark.parametrize("length", [0, 1, 1 << 30, 1 << 60, (1 << 64) - 1])
def test_a_header_that_claims_another_length(saved, tmp_path, length):
    contents = (saved / FILE).read_bytes()
    (saved / FILE).write_bytes(length.to_bytes(8, "little") + contents[8:])
    reseal(saved)
    refused(saved, tmp_path / "marker", rf"{FILE}: is no safetensors file")


def test_a_manifest_that_nests_too_deeply(saved, tmp_path):
    (saved / MANIFEST).write_text("[" * 100_000)
    refused(saved, tmp_path / "marker", rf"{MANIFEST}: cannot be read")


def test_an_honest_reseal_opens(saved):
    rewrite(saved / FILE, lambda header: None)
    reseal(saved)
    assert Checkpoint.open(saved).step == 2
