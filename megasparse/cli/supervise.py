"""Run a training script as several ranks that are stopped, ended and started again together.

    megasparse supervise --ranks 2 pretrain quickstart
    megasparse supervise --ranks 8 --restarts 3 pretrain reformer_64k --set data.path=data/enwik8
    megasparse supervise --ranks 8 --nodes 2 --node-rank 0 --address host:29500 pretrain reformer_64k
    megasparse supervise --ranks 8 --restarts 3 --min-ranks 4 pretrain reformer_64k
    megasparse supervise --ranks 2 my_script.py --config my_run.json
    megasparse supervise --ranks 2 evaluate --checkpoint runs/quickstart --set parallel.sequence=2

With --min-ranks and several nodes the run goes on without a node that has vanished, and takes it in when its command is
started again: docs/nodes.md.

SIGTERM, SIGINT (Ctrl-C) and SIGUSR1 are passed on to every rank once, and the saves that follow may take as long as
they take; a second SIGTERM or SIGINT ends all within 5 s. When a rank dies, the others are ended within 5 s, and the
last line names the cause. Exit codes are those of the ranks: 0 done or saved, 2 a mistake, 3 a checkpoint could
not be written, 4 diverged, 5 hung, 6 lost a rank of another node, 128 + n killed by signal n or by a second one.
"""

import argparse
import sys
from pathlib import Path

from megasparse.cli.arguments import positive
from megasparse.errors import ConfigError, UserError

COMMANDS = ("pretrain", "evaluate", "generate")
"""Subcommands that several ranks run."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=positive, default=1, metavar="N", help="processes on this node, one a GPU (1)")
    parser.add_argument(
        "--restarts",
        type=natural,
        default=0,
        metavar="N",
        help="restart after a failure that this may cure, at most N times in a row without a new checkpoint (0)",
    )
    parser.add_argument(
        "--min-ranks",
        type=positive,
        metavar="N",
        help="go on with fewer ranks, of all nodes, where restarts do not help, a node is gone or the batch does not "
        "divide; try all again every hour, and nodes when they are back (all of them: never with fewer)",
    )
    parser.add_argument("--nodes", type=positive, default=1, metavar="N", help="nodes, each with a supervisor (1)")
    parser.add_argument("--node-rank", type=natural, default=0, metavar="N", help="which of them this is (0)")
    parser.add_argument(
        "--address", type=host_and_port, metavar="HOST:PORT", help="node 0 and a free port there; one node needs none"
    )
    parser.add_argument("script", help='"pretrain", "evaluate", "generate", or a Python script that trains')
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")


def natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def host_and_port(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT, such as node0:29500")
    return host, int(port)


def run(args: argparse.Namespace) -> None:
    from megasparse.training.hosts import HostSupervisor
    from megasparse.training.stopping.watchdog import HEARTBEATS
    from megasparse.training.supervisor import NodeLayout, Supervisor, ranks_to_go_on_with, report, supervised_config

    program, trains = [args.script], True
    if not Path(args.script).is_file():
        if args.script not in COMMANDS:
            known = ", ".join(COMMANDS)
            raise UserError(f"{args.script}: no such script. Give {known}, or the path of a Python script")
        program, trains = ["-m", "megasparse", args.script], args.script == "pretrain"
        if trains and args.arguments and not args.arguments[0].startswith("-"):
            args.arguments.insert(0, "--config")
    if args.node_rank >= args.nodes:
        raise UserError(f"--node-rank {args.node_rank}: nodes are counted from 0. Give less than --nodes {args.nodes}")
    if args.nodes > 1 and args.address is None:
        raise UserError(
            f"--address: is not given, and --nodes is {args.nodes}. Give node 0 and a free port, host:29500"
        )
    layout = NodeLayout(args.ranks, args.nodes, args.node_rank, args.address)
    command = [sys.executable, *program, *args.arguments]
    if not trains:
        for option, given in (("--restarts", args.restarts), ("--min-ranks", args.min_ranks)):
            if given:
                problem = f"{args.script} saves nothing that another start could go on from"
                raise ConfigError(f"{option} {given}", problem, "Leave it out")
        sys.exit(Supervisor(command, layout, None).run())
    config = supervised_config(args.arguments, args.restarts)
    sizes = ranks_to_go_on_with(config, layout.world_size, args.min_ranks)
    if args.min_ranks is not None:
        report(f"numbers of ranks that this run may have: {', '.join(map(str, sizes))}")
    directory = Path(config.run.directory)
    place = (command, layout, directory / "checkpoints", args.restarts, sizes)
    if args.nodes > 1 and args.min_ranks is not None:
        sys.exit(HostSupervisor(*place, directory / HEARTBEATS).run())
    sys.exit(Supervisor(*place).run())
