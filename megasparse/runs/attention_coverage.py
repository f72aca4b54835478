"""What windows, hashes and n-grams find of the full attention of trained decoders, checkpoint by checkpoint."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor
from tqdm import tqdm

from megasparse.config.attention import AttentionConfig
from megasparse.data.reader import EvaluationStream
from megasparse.data.tokenizers import build_tokenizer
from megasparse.errors import ConfigError
from megasparse.evaluation.attention.coverage import Patterns, gradient_norms, report, restricted_nats, sums
from megasparse.evaluation.attention.quality import record_calls
from megasparse.evaluation.figure import COLOURS, new_figure, save_figure
from megasparse.evaluation.restore import restore
from megasparse.model.decoder import Decoder
from megasparse.planning.measure import alone, machine
from megasparse.runs.attention_quality import window
from megasparse.runs.data import open_folder

BOUNDS = (64, 512, 2048)
"""Distances, in tokens, up to which what is seen is counted together; the last one is the sequence's length."""
RESTRICTIONS: dict[str, Patterns | None] = {
    "all earlier keys": None,
    "window 64": Patterns((64,), (), (), (), ()),
    "window 64, best 64": Patterns((64,), (64,), (), (), ()),
    "window 64, best 128": Patterns((64,), (128,), (), (), ()),
    "window 64, lsh, 4 rounds": Patterns((64,), (), ("lsh",), (4,), ()),
    "window 64, n-gram 4": Patterns((64,), (), (), (), (4,)),
}
"""What full attention sees in the held-out losses."""


def attention_coverage(
    directories: Sequence[str],
    data: str | None,
    overrides: Sequence[str] = (),
    *,
    command: str = "",
    split: str = "validation",
    sequences: int = 4,
    length: int | None = None,
    queries: int = 256,
    context: int = 12,
    restricted: bool = False,
) -> dict[str, Any]:
    """Measure every layer of checkpoints of decoders on the same held-out sequences, see `report`, and the gradients
    into it, see `gradient_norms`.

    directories: checkpoints, or runs' folders. data: a folder of shards, by default the first one trained on. length:
    of the sequences; by default model.max_length. restricted: measure also the held-out bits a token with full
    attention restricted to patterns, see RESTRICTIONS. Raises ConfigError for numbers that do not go together.
    """
    found = []
    for directory in directories:
        model, config, checkpoint, device = restore(directory, overrides)
        if not isinstance(model, Decoder):
            raise ConfigError("--checkpoint", f"{directory} is no decoder", "Give a causal language model")
        index = open_folder(data or config.data.path, config, build_tokenizer(config.data.tokenizer))
        tokens = length or config.model.max_length
        stream = EvaluationStream(index, split)
        if not 2 <= tokens <= config.model.max_length:
            raise ConfigError("--length", f"{tokens} is not in 2 … {config.model.max_length}", "Change it")
        if stream.tokens < sequences * tokens:
            problem = f"{sequences} of {tokens} tokens do not fit a split of {stream.tokens}"
            raise ConfigError("--sequences", problem, "Ask for fewer")
        held_out = [window(stream, n, sequences, tokens, index.record or 1).to(device) for n in range(sequences)]
        layers, gradients = measure(model, held_out, config.run.seed, config.model.attention, queries, context)
        entry: dict[str, Any] = {"checkpoint": str(checkpoint.path), "step": checkpoint.step, "layers": layers}
        if restricted:
            entry["bits_per_token"] = bits(model, held_out, config.run.seed, config.model.attention)
        found.append({**entry, "gradients": gradients})
        protocol = {"data": index.fingerprint, "split": split, "sequences": sequences, "length": tokens}
        protocol |= {"queries": queries, "context": context, "bounds": bounds(tokens), "patterns": asdict(Patterns())}
    about = {"command": command, "machine": alone(machine, device), "seed": config.run.seed}
    return {**about, "protocol": protocol, "checkpoints": found}


def bounds(length: int) -> list[int]:
    return [*(bound for bound in BOUNDS if bound < length), length]


def measure(
    model: Decoder, held_out: list[Tensor], seed: int, attention: AttentionConfig, queries: int, context: int
) -> tuple[list[dict[str, Any]], list[dict[str, float]]]:
    """The report of every layer, and the mean over the sequences of its gradients' norms."""
    total: dict[tuple[int, str], dict[str, Any]] = defaultdict(lambda: defaultdict(int))
    gradients: list[dict[str, float]] = []
    for tokens in tqdm(held_out, desc="sequences", unit="sequence", disable=None):
        for call in record_calls(model, tokens, seed):
            own = sums(call, tokens, attention, Patterns(), bounds(tokens.shape[1]), queries, context)
            for name, value in own.items():
                total[call.context.layer, call.kind][name] += value
        norms = gradient_norms(model, tokens, seed)
        gradients = gradients or [dict.fromkeys(layer, 0.0) for layer in norms]
        for layer, each in zip(gradients, norms, strict=True):
            for name, norm in each.items():
                layer[name] += norm / len(held_out)
    layers = [{"layer": layer, "kind": kind, **report(own)} for (layer, kind), own in total.items()]
    return layers, gradients


def bits(model: Decoder, held_out: list[Tensor], seed: int, attention: AttentionConfig) -> dict[str, float]:
    """Mean bits a token by what full attention sees."""
    progress = tqdm(RESTRICTIONS.items(), desc="restrictions", unit="run", disable=None)
    return {
        name: sum(restricted_nats(model, tokens, seed, attention, patterns) for tokens in held_out)
        / (len(held_out) * math.log(2))
        for name, patterns in progress
    }


def summary(result: dict[str, Any]) -> str:
    """The tables that are printed, in Markdown: mean over the layers of each kind."""
    limits = result["protocol"]["bounds"]
    headings = [f"to {limit:,}" for limit in limits]
    lines = []
    for entry in result["checkpoints"]:
        for kind, layers in by_kind(entry).items():
            lines += ["", f"step {entry['step']:,}, {kind}, by distance", ""]
            lines += [f"| | keys | {' | '.join(headings)} | reached {' | '.join(headings)} |"]
            lines += ["|---" * (2 + 2 * len(limits)) + "|"]
            lines += [_row("full attention", "", average(layers, "mass"), average(layers, "source_weight"))]
            for name in layers[0]["patterns"]:
                keys, held, reached = (average(layers, "patterns", name, key) for key in ("keys", "held", "reached"))
                lines += [_row(name, f"{keys:.0f}", held, reached)]
        for name, value in entry.get("bits_per_token", {}).items():
            lines += [f"bits a token, full attention sees {name}: {value:.3f}"]
    return "\n".join(lines[1:])


def _row(name: str, keys: str, *numbers: list[float]) -> str:
    shown = [f"{100 * value:.1f} %" for values in numbers for value in values]
    return f"| {' | '.join([name, keys, *shown])} |"


def by_kind(entry: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    kinds: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for layer in entry["layers"]:
        kinds[layer["kind"]].append(layer)
    return kinds


def average(layers: list[dict[str, Any]], *path: str) -> Any:
    """The mean over layers of a number, or of each in a list, at a path of keys."""
    values = []
    for layer in layers:
        value: Any = layer
        for key in path:
            value = value[key]
        values.append(value)
    if isinstance(values[0], list):
        return [sum(each) / len(values) for each in zip(*values, strict=True)]
    return sum(values) / len(values)


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw into an SVG what patterns hold of the mass beyond the first bound and how often they show the key that
    followed an earlier occurrence, by distance: the last checkpoint's layers of full attention, or all where it has
    none. Raises ConfigError without matplotlib.
    """
    figure, (mass, induction) = new_figure(2)
    entry, limits = result["checkpoints"][-1], result["protocol"]["bounds"]
    layers = by_kind(entry).get("full", entry["layers"])
    all_of_it, labels = average(layers, "mass"), [f"to {limit:,}" for limit in limits]
    shown = ("window 256", "lsh, 1 rounds", "lsh, 8 rounds", "lsh shifted, 8 rounds", "n-gram 4", "best 64")
    for colour, name in zip(COLOURS, shown, strict=False):
        held, reached = (average(layers, "patterns", name, key) for key in ("held", "reached"))
        shares = [100 * part / whole if whole else 0.0 for part, whole in zip(held, all_of_it, strict=True)]
        mass.plot(labels, shares, color=colour, marker="o", markersize=3, label=name)
        induction.plot(labels, [100 * part for part in reached], color=colour, marker="o", markersize=3)
    mass.set(title="% of full attention's mass held", xlabel="distance, tokens")
    induction.set(title="% of the induction keys reached", xlabel="distance, tokens")
    save_figure(figure, path)
