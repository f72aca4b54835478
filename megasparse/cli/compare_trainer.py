"""Fine-tune a HuggingFace model with transformers' own Trainer, on the same task, examples and settings as `megasparse
finetune`, and report how good it is: an independent implementation to compare with.

    megasparse compare-trainer finetune/glue_rte --seeds 3 --ours runs/rte/seed*
    megasparse compare-trainer finetune/glue_rte --set training.steps=100 --json trainer.json

The configuration is a fine-tuning one that begins from `start.huggingface`. Readers of the task's files and the choice
of what is held out are ours; tokenizer, padding, model, head, order of examples, optimizer and loop are transformers'.
`start.attention` is left out: the model keeps its own attention. The weights are saved nowhere. It validates as often
as `megasparse finetune` does and, like it, reports the best one by `evaluation.metric`. Needs accelerate: pip install
"megasparse[tasks]".
"""

import argparse
from pathlib import Path

from megasparse.cli.arguments import add_config, add_json, config_from
from megasparse.config.finetuning import FinetuneConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="run.seed and the N-1 after it (default: 1)")
    parser.add_argument("--ours", type=Path, nargs="+", default=[], metavar="RUN", help="finished runs to compare with")
    add_json(parser)


def run(args: argparse.Namespace) -> None:
    config = config_from(args, FinetuneConfig)
    from megasparse.tasks.trainer import compare_with_trainer

    compare_with_trainer(config, args.seeds, args.ours, args.json)
