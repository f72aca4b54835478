"""The quickstart: prepare real text, train a small model, evaluate it and generate a sample, on any machine.

Each step is an ordinary command, printed before it runs. Finished steps are skipped when you run it again.
"""

import bz2
import gzip
import importlib.util
import json
import lzma
import shlex
import subprocess
import sys
from pathlib import Path

from megasparse.data.corpora.download import fetch_wheel
from megasparse.data.index import Index
from megasparse.data.reader import EvaluationStream
from megasparse.errors import UserError
from megasparse.files import write_file
from megasparse.training.checkpoints.manifest import find_newest

SHARDS = Path("data/quickstart")
SMALL = ("training.steps=250", "evaluation.every=125", "checkpoint.every=125", "run.directory=runs/quickstart_small")
"""Settings that show all steps in two minutes; the model learns little."""
ROWS = {
    "gzip -9": "gzip_", "bzip2 -9": "bzip2_", "xz -9": "xz_", "xz -9, primed": "primed_xz_",
    "this model": "", "its file": "file_",
}  # fmt: skip

# The package gensim contains a Wikipedia dump in enwik8's format (6 MB) as test data. The platform tag is fixed, so
# that every machine gets the same file.
WHEEL = "gensim-4.4.0-cp311-cp311-manylinux_2_24_x86_64.manylinux_2_28_x86_64.whl"
WHEEL_SHA256 = "91a7fa5e814e7b1bad4b2dffa8d62c1e55410d5cbdf930714c1997ffb4404db8"
MEMBER = "gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
PLATFORM = ["--platform", "manylinux_2_24_x86_64", "--python-version", "3.11", "--implementation", "cp"]

NEXT = """
Next:
  # open {run}/report.html, a page about this run, in a browser; or watch the curves of all runs
  tensorboard --logdir runs
  # generate more text
  megasparse generate --checkpoint {run} --prompt "A "
  # train on your own text
  megasparse prepare-data text --source my_books/ --output data/books
  megasparse pretrain quickstart --set data.path=data/books --set run.directory=runs/books
  # classify reviews, or your own table
  megasparse finetune finetune/reviews --set start.checkpoint={run}"""


def quickstart(small: bool = False) -> None:
    """Run every step. small: train for a minute only."""
    run = Path("runs/quickstart_small" if small else "runs/quickstart")
    say("1/5  a sample of Wikipedia, as webdataset shards")
    wheel = fetch_wheel("gensim==4.4.0", WHEEL, WHEEL_SHA256, PLATFORM)
    megasparse("prepare-data", "text", "--source", wheel, "--member", MEMBER, "--output", SHARDS)
    say("2/5  training (curves: tensorboard --logdir runs)")
    changes = [word for setting in (SMALL if small else ()) for word in ("--set", setting)]
    megasparse("pretrain", "quickstart", *changes)
    say(f"3/5  bits/dim of held-out text, {'one window' if small else 'every byte'} of the test split")
    result, newest = run / "evaluation.json", find_newest(run / "checkpoints")
    if result.exists() and newest and json.loads(result.read_text())["protocol"]["checkpoint_step"] == int(newest.name):
        print(f"  {result}: already exists")
    else:
        limit = ("--limit", 1) if small else ()
        megasparse("evaluate", "--checkpoint", run, "--data", SHARDS, *limit, "--json", result)
    say("4/5  the same text as a file, compressed by the model")
    text, held_out = run / "held_out.txt", EvaluationStream(Index.load(SHARDS), "test")
    size = min(held_out.tokens, 65536) if small else held_out.tokens
    write_file(text, bytes(held_out.read(0, size).tolist()))
    if importlib.util.find_spec("constriction") is None:
        print("  skipped: install the coder with pip install -e '.[compress]', then run this again")
    elif not text.with_name(f"{text.name}.msz").exists():
        megasparse("compress", text, "--checkpoint", run)
    say("5/5  a sample, and a page about the run")
    megasparse("generate", "--checkpoint", run, "--prompt", "The history of ", "--tokens", 300, "--temperature", 0.8)
    summary = summarise(run, text)
    megasparse("report", run)
    say(f"done; the same held-out bytes, in bits/dim (also in {run / 'summary.json'})")
    for name, key in ROWS.items():
        if (value := summary.get(f"{key}bits_per_dim")) is not None:
            print(f"  {name:<14}{value:.3f}  {'#' * round(value * 10)}")
    print(NEXT.format(run=run))


def summarise(run: Path, text: Path) -> dict[str, float]:
    """Write bits/dim of compressors, the model and the compressed file to RUN/summary.json."""
    raw, packed = text.read_bytes(), text.with_name(f"{text.name}.msz")
    training = EvaluationStream(Index.load(SHARDS), "train")
    training_text = bytes(training.read(0, training.tokens).tolist())
    sizes = {"gzip": len(gzip.compress(raw, 9)), "xz": len(_xz(raw)), "bzip2": len(bz2.compress(raw, 9))}
    sizes["primed_xz"] = len(_xz(training_text + raw)) - len(_xz(training_text))
    sizes |= {"file": packed.stat().st_size} if packed.exists() else {}
    summary = {f"{name}_bits_per_dim": 8 * size / len(raw) for name, size in sizes.items()}
    summary["bits_per_dim"] = json.loads((run / "evaluation.json").read_text())["bits_per_dim"]
    write_file(run / "summary.json", json.dumps(summary, indent=2) + "\n")
    return summary


def _xz(raw: bytes) -> bytes:
    return lzma.compress(raw, preset=9)


def megasparse(*words: object) -> None:
    """Print a command and run it."""
    command = shlex.join(["megasparse", *map(str, words)])
    print(f"$ {command}", flush=True)
    code = subprocess.run([sys.executable, "-m", "megasparse", *map(str, words)], check=False).returncode
    if code != 0:
        raise UserError(f"{command} failed with exit code {code}. Correct the error printed above and run again")


def say(text: str) -> None:
    print(f"\n== {text}", flush=True)
