"""Plan configurations on 1 to 512 GPUs: memory, seconds by part, traffic, goodput, cost; and published steps beside it.

    megasparse bench scaling llama_8b_1m llama_8b_1m_lha llama_1b_256k --json docs/measured/scaling.json  # 2 minutes
    megasparse bench scaling reformer_64k --gpus 8,64 --price H100=2.5

Each number of GPUs is planned with as many ranks a sequence as a node has, and as the heads allow; the global batch is
one micro-batch for each such group. Counted, not measured: see megasparse plan. Costs are of a billion tokens.
"""

import argparse

from megasparse.cli.arguments import add_json
from megasparse.config.messages import show
from megasparse.errors import ConfigError
from megasparse.planning.hardware import GPUS

PRICES = "A100=1.5,H100=2.5"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("configs", nargs="+", metavar="CONFIG", help="names of configurations, or files")
    parser.add_argument("--gpus", default="1,8,64,512", metavar="N,N", help="default: %(default)s")
    parser.add_argument(
        "--price", default=PRICES, metavar="GPU=X", help="GPUs, and the price of each an hour (default: %(default)s)"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> None:
    gpus = [_number("--gpus", number) for number in args.gpus.split(",")]
    prices = {}
    for part in args.price.split(","):
        gpu, _, price = part.partition("=")
        if gpu not in GPUS:
            raise ConfigError("--price", f"{show(gpu)} is not one of {', '.join(GPUS)}", f"Write it as in {PRICES}")
        prices[gpu] = _number("--price", price)
    from megasparse.benchmarks.scaling import bench_scaling

    for line in bench_scaling(args.configs, [int(number) for number in gpus], prices, args.command, args.json):
        print(line, flush=True)


def _number(option: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf") or (option == "--gpus" and number % 1):
        raise ConfigError(option, f"{show(text)} is no number above 0", "Write numbers such as 1,8,64")
    return number
