"""Text from a trained model.

python launch/generate.py --checkpoint runs/quickstart --prompt "The history of " --tokens 300 --temperature 0.8
"""

import argparse
import itertools
import os
import sys

from megasparse.config.command_line import checkpoint_parser
from megasparse.data.tokenizers import build_tokenizer
from megasparse.errors import ConfigError, report_user_errors
from megasparse.evaluation.bits_per_dim import refuse_leaks
from megasparse.evaluation.generate import check_request, generate
from megasparse.evaluation.restore import restore
from megasparse.model.decoder import Decoder


def arguments() -> argparse.Namespace:
    parser = checkpoint_parser(__doc__)
    parser.add_argument("--prompt", default="", help="text to continue")
    parser.add_argument("--tokens", type=int, default=200, metavar="N", help="how many tokens to add")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 takes the likeliest token each time")
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="sample from the likeliest tokens of this total probability"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the sampling")
    return parser.parse_args()


@report_user_errors
def main() -> None:
    args = arguments()
    decoder, config, _, device = restore(args.checkpoint, args.set)
    if not isinstance(decoder, Decoder):
        raise ConfigError("--checkpoint", "an encoder tells masked tokens and writes no text", "Give a decoder's")
    refuse_leaks(decoder.leaks)
    tokenizer = build_tokenizer(config.data.tokenizer)
    prompt = os.fsencode(args.prompt)  # the bytes that the shell passed, UTF-8 or not
    tokens = tokenizer.encode(prompt).to(device)
    check_request(len(tokens), args.tokens, config.model.max_length, args.temperature, args.top_p)
    continuation = generate(
        decoder,
        tokens,
        args.tokens,
        hash_seed=config.run.seed,
        seed=args.seed,
        temperature=args.temperature,
        top_p=args.top_p,
        vocabulary=tokenizer.vocabulary,
    )
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    for text in tokenizer.text(itertools.chain(prompt, continuation)):
        print(text, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
