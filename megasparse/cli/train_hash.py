"""Train the hash functions of LHA in a pretrained HuggingFace encoder, with everything else frozen.

    megasparse replace-attention --model PRETRAINED --attention '{"kind": "lha", "chunk": 64}' --output DIR
    megasparse train-hash --model DIR --texts reviews/ --steps 300 --output TRAINED

A text file is cut into windows of --length tokens; the last --held-out windows are not trained on. The part of the
model's attention on those that the hash functions keep, before and after, is printed.
"""

import argparse
import random
from typing import Any

from tqdm import tqdm

from megasparse.cli.arguments import add_json, add_learning
from megasparse.errors import ConfigError, DataError
from megasparse.evaluation.outputs import write_json
from megasparse.hub import require_transformers
from megasparse.hub.output_folder import refuse_existing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_learning(parser, held_out=8)
    parser.add_argument("--steps", type=int, default=300, help="steps of Adam (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="windows a step (default: %(default)s)")
    add_json(parser)


def run(args: argparse.Namespace) -> None:
    for key, value in (("--steps", args.steps), ("--batch", args.batch), ("--held-out", args.held_out)):
        if value < 1:
            raise ConfigError(key, f"{value} is too few", "Ask for 1 or more")
    refuse_existing(args.output)
    require_transformers()
    from transformers import AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    from megasparse.hub.hash_training import kept, train_hashes
    from megasparse.hub.lengthen import positions
    from megasparse.hub.replaced_folder import load_replaced, save_replaced
    from megasparse.hub.text_windows import windows

    disable_progress_bar()
    model = load_replaced(args.model)
    tokenizer = AutoTokenizer.from_pretrained(args.model, local_files_only=True)
    longest = positions(model)
    length = longest if args.length is None else args.length
    if not 8 <= length <= longest:
        raise ConfigError("--length", f"{length} is not in 8 … {longest}, the model's longest input", "Change it")
    found = windows(tokenizer, args.texts, length)
    if len(found) <= args.held_out:
        problem = f"they hold {len(found)} windows, no more than --held-out {args.held_out}"
        raise DataError(args.texts[0], problem, "Give more text, or hold out fewer")
    training, held_out = found[: -args.held_out], found[-args.held_out :]
    tokenizer.model_max_length = longest

    def batch(tokens: list[list[int]]) -> Any:
        return tokenizer.pad({"input_ids": tokens}, return_tensors="pt")

    measured = [batch([tokens]) for tokens in held_out]
    before = kept(model, measured, args.seed)
    draw = random.Random(args.seed)
    steps = (batch(draw.sample(training, min(args.batch, len(training)))) for _ in range(args.steps))
    progress = tqdm(train_hashes(model, steps, args.seed), total=args.steps, unit="step", disable=None)
    for divergence in progress:
        progress.set_postfix(divergence=f"{divergence:.3f}")
    after = kept(model, measured, args.seed)
    save_replaced(model, args.output, tokenizer)
    print(f"attention kept on {len(held_out)} held-out windows: {before:.4f} before, {after:.4f} after")
    print(args.output)
    if args.json is not None:
        write_json(args.json, {"command": args.command, "seed": args.seed, "before": before, "after": after})
