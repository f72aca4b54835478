"""Fine-tune a pretrained model on a downstream task, or on a CSV or JSONL file of your own.

    megasparse finetune finetune/quick                                 # a small model, the shipped table: a minute
    megasparse finetune finetune/reviews                               # the quickstart's model, the same table
    megasparse finetune finetune/reviews --set task.source=mine.csv --set 'task.text=["review"]' --set task.label=stars
    megasparse finetune finetune/own_data_4k --set task.source=reviews.csv \\
      --set 'task.text=["review"]' --set task.label=stars --set start.huggingface=models/encoder
    deepspeed launch/finetune.py --config configs/finetune/glue_mnli.json    # every GPU of this machine

Started again, the run resumes from its newest checkpoint. `megasparse evaluate --task` and `megasparse predict` read
its best one.
"""

import argparse

from megasparse.cli.arguments import add_training, config_from
from megasparse.config.finetuning import FinetuneConfig
from megasparse.tasks import build_task
from megasparse.training.stopping.signals import StopSignals


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_training(parser)


def run(args: argparse.Namespace) -> None:
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
