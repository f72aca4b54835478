"""What a check for silent corruption costs: seconds beside those of the step, forward passes, bytes read.

    python -m tests.reliability.corruption_cost --config quickstart_relu --json docs/measured/corruption_check.json

trains the configured model on plain torch in one process on random tokens, and checks every step.
"""

import argparse
import json
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megasparse.config.load import load_config
from megasparse.data.batches import Batch
from megasparse.model.build import build_model
from megasparse.ops.random import RngContext
from megasparse.planning.dry_run import dummy_records
from megasparse.planning.measure import machine
from megasparse.training.corruption import CorruptionCheck
from megasparse.training.engines.build import build_engine
from megasparse.training.ranks import start_ranks


def measure(name: str, steps: int) -> dict[str, Any]:
    keys = ["run.engine=torch", "run.corruption_check_every=1", "run.device=cpu", "deepspeed={}"]
    config = load_config(name, keys)
    ranks, training = start_ranks(config.run), config.training
    engine = build_engine(build_model(config.model, 0), config, partial(RngContext, 0, training=True), ranks)
    number, forwards = training.global_batch // training.micro_batch, []
    engine.module.register_forward_pre_hook(lambda module, inputs: forwards.append(torch.is_grad_enabled()))
    tokens = dummy_records(config.model, training.global_batch, config.data.sequence_length, 0)
    samples = torch.arange(training.global_batch)
    batches = [Batch(*pair, 0) for pair in zip(tokens.chunk(number), samples.chunk(number), strict=True)]
    check, whole, checks = CorruptionCheck(engine, config, 0), [], []
    for step in range(1, steps + 1):
        began = time.perf_counter()
        verify = check.begin(step, batches[0])
        engine.train_step(batches, step, 1e-4, verify=verify)
        assert check.seconds is not None
        checks.append(check.seconds)
        whole.append(time.perf_counter() - began - check.seconds)
    return {
        "configuration": name,
        "seed": 0,
        "steps": steps,
        "micro_batches": number,
        "weights_bytes": sum(weight.nbytes for _, weight in engine.weights()),
        "bytes_read": 2 * sum(weight.nbytes for _, weight in engine.weights()),
        "forwards": forwards.count(False) // steps,
        "check_seconds": statistics.median(checks),
        "step_seconds": statistics.median(whole),
        "machine": machine(ranks.device),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="quickstart_relu")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    found = measure(args.config, args.steps)
    args.json.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
