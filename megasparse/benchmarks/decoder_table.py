"""The table of a decoder's arms: measured row by row into a file, from which it goes on."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoTokenizer

from megasparse.benchmarks.decoders import Arm, measure
from megasparse.errors import DataError
from megasparse.evaluation.outputs import write_json
from megasparse.hub.replaced_folder import replacement_of
from megasparse.hub.text_windows import windows

KEYS = ("arm", "attention", "seed", "text")
"""What tells rows apart."""


def measured(
    plain: Path, arms: Iterable[Arm], texts: list[Path], length: int, seeds: int, output: Path
) -> list[dict[str, Any]]:
    """The rows of every arm, seed and text, of which those that are not in the JSON file `output` are measured and
    written. Raises DataError for texts that are too short, or a file of something else.
    """
    found = _windows(plain, texts, length)
    rows = _kept(output, length)
    wanted = [
        (arm, seed, number) for arm in arms for seed in range(seeds if arm.drawn else 1) for number in range(len(found))
    ]
    model, placed = None, None
    for arm, seed, number in tqdm(wanted, unit="row", disable=None):
        text = hashlib.sha256(json.dumps(found[number]).encode()).hexdigest()[:16]
        attention = arm.attention
        if isinstance(attention, Path):
            attention = {"folder": attention.name, **replacement_of(attention)["attention"]}
        key = {"arm": arm.name, "attention": attention, "seed": seed, "text": text}
        if any(all(row[name] == key[name] for name in KEYS) for row in rows):
            continue
        if placed != (arm, seed):
            model, placed = None, (arm, seed)  # one at a time
            model = arm.model(plain, length, seed)
        assert model is not None
        rows.append({**key, **measure(model, torch.tensor([found[number]]), arm.oracle)})
        write_json(output, {"length": length, "threads": torch.get_num_threads(), "rows": rows})
    return rows


def _windows(plain: Path, texts: list[Path], length: int) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(plain, local_files_only=True)
    found = []
    for path in [file for text in texts for file in (sorted(text.rglob("*.txt")) if text.is_dir() else [text])]:
        first = windows(tokenizer, [path], length)[0]
        if len(first) < length:
            raise DataError(path, f"has {len(first)} tokens, fewer than --length {length}", "Give longer texts")
        found.append(first)
    if not found:
        raise DataError(texts[0], "holds no *.txt", "Give text files")
    return found


def _kept(output: Path, length: int) -> list[dict[str, Any]]:
    if not output.exists():
        return []
    try:
        found = json.loads(output.read_bytes())
        rows = list(found["rows"])
        if found["length"] != length or not all({*KEYS} <= row.keys() for row in rows):
            raise ValueError
    except (ValueError, LookupError, TypeError, AttributeError):
        problem = f"holds no rows of {length} tokens that this command wrote"
        raise DataError(output, problem, "Name another file, or remove it") from None
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Means over texts and seeds of each arm, as lines of Markdown; with several seeds the range of their means."""
    arms: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        arms[row["arm"]].append(row)
    lines = ["| attention | keys a query | captured | nats a token | CPU seconds |", "|---|---|---|---|---|"]
    for name, own in arms.items():
        mean = {key: sum(row[key] for row in own) / len(own) for key in ("keys", "captured", "nats", "seconds")}
        seeds = sorted({row["seed"] for row in own})
        of_seed = [[row["nats"] for row in own if row["seed"] == seed] for seed in seeds]
        means = [sum(values) / len(values) for values in of_seed]
        spread = f" ({min(means):.3f} … {max(means):.3f})" if len(seeds) > 1 else ""
        cells = (
            f"{mean['keys']:.0f}",
            f"{mean['captured']:.3f}",
            f"{mean['nats']:.3f}{spread}",
            f"{mean['seconds']:.0f}",
        )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)
