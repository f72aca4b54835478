"""A long training pass with attention in groups of heads: what it allocates, beside what short passes predict.

    python -m tests.planning.long_pass --json docs/measured/long_pass.json                    # both cases
    python -m tests.planning.long_pass --case width --length 16384 --json docs/measured/long_pass.json

`width`: one layer of llama_8b_1m at its full width in bf16, with a vocabulary of 256. `length`: one layer, 32 wide, of
the same attention over 1,048,576 tokens. One forward and backward on one rank, on a CPU, blockwise; every storage that
torch's operators make is counted, weights aside. The prediction continues passes of at most 4,096 tokens, as
`megasparse plan --measure` does.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from megasparse.config.load import load_config
from megasparse.config.schema import Config
from megasparse.evaluation.outputs import write_json
from megasparse.model.build import build_model
from megasparse.ops.random import RngContext
from megasparse.planning.measure import machine
from megasparse.planning.pass_memory import PassMemory
from tests.helpers.models import random_tokens
from tests.helpers.peak_memory import PeakMemory

ALIKE = ["parallel.sequence=1", "training.global_batch=1", "run.device=cpu", "model.vocabulary=256"]
CASES: dict[str, tuple[int, list[str]]] = {
    "width": (65536, ["model.layers=1", "model.attention.head_groups=8", "model.loss_tiles=8"]),
    "length": (
        1048576,
        [
            "model.layers=1", "model.d_model=32", "model.d_ff=64", "model.heads=2", "model.key_heads=1",
            "model.attention.head_groups=2", "model.attention.lsh.chunk=16", "model.attention.lsh.rounds=1",
            "model.feed_forward_tiles=16", "model.loss_tiles=16", "training.precision=fp32",
        ],
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--length", type=int, help="tokens, in place of the case's")
    parser.add_argument("--json", type=Path, required=True, help="takes a row of each case, in place of an earlier one")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for case in CASES if args.case is None else [args.case]:
        rows = json.loads(args.json.read_text())["rows"] if args.json.exists() else []
        found = row(case, args.length or CASES[case][0])
        print(found, flush=True)
        rows = [each for each in rows if each["case"] != case] + [found]
        command = "python -m tests.planning.long_pass --json docs/measured/long_pass.json"
        write_json(args.json, {"command": command, "machine": machine(torch.device("cpu")), "rows": rows})


def row(case: str, length: int) -> dict[str, Any]:
    """What a pass of so many tokens allocates, and what is predicted. Bytes, seconds."""
    config = load_config("llama_8b_1m", [*ALIKE, *CASES[case][1], f"data.sequence_length={length}"])
    assert isinstance(config, Config)
    passes = PassMemory(config, "measured")
    predicted = passes.curve.bytes(1, length)
    memory, seconds = _pass(config, length)
    model = config.model
    return {
        "case": case,
        "tokens": length,
        "layers": model.layers,
        "d_model": model.d_model,
        "head_groups": model.attention.head_groups,
        "precision": config.training.precision,
        "predicted": predicted,
        "longest_pass": max(passes.lengths),
        "allocated": memory.peak,
        "largest": memory.largest,
        "stream": length * model.d_model * 4,
        "seconds": seconds,
        "seed": config.run.seed,
    }


def _pass(config: Config, length: int) -> tuple[PeakMemory, float]:
    dtype = torch.bfloat16 if config.training.precision == "bf16" else torch.float32
    model = build_model(config.model, config.run.seed, dtype)
    tokens = random_tokens(1, length, config.model.vocabulary, config.run.seed)
    start = time.monotonic()
    with PeakMemory() as memory:
        objective, _ = model(tokens, RngContext(config.run.seed, 0, torch.zeros(1, dtype=torch.int64), training=True))
        objective.backward()
    return memory, time.monotonic() - start


if __name__ == "__main__":
    main()
