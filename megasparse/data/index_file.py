"""The entries of index.json, and a parser that validates all of it: the file may come from anyone."""

import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field, ValidationError

from megasparse.errors import DataError, one_line, without_secrets
from megasparse.files import read_file, strict_json, write_file

INDEX_FILE = "index.json"
AGAIN = "Prepare the data again with megasparse prepare-data: it rewrites what is damaged"
ANEW = "Delete the folder and prepare the data again with megasparse prepare-data"
MOST_BYTES = 1 << 29  # of index.json: 50 million samples take less
MOST_SAMPLES = 1 << 21  # of a shard
SEPARATOR = "document_separator"
"""Entry of a source of conversations with the value for the model's key of this name."""

TAR_HEADER = tarfile.BLOCKSIZE
"""Bytes of the tar header before each sample."""

Count = Annotated[int, Field(ge=1, le=1 << 50)]
Width = Literal[1, 2, 4]
Name = Annotated[str, Field(pattern=r"^[ -~]{1,80}$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class IndexEntry(BaseModel):
    """A part of index.json: nothing unknown in it, nothing coerced."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Shard(IndexEntry):
    """One tar file of samples."""

    file: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*\.tar$")]  # a plain name: never a path
    samples: Annotated[int, Field(ge=1, le=MOST_SAMPLES)]
    tokens: Count
    width: Width = 1
    """Bytes per token: an unsigned number, little endian. Earlier versions state none."""
    bytes: Count
    """Size of the file."""
    sha256: Sha256
    start: Literal[0] = 0
    """Part of the format."""
    crc32: Annotated[str, Field(pattern=r"^[0-9a-f]+$")] | None = None
    """The zlib.crc32 of each sample, 8 digits each, in order. Earlier versions have none."""

    @property
    def data_bytes(self) -> int:
        """Bytes of all samples together."""
        return self.tokens * self.width


class Split(IndexEntry):
    """The shards of one split, in the order of the corpus."""

    tokens: Count
    samples: Count
    shards: Annotated[tuple[Shard, ...], Field(min_length=1, strict=False), FailFast()]
    raw_bytes: Count | None = None
    """Bytes of the text before tokenization; None if unknown."""
    words: Count | None = None
    """Reference words of that text; None if the corpus defines none."""

    @classmethod
    def of(cls, shards: Sequence[Shard], raw_bytes: int | None = None, words: int | None = None) -> "Split":
        tokens, samples = sum(shard.tokens for shard in shards), sum(shard.samples for shard in shards)
        return cls(tokens=tokens, samples=samples, shards=tuple(shards), raw_bytes=raw_bytes, words=words)


class TokenizerEntry(IndexEntry):
    name: Name
    sha256: Sha256


def public(value: Any) -> Any:
    """Return a JSON value with the secrets of URLs removed: folders of shards are published."""
    if isinstance(value, dict):
        return {key: public(item) for key, item in value.items()}
    if isinstance(value, list):
        return [public(item) for item in value]
    return without_secrets(value) if isinstance(value, str) else value


class IndexFile(IndexEntry):
    """The content of index.json as it is on disk."""

    format: Literal[1] = 1
    tokenizer: TokenizerEntry
    corpus: Name
    command: Annotated[str, Field(max_length=1 << 24), AfterValidator(public)]
    """The command that made the folder."""
    source: Annotated[dict[str, Any], AfterValidator(public)]
    """Origin of the corpus, with the size and sha256 of its text."""
    settings: dict[str, Any]
    """Settings by which it was cut."""
    splits: Annotated[dict[str, Split], Field(min_length=1)]


File = TypeVar("File", bound=IndexFile)


def tar_stride(sample_bytes: int) -> int:
    """Return the bytes that a sample of this size takes in a tar file: its header, and whole blocks of data."""
    return TAR_HEADER + -(-sample_bytes // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


def save(content: IndexFile, path: Path) -> None:
    """Write an index file atomically."""
    write_file(path, content.model_dump_json(indent=2) + "\n")


def parse(path: Path, kind: type[File]) -> File:
    """Read and check an index file of at most MOST_BYTES. Raises DataError naming the entry that is wrong."""
    with DataError.instead_of(OSError, path, "cannot be read: {}", "Check the path and its permissions"):
        content = read_file(path, MOST_BYTES)
    return parse_content(content, path, kind)


def parse_content(raw: bytes, path: Path | str, kind: type[File]) -> File:
    """Return the index file that is at `path`, a URL too, and has this content. Raises DataError as `parse` does."""
    try:
        file = kind.model_validate(strict_json(raw.decode()))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise DataError(path, f"{one_line(where)}: {one_line(first['msg'])}", ANEW) from None
    except ValueError as error:  # among them JSONDecodeError and UnicodeDecodeError
        raise DataError(path, f"it is not the JSON of an index: {one_line(str(error))}", ANEW) from None
    _check_counts(path, file)
    return file


def _check_counts(path: Path | str, file: IndexFile) -> None:
    for key in ("sample_bytes", "record"):
        number = file.settings.get(key)
        if (number is not None or key == "sample_bytes") and (type(number) is not int or number < 1):
            raise DataError(path, f"settings.{key} is {one_line(repr(number))}, a number above 0 is expected", ANEW)
    names: set[str] = set()
    for split_name, split in file.splits.items():
        for shard in split.shards:
            problem = "is listed more than once" if shard.file in names else _shard_problem(shard, file.settings)
            if problem:
                raise DataError(path, f"{shard.file} {problem}", ANEW)
            names.add(shard.file)
        for count in ("tokens", "samples"):
            total, stated = sum(getattr(shard, count) for shard in split.shards), getattr(split, count)
            if total != stated:
                problem = f"splits.{one_line(split_name)}.{count} is {stated}, but its shards have {total}"
                raise DataError(path, problem, ANEW)


def _shard_problem(shard: Shard, settings: dict[str, Any]) -> str | None:
    """Return a contradiction within a shard's entry or to the settings; all samples but the last have the same size."""
    size, record = settings["sample_bytes"], settings.get("record")
    before_last = (shard.samples - 1) * size
    if not before_last < shard.data_bytes <= before_last + size or min(size, shard.data_bytes) % shard.width:
        tokens = f"{shard.tokens} tokens of width {shard.width}"
        return f"has {shard.samples} samples for {tokens}, which are not samples of settings.sample_bytes = {size}"
    if (shard.samples - 1) * tar_stride(size) + TAR_HEADER + shard.data_bytes - before_last > shard.bytes:
        return f"has {shard.bytes} bytes, too few for its {shard.samples} samples"
    if shard.crc32 is not None and len(shard.crc32) != 8 * shard.samples:
        return f"has {len(shard.crc32)} digits of crc32 for {shard.samples} samples, 8 each are expected"
    if record is not None and shard.tokens % record:
        return f"has {shard.tokens} tokens, which is not a whole number of records of {record}"
    return None
