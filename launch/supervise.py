"""Run a training script as several ranks that are stopped, ended and started again together.

    python launch/supervise.py --ranks 2 launch/pretrain.py --config configs/quickstart.json
    python launch/supervise.py --ranks 8 --restarts 3 launch/pretrain.py --config configs/reformer_64k.json
    python launch/supervise.py --ranks 8 --nodes 2 --node-rank 0 --address host:29500 launch/pretrain.py --config ...

SIGTERM, SIGINT (Ctrl-C) and SIGUSR1 are passed on to every rank once, and the saves that follow may take as long as
they take; a second SIGTERM or SIGINT ends all within 5 s. When a rank dies, the others are ended within 5 s, and the
last line says what it died of. Exit codes are those of the ranks: 0 done or saved, 2 a mistake, 3 a checkpoint could
not be written, 4 diverged, 5 hung, 6 lost a rank of another node, 128 + n killed by signal n or by a second one.
"""

import argparse
import sys
from pathlib import Path

from megasparse.errors import UserError, report_user_errors
from megasparse.training.stopping.supervisor import NodeLayout, Supervisor, checkpoints_folder


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--ranks", type=whole, default=1, metavar="N", help="processes on this node, one a GPU (1)")
    parser.add_argument(
        "--restarts",
        type=whole_or_zero,
        default=0,
        metavar="N",
        help="start again after a failure that this may mend, at most N times in a row without a new checkpoint (0)",
    )
    parser.add_argument("--nodes", type=whole, default=1, metavar="N", help="nodes, each with its own supervisor (1)")
    parser.add_argument("--node-rank", type=whole_or_zero, default=0, metavar="N", help="which of them this is (0)")
    parser.add_argument(
        "--address", type=host_and_port, metavar="HOST:PORT", help="node 0 and a free port there; one node needs none"
    )
    parser.add_argument("script", help="launch/pretrain.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments, with --config")
    return parser.parse_args()


def whole_or_zero(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def whole(text: str) -> int:
    if not whole_or_zero(text):
        raise argparse.ArgumentTypeError("0 is not 1 or more")
    return int(text)


def host_and_port(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT, such as node0:29500")
    return host, int(port)


@report_user_errors
def main() -> None:
    args = arguments()
    if not Path(args.script).is_file():
        raise UserError(f"{args.script}: no such script. Name the one to run, such as launch/pretrain.py")
    if args.node_rank >= args.nodes:
        raise UserError(f"--node-rank {args.node_rank}: nodes are counted from 0. Give less than --nodes {args.nodes}")
    if args.nodes > 1 and args.address is None:
        raise UserError(
            f"--address: is not given, and --nodes is {args.nodes}. Give node 0 and a free port, host:29500"
        )
    place = NodeLayout(args.ranks, args.nodes, args.node_rank, args.address)
    checkpoints = checkpoints_folder(args.arguments, args.restarts)
    command = [sys.executable, args.script, *args.arguments]
    sys.exit(Supervisor(command, place, checkpoints, args.restarts).run())


if __name__ == "__main__":
    main()
