"""Commands that train, and that plan a training."""

import argparse
import json
import math

from megasparse.cli.arguments import add_config, add_start, add_training, config_from
from megasparse.config.finetuning import FinetuneConfig
from megasparse.config.messages import show
from megasparse.config.schema import Config
from megasparse.errors import ConfigError


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
        torchrun --nproc-per-node 2 --max-restarts 3 -m megasparse pretrain quickstart    # two, restarted if one dies
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
