"""Teach the hashes or sketches of a HuggingFace decoder whose attention was replaced: they learn which keys its own
full attention sees beyond the window and the first tokens. Nothing else of the model moves.

    megasparse replace-attention --model MODEL --output HASHED --max-length 4096 --attention \\
      '{"kind": "smart_bird", "keys": 96, "sketch": "heads", "objective": "attention", "local": true, "sinks": 4}'
    megasparse convert teach --model HASHED --texts books/ --length 4096 --passes 24 --output TAUGHT

Text files are cut into windows of --length tokens; a pass reads one. The last --held-out windows are not learned from:
the loss on them is printed, before and after. What is learned is kept in TAUGHT.teaching after every pass: the same
command goes on from there, bit for bit, and removes it when TAUGHT is written. Hashes: {"kind": "lha", "joint": false,
"utility": "collisions"}.
"""

import argparse

from megasparse.cli.arguments import add_learning


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_learning(parser, held_out=1)
    parser.add_argument("--passes", type=int, default=24, help="windows to learn from (default: %(default)s)")


def run(args: argparse.Namespace) -> None:
    from megasparse.errors import ConfigError, DataError
    from megasparse.hub import require_transformers

    for key, value in (("--passes", args.passes), ("--held-out", args.held_out)):
        if value < 1:
            raise ConfigError(key, f"{value} is too few", "Ask for 1 or more")
    require_transformers()
    from transformers import AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    from megasparse.hub.output_folder import refuse_existing
    from megasparse.hub.replaced_folder import load_replaced, replacement_of, save_replaced
    from megasparse.hub.taught import Course
    from megasparse.hub.text_windows import windows

    refuse_existing(args.output)
    disable_progress_bar()
    longest = replacement_of(args.model)["max_length"]
    length = longest if args.length is None else args.length
    if not 8 <= length <= longest:
        raise ConfigError("--length", f"{length} is not in 8 … {longest}, the longest input", "Change it")
    model = load_replaced(args.model)
    tokenizer = AutoTokenizer.from_pretrained(args.model, local_files_only=True)
    found = [tokens for tokens in windows(tokenizer, args.texts, length) if len(tokens) == length]
    if len(found) <= args.held_out:
        problem = f"they hold {len(found)} windows of {length} tokens, no more than --held-out {args.held_out}"
        raise DataError(args.texts[0], problem, "Give more text, or ask for shorter windows")
    course = Course(model, found[: -args.held_out], found[-args.held_out :], args.seed)
    before, after = course.run(args.passes, args.output.with_name(f"{args.output.name}.teaching"))
    save_replaced(model, args.output, tokenizer)
    course.remove()
    passes = course.teacher.passes
    print(f"loss on {args.held_out} held-out windows: {before:.4f} before, {after:.4f} after {passes} passes")
    print(args.output)
