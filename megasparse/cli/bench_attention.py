r"""Measure time and memory of the attention operation, heads in and heads out, beside torch's and published Reformers'.

    megasparse bench attention                                         # a GPU: an hour or two
    megasparse bench attention --mechanisms lsh --lengths 16384,65536  # a GPU: minutes
    megasparse bench attention --device cpu --lengths 1024,4096        # a CPU: a minute
    megasparse bench attention --device cpu --lengths 4096,16384,65536 --compare sdpa,hf,reformer-pytorch \
      --json bench.json
    megasparse bench attention --write-crossover configs/mine.json

Each implementation is measured at each length in a process of its own, on the same random queries, keys and values:
normalisation of keys, hashing, sorting, attention and, with the mechanisms that learn their hashes, that learning. A
warm-up, then --repeat runs, forward and backward: median and range of their times (CUDA events on a GPU), and the peak
of memory beyond inputs and the outputs' gradient (resident memory on a CPU), in training and in a forward pass without
gradients, beside what the forward pass keeps for the backward, inputs included. What runs out of memory is a row that
says so, and is not tried at greater lengths.

LSH has shared queries and keys, --rounds rounds and --window tokens a chunk (of half a chunk a bucket); HuggingFace's
LSHSelfAttention (its projections left out) and reformer-pytorch's LSHAttention have the same. LHA (window: a bucket)
and local attention have the same window, YOSO --hashes hashes, Smart Bird 20 keys, torch's SDPA the fastest of its
backends, all of them causal unless --bidirectional is given. YOSO's time depends on which queries and keys collide:
yoso-clustered has each of them near one of L/64 random centres (two of a cluster have a cosine of about 0.9), as
trained ones have, which random ones have not.

--write-crossover measures the hashed mechanism of a configuration, with its heads, rounds, window and precision,
beside full attention of the same queries and keys, and writes the length from which on it is faster into
model.attention.full_below. Nothing else in the file changes.
"""

import argparse
import importlib.util
from pathlib import Path
from typing import Any

import torch

from megasparse.benchmarks.attention import DTYPES, MECHANISMS, NEEDS, PEERS
from megasparse.benchmarks.attention_table import Settings, bench_attention, report
from megasparse.benchmarks.crossover import write_crossover
from megasparse.cli.arguments import add_json
from megasparse.config.load import load_config
from megasparse.errors import ConfigError, did_you_mean

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
OF_THE_CONFIGURATION = ("mechanisms", "heads", "head_dim", "rounds", "window", "dtype", "compare", "json")
"""Options that do not go with --write-crossover."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is a GPU")
    parser.add_argument("--mechanisms", metavar="A,B", help=f"of {', '.join(MECHANISMS)} (a CPU: lsh, a GPU: all)")
    parser.add_argument("--lengths", metavar="N,N", help="tokens (a CPU: 4096,16384; a GPU: 1024 to 1048576)")
    parser.add_argument("--heads", metavar="N,N", help="batch × heads; sequences have 8 heads (a CPU: 8; a GPU: 8,64)")
    parser.add_argument("--head-dim", metavar="N,N", help="(a CPU: 64; a GPU: 64,128)")
    parser.add_argument("--rounds", metavar="N", help="hash rounds of LSH and its peers (a CPU: 4, a GPU: 2)")
    parser.add_argument("--window", metavar="N", help="M, tokens of a chunk (a CPU: 64, a GPU: 128)")
    parser.add_argument("--hashes", metavar="N", help="YOSO's (32)")
    parser.add_argument("--bidirectional", action="store_true", help="as in an encoder; --compare sdpa or none")
    parser.add_argument("--dtype", choices=list(DTYPES), help="(a CPU: fp32, a GPU: bf16)")
    parser.add_argument("--compare", metavar="A,B", help=f"of {', '.join(PEERS)}, or none (all that are installed)")
    parser.add_argument("--repeat", metavar="N", help="measured runs (a CPU: 3, a GPU: 10)")
    add_json(parser)
    parser.add_argument(
        "--write-crossover", type=Path, metavar="CONFIG", help="measure for this configuration, and write it there"
    )


def run(args: argparse.Namespace) -> None:
    if args.write_crossover is not None:
        _write_crossover(args)
        return
    settings = settings_from(args)
    print("\n".join(report(bench_attention(settings, args.command, args.json), settings)))


def _write_crossover(args: argparse.Namespace) -> None:
    path = args.write_crossover
    for option in OF_THE_CONFIGURATION:
        if getattr(args, option) is not None:
            name = f"--{option.replace('_', '-')}"
            raise ConfigError(name, "comes from the configuration of --write-crossover", "Leave it out")
    if not path.is_file():
        raise ConfigError("--write-crossover", f"there is no file {path}", "Give the configuration to write to")
    longest = load_config(path).model.max_length
    args.lengths = args.lengths or ",".join(str(512 << i) for i in range(8))
    args.compare = "none"
    length = write_crossover(path, settings_from(args))
    force = "is" if longest < length else "is not"
    print(f"{path}: model.attention.full_below = {length}, which {force} above its max_length")


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
        hashes=number("--hashes", args.hashes) or 32,
        bidirectional=args.bidirectional,
    )
    if args.bidirectional and (causal := sorted(set(NEEDS) & set(made.compare))):
        raise ConfigError("--bidirectional", f"{causal[0]} is measured as a decoder's", "Write --compare sdpa")
    for peer in made.compare:
        if not has(peer):
            raise ConfigError(
                "--compare", f"{peer} is not installed", "pip install 'megasparse[bench]', or leave it out"
            )
    unfit = [length for length in made.lengths if length % (2 * made.window)]
    if unfit and set(NEEDS) & set(made.compare):
        hint = f"Take multiples of {2 * made.window}, or --compare sdpa"
        raise ConfigError("--lengths", f"{unfit[0]} is no multiple of two windows, which hf and its like need", hint)
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
