"""Generate text or images with a trained model.

megasparse generate --checkpoint runs/quickstart --prompt "The history of " --tokens 300 --temperature 0.8
megasparse generate --checkpoint runs/pixels --images 16 --output samples
megasparse generate --checkpoint runs/pixels --complete cat.png dog.png --output completions
megasparse supervise --ranks 2 generate --checkpoint runs/quickstart --set parallel.sequence=2
megasparse generate --checkpoint runs/translation --source "Ein Satz." --beams 4 --length-penalty 0.6

Several ranks write a decoder's text together: each has the decoding caches of its part of the heads.
"""

import argparse
import os
import sys
from functools import partial
from typing import Any

from megasparse.cli.arguments import add_checkpoint
from megasparse.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_checkpoint(parser)
    parser.add_argument("--prompt", default="", help="text to continue")
    parser.add_argument("--tokens", type=int, metavar="N", help="how many tokens to add (default: 200)")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--source", metavar="TEXT", help="what an encoder-decoder reads")
    kind.add_argument("--source-file", metavar="FILE", help="a source in each line; each text becomes a line")
    kind.add_argument("--images", type=int, metavar="N", help="draw N images")
    kind.add_argument("--complete", nargs="+", metavar="IMAGE", help="draw the lower halves of images anew")
    parser.add_argument("--output", metavar="DIR", help="a new folder for the images")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 takes the likeliest token each time")
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="sample from the likeliest tokens with this total probability"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default: %(default)s)")
    parser.add_argument("--beams", type=int, metavar="K", help="beam search in place of sampling")
    parser.add_argument(
        "--length-penalty", type=float, default=0.0, metavar="A", help="exponent of beam search's ((5 + length)/6)^A"
    )


def run(args: argparse.Namespace) -> None:
    drawing = args.images is not None or args.complete
    for option in ("prompt", "tokens", "beams") if drawing else ("output",):
        if getattr(args, option) not in (None, ""):
            what = "images" if drawing else "text"
            raise ConfigError(f"--{option}", f"it does not go with {what}", "Leave it out")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        for option in ("images", "complete", "source", "source_file"):
            if getattr(args, option) is not None:
                problem = "several ranks continue a decoder's text, and nothing else"
                raise ConfigError(f"--{option.replace('_', '-')}", problem, "Start it without supervise")
    from megasparse.evaluation.bits_per_dim import refuse_leaks
    from megasparse.evaluation.generate import Sampling, shared_decoder
    from megasparse.evaluation.images import complete_images, draw_images, shape_of
    from megasparse.evaluation.restore import restore_on_ranks, trained_tokenizer
    from megasparse.evaluation.texts import Request, read_sources, texts
    from megasparse.model.encoder import Encoder

    model, config, checkpoint, ranks = restore_on_ranks(args.checkpoint, args.set)
    if isinstance(model, Encoder):
        raise ConfigError("--checkpoint", "an encoder predicts masked tokens and writes no text", "Give a decoder's")
    refuse_leaks(model.leaks)
    tokenizer = trained_tokenizer(config, checkpoint)
    sampling, seed = Sampling(args.temperature, args.top_p, args.seed), config.run.seed
    if args.images is not None:
        draw_images(model, shape_of(config, "--images"), args.images, seed, sampling, args.output)
    elif args.complete:
        complete_images(model, shape_of(config, "--complete"), args.complete, seed, sampling, args.output)
    else:
        # the bytes that the shell passed, UTF-8 or not
        request = Request(os.fsencode(args.prompt), args.tokens, sampling, args.beams, args.length_penalty)
        sources = read_sources(args.source, args.source_file)
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
        show: Any = partial(print, flush=True) if ranks.rank == 0 else lambda *_, **__: None
        decoder = shared_decoder(model, ranks) if config.model.source is None else model
        for pieces in texts(decoder, config, tokenizer, request, sources, ranks.device):
            for piece in pieces:
                show(" ".join(piece.split("\n")) if args.source_file else piece, end="")
            show()
