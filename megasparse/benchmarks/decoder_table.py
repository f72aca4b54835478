"""The table of a decoder's arms: measured row by row into a file, from which it goes on."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoTokenizer

from megasparse.benchmarks.decoders import Arm, attending, measure
from megasparse.benchmarks.passkey import Trial, retrieved
from megasparse.errors import DataError
from megasparse.evaluation.outputs import kept_rows, write_json
from megasparse.hub.replace import replacement_of
from megasparse.hub.teaching import read_windows

KEYS = ("arm", "attention", "seed", "text", "trial")
"""What rows differ by. trial: the number of a passkey trial, None in rows of texts."""


def measured(
    plain: Path, arms: Sequence[Arm], texts: list[Path], length: int, seeds: int, trials: int, output: Path
) -> list[dict[str, Any]]:
    """The rows of every arm, seed and text, and of passkey trials in the first text, of which those that are not in the
    JSON file `output` are measured and written. Raises DataError for texts that are too short, or a file of something
    else.
    """
    tokenizer = AutoTokenizer.from_pretrained(plain, local_files_only=True)
    found, rows = _windows(tokenizer, texts, length), kept_rows(output, KEYS, length=length)
    places: list[tuple[int, int | None]] = [(number, None) for number in range(len(found))]
    places += [(0, trial) for trial in range(trials)]
    wanted = [(arm, seed, place) for arm in arms for seed in arm.seeds(seeds) for place in places]
    model, made = None, None
    for arm, seed, (number, trial) in tqdm(wanted, unit="row", disable=None):
        text = hashlib.sha256(json.dumps(found[number]).encode()).hexdigest()[:16]
        attention = arm.attention
        if isinstance(attention, Path):
            attention = {"folder": attention.name, **replacement_of(attention)["attention"]}
        row = {"arm": arm.name, "attention": attention, "seed": seed, "text": text, "trial": trial}
        if any(all(old[name] == row[name] for name in KEYS) for old in rows):
            continue
        if made != (arm.name, seed):
            model = None  # one at a time
            model, made = arm.model(plain, length, seed), (arm.name, seed)
        assert model is not None
        if trial is None:
            rows.append(row | measure(model, torch.tensor([found[number]]), arm.oracle))
        else:
            asked = Trial.draw(tokenizer, found[0], length, trial)
            with attending(model, arm.oracle):
                rows.append(row | {"depth": round(asked.depth, 3), "found": retrieved(model, asked)})
        write_json(output, {"length": length, "threads": torch.get_num_threads(), "rows": rows})
    return rows


def _windows(tokenizer: Any, texts: list[Path], length: int) -> list[list[int]]:
    found = []
    for path in [file for text in texts for file in (sorted(text.rglob("*.txt")) if text.is_dir() else [text])]:
        first = read_windows(tokenizer, [path], length)[0]
        if len(first) < length:
            raise DataError(path, f"has {len(first)} tokens, fewer than --length {length}", "Give longer texts")
        found.append(first)
    if not found:
        raise DataError(texts[0], "holds no *.txt", "Give text files")
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """Means over texts and seeds of each arm, as lines of Markdown: with several seeds the range of their means, with
    passkey trials the number found.
    """
    arms: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        arms[row["arm"]].append(row)
    lines = [
        "| attention | keys a query | captured | nats a token | CPU seconds | pass keys |",
        "|---|---|---|---|---|---|",
    ]
    for name, all_rows in arms.items():
        own = [row for row in all_rows if row["trial"] is None]
        trials = [row["found"] for row in all_rows if row["trial"] is not None]
        keys, captured, seconds = (
            sum(row[key] for row in own) / max(1, len(own)) for key in ("keys", "captured", "seconds")
        )
        of_seed: dict[int, list[float]] = defaultdict(list)
        for row in own:
            of_seed[row["seed"]].append(row["nats"])
        means = [sum(values) / len(values) for values in of_seed.values()]
        spread = f" ({min(means):.3f} … {max(means):.3f})" if len(means) > 1 else ""
        nats = sum(means) / max(1, len(means))
        hits = f"{sum(trials)} of {len(trials)}" if trials else ""
        lines.append(f"| {name} | {keys:.0f} | {captured:.3f} | {nats:.3f}{spread} | {seconds:.0f} | {hits} |")
    return "\n".join(lines)
