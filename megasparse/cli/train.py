"""Commands that train, and that plan a training."""

import argparse
import json
import math
import sys
from pathlib import Path

from megasparse.cli.arguments import add_config, add_start, add_training, config_from, positive
from megasparse.config.finetuning import FinetuneConfig
from megasparse.config.messages import show
from megasparse.config.schema import Config
from megasparse.errors import ConfigError, UserError


def add_pretrain(parser: argparse.ArgumentParser) -> None:
    add_training(parser)
    add_start(parser)
    parser.add_argument(
        "--data",
        metavar="TEXTS",
        help="text files, or JSON lines with a field `text`: a file or a folder, prepared once into run.directory;"
        " or a folder of shards",
    )


def pretrain(args: argparse.Namespace) -> None:
    """Pretrain a decoder, an encoder or an encoder-decoder.

        megasparse pretrain quickstart                                     # one process
        megasparse pretrain quickstart --dry-run                           # one step on dummy data
        megasparse supervise --ranks 2 --restarts 3 pretrain quickstart    # several, looked after
        deepspeed launch/pretrain.py --config configs/quickstart.json      # every GPU of this machine, or its CPU
        megasparse pretrain yoso_table3 --start models/bert-base-uncased   # a BERT's weights, another attention
        megasparse pretrain decoder_64k --start runs/smollm2 --data my_books/    # a downloaded decoder, one's own texts

    Started again, the run resumes from its newest checkpoint in `run.directory`. SIGTERM, SIGINT and SIGUSR1 make it
    save and end after the current step.
    """
    from megasparse.training.stopping.signals import StopSignals

    config = config_from(args, Config)
    if args.start is not None and args.resume != "auto":
        raise ConfigError(
            "--start", f"the weights of --resume {args.resume} are asked for too", "Leave one of them out"
        )
    signals = StopSignals()
    if not args.dry_run:
        signals.follow_launcher()
    # Imported when the configuration is known to be right: a mistake in it should be reported at once.
    from megasparse.runs.pretraining import pretrain, pretrain_dry_run

    if args.dry_run:
        for part in pretrain_dry_run(config):
            print(part, flush=True)
        return
    resume, changed = args.resume, args.allow_changed_config
    pretrain(
        config,
        resume=resume,
        start=args.start,
        texts=args.data,
        allow_changed_config=changed,
        stop_at=args.stop_at,
        signals=signals,
    )


def add_finetune(parser: argparse.ArgumentParser) -> None:
    add_training(parser)


def finetune(args: argparse.Namespace) -> None:
    r"""Fine-tune a pretrained model on a downstream task, or on a CSV or JSONL file of your own.

        megasparse finetune finetune/quick                                 # a small model, the shipped table: a minute
        megasparse finetune finetune/reviews                               # the quickstart's model, the same table
        megasparse finetune finetune/reviews --set task.source=mine.csv --set 'task.text=["review"]' \
          --set task.label=stars
        megasparse finetune finetune/own_data_4k --set task.source=reviews.csv \
          --set 'task.text=["review"]' --set task.label=stars --set start.huggingface=models/encoder
        deepspeed launch/finetune.py --config configs/finetune/glue_mnli.json    # every GPU of this machine

    Started again, the run resumes from its newest checkpoint. `megasparse evaluate --task` and `megasparse predict`
    read its best one.
    """
    from megasparse.tasks import build_task
    from megasparse.training.stopping.signals import StopSignals

    config = config_from(args, FinetuneConfig)
    signals = StopSignals()
    if not args.dry_run:
        signals.follow_launcher()
    build_task(config.task)  # a file that is missing, or has other columns, is reported at once too
    # Imported when the configuration is known to be right: a mistake in it should be reported at once.
    from megasparse.runs.finetuning import finetune, finetune_dry_run

    if args.dry_run:
        print(finetune_dry_run(config))
        return
    resume, changed = args.resume, args.allow_changed_config
    finetune(config, resume=resume, allow_changed_config=changed, stop_at=args.stop_at, signals=signals)


COMMANDS = ("pretrain", "evaluate", "generate")
"""Subcommands that several ranks run."""


def natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def host_and_port(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT, such as node0:29500")
    return host, int(port)


def add_supervise(parser: argparse.ArgumentParser) -> None:
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


def supervise(args: argparse.Namespace) -> None:
    """Run a training script as several ranks that are stopped, ended and started again together.

        megasparse supervise --ranks 2 pretrain quickstart
        megasparse supervise --ranks 8 --restarts 3 pretrain reformer_64k --set data.path=data/enwik8
        megasparse supervise --ranks 8 --nodes 2 --node-rank 0 --address host:29500 pretrain reformer_64k
        megasparse supervise --ranks 8 --restarts 3 --min-ranks 4 pretrain reformer_64k
        megasparse supervise --ranks 2 my_script.py --config my_run.json
        megasparse supervise --ranks 2 evaluate --checkpoint runs/quickstart --set parallel.sequence=2

    With --min-ranks and several nodes the run goes on without a node that has vanished, and takes it in when its
    command is started again: docs/nodes.md.

    SIGTERM, SIGINT (Ctrl-C) and SIGUSR1 are passed on to every rank once, and the saves that follow may take as long
    as they take; a second SIGTERM or SIGINT ends all within 5 s. When a rank dies, the others are ended within 5 s,
    and the last line names the cause. Exit codes are those of the ranks: 0 done or saved, 2 a mistake, 3 a checkpoint
    could not be written, 4 diverged, 5 hung, 6 lost a rank of another node, 128 + n killed by signal n or by a second
    one.
    """
    from megasparse.training.hosts import HostSupervisor
    from megasparse.training.stopping.watchdog import HEARTBEATS
    from megasparse.training.supervisor import NodeLayout, Supervisor, ranks_to_go_on_with, report, supervised_config

    program, trains = [args.script], True
    if not Path(args.script).is_file():
        if args.script not in COMMANDS:
            choices = ", ".join(COMMANDS)
            raise UserError(f"{args.script}: no such script. Give {choices}, or the path of a Python script")
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
        for option, value in (("--restarts", args.restarts), ("--min-ranks", args.min_ranks)):
            if value:
                problem = f"{args.script} saves nothing that another start could go on from"
                raise ConfigError(f"{option} {value}", problem, "Leave it out")
        sys.exit(Supervisor(command, layout, None).run())
    config = supervised_config(args.arguments, args.restarts)
    sizes = ranks_to_go_on_with(config, layout.world_size, args.min_ranks)
    if args.min_ranks is not None:
        report(f"numbers of ranks that this run may have: {', '.join(map(str, sizes))}")
    directory = Path(config.run.directory)
    arguments = (command, layout, directory / "checkpoints", args.restarts, sizes)
    if args.nodes > 1 and args.min_ranks is not None:
        sys.exit(HostSupervisor(*arguments, directory / HEARTBEATS).run())
    sys.exit(Supervisor(*arguments).run())


def add_plan(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    add_start(parser)
    parser.add_argument("--gpus", type=int, required=True, metavar="N", help="GPUs of all nodes together")
    parser.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="GPUs of one node (%(default)s)")
    parser.add_argument("--gpu-memory", metavar="SIZE", help="memory of one GPU, such as 80GiB; by default --gpu's")
    parser.add_argument(
        "--gpu", default="A100", metavar="NAME", help="A100-80GB, H100 or H200, or another with its peak"
    )
    parser.add_argument("--peak-tflops", type=float, metavar="X", help="dense bf16 peak of one GPU")
    parser.add_argument("--json", action="store_true", help="print JSON: bytes, seconds, FLOPs")


def plan(args: argparse.Namespace) -> None:
    """Predict what a pretraining run will take: memory, FLOPs, seconds by part, and the longest sequence that fits.

        megasparse plan reformer_64k --gpus 8 --gpu-memory 80GiB
        megasparse plan reformer_64k --set parallel.sequence=8 --gpus 64 --gpu-memory 80GiB --json
        megasparse plan llama_8b_1m --gpus 8 --gpu H100
        megasparse plan decoder_64k --start runs/smollm2 --gpus 1 --gpu-memory 24GiB

    Needs no GPU and no memory of the model's size: the GPU kernels' allocations are counted, not made. docs/scaling.md
    has the formulae.
    """
    for option in ("gpus", "gpus_per_node", "peak_tflops"):
        value = getattr(args, option)
        if value is not None and not (math.isfinite(value) and value > 0):
            name = option.replace("_", "-")
            raise ConfigError(f"--{name}", f"{show(value)} is not above 0", "Give a number above 0")
    config = config_from(args, Config)
    from megasparse.planning.plan import Plan, hardware, parse_bytes

    memory = parse_bytes("--gpu-memory", args.gpu_memory) if args.gpu_memory else None
    plan = Plan(config, hardware(args.gpu, args.peak_tflops), args.gpus, args.gpus_per_node, memory)
    print(json.dumps(plan.as_json(), indent=2) if args.json else "\n".join(plan.lines()))


def add_quickstart(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--small", action="store_true", help="train for a minute, to see every step")


def quickstart(args: argparse.Namespace) -> None:
    """Go from nothing to a trained model, on any machine: real text, the real engine, held-out bits/dim, a sample.

        megasparse quickstart            # 9 minutes on two quiet cores; writes data/quickstart and runs/quickstart
        megasparse quickstart --small    # all steps in two or three minutes, into runs/quickstart_small
        make quickstart                  # the first in a checkout; installs into .venv first

    Each step is an ordinary command of megasparse and is printed before it runs. Run again, finished steps are not
    repeated: the corpus is not downloaded twice, and training resumes or reports that it is done.
    """
    from megasparse.runs.quickstart import quickstart

    quickstart(args.small)
