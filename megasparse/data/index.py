"""index.json: what is in a folder of shards. Read and checked before anything else of a run."""

import hashlib
import json
import os
import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megasparse.data.tokenizer import ByteTokenizer
from megasparse.errors import ConfigError, DataError, did_you_mean

INDEX_FILE = "index.json"
AGAIN = "Prepare the data again with tools/prepare_data.py: it rewrites what is damaged"
ANEW = "Delete the folder and prepare the data again with tools/prepare_data.py"

Count = Annotated[int, Field(ge=1)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Entry(BaseModel):
    """A part of index.json: nothing unknown in it, nothing coerced."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Shard(Entry):
    """One tar file of samples."""

    file: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*\.tar$")]  # a plain name: never a path
    samples: Count
    tokens: Count
    bytes: Count
    """Size of the tar file."""
    sha256: Sha256
    """Of the tar file."""


class Split(Entry):
    """The shards of one split, in the order of the corpus."""

    tokens: Count
    samples: Count
    shards: Annotated[tuple[Shard, ...], Field(min_length=1)]


class TokenizerEntry(Entry):
    """Which tokenizer the tokens were made with."""

    name: str
    sha256: Sha256


class IndexFile(Entry):
    """index.json as it is on disk."""

    format: Literal[1] = 1
    tokenizer: TokenizerEntry
    corpus: str
    command: str
    """The command that made the folder."""
    source: dict[str, Any]
    """Where the corpus came from: as the user named it, with the size and sha256 of its text."""
    settings: dict[str, Any]
    """How it was cut."""
    splits: Annotated[dict[str, Split], Field(min_length=1)]


File = TypeVar("File", bound=IndexFile)


@dataclass(frozen=True)
class Index:
    """The checked index of a folder of shards."""

    directory: Path
    file: IndexFile

    @classmethod
    def load(cls, directory: str | Path) -> "Index":
        """Read DIRECTORY/index.json and check it against the sizes of the shards on disk.

        Raises DataError when there is no index (with the command that makes one), when it is not valid, and when a
        shard is missing or has another size than the index says. The content of the shards is checked as they are
        first read, or all at once by `verify`.
        """
        directory = Path(directory)
        path = directory / INDEX_FILE
        if not path.exists():
            raise DataError(directory, f"there is no data here: {INDEX_FILE} is missing", _how_to_prepare(directory))
        index = cls(directory, parse(path, IndexFile))
        for split in index.file.splits.values():
            for shard in split.shards:
                check_size(index.path(shard), shard, index.path(shard))
        return index

    def split(self, name: str) -> Split:
        """The split of this name. Raises DataError naming the splits there are."""
        if name not in self.file.splits:
            problem = f'there is no split "{name}" in this data'
            raise DataError(self.directory / INDEX_FILE, problem, did_you_mean(name, self.file.splits))
        return self.file.splits[name]

    def path(self, shard: Shard) -> Path:
        return self.directory / shard.file

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over all that decides which tokens a run sees: tokenizer, and each split's shards in order."""
        splits = {
            name: [[s.sha256, s.tokens, s.samples] for s in split.shards] for name, split in self.file.splits.items()
        }
        identity = {"format": self.file.format, "tokenizer": self.file.tokenizer.model_dump(), "splits": splits}
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()

    def verify(self) -> None:
        """Compare the sha256 of every shard. Raises DataError naming the first that differs."""
        for split in self.file.splits.values():
            for shard in split.shards:
                verify_shard(self.path(shard), shard, self.path(shard))

    def require_tokenizer(self, tokenizer: ByteTokenizer) -> None:
        """Raises ConfigError unless the shards were made with exactly this tokenizer."""
        made = self.file.tokenizer
        if (made.name, made.sha256) != (tokenizer.name, tokenizer.sha256):
            problem = (
                f'"{tokenizer.name}" (sha256 {tokenizer.sha256[:12]}…), but the shards in {self.directory} '
                f'were made with "{made.name}" (sha256 {made.sha256[:12]}…)'
            )
            raise ConfigError("data.tokenizer", problem, "Set data.tokenizer to theirs, or prepare the data again")


def parse(path: Path, kind: type[File]) -> File:
    """Read and check an index file. Raises DataError naming the entry that is wrong."""
    try:
        file = kind.model_validate_json(path.read_bytes())
    except OSError as error:
        raise DataError(path, f"cannot be read: {error.strerror}", "Check the path and its permissions") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise DataError(path, f"{where}: {first['msg']}", ANEW) from None
    seen: set[str] = set()
    for name, split in file.splits.items():
        for shard in split.shards:
            if shard.file in seen:
                raise DataError(path, f"{shard.file} is listed more than once", ANEW)
            seen.add(shard.file)
        for what in ("tokens", "samples"):
            total, stated = sum(getattr(shard, what) for shard in split.shards), getattr(split, what)
            if total != stated:
                raise DataError(path, f"splits.{name}.{what} is {stated}, but its shards have {total}", ANEW)
    return file


def _how_to_prepare(directory: Path) -> str:
    output = shlex.quote(str(directory))
    if "enwik8" in str(directory):
        source = "https://mattmahoney.net/dc/enwik8.zip"
        return f"Prepare it: python tools/prepare_data.py enwik8 --source {source} --output {output}"
    if "duplication" in str(directory):
        return f"Prepare it: python tools/prepare_data.py duplication --output {output}"
    return f"Prepare it: python tools/prepare_data.py text --source FILE_OR_FOLDER --output {output}"


def check_size(path: Path, shard: Shard, file: Path | int) -> None:
    """Raises DataError naming `path` unless `file` (it, or its descriptor) has the size the index states."""
    try:
        size = os.stat(file).st_size
    except OSError as error:
        raise DataError(path, f"this shard cannot be read: {error.strerror}", AGAIN) from None
    if size != shard.bytes:
        raise DataError(path, f"this shard has {size} bytes, {INDEX_FILE} says {shard.bytes}", AGAIN)


def verify_shard(path: Path, shard: Shard, file: Path | int) -> None:
    """Raises DataError naming `path` unless `file` (it, or its descriptor) has the size and sha256 of the index."""
    check_size(path, shard, file)
    try:
        digest = file_sha256(file)
    except OSError as error:
        raise DataError(path, f"this shard cannot be read: {error.strerror}", AGAIN) from None
    if digest != shard.sha256:
        problem = f"this shard is damaged: its sha256 is {digest[:12]}…, {INDEX_FILE} says {shard.sha256[:12]}…"
        raise DataError(path, problem, AGAIN)


def file_sha256(file: Path | int) -> str:
    """sha256 of a whole file, given by its path or an open descriptor."""
    digest = hashlib.sha256()
    with open(file, "rb", closefd=not isinstance(file, int)) as stream:
        stream.seek(0)
        while piece := stream.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
