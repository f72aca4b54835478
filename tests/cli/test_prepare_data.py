"""The command itself, in processes of its own."""

import os
import random
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megasparse.cli import prepare_data
from megasparse.cli.main import door, parser_of
from megasparse.data.corpora import CORPORA
from megasparse.data.index import Index
from megasparse.data.reader import EvaluationStream

main = door("prepare-data")

ROOT = Path(__file__).resolve().parents[2]
TEXT = random.Random(0).randbytes(50_000)


def run(*arguments: object, code: str | None = None) -> "subprocess.CompletedProcess[str]":
    program = ["-c", code] if code else [str(ROOT / "tools" / "prepare_data.py")]
    command = [sys.executable, *program, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in (".lock", "index.json")}


KILLED = """
import os, signal
from megasparse.cli.main import door
from megasparse.data import prepare
write, seen = prepare.TarWriter.write, []
def fatal(tar, sample):
    seen.append(sample)
    if len(seen) == 18:
        os.kill(os.getpid(), signal.SIGKILL)
    return write(tar, sample)
prepare.TarWriter.write = fatal
door("prepare-data")()
"""


def test_killed_in_the_middle_of_a_shard_it_completes_with_the_same_bytes(tmp_path):
    (tmp_path / "book.txt").write_bytes(TEXT)
    options = ["--sample-bytes", 1000, "--shard-bytes", 5000]
    command = ["text", "--source", tmp_path / "book.txt", *options]
    whole = run(*command, "--output", tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    assert "prepared" in whole.stdout and "train: 45,000 tokens in 45 samples, 9 shards" in whole.stdout

    killed = run(*command, "--output", tmp_path / "killed", code=KILLED)
    assert killed.returncode == -signal.SIGKILL
    left = {name: data for name, data in shards(tmp_path / "killed").items() if not name.startswith(".")}
    assert len(left) == 3 and left.items() <= shards(tmp_path / "whole").items()
    assert not (tmp_path / "killed" / "index.json").exists()

    again = run(*command, "--output", tmp_path / "killed")
    assert again.returncode == 0 and ": prepared" in again.stdout, again.stderr
    assert shards(tmp_path / "killed") == shards(tmp_path / "whole")
    index = Index.load(tmp_path / "killed")
    assert index.fingerprint == Index.load(tmp_path / "whole").fingerprint
    assert index.file.command.startswith("megasparse prepare-data text --source ")
    assert bytes(EvaluationStream(index, "test").read(0, 2500).tolist()) == TEXT[-2500:]

    done = run(*command, "--output", tmp_path / "killed")
    assert done.returncode == 0 and "already prepared" in done.stdout


@pytest.mark.parametrize("corpus", CORPORA)
def test_the_help_of_each_corpus_has_an_example_that_works(corpus, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([corpus, "--help"])
    example = f"megasparse prepare-data {corpus} {CORPORA[corpus].EXAMPLE}"
    assert example in capsys.readouterr().out
    assert parser_of("prepare-data", prepare_data).parse_args(shlex.split(example)[2:]).output.parent == Path("data")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["text", "--source", "nowhere.txt", "--output", "x"], "error: nowhere.txt: there is no such file or folder."),
        (["text", "--source", "ftp://x/y", "--output", "x"], 'error: --source: "ftp" is not'),
        (["text", "--source", __file__, "--output", "x", "--sample-bytes", "0"], "0 is not above 0"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, message):
    done = run(*arguments)
    assert done.returncode == 2
    assert message in done.stderr and "Traceback" not in done.stderr
