"""Teach the hashes or sketches of a HuggingFace model whose attention was replaced: they learn which keys its own full
attention sees; in a decoder, those beyond the window and the first tokens. Nothing else of the model moves.

    megasparse replace-attention --model MODEL --output HASHED --max-length 4096 --attention \\
      '{"kind": "smart_bird", "keys": 96, "sketch": "heads", "objective": "attention", "local": true, "sinks": 4}'
    megasparse teach --model HASHED --texts books/ --length 4096 --passes 24 --output TAUGHT

Text files are cut into windows of --length tokens; a pass reads one. The last --held-out windows are not learned from:
the loss on them is printed, before and after. What is learned is kept in TAUGHT.teaching after every pass: the same
command resumes from there, bit for bit, and removes it when TAUGHT is written. Hashes: {"kind": "lha", "chunk": 64} in
an encoder, {"kind": "lha", "joint": false, "utility": "collisions"} in a decoder.
"""

import argparse
from pathlib import Path

from megasparse.cli.arguments import add_texts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", type=Path, required=True, metavar="DIR", help="a folder that `megasparse replace-attention` wrote"
    )
    add_texts(parser)
    parser.add_argument("--length", type=int, metavar="TOKENS", help="of a window; by default the model's longest")
    parser.add_argument("--passes", type=int, default=24, help="windows to learn from (default: %(default)s)")
    parser.add_argument("--held-out", type=int, default=1, metavar="N", help="windows measured (default: %(default)s)")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the windows' order and draws (default: %(default)s)"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="a new folder")


def run(args: argparse.Namespace) -> None:
    import shutil

    from megasparse.errors import ConfigError, DataError
    from megasparse.hub import require_transformers

    for key, value in (("--passes", args.passes), ("--held-out", args.held_out)):
        if value < 1:
            raise ConfigError(key, f"{value} is too few", "Ask for 1 or more")
    require_transformers()
    from transformers import AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    from megasparse.hub.output_folder import refuse_existing
    from megasparse.hub.replace import load_replaced, replacement_of, save_replaced
    from megasparse.hub.teaching import Teacher, read_windows

    refuse_existing(args.output)
    disable_progress_bar()
    longest = replacement_of(args.model)["max_length"]
    length = longest if args.length is None else args.length
    if not 8 <= length <= longest:
        raise ConfigError("--length", f"{length} is not in 8 … {longest}, the longest input", "Change it")
    model = load_replaced(args.model)
    tokenizer = AutoTokenizer.from_pretrained(args.model, local_files_only=True)
    windows = [tokens for tokens in read_windows(tokenizer, args.texts, length) if len(tokens) == length]
    if len(windows) <= args.held_out:
        problem = f"they hold {len(windows)} windows of {length} tokens, no more than --held-out {args.held_out}"
        raise DataError(args.texts[0], problem, "Give more text, or ask for shorter windows")
    folder = args.output.with_name(f"{args.output.name}.teaching")
    teacher = Teacher(model, args.seed)
    before, after = teacher.teach(windows[: -args.held_out], windows[-args.held_out :], args.passes, folder)
    save_replaced(model, args.output, tokenizer)
    shutil.rmtree(folder, ignore_errors=True)
    print(f"loss on {args.held_out} held-out windows: {before:.4f} before, {after:.4f} after {teacher.passes} passes")
    print(args.output)
