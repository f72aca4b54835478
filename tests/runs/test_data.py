"""The data folders of a run: checks against its configuration, and fingerprints."""

import json
import re
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest

from megasparse.config.schema import Config, EvaluationConfig, RunConfig
from megasparse.data.index import Index
from megasparse.data.tokenizers.simple import ByteTokenizer
from megasparse.errors import ConfigError, DataError
from megasparse.runs.data import from_data, open_data, open_folder, training_batches, with_texts
from megasparse.settings.load import build_config
from megasparse.training.ranks import Ranks, RunHooks
from tests.data.corpora.pictures import write_files
from tests.data.folders import edit, prepared, ramp, source_of, write_folder
from tests.helpers.commands import refusal
from tests.helpers.tiny import tiny_config
from tests.helpers.tokenizers import PROSE, sentencepiece_model


def config_of(folder: Path, model: dict[str, Any] | None = None, **data: Any) -> Config:
    given = {"path": str(folder), "sequence_length": 30, **data}
    return tiny_config("runs/none", model={"vocabulary": 256, **(model or {})}, data=given)


@pytest.mark.parametrize(("form", "words"), [("text", 50), ("jsonl", 5)])
def test_the_larger_of_texts_and_json_lines_is_read_and_the_other_reported(tmp_path, capsys, form, words):
    files = {f"shelf/{number:02}.txt": f"book {number} ".encode() * words for number in range(20)}
    lines = b"".join(b'{"text": "an entry of %d"}\n' % number for number in range(100))
    write_files(tmp_path, {**files, "shelf/metadata.jsonl": lines, "shelf/.hidden/app.json": b"{}" * 9999})
    config = config_of(tmp_path / "none").model_copy(update={"run": RunConfig(directory=str(tmp_path / "run"))})
    index = Index.load(with_texts(config, str(tmp_path / "shelf"), Ranks()).data.path).file
    size, report = 1390, "1 files are read, 20 left out (00.txt, 01.txt, 02.txt, …)"
    if form == "text":
        size, report = sum(map(len, files.values())), "20 files are read, 1 left out (metadata.jsonl)"
    assert (index.corpus, index.source["bytes"]) == (form, size) and f"shelf: {report}" in capsys.readouterr().err


def test_members_of_an_archive_count_with_their_own_bytes(tmp_path, capsys):
    entry = b'{"text": "an entry"}\n'
    with ZipFile(tmp_path / "both.zip", "w") as archive:
        archive.writestr("README.md", "about it")
        archive.writestr("lines.jsonl", entry * 100)
    config = config_of(tmp_path / "none").model_copy(update={"run": RunConfig(directory=str(tmp_path / "run"))})
    index = Index.load(with_texts(config, str(tmp_path / "both.zip"), Ranks()).data.path).file
    assert (index.corpus, index.source["bytes"]) == ("jsonl", 800)
    assert "1 files are read, 1 left out (README.md)" in capsys.readouterr().err
    (tmp_path / "long.jsonl").write_bytes(entry * 100 + entry.replace(b"an", b"an" * 2000))
    refusal(lambda: with_texts(config, str(tmp_path / "long.jsonl"), Ranks()), DataError, "last 30 % of the bytes")


@pytest.fixture
def folders(tmp_path):
    """Three with nothing in common."""
    return {name: write_folder(tmp_path / name, [ramp(300, 60 * i) % 256]) for i, name in enumerate("abc")}


def mixture(folders: dict[str, Path], **weights: float) -> dict[str, float]:
    return {str(folders[name]): weight for name, weight in weights.items()}


def test_tokenizer_and_vocabulary_are_taken_from_the_data_unless_they_are_set(tmp_path):
    path = write_files(tmp_path, {"own.model": sentencepiece_model(), "in/a.txt": PROSE.encode()}) / "own.model"
    options = {"tokenizer": str(path), "split": "100,0,0", "documents": False}
    prepared("text", source_of(tmp_path / "in", kind="stream"), tmp_path / "data", 500, 5000, **options)
    values = {"data": {"path": str(tmp_path / "data"), "sequence_length": 30}}
    config = from_data(build_config(values))
    assert (config.data.tokenizer, config.model.vocabulary) == (str(tmp_path / "data" / "tokenizer.model"), 420)
    assert open_data(config).tokenizer.vocabulary == 420
    assert from_data(build_config(values, ["model.vocabulary=512"])).model.vocabulary == 512
    stated = from_data(build_config(values, [f"data.tokenizer={path}"]))
    assert (stated.data.tokenizer, stated.model.vocabulary) == (str(path), 420)
    refusal(lambda: open_data(from_data(build_config(values, ["data.tokenizer=bytes"]))), ConfigError, "data.tokenizer")
    (tmp_path / "few.txt").write_text("<unk>\n<eos>\n")
    assert from_data(build_config(values, [f"data.tokenizer={tmp_path}/few.txt"])).model.vocabulary == 256


def test_data_path_is_evaluated_and_trained_on_unless_there_is_a_mixture(folders):
    data = open_data(config_of(folders["a"]))
    assert data.mixture == [(data.evaluation, 1.0)] and data.evaluation.directory == folders["a"]
    assert data.fingerprint == Index.load(folders["a"]).fingerprint and data.tokenizer.name == "bytes"
    data = open_data(config_of(folders["c"], mixture=mixture(folders, a=0.7, b=0.3)))
    assert data.evaluation.directory == folders["c"]
    assert {(index.directory, weight) for index, weight in data.mixture} == {(folders["a"], 0.7), (folders["b"], 0.3)}


def fingerprint(folders: dict[str, Path], **weights: float) -> str:
    return open_data(config_of(folders["c"], mixture=mixture(folders, **weights))).fingerprint


def test_the_fingerprint_of_a_mixture_is_of_contents_and_weights(folders):
    one = fingerprint(folders, a=2, b=1)
    assert fingerprint(folders, b=1, a=2) == one, "not the order they are written in"
    others = [fingerprint(folders, **w) for w in ({"a": 1, "b": 2}, {"a": 2, "b": 1, "c": 1}, {"a": 2, "c": 1})]
    assert len({one, *others}) == 4
    assert fingerprint(folders, a=5) == Index.load(folders["a"]).fingerprint, "a single one has no weight"
    moved = {name: folder.rename(folder.with_name(f"z{'cba'.index(name)}")) for name, folder in folders.items()}
    assert fingerprint(moved, a=2, b=1) == one, "not their paths"


def test_training_data_do_not_depend_on_paths_or_their_order(folders):
    def first_steps(where: dict[str, Path], **weights: float) -> list[list[int]]:
        config = config_of(where["c"], mixture=mixture(where, **weights))
        with training_batches(config, open_data(config), Ranks(), 0, RunHooks()) as steps:
            return [batch.tokens.flatten().tolist() for _ in range(6) for batch in next(steps).micro_batches]

    want = first_steps(folders, a=2, b=1)
    assert first_steps(folders, b=1, a=2) == want
    moved = {name: folder.rename(folder.with_name(f"z{'cba'.index(name)}")) for name, folder in folders.items()}
    assert first_steps(moved, a=2, b=1) == want


@pytest.mark.parametrize("where", ["path", "mixture"])
def test_each_folder_is_checked(folders, where):
    """A folder of another tokenizer, or of records, is named, wherever it is listed."""

    def refused(kind: type[Exception], problem: str) -> None:
        config = config_of(folders["a"], mixture=mixture(folders, b=1, c=2))
        if where == "path":
            config = config_of(folders["c"], mixture=mixture(folders, a=1, b=2))
        assert re.search(problem, refusal(lambda: open_data(config), kind))

    index = Index.load(folders["c"])
    edit(index, lambda content: content["tokenizer"].update(name="words", sha256="1" * 64))
    refused(ConfigError, r'data\.tokenizer: "bytes" .* in .*/c were made with "words" \(sha256 111111111111…\)\. Set')
    edit(index, lambda content: content["tokenizer"].update(name="bytes", sha256=ByteTokenizer.sha256))
    edit(index, lambda content: content["settings"].update(record=100))
    refused(ConfigError, r"data\.sequence_length: 30 tokens, but each record .*/c has 100\. Set it to 100")
    evaluation = EvaluationConfig(sequence_length=50)
    config = config_of(folders["c"], sequence_length=100).model_copy(update={"evaluation": evaluation})
    with pytest.raises(ConfigError, match=r"evaluation\.sequence_length: 50 tokens, but each record"):
        open_data(config)
    (folders["c"] / "train-000000.tar").unlink()
    refused(DataError, r"c/train-000000\.tar: this shard cannot be read")
    (folders["c"] / "index.json").unlink()
    refused(DataError, r"/c: there is no data here.*; or give pretrain your texts: --data my_books/")


PADDED = {"width": 2, "record": 30}
PAIR = {"kind": "encoder_decoder", "vocabulary": 260, "padding_token": 257}
ENCODER = {"kind": "encoder", "vocabulary": 264, "padding_token": 257, "sentence_order": {"separator": 259}}


@pytest.mark.parametrize(
    ("shards", "corpus", "model", "problem"),
    [
        ({}, "text", {"vocabulary": 256}, None),
        (PADDED, "text", {"vocabulary": 259, "padding_token": 257}, r"model\.vocabulary: 259 .* 259\. Set it to 260"),
        (PADDED, "text", {"vocabulary": 260}, r"padding_token: null, but the padding in .* is 257\. Set it to 257"),
        (PADDED, "text", {"vocabulary": 264, "padding_token": 256}, r"padding_token: 256, .* is 257\. Set it to 257"),
        (PADDED, "text", {"vocabulary": 260, "padding_token": 257}, None),
        ({**PADDED, "source_length": 20}, "text", {**PAIR, "source": {"length": 20, "layers": 1}}, None),
        (
            {**PADDED, "source_length": 20}, "text", {**PAIR, "source": {"length": 10, "layers": 1}},
            r"model\.source\.length: 10 tokens, .*data the source has 20\. Set it to 20",
        ),
        ({}, "text", {**PAIR, "source": {"length": 10}}, r'model\.kind: "encoder_decoder", but .* running text\. P'),
        (PADDED, "pairs", ENCODER, None),
        (PADDED, "text", ENCODER, r"model\.sentence_order: given, but .*data contains text\. Prepare pairs"),
        (
            PADDED, "pairs", {**ENCODER, "sentence_order": {"separator": 258}},
            r"sentence_order\.separator: 258, but the separator .* is 259\. Set",
        ),
        (
            PADDED, "text", {**ENCODER, "sentence_order": None, "masking": {"token": 97}},
            r"model\.masking\.token: 97 is .* Set it to 256",
        ),
    ],
)  # fmt: skip
def test_a_model_fits_the_folder(tmp_path, shards, corpus, model, problem):
    """Room for the tokens of padded records, their padding, the target's start, and an encoder's objectives."""
    folder = write_folder(tmp_path / "data", [ramp(300, 0) % 256], **shards)
    edit(Index.load(folder), lambda content: content.update(corpus=corpus))
    config = config_of(folder, model)
    if problem is None:
        assert open_folder(folder, config, ByteTokenizer()).record == shards.get("record")
        return
    assert re.search(problem, refusal(lambda: open_folder(folder, config, ByteTokenizer()), ConfigError))


def test_a_vocabulary_smaller_than_the_tokenizers_is_rejected(tmp_path):
    class Larger(ByteTokenizer):
        vocabulary = 30_000

    folder = write_folder(tmp_path / "data", [np.arange(300)], width=2)
    with pytest.raises(ConfigError, match=r"model\.vocabulary: 256 .*data go up to 29999\. Set it to 30000 or more"):
        open_folder(folder, config_of(folder), Larger())
    open_folder(folder, config_of(folder, {"vocabulary": 30_000}), Larger())


def test_weights_are_positive_numbers():
    for weight in (0, -1.0):
        with pytest.raises(ValueError, match=r"greater than 0"):
            config_of(Path("a"), mixture={"b": weight})
    dumped = json.loads(config_of(Path("a"), mixture={"b": 2, "c": 0.5}).model_dump_json())
    assert dumped["data"]["mixture"] == {"b": 2.0, "c": 0.5}
