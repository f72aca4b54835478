"""Turn a HuggingFace model (a Llama, SmolLM, Mistral, Qwen2, Qwen3, GPT-2, BERT, Reformer or YOSO, or one that
`megasparse convert to-hf` wrote) into a checkpoint.

    megasparse convert from-hf --model ~/models/SmolLM2-135M --output runs/imported
    megasparse convert from-hf --model ~/models/SmolLM2-135M-Instruct.Q4_1.gguf --output runs/imported
    megasparse convert from-hf --model google/reformer-enwik8 --first-byte 2 --output runs/imported
    megasparse pretrain runs/imported/config.json --set data.path=data/enwik8
    megasparse evaluate --checkpoint runs/imported --data data/enwik8

The third one is read from transformers' local cache: nothing is downloaded, and no code that comes with a model is
run. A GGUF file is dequantised to fp32 by transformers and gguf. A tokenizer.json that lies with the model is copied
into the output, as its data.tokenizer, a decoder's chat template with it. Both models run on the
same tokens first, and nothing is written unless they agree. Takes the memory of both, and for a Reformer twice as much
again, in float64.
"""

import argparse
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", required=True, metavar="NAME_OR_DIR", help="its folder or GGUF file, or its name in the cache"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="a new folder, laid out like a run's")
    parser.add_argument(
        "--first-byte",
        type=int,
        default=0,
        metavar="ID",
        help="its token for byte 0 (0), for byte-level models whose ids begin later; the vocabulary is rotated by it",
    )


def run(args: argparse.Namespace) -> None:
    from megasparse.config.load import build_config
    from megasparse.hub import require_transformers

    require_transformers()
    from megasparse.hub.hf_model import HFModel
    from megasparse.hub.importing import turned, write_checkpoint
    from megasparse.hub.output_folder import refuse_existing

    refuse_existing(args.output)
    model = HFModel.open(args.model)
    values = model.config.model_dump(mode="json")
    values["run"]["directory"] = str(args.output)
    tokenizer = None if args.first_byte else model.tokenizer_file
    if args.first_byte:
        values["data"]["tokenizer"] = "bytes"
    elif tokenizer is not None:
        values["data"]["tokenizer"] = str(args.output / f"tokenizer{tokenizer.suffix}")
    config = build_config(values)
    tokens = model.compare()
    print(f"{model.folder}: the same logits as ours on {tokens} tokens", file=sys.stderr)
    tensors, beside = turned(model.tensors, args.first_byte), {} if tokenizer is None else model.beside
    print(write_checkpoint(config, tensors, args.output, tokenizer, beside))
