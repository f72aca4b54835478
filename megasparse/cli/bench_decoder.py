"""Compare attentions inside a pretrained decoder on texts of one's own: nats a token, keys a query, the share of full
attention on those keys, seconds.

    megasparse bench decoder --model MODEL --texts held_out/ --length 4096 --json decoder.json \\
      --arm 'full={"kind": "full"}' --arm 'window, sinks={"kind": "local", "chunk": 128, "sinks": 4}' \\
      --arm 'oracle={"best": 96, "window": 96, "sinks": 4}' --arm taught=TAUGHT

An arm is settings of `megasparse replace-attention` for MODEL, a replaced folder, or an oracle: the `best` keys of each
head beside a window and the first tokens. Arms that draw are measured once for each of --seeds; folders of several
seeds may share a NAME. One window of --length tokens is taken from the beginning of every text. Rows that FILE holds
already are not measured again, so the command can be stopped. With --passkey every arm also has so many trials of
passkey retrieval: a number hidden at a drawn depth of the first text, --length tokens long, and asked for at its end.
"""

import argparse
from pathlib import Path
from typing import Any

from megasparse.cli.arguments import add_texts, positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="folder of a pretrained decoder")
    add_texts(parser)
    parser.add_argument("--length", type=positive, default=4096, help="tokens of each text (default: %(default)s)")
    parser.add_argument(
        "--arm", action="append", required=True, metavar="NAME=VALUE", help="what to measure; may be repeated"
    )
    parser.add_argument("--seeds", type=positive, default=1, metavar="N", help="of arms that draw (default: 1)")
    parser.add_argument("--passkey", type=int, default=0, metavar="N", help="trials of passkey retrieval (default: 0)")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="where the rows are kept")


def run(args: argparse.Namespace) -> None:
    from megasparse.hub import require_transformers

    require_transformers()
    from transformers.utils.logging import disable_progress_bar

    from megasparse.benchmarks.decoder_table import measured, table

    disable_progress_bar()
    arms = [arm_of(given) for given in args.arm]
    print(table(measured(args.model, arms, args.texts, args.length, args.seeds, args.passkey, args.json)))


def arm_of(given: str) -> Any:
    """Read NAME=VALUE. Raises ConfigError for what is none."""
    from megasparse.benchmarks.decoders import Arm
    from megasparse.config.strict_json import parse
    from megasparse.errors import ConfigError

    name, equals, value = given.partition("=")
    hint = 'Write NAME={"kind": "full"}, NAME=FOLDER or NAME={"best": 96, "window": 96, "sinks": 4}'
    if not (name and equals and value):
        raise ConfigError("--arm", f"{given} names no attention", hint)
    if not value.startswith("{"):
        return Arm(name, Path(value))
    attention = parse(value, "--arm")
    if not isinstance(attention, dict) or ("best" in attention and attention.keys() != {"best", "window", "sinks"}):
        raise ConfigError("--arm", f"{value} is no attention", hint)
    return Arm(name, attention)
