"""How well hashes find the attention of a trained model: utility, imbalance, recall, errors of the output.

    python tools/attention_quality.py --checkpoint runs/full --data data/enwik8 --json quality.json
    python tools/attention_quality.py --checkpoint runs/full --data data/enwik8 --split test --windows 20 --picture maps

Takes a decoder or encoder with any attention, best with full attention. On windows of held-out text it reads the
queries and keys of every layer and assigns them to --buckets equal buckets: at random, by position, by LSH, by SMYRF,
and by LHA's hash functions, which are trained here on windows of the training split, the model itself staying as it is.
It prints the attention utility of each (LHA Eq. 5) beside its upper bound and floor, how uneven the buckets are, the
recall of the largest weights, and the error of the output by hash rounds. Holds the L² weights of a layer: for windows
of up to a few thousand tokens.
"""

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import get_args

import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from megasparse.attention.hash_training import Utility, train_hashes
from megasparse.config.command_line import checkpoint_parser
from megasparse.data.reader import EvaluationStream
from megasparse.data.tokenizers import build_tokenizer
from megasparse.errors import ConfigError, report_user_errors
from megasparse.evaluation.attention.quality import record_calls
from megasparse.evaluation.attention.study import Protocol, maps, study, summary
from megasparse.evaluation.restore import restore
from megasparse.model.encoder import Encoder
from megasparse.runs.data import open_folder


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = checkpoint_parser(__doc__)
    parser.add_argument("--data", metavar="SHARDS", help="folder of shards; the one trained on where left out")
    parser.add_argument("--split", default="validation", help="measured on it (default: %(default)s)")
    parser.add_argument("--windows", type=int, default=10, metavar="N", help="windows of text (default: %(default)s)")
    parser.add_argument("--length", type=int, help="tokens a window; data.sequence_length, 1,024 at most, if left out")
    parser.add_argument("--buckets", type=int, default=4, help="an even number (default: %(default)s)")
    parser.add_argument("--top", type=int, default=16, help="weights a query that recall counts (default: %(default)s)")
    parser.add_argument(
        "--hash-steps", type=int, default=300, help="training of LHA's hashes, a window a step (default: %(default)s)"
    )
    parser.add_argument(
        "--hash-utility",
        choices=get_args(Utility),
        default="exact",
        help="how the targets of LHA's hashes are found (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the numbers and their protocol to this file")
    parser.add_argument(
        "--picture", type=Path, metavar="DIR", help="write attention maps, a PNG a layer, to this folder"
    )
    return parser.parse_args(given)


@report_user_errors
def main(given: Sequence[str] | None = None) -> None:
    args = arguments(given)
    model, config, checkpoint, device = restore(args.checkpoint, args.set)
    tokenizer = build_tokenizer(config.data.tokenizer)
    if isinstance(model, Encoder) and config.model.masking.whole_words:
        model.set_word_starts(tokenizer.word_starts())
    index = open_folder(args.data or config.data.path, config, tokenizer)
    protocol = Protocol(
        checkpoint=str(checkpoint.path),
        checkpoint_step=checkpoint.step,
        data_fingerprint=index.fingerprint,
        split=args.split,
        windows=args.windows,
        length=min(1024, config.data.sequence_length) if args.length is None else args.length,
        buckets=args.buckets,
        top=args.top,
        hash_split=config.data.split,
        hash_steps=args.hash_steps,
        hash_utility=args.hash_utility,
        seed=config.run.seed,
    )
    held_out, training = EvaluationStream(index, args.split), EvaluationStream(index, protocol.hash_split)
    check(protocol, held_out, training, min(config.model.max_length, index.record or config.model.max_length))

    def calls(stream: EvaluationStream, windows: int, number: int) -> list:
        tokens = window(stream, number, windows, protocol.length, index.record or 1)
        return record_calls(model, tokens.to(device), config.run.seed + number)

    order = torch.randperm(protocol.hash_steps, generator=torch.Generator().manual_seed(config.run.seed)).tolist()
    progress = tqdm(order, desc="training hashes", unit="step", disable=None)
    steps = (calls(training, protocol.hash_steps, number) for number in progress)
    hashes, divergence = train_hashes(steps, protocol.buckets, config.run.seed, args.hash_utility)
    measured = partial(calls, held_out, protocol.windows)
    result = {**study(measured, hashes, protocol, config.model.attention), "hash_divergence": divergence}
    print(summary(result))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    if args.picture:
        args.picture.mkdir(parents=True, exist_ok=True)
        for number, (call, mechanism) in enumerate(zip(measured(0), hashes, strict=True)):
            picture = maps(call, mechanism, protocol)
            Image.fromarray(picture.cpu().numpy()).save(
                args.picture / f"{number:02d}_layer{call.context.layer}_{call.kind}.png"
            )


def check(protocol: Protocol, held_out: EvaluationStream, training: EvaluationStream, longest: int) -> None:
    """ConfigError for numbers that do not go together. longest: what both the model and the data's records allow."""
    if protocol.split == protocol.hash_split:
        raise ConfigError("--split", f'LHA\'s hashes are trained on "{protocol.split}"', "Measure on another split")
    if not 2 <= protocol.length <= longest:
        problem = f"{protocol.length} is not in 2 … {longest}, what model.max_length and the data's records allow"
        raise ConfigError("--length", problem, "Change it")
    if protocol.buckets < 2 or protocol.buckets % 2 or protocol.buckets > protocol.length:
        raise ConfigError("--buckets", f"{protocol.buckets} is not an even number up to --length", "LSH wants it even")
    for key, number in (
        ("--windows", protocol.windows - 1),
        ("--top", protocol.top),
        ("--hash-steps", protocol.hash_steps),
    ):
        if number < 1:
            raise ConfigError(key, "too few", "Ask for more")
    for key, stream, windows in (("--windows", held_out, protocol.windows), ("--length", training, 1)):
        if stream.tokens < windows * protocol.length:
            problem = f"{windows} windows of {protocol.length} tokens do not fit a split of {stream.tokens}"
            raise ConfigError(key, problem, "Ask for fewer, or for shorter ones")


def window(stream: EvaluationStream, number: int, windows: int, length: int, record: int) -> Tensor:
    """One of `windows` windows, spread evenly over a split, each the beginning of a record: (1, length)."""
    start = number * (stream.tokens - length) // max(1, windows - 1) // record * record
    return stream.read(start, start + length).unsqueeze(0)


if __name__ == "__main__":
    main()
