"""Train the hash functions of LHA in a pretrained encoder of HuggingFace's, everything else staying as it is.

    python tools/replace_attention.py --model PRETRAINED --attention '{"kind": "lha", "chunk": 64}' --output DIR
    python tools/train_hash.py --model DIR --texts reviews/ --steps 300 --output TRAINED

A text file is cut into windows of --length tokens; the last --held-out windows are not trained on. What the hash
functions keep of the model's attention on those, before and after, is printed.
"""

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megasparse.errors import ConfigError, DataError, HubError, report_user_errors
from megasparse.hub import require_transformers


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train_hash.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, required=True, metavar="DIR", help="a folder that tools/replace_attention.py wrote"
    )
    parser.add_argument(
        "--texts", type=Path, nargs="+", required=True, metavar="FILE", help="text files, or folders with *.txt"
    )
    parser.add_argument("--steps", type=int, default=300, help="steps of Adam (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="windows a step (default: %(default)s)")
    parser.add_argument("--length", type=int, metavar="TOKENS", help="of a window; the model's longest if left out")
    parser.add_argument("--held-out", type=int, default=8, metavar="N", help="windows measured (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the windows' order and draws (default: %(default)s)")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="a new folder")
    return parser


@report_user_errors
def main(arguments: Sequence[str] | None = None) -> None:
    given = build_parser().parse_args(arguments)
    for key, value in (("--steps", given.steps), ("--batch", given.batch), ("--held-out", given.held_out)):
        if value < 1:
            raise ConfigError(key, f"{value} is too few", "Ask for 1 or more")
    if given.output.exists():
        raise HubError(given.output, "exists already", "Give the name of a new folder")
    require_transformers()
    from transformers import AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    from megasparse.hub.hash_training import kept, train_hashes
    from megasparse.hub.lengthen import positions
    from megasparse.hub.replaced_folder import load_replaced, save_replaced

    disable_progress_bar()
    model = load_replaced(given.model)
    tokenizer = AutoTokenizer.from_pretrained(given.model, local_files_only=True)
    longest = positions(model)
    length = longest if given.length is None else given.length
    if not 8 <= length <= longest:
        raise ConfigError("--length", f"{length} is not in 8 … {longest}, the model's longest input", "Change it")
    found = windows(tokenizer, given.texts, length)
    if len(found) <= given.held_out:
        problem = f"they hold {len(found)} windows, no more than --held-out {given.held_out}"
        raise DataError(given.texts[0], problem, "Give more text, or hold out fewer")
    training, held_out = found[: -given.held_out], found[-given.held_out :]
    tokenizer.model_max_length = longest

    def batch(tokens: list[list[int]]) -> Any:
        return tokenizer.pad({"input_ids": tokens}, return_tensors="pt")

    measured = [batch([tokens]) for tokens in held_out]
    before = kept(model, measured, given.seed)
    draw = random.Random(given.seed)
    steps = (batch(draw.sample(training, min(given.batch, len(training)))) for _ in range(given.steps))
    progress = tqdm(train_hashes(model, steps, given.seed), total=given.steps, unit="step", disable=None)
    for divergence in progress:
        progress.set_postfix(divergence=f"{divergence:.3f}")
    after = kept(model, measured, given.seed)
    save_replaced(model, given.output, tokenizer)
    print(f"attention kept on {len(held_out)} held-out windows: {before:.4f} before, {after:.4f} after")
    print(given.output)


def windows(tokenizer: Any, paths: list[Path], length: int) -> list[list[int]]:
    """Token ids of every window of every file, special tokens included, no longer than `length`. DataError for files
    that cannot be read.
    """
    files = [file for path in paths for file in (sorted(path.rglob("*.txt")) if path.is_dir() else [path])]
    found: list[list[int]] = []
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(file, f"cannot be read as UTF-8 text ({error})", "Give text files") from None
        cut = tokenizer(text, truncation=True, max_length=length, return_overflowing_tokens=True)["input_ids"]
        found += cut if cut and isinstance(cut[0], list) else [cut]
    return found


if __name__ == "__main__":
    main()
