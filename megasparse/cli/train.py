"""Commands that train models, predict costs, list configurations, and compare and report runs."""

import argparse
import json
import math
import sys
from pathlib import Path

from megasparse.cli.arguments import (
    add_config,
    add_overrides,
    add_start,
    add_training,
    config_from,
    require_config,
    require_data,
    require_paths,
    require_task,
)
from megasparse.config.files import shipped_configs
from megasparse.config.messages import show
from megasparse.errors import ConfigError, UserError, positive, whole
from megasparse.files import write_file


def add_pretrain(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_training(parser)
    add_start(parser)
    texts = "text, or JSON lines with a field `text` or conversations, prepared once in run.directory; or shards"
    add("--data", metavar="TEXTS", help=texts)
    add("--gpus", type=positive, metavar="N", help="with --dry-run: also plan the run for N A100 GPUs")


def pretrain(args: argparse.Namespace) -> None:
    """Pretrain a decoder, an encoder or an encoder-decoder.

        megasparse pretrain quickstart                                     # one process
        megasparse pretrain quickstart --dry-run                           # a few steps on dummy data
        torchrun --nproc-per-node 2 --max-restarts 3 -m megasparse pretrain quickstart    # two, restarted if one dies
        deepspeed launch/pretrain.py --config configs/quickstart.json      # every GPU of this machine, or its CPU
        megasparse pretrain yoso_table3 --start models/roberta-base   # a RoBERTa's weights, another attention
        megasparse pretrain decoder_64k --start runs/smollm2 --data my_books/    # a downloaded decoder, your own texts
        megasparse pretrain decoder_64k --start runs/smollm2 --data chats.jsonl  # conversations, loss on the answers

    Run the same command again to resume from the newest checkpoint. After SIGTERM, SIGINT or SIGUSR1 the run saves a
    checkpoint and stops at the end of the current step.
    """
    if args.gpus is not None and not args.dry_run:
        raise ConfigError("--gpus", f"{args.gpus} is only for --dry-run", "Start the ranks with torchrun or deepspeed")
    checked = require_config(args)
    require_paths(args.data, None if args.resume in ("auto", "never") else args.resume)
    if args.data is None and not (args.dry_run or args.print_config):
        require_data(checked)
    from megasparse.config.schema import Config
    from megasparse.training.stopping.signals import StopSignals

    config = config_from(args, Config)
    if args.start is not None and args.resume != "auto":
        raise ConfigError("--start", f"cannot be combined with --resume {args.resume}", "Remove one of them")
    signals = None if args.dry_run else StopSignals()
    if signals is not None:
        signals.follow_launcher()
    from megasparse.planning.dry_run import dry_run_report
    from megasparse.runs.data import from_data, open_data
    from megasparse.runs.pretraining import pretrain

    if args.dry_run:
        try:
            config = from_data(config)
            if args.data is None:
                open_data(config)
        except UserError as error:
            print(f"warning: training would end with this error: {error}", file=sys.stderr)
        for part in dry_run_report(config, args.gpus):
            print(part, flush=True)
        return
    options = {"resume": args.resume, "allow_changed_config": args.allow_changed_config, "stop_at": args.stop_at}
    pretrain(config, start=args.start, texts=args.data, signals=signals, **options)


def add_finetune(parser: argparse.ArgumentParser) -> None:
    add_training(parser)
    parser.add_argument("--source", metavar="PATH", help="the task's files: task.source")


def finetune(args: argparse.Namespace) -> None:
    r"""Fine-tune a pretrained model on a downstream task, or on a CSV or JSONL file of your own.

        megasparse finetune finetune/quick                                 # a small model, the shipped table: a minute
        megasparse finetune finetune/reviews                               # the quickstart's model, the same table
        megasparse finetune finetune/reviews --set task.source=mine.csv --set 'task.text=["review"]' \
          --set task.label=stars
        megasparse finetune finetune/own_data_4k --source reviews.csv \
          --set 'task.text=["review"]' --set task.label=stars --set start.huggingface=models/encoder
        megasparse finetune glue/sst2                                      # finetune/glue_sst2, its data from the Hub
        megasparse finetune glue/sst2 --source data/glue                   # official files, or a saved dataset
        deepspeed launch/finetune.py --config configs/finetune/glue_mnli.json    # every GPU of this machine

    Run the same command again to resume from the newest checkpoint. `megasparse evaluate --task` and `megasparse
    predict` use the best checkpoint.
    """
    name = f"finetune/{str(args.name).replace('/', '_')}"
    if "/" in str(args.name) and name in shipped_configs():  # a dataset of the Hub, such as glue/sst2
        args.name, args.source = name, args.source or "hub"
    if args.source is not None:
        args.set.append(f"task.source={json.dumps(args.source)}")
    checked = require_config(args, task=True)
    require_paths(args.source, None if args.resume in ("auto", "never") else args.resume)
    if not args.print_config:
        require_task(checked)
    from megasparse.config.finetuning import FinetuneConfig
    from megasparse.training.stopping.signals import StopSignals

    config = config_from(args, FinetuneConfig)
    signals = None if args.dry_run else StopSignals()
    if signals is not None:
        signals.follow_launcher()
    from megasparse.runs.finetuning import finetune, finetune_dry_run

    if args.dry_run:
        print(finetune_dry_run(config))
        return
    resume, changed = args.resume, args.allow_changed_config
    finetune(config, resume=resume, allow_changed_config=changed, stop_at=args.stop_at, signals=signals)


def add_plan(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_config(parser)
    add_start(parser)
    add("--gpus", type=whole, required=True, metavar="N", help="number of GPUs on all nodes")
    add("--gpus-per-node", type=whole, default=8, metavar="N", help="GPUs per node (%(default)s)")
    add("--gpu-memory", metavar="SIZE", help="memory per GPU, such as 80GiB (default: --gpu's memory)")
    host = "CPU memory per node, such as 256GB: choose tiles and recomputed layers that fit it and --gpu-memory"
    add("--host-memory", metavar="SIZE", help=host)
    add("--gpu", default="A100", metavar="NAME", help="A100, H100, H200, or any with --peak-tflops")
    add("--peak-tflops", type=float, metavar="X", help="dense bf16 peak per GPU")
    add("--json", action="store_true", help="print JSON: bytes, seconds, FLOPs")


def plan(args: argparse.Namespace) -> None:
    """Predict memory, FLOPs, seconds by part, and the longest sequence that fits, for a pretraining run.

        megasparse plan reformer_64k --gpus 8 --gpu-memory 80GiB
        megasparse plan reformer_64k --set parallel.sequence=8 --gpus 64 --gpu-memory 80GiB --json
        megasparse plan llama_8b_1m --gpus 8 --gpu H100
        megasparse plan decoder_64k --start FOLDER --gpus 1 --gpu-memory 24GB --host-memory 128GB

    It needs neither a GPU nor memory for the model, because allocations are only counted. docs/scaling.md explains the
    formulae. FOLDER needs only the config.json of a decoder.
    """
    for option in ("gpus", "gpus_per_node", "peak_tflops"):
        value = getattr(args, option)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ConfigError(f"--{option.replace('_', '-')}", f"{show(value)} is not above 0", "Give a number above 0")
    config = require_config(args)
    from megasparse.planning.hardware import hardware, micro_batches, parse_bytes

    micro_batches(config, args.gpus, args.gpus_per_node)
    gpu = hardware(args.gpu, args.peak_tflops)
    memory = parse_bytes("--gpu-memory", args.gpu_memory) if args.gpu_memory else None
    from megasparse.config.schema import Config

    config = config_from(args, Config, weights=False)
    from megasparse.planning.plan import Plan

    plan = Plan(config, gpu, args.gpus, args.gpus_per_node, memory)
    if args.host_memory:
        plan = plan.fitted(parse_bytes("--host-memory", args.host_memory))
    print(json.dumps(plan.as_json(), indent=2) if args.json else "\n".join(plan.lines()))


def add_quickstart(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--small", action="store_true", help="train for only a minute, to see all steps")


def quickstart(args: argparse.Namespace) -> None:
    """Prepare real text, train a small model on it, evaluate it and generate a sample, on any machine.

        megasparse quickstart            # 8 minutes on two idle cores; writes data/quickstart and runs/quickstart
        megasparse quickstart --small    # all steps in two or three minutes; writes runs/quickstart_small
        make quickstart                  # the first command in a checkout, after installing into .venv

    Each step is an ordinary megasparse command and is printed before it runs. When you run it again, finished steps are
    skipped, and training resumes.
    """
    from megasparse.runs.quickstart import quickstart

    quickstart(args.small)


def add_configs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("part", nargs="?", default="", help="list only names that contain this")


def configs(args: argparse.Namespace) -> None:
    """List the names of the shipped configurations with their kind, length and data.

    megasparse configs                                        # all configurations
    megasparse configs finetune                               # names that contain "finetune"
    megasparse pretrain reformer_64k --print-config           # all keys of one configuration
    """
    from megasparse.config.files import read_values, shipped_configs

    for name, file in shipped_configs().items():
        if args.part not in name or name.startswith("comparisons/"):
            continue
        values = read_values(file)
        task, model, data = (values.get(section, {}) for section in ("task", "model", "data"))
        kind = model.get("kind", "decoder").replace("_", "-")
        if task:
            purpose = f"fine-tuning on {task['name']}, {task.get('max_length', 512)} tokens"
        else:
            purpose = f"{kind}, {data['sequence_length']:,} tokens, {data['path']}"
        print(f"{name:36} {purpose}")


def add_compare(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("comparison", metavar="COMPARISON", help="name or file of a comparison")
    add("--seeds", type=whole, nargs="+", default=[0], help="one run of each arm per seed (default: 0)")
    add("--arms", nargs="+", help="run only these arms; by default all")
    add("--corpora", nargs="+", help="run only these corpora of a comparison; by default all")
    add_overrides(parser)
    add("--jobs", type=positive, default=1, help="parallel runs, each on one CPU thread (default: 1)")
    add("--output", type=Path, metavar="DIR", help="folder of the runs (default: runs/COMPARISON)")
    add("--dry-run", action="store_true", help="check the arms and print the commands; run nothing")


def compare(args: argparse.Namespace) -> None:
    """Train and evaluate several attention mechanisms alike on one task, and print the table.

        megasparse compare comparisons/duplication
        megasparse compare comparisons/masked_text --seeds 0 1 2 --jobs 2
        megasparse compare comparisons/duplication --arms full lha        (two minutes on a CPU)
        megasparse compare comparisons/duplication --arms lha --set training.steps=3000 --output runs/longer
        megasparse compare comparisons/reformer_table2 --dry-run          (print the commands)
        megasparse compare comparisons/pays --corpora client recall --seeds 0 1 2 --arms "window 64" n-gram

    A comparison is a JSON file with the keys `prepare`, arguments of `megasparse prepare-data`; `config`, the run's
    configuration; `evaluate`, further arguments of `megasparse evaluate`, or name -> arguments for several evaluations;
    and `arms`, name -> list of `section.key=value`. Arms read the data in the same order, and shared weights have the
    same initial values. Instead of `prepare`, `corpora` may define several corpora, each with settings for all arms and
    with its own folder. Finished steps are skipped. The results are OUTPUT/table.md and, if evaluation.every is above
    0, OUTPUT/curves.svg; bits/token equals bits/dim if tokens are bytes or pixels.
    """
    import shlex

    from megasparse.runs.comparison import load, plot, runs_of, table, train_all

    parts = load(args.comparison, args.corpora)
    if args.set and args.output is None:
        raise ConfigError("--set", "changes the runs of the comparison", "Choose another folder with --output")
    for corpus, part in parts.items():
        folder = (args.output or Path("runs") / Path(args.comparison).stem) / corpus
        runs = runs_of(part, folder, args.arms, args.seeds, args.set)
        if args.dry_run:
            trainings = [words for run in runs for words in (run.training, *run.evaluations.values())]
            for words in (["prepare-data", *part["prepare"]], *trainings):
                print(shlex.join(["megasparse", *words]))
            continue
        lines = table(train_all(part, runs, folder / "prepare.log", args.jobs))
        write_file(folder / "table.md", "\n".join(lines) + "\n")
        plot(folder, runs)
        print(*[f"{corpus}:"] * bool(corpus), *lines, sep="\n")


def add_report(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    add("--output", type=Path, metavar="FILE", help="default: report.html in the first run's folder")


def report(args: argparse.Namespace) -> None:
    """Write a self-contained HTML report about one or several runs.

        megasparse report runs/quickstart                              # writes runs/quickstart/report.html
        megasparse report runs/lsh runs/full --output comparison.html  # curves of several runs in the same charts

    The report contains headline numbers, curves of all scalars (docs/reference/scalars.md) with incidents marked,
    attention maps, samples, checkpoints, and the configuration with its differences from the defaults. Runs that are
    still training, crashed or were restarted are reported up to their last step.
    """
    from megasparse.evaluation.outputs import write_output
    from megasparse.runs.report import page, read_run

    runs = [read_run(path) for path in args.run]
    output = args.output or args.run[0] / "report.html"
    write_output(output, page(runs).encode(errors="replace"))
    print(f"{output}: {output.stat().st_size:,} bytes")
