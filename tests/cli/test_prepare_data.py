"""The command itself: killed and started again, its examples, and its mistakes."""

import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megasparse.cli.main import door, parser_of
from megasparse.data.corpora import CORPORA
from megasparse.data.index import Index
from megasparse.data.reader import EvaluationStream
from tests.helpers.cases import together
from tests.helpers.commands import refused, run
from tests.helpers.shard_server import serving

main = door("prepare-data")

ROOT = Path(__file__).resolve().parents[2]
TEXT = random.Random(0).randbytes(50_000)


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in (".lock", "index.json")}


KILLED = """
import os, signal
from megasparse.cli.main import door
from webdataset.writer import TarWriter
write, seen = TarWriter.write, []
def fatal(tar, sample):
    seen.append(sample)
    if len(seen) == 18:
        os.kill(os.getpid(), signal.SIGKILL)
    return write(tar, sample)
TarWriter.write = fatal
door("prepare-data")()
"""


def test_killed_in_the_middle_of_a_shard_it_completes_with_the_same_bytes(tmp_path, capsys):
    (tmp_path / "book.txt").write_bytes(TEXT)
    command = ["text", "--source", tmp_path / "book.txt", "--sample-bytes", 1000, "--shard-bytes", 5000]
    run(main, *command, "--output", tmp_path / "whole")
    said = capsys.readouterr().out
    assert "prepared" in said and "train: 45,000 tokens in 45 samples, 9 shards" in said

    killed = [sys.executable, "-c", KILLED, *map(str, command), "--output", str(tmp_path / "killed")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run(killed, env=environment, timeout=60, check=False).returncode == -signal.SIGKILL
    left = {name: data for name, data in shards(tmp_path / "killed").items() if not name.startswith(".")}
    assert len(left) == 3 and left.items() <= shards(tmp_path / "whole").items()
    assert not (tmp_path / "killed" / "index.json").exists()

    run(main, *command, "--output", tmp_path / "killed")
    assert ": prepared" in capsys.readouterr().out
    assert shards(tmp_path / "killed") == shards(tmp_path / "whole")
    index = Index.load(tmp_path / "killed")
    assert index.fingerprint == Index.load(tmp_path / "whole").fingerprint
    assert index.file.command.startswith("megasparse prepare-data text --source ")
    assert bytes(EvaluationStream(index, "test").read(0, 2500).tolist()) == TEXT[-2500:]

    run(main, *command, "--output", tmp_path / "killed")
    assert "already prepared" in capsys.readouterr().out


def test_the_signature_of_a_url_is_in_no_file(tmp_path, capsys):
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "a.jsonl?Signature=SECRET").write_text('{"text": "some words"}\n' * 90)
    with serving(tmp_path / "served") as server:
        url = f"{server.url}/a.jsonl?Signature=SECRET"
        options = ["jsonl", "--source", url, "--output", tmp_path / "data", "--workers", 1]
        run(main, *options)
        server.faults["a.jsonl?Signature=SECRET"].append(404)
        shutil.rmtree(tmp_path / "data" / ".download")
        shown = capsys.readouterr()
        assert "SECRET" not in refused(capsys, main, *options) + shown.out + shown.err
    index = Index.load(tmp_path / "data").file
    assert index.source["location"] == [url.partition("?")[0]] and "a.jsonl --output" in index.command
    written = [path for path in tmp_path.joinpath("data").rglob("*") if path.is_file()]
    assert len(written) > 4 and not [path for path in written if b"SECRET" in path.read_bytes()]


def test_records_have_a_report_with_a_picture(tmp_path, capsys):
    texts = ["word " * count for count in range(1, 60)] + ["word " * 9, ""]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    given = ["jsonl", "--source", tmp_path / "a.jsonl", "--field", "body", "--deduplicate", "--min-bytes", 10]
    given += ["--output", tmp_path / "data", "--workers", 1]
    run(main, *given)
    said = capsys.readouterr().out
    assert "61 records in 1 files" in said and "kept: 58 documents of 8,845 bytes" in said
    assert "left out: 1 copy of an earlier one" in said and "left out: 1 shorter than 10 bytes" in said
    report = json.loads((tmp_path / "data" / "report.json").read_text())
    assert report["documents"] == 58 and sum(report["left_out"].values()) == 3
    assert report["splits"]["train"]["tokens"] == Index.load(tmp_path / "data").split("train").tokens
    picture = (tmp_path / "data" / "lengths.svg").read_bytes()
    run(main, *given)
    assert picture == (tmp_path / "data" / "lengths.svg").read_bytes() and b"<svg" in picture


@together("corpus", CORPORA)
def test_the_help_of_each_corpus_has_an_example_that_works(corpus, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([corpus, "--help"])
    example = f"megasparse prepare-data {corpus} {CORPORA[corpus].EXAMPLE}"
    assert example in capsys.readouterr().out
    given = parser_of("prepare-data").parse_args(shlex.split(example)[2:])
    assert given.corpus == corpus and given.output.parent == Path("data")


def test_a_mistake_is_one_line_and_exit_code_2(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = refused(capsys, main, "text", "--source", "nowhere.txt", "--output", "x")
    assert said.startswith("error: nowhere.txt: there is no such file or folder.")
