"""Measure tokens per second and peak memory of training steps, compared with the same model with full attention.

    python tools/bench/training.py reformer_64k --json training.json             # on a GPU
    python tools/bench/training.py quickstart --set data.sequence_length=256     # on a CPU, a minute
    python tools/bench/training.py masked_text --evaluate                        # passes without gradients

Variants of a configuration are measured in separate processes on plain torch (without ZeRO and offloading), with dummy
tokens and one micro-batch per step:

    as configured
    full, checkpointed    full attention in every layer, in ordinary blocks with activation checkpointing
    all layers full       full attention in every layer, otherwise as configured
    hashed layers full    full attention instead of every mechanism except local attention
    2 layers, 20 layers   as configured except for the depth; the 2 layers use different mechanisms

"activations" is the peak before the optimizer's step, without weights, optimizer state and gradients. --evaluate
compares passes in evaluation of the first and the third model.
"""

import argparse
import shlex
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megasparse.config.schema import Config
from megasparse.errors import ConfigError, report_user_errors
from megasparse.settings.load import build_config, load_config, load_settings


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", metavar="CONFIG", help="a shipped configuration, or a file")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=JSON", help="override one key")
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="measured steps (default: %(default)s)")
    parser.add_argument("--evaluate", action="store_true", help="measure passes in evaluation instead of steps")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the results and their settings to this file")
    args = parser.parse_args(words)
    load_settings(args.config, args.set, Config, mechanisms=False)
    return args


if __name__ == "__main__":  # help and mistakes end before the slow imports
    report_user_errors(arguments)()

import torch
from torch import Tensor
from tqdm import tqdm

from megasparse.data.batches import Batch
from megasparse.evaluation.outputs import write_json
from megasparse.ops.random import RngContext
from megasparse.planning.dry_run import trial_engine
from megasparse.planning.passes import META, ConfiguredPass, dummy_records
from megasparse.training.engines.contract import Engine
from megasparse.training.engines.cuda_graph import GraphedModel
from megasparse.training.ranks import start_ranks
from tools.bench.measuring import MeasurementError, alone, machine, peak, reset_peak

DEPTHS = (2, 20)
WARM_UP = 2
AS_CONFIGURED, ALL_FULL = "as configured", "all layers full"


def bench_training(
    config: Config, steps: int, command: str, json_file: Path | None = None, evaluate: bool = False
) -> dict[str, Any]:
    """Measure the models of a configuration (see `models`). Return all figures, which are also written to a file after
    each model. Raises ConfigError for unsupported settings.
    """
    if steps < 1:
        raise ConfigError("--steps", f"{steps} is too few", "Give 1 or more")
    if config.model.source is not None:
        raise ConfigError("model.kind", '"encoder_decoder" is not supported', "Give a decoder or an encoder")
    device = config.run.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    result: dict[str, Any] = {"command": command, "machine": alone(machine, torch.device(device)), "rows": []}
    variants = models(config)
    if evaluate:
        variants = {name: variants[name] for name in (AS_CONFIGURED, ALL_FULL)}
    for name, changed in tqdm(variants.items(), unit="model", disable=None):
        try:
            row = alone(measure, changed, steps, evaluate)
        except MeasurementError as error:
            row = {"error": error.problem}
        result["rows"].append({"model": name} | row)
        if json_file is not None:  # written after each model, in case the rest is stopped
            write_json(json_file, result)
    return result


def models(config: Config) -> dict[str, dict[str, Any]]:
    """Return name -> values of the complete configuration for all models to measure."""
    pattern = config.model.attention.pattern
    entries = [{entry: config.model.heads} if isinstance(entry, str) else dict(entry) for entry in pattern]
    kinds = list(dict.fromkeys(kind for entry in entries for kind in entry))
    variants: dict[str, dict[str, Any]] = {
        AS_CONFIGURED: {},
        "full, checkpointed": {"pattern": ["full"], "blocks": "ordinary", "activations": "checkpoint"},
        ALL_FULL: {"pattern": ["full"]},
        "hashed layers full": {"pattern": [in_full(entry) for entry in entries]},
    }
    for depth in DEPTHS:
        variants[f"{depth} layers"] = {"layers": depth, "pattern": pattern if depth >= len(pattern) else kinds[:depth]}
    return {name: changed(config, **changes) for name, changes in variants.items()}


def in_full(entry: dict[Any, int]) -> dict[str, int]:
    """Return kind -> heads of a layer, with full attention instead of every mechanism except local attention."""
    local = entry.get("local", 0)
    heads = {"local": local, "full": sum(entry.values()) - local}
    return {kind: number for kind, number in heads.items() if number}


def changed(config: Config, pattern: list[Any] | None = None, **model: Any) -> dict[str, Any]:
    values = config.model_dump(mode="json")
    values["model"] |= model
    if pattern is not None:
        values["model"]["attention"] |= {"pattern": pattern}
    build_config(values)
    return values


def measure(values: dict[str, Any], steps: int, evaluate: bool) -> dict[str, Any]:
    """Measure one model in a separate process. values: values of its configuration. evaluate: see --evaluate."""
    config = build_config(values)
    ranks = start_ranks(config.run.model_copy(update={"engine": "torch"}))
    device = ranks.device
    start = reset_peak(device)
    engine, batch = trial_engine(config, ranks)
    before_update: list[int] = []
    seconds = []
    for step in range(WARM_UP + steps):
        if step == WARM_UP:  # the optimizer's state exists now
            baseline = reset_peak(device)
            engine.optimizer.register_step_pre_hook(lambda *_: before_update.append(peak(device)))
        seconds.append(step_seconds(engine, batch, step, config.optimizer.learning_rate, evaluate))
    gradients = sum(p.numel() * p.element_size() for p in engine.module.parameters())
    tokens = config.training.micro_batch * config.data.sequence_length
    return {
        "parameters": sum(p.numel() for p in engine.module.parameters()),
        "tokens_a_second": tokens / statistics.median(seconds[WARM_UP:]),
        "seconds": seconds[WARM_UP:],
        "peak_bytes": peak(device) - start,
        "activation_bytes": before_update[0] - baseline - gradients if before_update else None,
    }


def step_seconds(engine: Engine, batch: Batch, step: int, learning_rate: float, evaluate: bool = False) -> float:
    """Return the seconds of a training step of one micro-batch, or of its pass in evaluation."""
    started = time.perf_counter()
    if evaluate:
        engine.evaluate(batch.tokens, RngContext.evaluation(step, len(batch.tokens)))
    else:
        engine.train_step([batch], step, learning_rate)
    if engine.ranks.device.type == "cuda":
        torch.cuda.synchronize(engine.ranks.device)
    return time.perf_counter() - started


def train_config(name: str, small: bool) -> Config:
    overrides = ["data.sequence_length=256", "model.max_length=256"] if small else []
    config = load_config("quickstart_relu" if small else "reformer_64k", [*overrides, "run.engine=torch"])
    return build_config(models(config)[name])


def graph_config(small: bool, cuda_graph: bool = True) -> Config:
    """Return configs/reformer_64k with sequences of 16,384 tokens, which a host launches more slowly than a GPU runs
    them.
    """
    values = train_config("as configured", small).model_dump(mode="json")
    values["run"] |= {"cuda_graph": cuda_graph, "deterministic": True}
    values["data"] |= {"sequence_length": 32 if small else 16384}
    values["model"] |= {"dropout": 0.1, "ngrams": None}
    values["evaluation"] |= {"every": 0, "sequence_length": None, "sample_tokens": 0}
    values["optimizer"] |= {"name": "adamw"}
    return build_config(values)


def graph(device: torch.device, steps: int, output: Any) -> None:
    """Compare training steps with and without `run.cuda_graph`: losses, which must be equal, and seconds per step.
    output: a `jobs.Report`.
    """
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # it adds launches
    losses: dict[str, list[float]] = {"eager": [], "graph": []}
    figures: dict[str, float] = {}
    for name in losses:
        config = graph_config(device.type == "cpu", name == "graph")
        ranks = start_ranks(config.run.model_copy(update={"device": device.type}))
        before = reset_peak(ranks.device)
        engine, batch = trial_engine(config, ranks)
        seconds = []
        for step in range(1, 1 + steps):
            tokens = dummy_records(config.model, len(batch.tokens), batch.tokens.shape[1], step)
            started = time.perf_counter()
            losses[name].append(engine.train_step([Batch(tokens, batch.samples + step)], step, 1e-3).loss)
            seconds.append(time.perf_counter() - started)
        figures |= {f"{name} s": statistics.median(seconds[1:]), f"{name} first s": seconds[0]}
        figures |= {f"{name} GB": (peak(ranks.device) - before) / 1e9}
        del engine
    right = losses["graph"] == losses["eager"]
    pairs = enumerate(zip(*losses.values(), strict=True), start=1)
    note = "" if right else f"they differ at step {next(step for step, (a, b) in pairs if a != b)}"
    output.add(f"{steps} steps of {config.data.sequence_length:,} tokens", figures, right, note)


def graph_launches() -> None:
    config = graph_config(False)
    counted = ConfiguredPass(config)
    counted.count(config.data.sequence_length)
    tokens = dummy_records(config.model, config.training.micro_batch, config.data.sequence_length, 0).to(META)
    samples = torch.arange(len(tokens), device=META)
    GraphedModel(counted.model, Tensor.backward, ())(tokens, RngContext(0, 0, samples, training=True))


def report(result: dict[str, Any], config: Config) -> Iterator[str]:
    """Yield the figures as Markdown lines."""
    about, data = result["machine"], config.data
    yield f"`{result['command']}` on {about['device']}, torch {about['torch']}, {about['threads']} threads"
    yield ""
    yield f"{config.training.micro_batch} × {data.sequence_length:,} tokens per step, {config.training.precision}"
    yield ""
    heading = ["model", "parameters, millions", "tokens/s", "step, s (least to greatest)", "peak, GB"]
    heading.append("activations, GB")
    yield f"| {' | '.join(heading)} | as configured is faster × |"
    yield "|" + "---|" * (len(heading) + 1)
    configured: dict[str, Any] = next((row for row in result["rows"] if row["model"] == AS_CONFIGURED), {})
    for row in result["rows"]:
        if "error" in row:
            yield f"| {row['model']} |  | {row['error'].replace('|', '/')} |  |  |  |  |"
            continue
        middle, times = statistics.median(row["seconds"]), row["seconds"]
        activations = "" if row["activation_bytes"] is None else f"{row['activation_bytes'] / 1e9:.3f}"
        ratio = (
            f"{configured['tokens_a_second'] / row['tokens_a_second']:.3g}" if "tokens_a_second" in configured else ""
        )
        yield (
            f"| {row['model']} | {row['parameters'] / 1e6:.1f} | {row['tokens_a_second']:,.0f} "
            f"| {middle:.4g} ({min(times):.4g} to {max(times):.4g}) | {row['peak_bytes'] / 1e9:.3f} "
            f"| {activations} | {ratio} |"
        )


@report_user_errors
def main(words: Sequence[str] | None = None) -> None:
    words = sys.argv[1:] if words is None else [str(word) for word in words]
    args = arguments(words)
    config = load_config(args.config, args.set)
    command = shlex.join(["python", "tools/bench/training.py", *words])
    print("\n".join(report(bench_training(config, args.steps, command, args.json, args.evaluate), config)))


if __name__ == "__main__":
    main()
