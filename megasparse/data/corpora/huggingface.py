"""A dataset of HuggingFace's: of each row one column is the text of a document, with a separator after it.

A folder that `datasets` saved (save_to_disk) or keeps in its cache, or a copy of a repository of the Hub, as `hf
download --repo-type dataset` makes one: its .arrow, .parquet or .jsonl files are read as they are, `datasets` itself is
not needed, and nothing is downloaded. hf://datasets/OWNER/NAME@REVISION/... is downloaded once. Splits are the
dataset's own, by the names of files and folders; where it has but one, and with --split, the training part is cut by
bytes. The revision, where the folder or its URL states one, stands in index.json and report.json.
"""

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from megasparse.data.corpora import jsonl, parquet
from megasparse.data.corpora.arrow import arrow_values
from megasparse.data.corpora.cutting import NAMES
from megasparse.data.corpora.number_files import natural
from megasparse.data.corpora.records import (
    RecordSource,
    Unfit,
    about,
    add_column_argument,
    add_record_arguments,
    encoder,
    from_values,
    splits,
)
from megasparse.data.corpora.source import Part, add_sample_argument, find_parts
from megasparse.errors import DataError

HELP = "a dataset's folder, as datasets or the Hub's client leave it: a column of texts"
EXAMPLE = "--source ~/.cache/huggingface/datasets/NAME/default/0.0.0/REVISION --column text --output data/name"
SUFFIXES = (".arrow", ".parquet", *(name for name in jsonl.SUFFIXES if name.startswith(".jsonl")))
SPLIT_NAMES = {**{name: name for name in NAMES}, "valid": "validation", "val": "validation", "dev": "validation"}
NAMED_SPLIT = re.compile(rf"(?<![a-z])({'|'.join(SPLIT_NAMES)})(?![a-z])")
NUMBERED = re.compile(r"(.*)-(\d{5,})-of-(\d{5,})\.")
REVISION = re.compile(r"(?<![0-9a-f])[0-9a-f]{40}(?![0-9a-f])")
PINNED_URL = re.compile(r"@([0-9a-f]{40})/")
INFO, LARGEST_INFO = "dataset_info.json", 1 << 26  # bytes: a large dataset has some 200 for each of its files
__all__ = ["EXAMPLE", "HELP", "about", "add_arguments", "encoder", "open_source", "splits"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--source", nargs=1, required=True, metavar="DIR_OR_URL", help="the dataset's folder, or hf://...@REVISION"
    )
    add_sample_argument(parser)
    add_column_argument(parser)
    add_record_arguments(parser)
    parser.add_argument(
        "--split",
        metavar="TRAIN,VALIDATION,TEST",
        help="percent of the training part's bytes for each split (default: the dataset's own, or 90,5,5 of its only)",
    )


def open_source(
    locations: Sequence[str], member: str | None, downloads: Path, settings: Mapping[str, Any], workers: int
) -> RecordSource:
    """Find the dataset's files and read their column once. Raises DataError where files are missing or cannot be read,
    or where there are several configurations; ConfigError for the column.
    """
    (location,) = locations
    found = [part for part in find_parts(locations, None, downloads, "raw", SUFFIXES) if _is_data(part)]
    if not found:
        raise DataError(location, "there are only intermediate results in it", "Give the folder of a dataset")
    _require_all(found)
    of_split = {part: split_of(part.name) for part in found}
    if not any(of_split.values()):
        of_split = dict.fromkeys(found, "train")
    chosen = [name for name in NAMES if name in of_split.values()]
    if settings.get("split") and "train" in chosen:
        chosen = ["train"]
    parts = [
        part for name in chosen for part in sorted(found, key=lambda part: natural(part.name)) if of_split[part] == name
    ]
    _require_one(location, parts)
    facts = {"revision": revision(location), "other_files": sorted(part.name for part in {*found} - {*parts})}
    own = [of_split[part] or "" for part in parts] if len(chosen) > 1 else None
    return RecordSource.examine(locations, parts, texts, settings, workers, own=own, facts=facts)


def texts(part: Part, column: str) -> Iterator[tuple[int, bytes | Unfit]]:
    """(row from 1 on, its text or why it has none) of a file of any of the formats."""
    suffix = PurePosixPath(part.path.name).suffix.lower()
    if suffix == ".arrow":
        return from_values(arrow_values(part.path, column))
    return parquet.texts(part, column) if suffix == ".parquet" else jsonl.texts(replace(part, raw=False), column)


def split_of(name: str) -> str | None:
    """The split that a file belongs to, by the last part of its path that names one."""
    for place in reversed(PurePosixPath(name.lower()).parts):
        if match := NAMED_SPLIT.search(place):
            return SPLIT_NAMES[match[1]]
    return None


def revision(location: str) -> str | None:
    """The commit of the Hub that a dataset is from, as its URL, its path or its description states it."""
    if named := REVISION.search(location) or REVISION.search(str(Path(location).resolve())):
        return named[0]
    for info in sorted(Path(location).glob(f"**/{INFO}")):
        try:
            if info.stat().st_size > LARGEST_INFO:
                raise DataError(info, f"more than {LARGEST_INFO:,} bytes are too many for a description", "Remove it")
            described = json.loads(info.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise DataError(info, f"cannot be read ({type(error).__name__})", "Restore or remove it") from None
        checksums = described.get("download_checksums") if isinstance(described, dict) else None
        for url in checksums if isinstance(checksums, dict) else ():
            if pinned := PINNED_URL.search(url):
                return pinned[1]
    return None


def _is_data(part: Part) -> bool:
    """No result of map or filter, which `datasets` keeps beside what it was made of."""
    return not PurePosixPath(part.name).name.startswith(("cache-", "tmp"))


def _require_one(location: str, parts: Sequence[Part]) -> None:
    roots = set()
    for part in parts:
        folders = PurePosixPath(part.name).parent.parts
        roots.add("/".join(folder for folder in folders if folder.lower() not in SPLIT_NAMES) or ".")
    if len(roots) > 1:
        some = ", ".join(sorted(roots)[:5])
        hint = "Give the folder of one; the corpora parquet and jsonl take any files together"
        raise DataError(location, f"files are in {len(roots)} folders ({some}), as of several configurations", hint)


def _require_all(parts: Sequence[Part]) -> None:
    """Raises DataError where of NAME-00000-of-00003 and so on one is missing."""
    groups: dict[tuple[str, int], set[int]] = {}
    for part in parts:
        if match := NUMBERED.match(part.name):
            groups.setdefault((match[1], int(match[3])), set()).add(int(match[2]))
    for (name, count), numbers in groups.items():
        if len(numbers) < count:
            first = next(number for number in range(count) if number not in numbers)
            problem = f"{len(numbers)} of its {count} files are here, not number {first}"
            raise DataError(name, problem, "Get the dataset again")
