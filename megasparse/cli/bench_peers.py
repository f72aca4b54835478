"""Train HuggingFace's Reformer and reformer-pytorch on the batches of a configuration of ours, and score each twice: as
it reports itself, and strictly causally, each sampled token from the tokens before it alone. The difference is what
later tokens gave away.

    megasparse compare comparisons/pays --corpora client --arms "window 64"   # prepares data/pays/client, trains ours
    megasparse bench peers pays --set data.path=data/pays/client --json peers.json           # 20 minutes an arm
    megasparse bench peers pays --set data.path=data/pays/client --peers huggingface --rates 3e-3,1e-3 --seeds 0,1,2 \\
      --json peers.json

The peers have the configuration's width, depth, heads, chunk, rounds, steps, batches and schedule, and are wrapped as
they are. Rows that the file holds already are not measured again, so the command can be stopped between them.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megasparse.cli.arguments import add_config, config_from, positive
from megasparse.config.schema import Config
from megasparse.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument(
        "--peers",
        default="huggingface,reformer-pytorch",
        metavar="NAME,NAME",
        help="of huggingface, huggingface-small-positions, reformer-pytorch (default: %(default)s)",
    )
    parser.add_argument("--rates", default="1e-3", metavar="X,X", help="learning rates (default: %(default)s)")
    parser.add_argument("--seeds", default="0", metavar="N,N", help="(default: %(default)s)")
    parser.add_argument(
        "--positions", type=positive, default=128, metavar="N", help="tokens scored twice (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="where the rows are kept")


def run(args: argparse.Namespace) -> None:
    config = config_from(args, Config)
    from megasparse.runs.peers import PEERS, compare_peers, table

    names = args.peers.split(",")
    for name in names:
        if name not in PEERS:
            raise ConfigError("--peers", f'there is no "{name}"', f"Choose among {', '.join(PEERS)}")
    rates, seeds = _numbers("--rates", args.rates, float), _numbers("--seeds", args.seeds, int)
    print("\n".join(table(compare_peers(config, names, seeds, rates, args.positions, args.json))))


def _numbers(option: str, given: str, kind: Callable[[str], Any]) -> list[Any]:
    try:
        return [kind(part) for part in given.split(",")]
    except ValueError:
        raise ConfigError(option, f'"{given}" holds what is no number', "Write numbers with commas") from None
