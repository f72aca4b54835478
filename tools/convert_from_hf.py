"""Turn a model of HuggingFace's (BERT, Reformer, YOSO, or one that convert_to_hf.py wrote) into a checkpoint to go on
from.

    python tools/convert_from_hf.py --model ~/models/reformer --output runs/imported
    python tools/convert_from_hf.py --model ~/models/bert-base-uncased --output runs/bert
    python tools/convert_from_hf.py --model google/reformer-enwik8 --first-byte 2 --output runs/imported
    python launch/pretrain.py --config runs/imported/config.json --set data.path=data/enwik8
    python launch/evaluate.py --checkpoint runs/imported --data data/enwik8

The third one is read from transformers' local cache: nothing is downloaded, and no code that comes with a model is
run. A tokenizer.json that lies with the model is copied into the output, as its data.tokenizer. Both models run on the
same tokens first, and nothing is written unless they agree. Takes the memory of both, and for a Reformer twice as much
again, in float64.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megasparse.config.load import build_config
from megasparse.errors import report_user_errors
from megasparse.hub import require_transformers


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="convert_from_hf.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, metavar="NAME_OR_DIR", help="its folder, or its name in the cache")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="a new folder, as of a run")
    parser.add_argument(
        "--first-byte",
        type=int,
        default=0,
        metavar="ID",
        help="its token for byte 0, for models of bytes whose ids begin later (0); its vocabulary is turned by so many",
    )
    return parser


@report_user_errors
def main(arguments: Sequence[str] | None = None) -> None:
    given = build_parser().parse_args(arguments)
    require_transformers()
    from megasparse.hub.hf_model import HFModel
    from megasparse.hub.importing import turned, write_checkpoint
    from megasparse.hub.output_folder import refuse_existing

    refuse_existing(given.output)
    foreign = HFModel.open(given.model)
    values = foreign.config.model_dump(mode="json")
    values["run"]["directory"] = str(given.output)
    tokenizer = None if given.first_byte else foreign.tokenizer_file
    values["data"]["tokenizer"] = _tokenizer(given, tokenizer, foreign.config.data.tokenizer)
    config = build_config(values)
    tokens = foreign.compare()
    print(f"{foreign.folder}: the same as ours in every layer, on {tokens} tokens", file=sys.stderr)
    print(write_checkpoint(config, turned(foreign.tensors, given.first_byte), given.output, tokenizer))


def _tokenizer(given: argparse.Namespace, file: Path | None, name: str) -> str:
    """`data.tokenizer` of what is written: the copy of a file, else a name."""
    if given.first_byte:
        return "bytes"
    return name if file is None else str(given.output / f"tokenizer{file.suffix}")


if __name__ == "__main__":
    main()
