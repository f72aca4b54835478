"""Count the launches and bytes of attention layers, or of a whole model's passes, on a GPU. None is needed: the passes
run on torch's meta device, where nothing is computed.

    megasparse bench launches --mechanisms lsh --length 65536                          # one layer, seconds
    megasparse bench launches reformer_64k                                             # a whole model, seconds
    megasparse bench launches reformer_64k --mechanisms lsh,yoso,lha --json launches.json

An operation of torch counts as one launch, and each tensor of an operation or kernel as moved once. "transfers" are
operations between the host and the GPU, "host" are those on the host alone; both make a GPU wait.
"""

import argparse
from dataclasses import asdict
from typing import get_args

from megasparse.benchmarks.attention import DTYPES, model_of
from megasparse.cli.arguments import add_config, add_json, config_from, positive
from megasparse.config.attention import AttentionKind
from megasparse.config.schema import Config
from megasparse.errors import ConfigError, did_you_mean
from megasparse.evaluation.outputs import write_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("--mechanisms", metavar="A,B", help="count a layer of each of these, such as lsh,yoso")
    parser.add_argument("--length", type=positive, default=65536, metavar="N", help="tokens (default: %(default)s)")
    parser.add_argument("--heads", type=positive, default=8, metavar="N", help="default: %(default)s")
    parser.add_argument("--head-dim", type=positive, default=64, metavar="N", help="default: %(default)s")
    parser.add_argument("--rounds", type=positive, default=2, metavar="N", help="of LSH (default: %(default)s)")
    parser.add_argument("--window", type=positive, default=128, metavar="N", help="tokens (default: %(default)s)")
    parser.add_argument("--batch", type=positive, default=1, metavar="N", help="default: %(default)s")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16", help="default: %(default)s")
    add_json(parser)


def run(args: argparse.Namespace) -> None:
    from megasparse.benchmarks.launches import count_layer, least_bytes, report, seconds
    from megasparse.planning.launches import Counts, count_step, total
    from megasparse.planning.roofline import PEAKS

    kinds = [] if args.mechanisms is None else args.mechanisms.split(",")
    for kind in kinds:
        if kind not in get_args(AttentionKind):
            raise ConfigError("--mechanisms", f'there is no "{kind}"', did_you_mean(kind, get_args(AttentionKind)))
    found: dict[str, dict[str, Counts]] = {}
    least: dict[str, float | None] = {}
    for kind in kinds:
        model = model_of(kind, args.length, args.heads, args.head_dim, args.rounds, args.window)
        found[kind] = count_layer(kind, model, args.batch, DTYPES[args.dtype])
        least[kind] = least_bytes(kind, model, args.batch, DTYPES[args.dtype])
    if not kinds or args.name is not None or args.config is not None:
        config = config_from(args, Config)
        found["step"] = count_step(config)
    for name, passes in found.items():
        print("\n".join([f"### {name}", "", *report(passes), ""]))
    if args.json is not None:
        counts = {name: {each: asdict(c) for each, c in passes.items()} for name, passes in found.items()}
        times = {name: {gpu: seconds(total(c), peaks) for gpu, peaks in PEAKS.items()} for name, c in found.items()}
        write_json(args.json, {"command": args.command, "counts": counts, "least_bytes": least, "seconds": times})
