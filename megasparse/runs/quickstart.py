"""From nothing to a trained model on any machine: real text, the real engine, held-out bits/dim, a sample.

Each step is an ordinary command and is printed before it runs. Run again, finished steps are not repeated.
"""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

from megasparse.data.index import Index
from megasparse.data.reader import EvaluationStream
from megasparse.data.wheels import fetch_wheel
from megasparse.errors import UserError
from megasparse.evaluation.compress import bits_per_byte

SHARDS = Path("data/quickstart")
RUN = Path("runs/quickstart")

# A Wikipedia dump in enwik8's own format, 6 MB, is test data of the package gensim. One fixed platform tag is asked
# for, so that every machine gets the same file, whatever it runs itself.
WHEEL = "gensim-4.4.0-cp311-cp311-manylinux_2_24_x86_64.manylinux_2_28_x86_64.whl"
WHEEL_SHA256 = "91a7fa5e814e7b1bad4b2dffa8d62c1e55410d5cbdf930714c1997ffb4404db8"
MEMBER = "gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
PLATFORM = ["--platform", "manylinux_2_24_x86_64", "--python-version", "3.11", "--implementation", "cp"]


def quickstart() -> None:
    """Run every step. Raises UserError where one fails."""
    say("1/4  a sample of Wikipedia, as webdataset shards")
    wheel = fetch_wheel("gensim==4.4.0", WHEEL, WHEEL_SHA256, PLATFORM)
    megasparse("prepare-data", "text", "--source", wheel, "--member", MEMBER, "--output", SHARDS)
    say("2/4  training (its curves: tensorboard --logdir runs)")
    megasparse(*training_command())
    say("3/4  bits/dim of held-out text, every byte of the test split scored")
    result = RUN / "evaluation.json"
    megasparse("evaluate", "--checkpoint", RUN, "--data", SHARDS, "--json", result)
    summary = summarize(result)
    say("4/4  a sample")
    megasparse("generate", "--checkpoint", RUN, "--prompt", "The history of ", "--tokens", 300, "--temperature", 0.8)
    report(summary)


def training_command() -> list[str]:
    """Two ranks share the batch of two sequences on a CPU of two cores or more; a GPU, or one core, takes both."""
    import torch

    alone = torch.cuda.is_available() or len(os.sched_getaffinity(0)) < 2
    return ["pretrain", "quickstart"] if alone else ["supervise", "--ranks", "2", "pretrain", "quickstart"]


def summarize(result: Path) -> dict[str, float]:
    """The model's bits/dim beside those of gzip -9 and xz -9 on the same bytes, also written to RUN/summary.json."""
    packed = bits_per_byte(EvaluationStream(Index.load(SHARDS), "test"))
    model = json.loads(result.read_text())["bits_per_dim"]
    summary = {"bits_per_dim": model, "gzip_bits_per_dim": packed["gzip"], "xz_bits_per_dim": packed["xz"]}
    (RUN / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return summary


def report(summary: dict[str, float]) -> None:
    say(f"done; the same held-out bytes, in bits/dim (also in {RUN / 'summary.json'})")
    for name, key in [("gzip -9", "gzip_bits_per_dim"), ("xz -9", "xz_bits_per_dim"), ("this model", "bits_per_dim")]:
        print(f"  {name:<11}{summary[key]:.3f}  {'#' * round(summary[key] * 16)}")


def megasparse(*words: object) -> None:
    run([sys.executable, "-m", "megasparse", *words])


def run(command: list[object]) -> None:
    words = [str(word) for word in command]
    shown = words[2:] if words[2] == "megasparse" else ["python", *words[1:]]
    print(f"$ {shlex.join(shown)}", flush=True)
    code = subprocess.run(words, check=False).returncode
    if code != 0:
        raise UserError(
            f"{shlex.join(shown)} ended with exit code {code}. Its message is above; correct it and run again"
        )


def say(text: str) -> None:
    print(f"\n== {text}", flush=True)
