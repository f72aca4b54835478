"""Write a checkpoint as a HuggingFace model.

    python tools/convert_to_hf.py --checkpoint runs/quickstart --output export/quickstart
    python tools/convert_to_hf.py --checkpoint runs/enwik8/checkpoints/00020000 --output export/enwik8 \\
        --evaluation runs/enwik8/test.json
    python tools/convert_to_hf.py --checkpoint runs/local --to reformer --output export/reformer

`megasparse`, the default, is any model of ours: its folder holds the code, and AutoModelForCausalLM,
AutoModelForMaskedLM or AutoModelForSeq2SeqLM load it with trust_remote_code=True where only torch and transformers are
installed; AutoModelForSequenceClassification and pipeline(), too, but an encoder-decoder's. `bert`, `reformer` and
`yoso` are transformers' own architectures, for the models that they can express. The tokenizer goes along.

The written model is run beside ours on the same text, and OUTPUT appears only where their outputs agree to 1e-4.
"""

import argparse
from pathlib import Path

from megasparse.errors import report_user_errors
from megasparse.hub import require_transformers
from megasparse.hub.export import to_hf
from megasparse.hub.formats import FORMATS


def arguments() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="convert_to_hf.py", description=__doc__, formatter_class=raw)
    parser.add_argument(
        "--checkpoint", required=True, metavar="DIR", help="a checkpoint's folder, or a run's (its newest checkpoint)"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="OUT", help="the folder to write, a new one")
    parser.add_argument(
        "--to", choices=sorted(FORMATS), default="megasparse", help="architecture (default: %(default)s)"
    )
    parser.add_argument(
        "--evaluation",
        type=Path,
        metavar="FILE",
        help="result of launch/evaluate.py for the model card, by default those in the run's folder",
    )
    return parser.parse_args()


@report_user_errors
def main() -> None:
    args = arguments()
    require_transformers()
    from transformers.utils import logging

    logging.disable_progress_bar()
    print(f"wrote {to_hf(args.checkpoint, args.output, args.to, args.evaluation)}")


if __name__ == "__main__":
    main()
