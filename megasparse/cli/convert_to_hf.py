"""Write a checkpoint as a HuggingFace model.

    megasparse convert to-hf --checkpoint runs/quickstart --output export/quickstart
    megasparse convert to-hf --checkpoint runs/enwik8/checkpoints/00020000 --output export/enwik8 \\
      --evaluation runs/enwik8/test.json
    megasparse convert to-hf --checkpoint runs/local --to reformer --output export/reformer
    megasparse convert to-hf --checkpoint runs/smollm --to llama --output export/smollm

`megasparse`, the default, takes any of our models: AutoModelForCausalLM, AutoModelForMaskedLM or AutoModelForSeq2SeqLM
load the folder with trust_remote_code=True where megasparse is installed; so do AutoModelForSequenceClassification and
pipeline(), except for an encoder-decoder. The others are
transformers' own architectures, for the models that they can express. The tokenizer is included, of an imported decoder
with its chat template.

The written model is run beside ours on the same text, and OUT appears only where their outputs agree to 1e-4.
"""

import argparse
from pathlib import Path

from megasparse.cli.arguments import add_checkpoint_alone
from megasparse.hub.formats import FORMATS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_checkpoint_alone(parser)
    parser.add_argument("--output", type=Path, required=True, metavar="OUT", help="the folder to write, a new one")
    parser.add_argument(
        "--to", choices=sorted(FORMATS), default="megasparse", help="architecture (default: %(default)s)"
    )
    parser.add_argument(
        "--evaluation",
        type=Path,
        metavar="FILE",
        help="result of `megasparse evaluate --json` for the model card; by default those in the run's folder",
    )


def run(args: argparse.Namespace) -> None:
    from megasparse.hub import require_transformers

    require_transformers()
    from transformers.utils import logging

    from megasparse.hub.export import to_hf

    logging.disable_progress_bar()
    print(f"wrote {to_hf(args.checkpoint, args.output, args.to, args.evaluation)}")
