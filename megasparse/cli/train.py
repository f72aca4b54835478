"""Commands that train, plan a training, and list, compare and report runs."""

import argparse
import json
import math
import sys
from pathlib import Path

from megasparse.cli.arguments import add_config, add_overrides, add_start, add_training, config_from
from megasparse.config.files import shipped_configs
from megasparse.config.finetuning import FinetuneConfig
from megasparse.config.messages import show
from megasparse.config.schema import Config
from megasparse.errors import ConfigError, UserError, positive, whole
from megasparse.files import write_file


def add_pretrain(parser: argparse.ArgumentParser) -> None:
    add_training(parser)
    add_start(parser)
    texts = "a file or folder of text or of JSON lines with a field `text`, prepared once into run.directory; or shards"
    parser.add_argument("--data", metavar="TEXTS", help=texts)


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
        problem = f"the weights of --resume {args.resume} are asked for too"
        raise ConfigError("--start", problem, "Leave one of them out")
    signals = StopSignals()
    if not args.dry_run:
        signals.follow_launcher()
    # Imported when the configuration is known to be right: a mistake in it should be reported at once.
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
        for part in dry_run_report(config):
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

    Started again, the run resumes from its newest checkpoint. `megasparse evaluate --task` and `megasparse predict`
    read its best one.
    """
    from megasparse.tasks.catalog import build_task
    from megasparse.training.stopping.signals import StopSignals

    name = f"finetune/{str(args.name).replace('/', '_')}"
    if "/" in str(args.name) and name in shipped_configs():  # a dataset of the Hub, such as glue/sst2
        args.name, args.source = name, args.source or "hub"
    if args.source is not None:
        args.set.append(f"task.source={json.dumps(args.source)}")
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
    parser.add_argument("--gpus", type=whole, required=True, metavar="N", help="GPUs of all nodes together")
    parser.add_argument("--gpus-per-node", type=whole, default=8, metavar="N", help="GPUs of one node (%(default)s)")
    parser.add_argument("--gpu-memory", metavar="SIZE", help="memory of one GPU, such as 80GiB; by default --gpu's")
    parser.add_argument("--gpu", default="A100", metavar="NAME", help="A100, H100 or H200, or another with its peak")
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


def add_configs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("part", nargs="?", default="", help="list only names that contain this")


def configs(args: argparse.Namespace) -> None:
    """List the shipped configurations by their names, each with its kind, its size and where it writes.

    megasparse configs                                        # all of them
    megasparse configs finetune                               # those whose name contains "finetune"
    megasparse pretrain reformer_64k --print-config           # one of them, whole
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
    parser.add_argument("comparison", metavar="COMPARISON", help="a comparison, by name or file")
    parser.add_argument("--seeds", type=whole, nargs="+", default=[0], help="a run of every arm for each (default: 0)")
    parser.add_argument("--arms", nargs="+", help="only these; by default all")
    parser.add_argument("--corpora", nargs="+", help="only these, of a comparison with several; by default all")
    add_overrides(parser)
    parser.add_argument("--jobs", type=positive, default=1, help="runs at a time, each on one CPU thread (default: 1)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder of the runs (default: runs/COMPARISON)")
    parser.add_argument("--dry-run", action="store_true", help="check the arms and print the commands; run nothing")


def compare(args: argparse.Namespace) -> None:
    """Train and evaluate several attention mechanisms alike on one task, and print the table.

        megasparse compare comparisons/duplication
        megasparse compare comparisons/masked_text --seeds 0 1 2 --jobs 2
        megasparse compare comparisons/duplication --arms full lha        (a CPU, two minutes)
        megasparse compare comparisons/duplication --arms lha --set training.steps=3000 --output runs/longer
        megasparse compare comparisons/reformer_table2 --dry-run          (what would be run)
        megasparse compare comparisons/pays --corpora client recall --seeds 0 1 2 --arms "window 64" n-gram

    A comparison is a JSON file: `prepare`, the arguments of `megasparse prepare-data` that make the data; `config`,
    the run's configuration; `evaluate`, further arguments of `megasparse evaluate`, or several such lists, each with
    its name; and `arms`, name -> what differs, as `section.key=value` each. Arms differ in nothing else: the data come
    in the same order, and weights that arms share start alike. Every step is an ordinary command. What is done already
    is not done again, so an interrupted comparison continues. In place of `prepare`, `corpora` names several, each
    with settings of its own, which all arms share, and a folder of its own. Results are OUTPUT/table.md and, of
    configurations with evaluation.every above 0, OUTPUT/curves.svg.
    """
    import shlex

    from megasparse.runs.comparison import load, plot, runs_of, table, train_all

    parts = load(args.comparison, args.corpora)
    if args.set and args.output is None:
        raise ConfigError("--set", "makes other runs than the comparison's own", "Give them a folder with --output")
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
    parser.add_argument("run", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: report.html in the first run's folder")


def report(args: argparse.Namespace) -> None:
    """Write a page about a run to look at and to pass on: one HTML file that needs nothing but itself.

        megasparse report runs/quickstart                              # writes runs/quickstart/report.html
        megasparse report runs/lsh runs/full --output comparison.html  # curves of several runs in the same charts

    Headline numbers, curves of all scalars (docs/reference/scalars.md) with incidents marked on them, attention maps
    and samples, incidents, ranks, checkpoints, the configuration with what differs from the defaults. A run that is
    under way, has crashed or was restarted is shown as far as it got. Long curves keep the least and the greatest value
    of every stretch.
    """
    from megasparse.evaluation.outputs import whole_file
    from megasparse.runs.report import page, read_run

    runs = [read_run(path) for path in args.run]
    output = args.output or args.run[0] / "report.html"
    with whole_file(output) as file:
        file.write(page(runs).encode(errors="replace"))
    print(f"{output}: {output.stat().st_size:,} bytes")
