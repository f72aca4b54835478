r"""Time and memory of the attention operation, heads in and heads out, beside what else one would take.

    python tools/bench_attention.py                                         # a GPU: an hour or two
    python tools/bench_attention.py --mechanisms lsh --lengths 16384,65536  # a GPU: minutes
    python tools/bench_attention.py --device cpu --lengths 1024,4096        # a CPU: a minute
    python tools/bench_attention.py --device cpu --lengths 4096,16384,65536 --compare sdpa,hf,reformer-pytorch \
      --json bench.json
    python tools/bench_attention.py --write-crossover configs/mine.json

Each implementation is measured at each length in a process of its own, on the same random queries, keys and values:
normalisation of keys, hashing, sorting, attention and, with the mechanisms that learn their hashes, that learning. A
warm-up, then --repeat runs, forward and backward: median and range of their times (CUDA events on a GPU), and the peak
of memory beyond inputs and the outputs' gradient (resident memory on a CPU). What runs out of memory is a row that says
so, and is not tried at greater lengths.

LSH has shared queries and keys, --rounds rounds and --window tokens a chunk (of half a chunk a bucket); HuggingFace's
LSHSelfAttention (its projections left out) and reformer-pytorch's LSHAttention have the same. LHA (window: a bucket)
and local attention have the same window, YOSO 32 hashes, Smart Bird 20 keys, torch's SDPA the fastest of its backends,
all of them causal. YOSO's time depends on which queries and keys collide: yoso-clustered has each of them near one of
L/64 random centres (two of a cluster have a cosine of about 0.9), as trained ones have, which random ones have not.

--write-crossover measures the hashed mechanism of a configuration, with its heads, rounds, window and precision,
beside full attention of the same queries and keys, and writes the length from which on it is faster into
model.attention.full_below. Nothing else in the file changes.
"""

import argparse
import importlib.util
import json
import math
import shlex
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from megasparse.benchmarks.attention import DTYPES, MECHANISMS, NEEDS, PEERS, Case, crossover, measure, model_of
from megasparse.config.attention import AttentionConfig
from megasparse.config.load import load_config
from megasparse.config.parts import decoder_part
from megasparse.config.pattern import kinds, replaceable_kinds
from megasparse.config.rewrite import with_value
from megasparse.config.schema import Config, ModelConfig
from megasparse.data.files import replacing
from megasparse.errors import ConfigError, did_you_mean, report_user_errors
from megasparse.planning.measure import MeasurementError, alone, machine

DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {
        "mechanisms": ["lsh"],
        "lengths": [4096, 16384],
        "heads": [8],
        "head_dim": [64],
        "rounds": 4,
        "window": 64,
        "dtype": "fp32",
        "repeat": 3,
    },
    "cuda": {
        "mechanisms": list(MECHANISMS),
        "lengths": [1024 << i for i in range(11)],
        "heads": [8, 64],
        "head_dim": [64, 128],
        "rounds": 2,
        "window": 128,
        "dtype": "bf16",
        "repeat": 10,
    },
}
SEED = 0
OF_THE_CONFIGURATION = ("mechanisms", "heads", "head_dim", "rounds", "window", "dtype", "compare", "json")
"""Arguments that do not go with --write-crossover."""


@dataclass(frozen=True)
class Settings:
    """What is measured; see the arguments."""

    device: str
    mechanisms: list[str]
    lengths: list[int]
    heads: list[int]
    head_dim: list[int]
    rounds: int
    window: int
    dtype: str
    compare: list[str]
    repeat: int


@report_user_errors
def main(given: Sequence[str] | None = None) -> None:
    args = arguments(given)
    if args.write_crossover is not None:
        write_crossover(args)
        return
    settings = settings_from(args)
    command = shlex.join(["python", "tools/bench_attention.py", *(sys.argv[1:] if given is None else given)])
    about = {"command": command, "machine": alone(machine, torch.device(settings.device)), "seed": SEED}
    rows: list[dict[str, Any]] = []
    for row in measured(settings):
        rows.append(row)
        found = {**about, "settings": asdict(settings), **compared(rows, settings)}
        if args.json is not None:  # each time: what was measured is there even if the rest takes too long
            write(args.json, json.dumps(found, indent=2) + "\n")
    print("\n".join(report(found, settings)))


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="bench_attention.py", description=__doc__, formatter_class=raw)
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is a GPU")
    parser.add_argument("--mechanisms", metavar="A,B", help=f"of {', '.join(MECHANISMS)} (a CPU: lsh, a GPU: all)")
    parser.add_argument("--lengths", metavar="N,N", help="tokens (a CPU: 4096,16384; a GPU: 1024 to 1048576)")
    parser.add_argument("--heads", metavar="N,N", help="batch × heads; sequences have 8 heads (a CPU: 8; a GPU: 8,64)")
    parser.add_argument("--head-dim", metavar="N,N", help="(a CPU: 64; a GPU: 64,128)")
    parser.add_argument("--rounds", metavar="N", help="hash rounds of LSH and its peers (a CPU: 4, a GPU: 2)")
    parser.add_argument("--window", metavar="N", help="M, tokens of a chunk (a CPU: 64, a GPU: 128)")
    parser.add_argument("--dtype", choices=list(DTYPES), help="(a CPU: fp32, a GPU: bf16)")
    parser.add_argument("--compare", metavar="A,B", help=f"of {', '.join(PEERS)}, or none (all that are installed)")
    parser.add_argument("--repeat", metavar="N", help="measured runs (a CPU: 3, a GPU: 10)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all figures, and the machine, to this file")
    parser.add_argument(
        "--write-crossover", type=Path, metavar="CONFIG", help="measure for this configuration, and write it there"
    )
    return parser.parse_args(given)


def settings_from(args: argparse.Namespace) -> Settings:
    """ConfigError for what does not go together or is not there."""
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device", "torch sees no GPU here", "Write --device cpu")
    default = DEFAULTS[device]
    installed = [peer for peer in PEERS if has(peer)]
    made = Settings(
        device=device,
        mechanisms=names("--mechanisms", args.mechanisms, MECHANISMS) or default["mechanisms"],
        lengths=sorted(numbers("--lengths", args.lengths) or default["lengths"]),
        heads=numbers("--heads", args.heads) or default["heads"],
        head_dim=numbers("--head-dim", args.head_dim) or default["head_dim"],
        rounds=number("--rounds", args.rounds) or default["rounds"],
        window=number("--window", args.window) or default["window"],
        dtype=args.dtype or default["dtype"],
        compare=[] if args.compare == "none" else names("--compare", args.compare, PEERS) or installed,
        repeat=number("--repeat", args.repeat) or default["repeat"],
    )
    for peer in made.compare:
        if not has(peer):
            raise ConfigError(
                "--compare", f"{peer} is not installed", "pip install 'megasparse[bench]', or leave it out"
            )
    uneven = [length for length in made.lengths if length % (2 * made.window)]
    if uneven and set(NEEDS) & set(made.compare):
        hint = f"Take multiples of {2 * made.window}, or --compare sdpa"
        raise ConfigError("--lengths", f"{uneven[0]} is no multiple of two windows, which hf and its like need", hint)
    return made


def has(peer: str) -> bool:
    return peer not in NEEDS or importlib.util.find_spec(NEEDS[peer]) is not None


def names(option: str, given: str | None, known: Any) -> list[str]:
    found = [] if given is None else given.split(",")
    for name in found:
        if name not in known:
            raise ConfigError(option, f'there is no "{name}"', did_you_mean(name, known))
    return list(dict.fromkeys(found))


def numbers(option: str, given: str | None) -> list[int]:
    found = [] if given is None else given.split(",")
    for text in found:
        if not (text.isascii() and text.isdigit() and 0 < int(text) < 1 << 31):
            raise ConfigError(option, f'"{text}" is no positive number', "Write numbers such as 4096,16384")
    return list(dict.fromkeys(int(text) for text in found))


def number(option: str, given: str | None) -> int | None:
    found = numbers(option, given)
    if len(found) > 1:
        raise ConfigError(option, f'"{given}" is more than one number', "Write one")
    return found[0] if found else None


def measured(settings: Settings) -> Iterator[dict[str, Any]]:
    """A row for every implementation and length, as each is done. After one that ran out of memory longer ones are not
    tried.
    """
    implementations = [*settings.compare, *settings.mechanisms]
    total = len(implementations) * len(settings.lengths) * len(settings.heads) * len(settings.head_dim)
    with tqdm(total=total, unit="measurement", disable=None) as progress:
        for heads in settings.heads:
            for dim in settings.head_dim:
                for name in implementations:
                    failed = None
                    for length in settings.lengths:
                        progress.set_description(f"{name}, {length:,} tokens")
                        row = {"implementation": name, "heads": heads, "head_dim": dim, "length": length}
                        found = {"error": failed} if failed else one(settings, name, heads, dim, length)
                        if "memory" in found.get("error", "") and not failed:
                            failed = f"not tried, after {length:,} tokens"
                        yield row | found
                        progress.update()


def one(settings: Settings, name: str, heads: int, dim: int, length: int) -> dict[str, Any]:
    batch, own = (heads // 8, 8) if heads % 8 == 0 else (1, heads)
    kind = MECHANISMS.get(name, "lsh")
    model = model_of(kind, length, own, dim, settings.rounds, settings.window)
    return figures(Case(name, model, batch, settings.dtype, settings.device, settings.repeat, SEED))


def figures(case: Case) -> dict[str, Any]:
    """Of a measurement, or the error that it ended with."""
    try:
        found = alone(measure, case)
    except MeasurementError as error:
        return {"error": str(error)}
    both = statistics.median(found.both)
    fewer = f"{len(found.both)} runs" if len(found.both) < case.repeats else ""
    return {
        "forward": spread(found.forward),
        "forward_backward": spread(found.both),
        "extra_bytes": found.extra_bytes,
        "of_roofline": None if found.least is None else found.least.both / both,
        "note": ", ".join(filter(None, [found.note, fewer])),
    }


def spread(seconds: list[float]) -> dict[str, Any]:
    return {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds), "seconds": seconds}


def compared(rows: list[dict[str, Any]], settings: Settings) -> dict[str, Any]:
    """The rows with what they are beside each peer at the same length, and the crossovers with SDPA: by how much ours
    is faster, forward and backward, and its memory as a part of the peer's.
    """
    at = {(row["implementation"], row["heads"], row["head_dim"], row["length"]): row for row in rows}
    reported = []
    for row in rows:
        beside = {}
        for peer in settings.compare:
            other = at.get((peer, row["heads"], row["head_dim"], row["length"]), {"error": ""})
            if row["implementation"] in settings.mechanisms and not ("error" in row or "error" in other):
                faster = other["forward_backward"]["median"] / row["forward_backward"]["median"]
                beside[peer] = {"faster": faster, "memory": row["extra_bytes"] / max(1, other["extra_bytes"])}
        reported.append(row | {"beside": beside})
    crossovers = [
        {"implementation": name, "heads": heads, "head_dim": dim, "length": crossover(*sides)}
        for name in settings.mechanisms
        for heads in settings.heads
        for dim in settings.head_dim
        if all(sides := [times(rows, who, heads, dim) for who in (name, "sdpa")])
    ]
    return {"rows": reported, "crossovers": crossovers}


def times(rows: list[dict[str, Any]], name: str, heads: int, dim: int) -> dict[int, float]:
    """Seconds forward and backward by length, infinite where it failed."""
    mine = [row for row in rows if (row["implementation"], row["heads"], row["head_dim"]) == (name, heads, dim)]
    return {row["length"]: math.inf if "error" in row else row["forward_backward"]["median"] for row in mine}


def report(found: dict[str, Any], settings: Settings) -> Iterator[str]:
    """Markdown: a table for every number of heads and head dim, and where ours crosses SDPA."""
    about = found["machine"]
    yield f"`{found['command']}` on {about['device']}, torch {about['torch']}, {about['threads']} threads"
    for heads in settings.heads:
        for dim in settings.head_dim:
            yield ""
            yield (
                f"batch × heads {heads}, head dim {dim}, {settings.dtype}, {settings.rounds} rounds, M = "
                f"{settings.window}, causal: median (least to greatest) of {settings.repeat}"
            )
            yield ""
            yield from table(
                [row for row in found["rows"] if (row["heads"], row["head_dim"]) == (heads, dim)], settings
            )
            for line in found["crossovers"]:
                if (line["heads"], line["head_dim"]) == (heads, dim):
                    yield ""
                    yield crossover_line(line, settings.lengths)


def table(rows: list[dict[str, Any]], settings: Settings) -> Iterator[str]:
    roofline = any(row.get("of_roofline") for row in rows)
    heading = ["attention", "tokens", "forward, ms", "forward + backward, ms", "ns a token", "extra memory, GB"]
    heading += [f"faster than {peer} × / its memory ×" for peer in settings.compare]
    heading += ["of its roofline, %"] * roofline
    yield f"| {' | '.join(heading)} |"
    yield "|" + "---|" * len(heading)
    for row in rows:
        cells = [row["implementation"] + (f" ({row['note']})" if row.get("note") else ""), f"{row['length']:,}"]
        if "error" in row:
            cells += [row["error"].replace("|", "/"), *[""] * (len(heading) - 3)]
        else:
            both = row["forward_backward"]["median"]
            cells += [milliseconds(row["forward"]), milliseconds(row["forward_backward"])]
            cells += [f"{both / row['length'] * 1e9:,.0f}", f"{row['extra_bytes'] / 1e9:.3f}"]
            cells += [beside(row["beside"].get(peer)) for peer in settings.compare]
            cells += [f"{100 * row['of_roofline']:.0f}" if row["of_roofline"] else ""] * roofline
        yield f"| {' | '.join(cells)} |"


def milliseconds(times: dict[str, Any]) -> str:
    low, middle, high = (f"{1000 * times[key]:.4g}" for key in ("min", "median", "max"))
    return f"{middle} ({low} to {high})"


def beside(ratio: dict[str, float] | None) -> str:
    return "" if ratio is None else f"{ratio['faster']:.3g} / {ratio['memory']:.3g}"


def crossover_line(line: dict[str, Any], lengths: list[int]) -> str:
    name, length = line["implementation"], line["length"]
    if length is None:
        return f"{name} is not faster than SDPA at {lengths[-1]:,} tokens."
    more = " or fewer" if length == lengths[0] else ""
    return f"{name} is faster than SDPA, forward + backward, from {length:,} tokens{more} on."


def write_crossover(args: argparse.Namespace) -> None:
    path = args.write_crossover
    for option in OF_THE_CONFIGURATION:
        if getattr(args, option) is not None:
            name = f"--{option.replace('_', '-')}"
            raise ConfigError(name, "comes from the configuration of --write-crossover", "Leave it out")
    config = load_config(path)
    model = config.model if config.model.source is None else decoder_part(config.model)
    hashed = [kind for kind in replaceable_kinds(model) if kind in kinds(model)]
    if not hashed:
        hint = f"Full attention can take the place of {' and '.join(replaceable_kinds(model))}"
        raise ConfigError(str(path), f"model.attention.pattern has {', '.join(kinds(model))}", hint)
    if args.lengths is None:
        args.lengths = ",".join(str(512 << i) for i in range(8))
    args.compare = "none"
    settings = settings_from(args)
    found = [crossover_with_full(kind, config, model, settings) for kind in hashed]
    above = [length for length in found if length is not None]
    if len(above) < len(found):
        problem = f"full attention is faster up to {settings.lengths[-1]:,} tokens here"
        raise ConfigError(str(path), problem, "Nothing is written")
    text = with_value(path.read_text(encoding="utf-8"), ["model", "attention", "full_below"], max(above))
    load_config(path, [f"model.attention.full_below={max(above)}"])
    write(path, text)
    force = "is" if config.model.max_length < max(above) else "is not"
    print(f"{path}: model.attention.full_below = {max(above)}, which {force} above its max_length")


def crossover_with_full(kind: str, config: Config, model: ModelConfig, settings: Settings) -> int | None:
    """Length from which on the mechanism is faster than full attention; measured until it is so twice in a row."""
    times: dict[str, dict[int, float]] = {kind: {}, "full": {}}
    with tqdm(settings.lengths, desc=kind, unit="length", disable=None) as lengths:
        for length in lengths:
            for name, case in cases(kind, model, length, config, settings).items():
                row = figures(case)
                times[name][length] = math.inf if "error" in row else row["forward_backward"]["median"]
            shown = ", ".join(f"{name} {1000 * by_length[length]:.4g} ms" for name, by_length in times.items())
            lengths.write(f"{length:,} tokens: {shown}", file=sys.stdout)
            last = list(times[kind])[-2:]
            if len(last) == 2 and all(times[kind][n] < times["full"][n] for n in last):
                break
    return crossover(times[kind], times["full"])


def cases(kind: str, model: ModelConfig, length: int, config: Config, settings: Settings) -> dict[str, Case]:
    """The mechanism as configured, in a model whose longest length this is, and full attention in its place."""
    own = getattr(model.attention, kind)
    fitted = {"chunk": min(own.chunk, length)} | ({"buckets": None} if kind == "lsh" else {})
    shared = model.attention.full.model_copy(update={"shared_qk": kind == "lsh" and own.shared_qk})
    made = {}
    for name in (kind, "full"):
        sections = {kind: own.model_copy(update=fitted), "full": shared}
        attention = AttentionConfig(pattern=[name]).model_copy(update=sections)  # type: ignore[list-item]
        placed = model.model_copy(update={"max_length": length, "attention": attention})
        batch, dtype = config.training.micro_batch, config.training.precision
        made[name] = Case(name, placed, batch, dtype, settings.device, settings.repeat, SEED)
    return made


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(text.encode())


if __name__ == "__main__":
    main()
