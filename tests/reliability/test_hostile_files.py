"""Mutants of every kind of external file: read, or rejected in one line, in little memory."""

import gzip
import hashlib
import io
import json
import os
import random
import shutil
import tarfile
import tempfile
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors import safe_open

from megasparse.data.batches import Sequences
from megasparse.data.corpora import CORPORA
from megasparse.data.corpora.image_sets import npz_batches, npz_rows
from megasparse.data.index import Index
from megasparse.data.reader import EvaluationStream
from megasparse.data.tokenizers import build_tokenizer
from megasparse.evaluation.results import restore
from megasparse.hub.export import to_hf
from megasparse.hub.gguf_file import check_gguf
from megasparse.hub.importing import HFModel
from megasparse.tasks.readers.rows import comma_separated
from megasparse.training.checkpoints.manifest import MANIFEST, seal
from tests.data.corpora.pictures import draw, png, write_tar, write_zip
from tests.data.folders import ramp, write_folder
from tests.helpers import fuzzing
from tests.helpers.cases import together
from tests.helpers.commands import refusal
from tests.helpers.fuzzing import Format, fuzz
from tests.helpers.tokenizers import sentencepiece_model, wordpiece
from tests.helpers.trained import prepared, trained
from tests.hub.test_gguf_file import gguf

CASES = int(os.environ.get("MEGASPARSE_FUZZ_CASES", "40"))
"""Mutants of each kind of file. A mutant is a function of its kind and number."""
TEXTS = [f"text {number} of a crawl, é " * (1 + number % 7) for number in range(60)]
SAMPLE = "the attention of a model\tis 1 é \n".encode()
OPTIONS = {"column": "text", "tokenizer": "bytes", "split": "100,0,0", "deduplicate": True, "min_bytes": 2}
OPTIONS |= {"documents": True, "size": 8, "seed": 0}


def checkpoint(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as other:
        trained(prepared(Path(other)), Path(other) / "run", ["local", "lsh"], 1)
        shutil.copytree(Path(other) / "run" / "checkpoints" / "00000001", folder / "00000001")


def reseal(folder: Path) -> None:
    """State the sizes and digests that files of a checkpoint have now."""
    for path in folder.glob(f"*/{MANIFEST}"):
        manifest = json.loads(path.read_bytes())
        for name, entry in manifest["files"].items():
            raw = (path.parent / name).read_bytes()
            entry.update(bytes=len(raw), sha256=hashlib.sha256(raw).hexdigest())
        path.write_text(seal(manifest))


def export(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as other:
        checkpoint(Path(other))
        to_hf(Path(other) / "00000001", folder / "export")
    for path in [*folder.rglob("*.py"), *folder.rglob("*.md")]:  # nothing of ours reads them
        path.unlink()
    shutil.copytree(folder / "export", folder / "sharded")
    (folder / "sharded" / "model.safetensors").rename(folder / "sharded" / "a.safetensors")
    with safe_open(folder / "sharded" / "a.safetensors", framework="pt") as file:
        places = dict.fromkeys(file.keys(), "a.safetensors")
    (folder / "sharded" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def read_export(folder: Path) -> None:
    for name in ("export", "sharded"):
        HFModel.open(folder / name).build()


def tokenizer(file: Path) -> None:
    found = build_tokenizer(str(file))
    found.decode(found.encode(SAMPLE))
    found.word_starts()


def shards(folder: Path) -> None:
    write_folder(folder / "data", [ramp(1000 + 90 * k, 7 * k, 11 + k) % 256 for k in range(2)])


def vouch(folder: Path) -> None:
    """State the sizes and digests that shards have now."""
    path = folder / "data" / "index.json"
    index = json.loads(path.read_bytes())
    for shard in index["splits"]["train"]["shards"]:
        raw = (path.parent / shard["file"]).read_bytes()
        shard.update(bytes=len(raw), sha256=hashlib.sha256(raw).hexdigest())
    path.write_text(json.dumps(index))


def read_shards(folder: Path) -> None:
    """Read all of the split `train` twice: in windows as training does, and as one stream."""
    index = Index.load(folder / "data")
    order: dict[str, Any] = {"sequence_length": 50, "seed": 0, "shuffle_shards": 1, "open_files": 2}
    with closing(Sequences(index, "train", **order)) as windows:
        for number in range(10):
            windows.read(number)
    with closing(EvaluationStream(index, "train")) as stream:
        stream.read(0, min(stream.tokens, 1 << 20))


def images(folder: Path) -> None:
    np.savez(folder / "train.npz", data=(np.arange(24 * 12) % 251).astype(np.uint8).reshape(24, 12))


def read_images(folder: Path) -> None:
    for batch in npz_batches(folder / "train.npz"):
        for _ in npz_rows(folder / "train.npz", batch, 12):
            pass


def archives(folder: Path) -> None:
    files = {f"train/{number}.png": png(image) for number, image in enumerate(draw(4))}
    write_tar(folder / "a.tar", files)
    write_tar(folder / "b.tar.gz", {"x" * 150: files["train/0.png"], **files}, "w:gz")


def texts(folder: Path) -> None:
    write_zip(folder / "a.zip", {f"{number}.txt": text.encode() for number, text in enumerate(TEXTS)})


def lines(folder: Path) -> None:
    content = "".join(json.dumps({"text": text, "id": 1}) + "\n" for text in TEXTS).encode()
    (folder / "a.jsonl").write_bytes(content)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(content))
    (folder / "c.jsonl.zst").write_bytes(pa.compress(content, "zstd", asbytes=True))


def read_records(corpus: str, folder: Path) -> None:
    source = CORPORA[corpus].open([str(folder)], None, folder.parent / ".download", OPTIONS, 1)
    for _, documents in CORPORA[corpus].splits(source, OPTIONS):
        for document in documents:
            b"".join(document)


TABLE = {"id": range(60), "text": TEXTS, "kind": pa.array(["a", "b", None] * 20).dictionary_encode()}


def tables(folder: Path) -> None:
    for packed in ("none", "zstd"):
        pq.write_table(pa.table(TABLE), folder / f"{packed}.parquet", compression=packed, row_group_size=25)
    large = pa.table({"text": pa.array(TEXTS, pa.large_string())})
    pq.write_table(large, folder / "large.parquet", use_dictionary=False)


def dataset(folder: Path) -> None:
    for name, form in (("train", pa.ipc.new_stream), ("test", pa.ipc.new_file)):
        table = pa.table({"text": pa.array(TEXTS, pa.string_view() if name == "test" else pa.string())})
        with form(str(folder / f"{name}-00000-of-00001.arrow"), table.schema) as writer:
            writer.write_table(table, max_chunksize=25)
    described = io.StringIO()
    json.dump({"download_checksums": {f"hf://datasets/a/b@{'0' * 40}/x": {}}}, described)
    (folder / "dataset_info.json").write_text(described.getvalue())


FORMATS = {
    "checkpoint": Format(checkpoint, lambda folder: restore(folder / "00000001"), reseal),
    "export": Format(export, read_export),
    "tokenizer.json": Format(
        lambda folder: (folder / "a.json").write_text(json.dumps(wordpiece())),
        lambda folder: tokenizer(folder / "a.json"),
    ),
    "sentencepiece": Format(
        lambda folder: (folder / "a.model").write_bytes(sentencepiece_model()),
        lambda folder: tokenizer(folder / "a.model"),
    ),
    "words": Format(
        lambda folder: (folder / "a.txt").write_text("<unk>\n<eos>\nthe\nattention\nof\na\nmodel\n"),
        lambda folder: tokenizer(folder / "a.txt"),
    ),
    "shards": Format(shards, read_shards, vouch),
    "npz": Format(images, read_images),
    "tar": Format(archives, lambda folder: read_records("images", folder)),
    "zip": Format(texts, lambda folder: read_records("text", folder)),
    "jsonl": Format(lines, lambda folder: read_records("jsonl", folder)),
    "parquet": Format(tables, lambda folder: read_records("parquet", folder)),
    "arrow": Format(dataset, lambda folder: read_records("huggingface", folder)),
    "gguf": Format(
        lambda folder: (folder / "a.gguf").write_bytes(gguf()), lambda folder: check_gguf(folder / "a.gguf")
    ),
}


SLOW = [pytest.param(name, marks=pytest.mark.slow) if name == "export" else name for name in FORMATS]
EVERY = pytest.mark.parametrize("name", SLOW)


@EVERY
def test_mutants_are_read_or_rejected_in_one_line(name, tmp_path):
    (tmp_path / "seeds").mkdir()
    FORMATS[name].make(tmp_path / "seeds")
    shutil.copytree(tmp_path / "seeds", tmp_path / "whole")
    FORMATS[name].read(tmp_path / "whole")
    cases = list(fuzz(name, FORMATS[name], tmp_path / "seeds", tmp_path / "mutant", range(CASES)))
    assert len(cases) == CASES
    assert not [case for case in cases if case.outcome not in ("read", "refused")]
    assert sum(case.outcome == "refused" for case in cases) > CASES // 10


def pipe(folder: Path, draw: random.Random, repair: object) -> None:
    path = draw.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    path.unlink()
    os.mkfifo(path)


@EVERY
def test_no_reader_waits_for_a_pipe(name, tmp_path, monkeypatch):
    monkeypatch.setattr(fuzzing, "mutate", pipe)
    (tmp_path / "seeds").mkdir()
    FORMATS[name].make(tmp_path / "seeds")
    cases = list(fuzz(name, FORMATS[name], tmp_path / "seeds", tmp_path / "mutant", range(5)))
    assert {case.outcome for case in cases} <= {"read", "refused"}


def packed(size: int, head: bytes = b"", byte: bytes = b"\0") -> bytes:
    """Return a gzip file of `size` bytes after the head, in members of 64 MB."""
    return gzip.compress(head) + gzip.compress(byte * (1 << 26)) * (size >> 26)


def header(size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    member = tarfile.TarInfo("notes.bin")
    member.size, member.type = size, kind
    return member.tobuf(tarfile.GNU_FORMAT)


def parquet(text: pa.Array) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table({"text": text}), out, compression="zstd")
    return out.getvalue()


def forged() -> bytes:
    """Return a Parquet file whose footer states 1,000 unpacked bytes, in as many digits as the right number has."""
    content = parquet(cell())
    size = pq.ParquetFile(io.BytesIO(content)).metadata.row_group(0).column(0).total_uncompressed_size
    stated, small = (bytes(2 * n >> 7 * i & 127 | 128 * (i < 3) for i in range(4)) for n in (size, 1000))
    footer = content.index(b"schema")
    return content[:footer] + content[footer:].replace(stated, small)


def stream(text: pa.Array, compression: str | None = None) -> bytes:
    out, options = io.BytesIO(), pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(out, pa.schema([("text", text.type)]), options=options) as writer:
        writer.write_table(pa.table({"text": text}))
    return out.getvalue()


def splits(value: Any) -> bytes:
    return json.dumps({"splits": value}).encode()


def cell() -> pa.Array:
    return pa.array(["a" * (5 << 24)])


def entry() -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array([0] * 5000, pa.int8()), pa.array(["a" * (1 << 20)]))


STATED = "the header of notes.bin states 3,221,225,472 bytes"
BOMBS: dict[str, tuple[str, str, Callable[[], bytes], str]] = {
    "negative size": ("images", "a.tar", lambda: header(-512) + bytes(1024), "states -512 bytes"),
    "PAX": ("images", "a.tar.gz", lambda: packed(3 << 30, header(3 << 30, tarfile.XHDTYPE)), STATED),
    "name": ("images", "a.tar.gz", lambda: packed(3 << 30, header(3 << 30, tarfile.GNUTYPE_LONGNAME)), STATED),
    "member": ("images", "a.tar.gz", lambda: packed(1 << 30, header(8 << 30)), "unfold to 200 times"),
    "line ends": ("jsonl", "a.jsonl.gz", lambda: packed(1 << 30, byte=b"\n"), "unfold to 200 times"),
    "objects": ("jsonl", "a.jsonl", lambda: b"[" + b"{}," * 5_000_000 + b"0]", "record 1 here: no JSON object"),
    "line": ("jsonl", "a.jsonl", lambda: b"[" + b"{}," * 21_000_000 + b"0]", "record 1 here: .* 16,777,216 bytes"),
    "wide": ("jsonl", "a.jsonl", lambda: '["\U0001f600'.encode() + b"a" * 16_000_000 + b'"]', "1 here: no JSON object"),
    "field": ("csv", "a.csv", lambda: b'"' + b"a\n" * 33_000_000 + b'"', "a.csv.*field larger than field limit"),
    "keys": ("index", "index.json", lambda: splits(dict.fromkeys(map(str, range(10**6)), 1)), "has 1,000,000 keys"),
    "shards": ("index", "index.json", lambda: splits({"a": {"shards": [{}] * 500_000}}), "Field required"),
    "page": ("parquet", "a.parquet", forged, "a.parquet: its .* bytes unfold to 200 times"),
    "batch": ("huggingface", "a.arrow", lambda: stream(cell(), "zstd"), "a.arrow: its .* bytes unfold to 200 times"),
    "cell": ("parquet", "a.parquet", lambda: parquet(cell()), 'a.parquet: column "text" of row group 0: its .* unfold'),
    "entry": ("parquet", "a.parquet", lambda: parquet(entry()), "a.parquet: its .* bytes unfold"),
    "entry of a dataset": ("huggingface", "a.arrow", lambda: stream(entry()), "a.arrow: its .* bytes unfold"),
}
"""Corpus, name and content of a file that unfolds to much, and the message."""


@together("name", BOMBS)
def test_a_bomb_is_one_line_before_its_memory_is_taken(name, tmp_path, monkeypatch):
    corpus, file, content, message = BOMBS[name]
    monkeypatch.setattr(fuzzing, "mutate", lambda *_: None)
    (tmp_path / "seeds").mkdir()
    (tmp_path / "seeds" / file).write_bytes(content())
    readers = {"csv": lambda folder: list(comma_separated(folder / file)), "index": Index.load}
    read = readers.get(corpus, partial(read_records, corpus))
    format = Format(print, lambda folder: refusal(lambda: read(folder), match=message))
    (case,) = fuzz(name, format, tmp_path / "seeds", tmp_path / "mutant", range(1))
    assert case.outcome == "read", case


def failing(folder: Path) -> None:
    """Fail in each of the ways that the fuzzer is to see, by the number that the file `how` has."""
    how = (folder / "how").read_bytes()[:1]
    if how == b"e":
        raise KeyError("uncaught")
    if how == b"m":
        bytes(bytearray(fuzzing.MOST_BYTES))
    while how == b"t":
        pass


@pytest.mark.parametrize(("how", "outcome"), [("e", "KeyError: 'uncaught'"), ("m", "took 1"), ("t", "took too long")])
def test_the_fuzzer_detects_forbidden_effects(tmp_path, monkeypatch, how, outcome):
    monkeypatch.setattr(fuzzing, "mutate", lambda *_: None)
    monkeypatch.setattr(fuzzing, "MOST_SECONDS", 0.3 if how == "t" else 5)
    monkeypatch.setattr(fuzzing, "MOST_BYTES", 64 << 20)
    (tmp_path / "seeds").mkdir()
    (tmp_path / "seeds" / "how").write_text(how)
    cases = list(fuzz("failing", Format(print, failing), tmp_path / "seeds", tmp_path / "mutant", range(2)))
    assert [case.number for case in cases] == [0, 1]
    assert all(case.outcome.startswith(outcome) for case in cases)
