"""Held-out bits/dim, perplexities and accuracy of a trained decoder; an encoder's loss and accuracy on masked tokens,
an encoder-decoder's on its targets.

    python launch/evaluate.py --checkpoint runs/quickstart --data data/quickstart --json runs/quickstart/test.json
    python launch/evaluate.py --checkpoint runs/quickstart --data data/quickstart --stride 1024 --rounds 8

Scores every symbol of the split once (or the first --limit windows), and writes the numbers with their whole protocol.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from megasparse.config.command_line import checkpoint_parser
from megasparse.data.reader import EvaluationStream
from megasparse.errors import report_user_errors
from megasparse.evaluation import code_length, masked_tokens, target_tokens
from megasparse.evaluation.bits_per_dim import refuse_leaks
from megasparse.evaluation.protocol import protocol_of
from megasparse.evaluation.restore import restore, trained_tokenizer
from megasparse.model.decoder import Causal
from megasparse.model.encoder import Encoder
from megasparse.training.batches import open_folder

MEASURES: dict[str, Any] = {"decoder": code_length, "encoder": masked_tokens, "encoder_decoder": target_tokens}


def arguments() -> argparse.Namespace:
    parser = checkpoint_parser(__doc__)
    parser.add_argument("--data", metavar="SHARDS", help="folder of shards; the one trained on where left out")
    parser.add_argument("--split", default="test")
    parser.add_argument("--rounds", type=positive, help="hash rounds in place of the configured ones")
    parser.add_argument("--stride", type=positive, help="new tokens a window; all of it where left out")
    parser.add_argument("--limit", type=positive, metavar="N", help="score only the first N windows")
    parser.add_argument("--batch", type=positive, default=1, help="windows scored at once")
    parser.add_argument(
        "--hash-seeds", type=positive, default=1, metavar="N", help="repeat with N draws of the rotations (and masks)"
    )
    parser.add_argument("--allow-leaking-attention", action="store_true", help="score a model that sees later tokens")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the number and its protocol to this file")
    return parser.parse_args()


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not 1 or more")
    return number


@report_user_errors
def main() -> None:
    args = arguments()
    model, config, checkpoint, device = restore(args.checkpoint, args.set)
    if isinstance(model, Causal) and not args.allow_leaking_attention:
        refuse_leaks(model.leaks)
    tokenizer = trained_tokenizer(config, checkpoint)
    index = open_folder(args.data or config.data.path, config, tokenizer)
    if isinstance(model, Encoder) and config.model.masking.whole_words:
        model.set_word_starts(tokenizer.word_starts())
    protocol = protocol_of(config, checkpoint, index, tokenizer, args.split, args.stride, args.rounds, args.hash_seeds)
    measure = MEASURES[config.model.kind]
    result = measure.evaluate(model, EvaluationStream(index, args.split), protocol, args.batch, args.limit, device)
    print(measure.summary(result))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
