"""Corpora of records: JSON lines, Parquet files, and datasets of Hugging Face.

pyarrow is an extra: only the code that needs it imports it. Values that come from a file are validated before one is
touched, because offsets in a forged file point anywhere.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from megasparse.data.corpora.corpus import (
    MEMBER,
    NAMES,
    SAMPLE,
    SOURCE,
    SPLIT_NAMES,
    SPLIT_OPTION,
    CorpusSettings,
    lines,
    option,
    split_option,
)
from megasparse.data.corpora.records import (
    EMPTY,
    NOT_UTF8,
    Invalid,
    RecordCorpus,
    Records,
    RecordSource,
    Texts,
    Unfit,
    json_hint,
)
from megasparse.data.corpora.source import (
    DECOMPRESS,
    Part,
    arrow,
    find_parts,
    read,
    reading,
    refuse_bomb,
    report_left_out,
)
from megasparse.errors import ConfigError, DataError, did_you_mean
from megasparse.files import natural, open_file, read_file

TEXTS = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view", "null")
"""Types of columns of texts, or of nothing."""
LONGEST_TEXT = 1 << 24  # bytes: in memory it may take four times as many, and several copies
TOO_LONG = Unfit(f"more than {LONGEST_TEXT:,} bytes", damaged=True)
SURROGATE = Unfit("half a surrogate pair", damaged=True)
BATCH_ROWS = 16  # decoded at once: each may be a copy of its page's largest text
LARGEST_FOOTER = 1 << 26
"""Bytes of any text, and numbers of any list, in a Parquet file's description."""
JSON_SUFFIXES = [f".{name}{packed}" for name in ("jsonl", "ndjson", "json") for packed in ("", *DECOMPRESS)]


COLUMN = option("--column", default="text", metavar="NAME", help="column of the texts (default: %(default)s)")


class JsonLinesCorpus(RecordCorpus):
    """JSON lines: of each line's object one field is the text of a document, with the tokenizer's separator after it.

    Plain, or compressed as .gz, .bz2, .xz or .zst, or in zip archives; of a folder, the files named *.jsonl, *.ndjson
    or *.json. Invalid lines are left out and counted, up to 1%.
    """

    EXAMPLE = "--source crawl/ --field text --min-bytes 200 --deduplicate --split 98,1,1 --output data/crawl"

    KIND = "files"
    SUFFIXES = JSON_SUFFIXES
    FIELD = option("--field", dest="column", default="text", metavar="NAME", help="(default: %(default)s)")
    OPTIONS = SOURCE | MEMBER | SAMPLE | FIELD | RecordCorpus.OPTIONS | SPLIT_OPTION

    def texts(self, settings: CorpusSettings) -> Texts:
        return json_texts


class Parquet(RecordCorpus):
    """Parquet files: of each row one column is the text of a document, with the tokenizer's separator after it.

    Reads the files named *.parquet of a folder, a few hundred rows at a time. Rows whose text is not UTF-8 are left out
    and counted, up to 1%. It requires `pip install -e '.[arrow]'`.
    """

    EXAMPLE = "--source crawl/ --column text --min-bytes 200 --split 98,1,1 --output data/crawl"

    KIND = "raw"
    SUFFIXES = (".parquet",)
    OPTIONS = SOURCE | SAMPLE | COLUMN | RecordCorpus.OPTIONS | SPLIT_OPTION

    def texts(self, settings: CorpusSettings) -> Texts:
        return parquet_texts


class HuggingFace(RecordCorpus):
    """A dataset of Hugging Face: of each row one column is the text of a document, with a separator after it.

    A folder that `datasets` saved (save_to_disk) or keeps in its cache, or a copy of a repository of the Hub, as `hf
    download --repo-type dataset` makes one: its .arrow, .parquet or .jsonl files are read as they are, `datasets`
    itself is not needed, and nothing is downloaded. hf://datasets/OWNER/NAME@REVISION/... is downloaded once. Splits
    are the dataset's own, by the names of files and folders; if it has only one, and with --split, the training part is
    cut by bytes. The revision, if the folder or its URL states one, is in index.json and report.json.
    """

    EXAMPLE = "--source ~/.cache/huggingface/datasets/NAME/default/0.0.0/REVISION --column text --output data/name"
    KIND = "raw"
    SUFFIXES = (".arrow", ".parquet", *(name for name in JSON_SUFFIXES if name.startswith(".jsonl")))

    FOLDER = option("--source", nargs=1, required=True, metavar="DIR_OR_URL", help="a folder, or hf://...@REVISION")
    SHARES = split_option("of the training part's bytes for each split (default: its own, or 90,5,5 of its only)")
    OPTIONS = SAMPLE | COLUMN | RecordCorpus.OPTIONS | FOLDER | SHARES

    def texts(self, settings: CorpusSettings) -> Texts:
        return dataset_texts

    def open(
        self, locations: Sequence[str], member: str | None, downloads: Path, settings: CorpusSettings, workers: int
    ) -> RecordSource:
        (location,) = locations
        parts = find_parts(locations, None, downloads, self.KIND, self.SUFFIXES)
        # `datasets` keeps results of map and filter next to the dataset
        files = [part for part in parts if not PurePosixPath(part.name).name.startswith(("cache-", "tmp"))]
        if not files:
            raise DataError(location, "there are only intermediate results in it", "Give the folder of a dataset")
        _require_all(files)
        of_split = {part: split_of(part.name) for part in files}
        if not any(of_split.values()):
            of_split = dict.fromkeys(files, "train")
        chosen = [name for name in NAMES if name in of_split.values()]
        if settings.get("split") and "train" in chosen:
            chosen = ["train"]
        ordered = sorted(files, key=lambda part: natural(part.name))
        parts = [part for name in chosen for part in ordered if of_split[part] == name]
        _require_one(location, parts)
        others = sorted(part.name for part in {*files} - {*parts})
        report_left_out(location, len(parts), others, f"they are of no split of {', '.join(chosen)}")
        facts = {"revision": revision(location), "other_files": others}
        splits = [of_split[part] or "" for part in parts] if len(chosen) > 1 else ()
        return self.examine(locations, parts, settings, workers, file_splits=splits, facts=facts)


# The texts of a file


def json_object(line: bytes) -> dict[str, Any] | Unfit:
    """Return the object of a line of JSON, or why it is none."""
    try:
        record = json.loads(line.decode())
    except (ValueError, RecursionError):
        return Unfit("not JSON", True, json_hint(line))
    return record if isinstance(record, dict) else Unfit("no JSON object", True, json_hint(line))


def json_records(part: Part, convert: Callable[[dict[str, Any]], bytes | Unfit]) -> Records:
    """Yield the records of all lines that are not blank. convert: converts an object of JSON, or raises Invalid."""
    for number, line in lines(read(part), LONGEST_TEXT):
        content: bytes | Unfit = TOO_LONG
        if line is not None:
            if not line.strip():
                continue
            record = json_object(line)
            try:
                content = record if isinstance(record, Unfit) else convert(record)
            except Invalid as error:
                content = error.unfit
            except UnicodeEncodeError:
                content = SURROGATE
            except ConfigError as error:
                raise DataError(part, f"line {number}: {error.problem}", error.hint) from None
        yield number, content


def json_texts(part: Part, field: str) -> Records:
    no_field, no_text = Unfit(f'no "{field}"', damaged=True), Unfit(f'"{field}" is no text', damaged=True)

    def encoded(record: dict[str, Any]) -> bytes | Unfit:
        text = record.get(field, no_field)
        if isinstance(text, str):
            return text.encode()
        return EMPTY if text is None else no_field if text is no_field else no_text

    return json_records(part, encoded)


def parquet_texts(part: Part, column: str) -> Records:
    return _from_values(part, _parquet_values(part.path, column))


def dataset_texts(part: Part, column: str) -> Records:
    suffix = PurePosixPath(part.path.name).suffix.lower()
    if suffix == ".arrow":
        return _from_values(part, _arrow_values(part.path, column))
    return parquet_texts(part, column) if suffix == ".parquet" else json_texts(replace(part, raw=False), column)


def _from_values(part: Part, values: Iterable[bytes | None]) -> Records:
    size, packed = 0, part.path.stat().st_size
    for row, value in enumerate(values, 1):
        if value is None:
            yield row, EMPTY
            continue
        size += len(value)
        refuse_bomb(part, size, packed)
        if len(value) > LONGEST_TEXT:
            yield row, TOO_LONG
            continue
        try:
            value.decode()
            yield row, value
        except UnicodeDecodeError:
            yield row, NOT_UTF8


def _parquet_values(path: Path, column: str) -> Iterator[bytes | None]:
    arrow()
    from pyarrow.parquet import ParquetFile

    limits = {"thrift_string_size_limit": LARGEST_FOOTER, "thrift_container_size_limit": LARGEST_FOOTER}
    with (
        _reading(path),
        open_file(path) as content,
        ParquetFile(content, page_checksum_verification=True, pre_buffer=False, **limits) as file,
    ):
        _require_texts(path, file.schema_arrow, column)
        leaf = [file.schema.column(number).path for number in range(len(file.schema))].index(column)
        for number in range(file.num_row_groups):
            chunk = file.metadata.row_group(number).column(leaf)
            name = f'{path}: column "{column}" of row group {number}'
            refuse_bomb(name, chunk.total_uncompressed_size, chunk.total_compressed_size)
        for batch in file.iter_batches(BATCH_ROWS, columns=[column], use_threads=False):
            yield from _values(batch.column(0))


def _arrow_values(path: Path, column: str) -> Iterator[bytes | None]:
    """Yield the values of a column, None for null, of an Arrow file of the stream or the file format."""
    pyarrow = arrow()
    with _reading(path), open_file(path) as file:
        file.seek(8 if file.read(6) == b"ARROW1" else 0)  # the file format is a stream between two frames
        table = pyarrow.ipc.open_stream(file)
        _require_texts(path, table.schema, column)
        for batch in table:
            yield from _values(batch.column(table.schema.get_field_index(column)))


def _require_texts(path: Path, schema: Any, column: str) -> None:
    """Raise ConfigError unless exactly one column of a file has this name, and consists of texts."""
    columns = schema.get_all_field_indices(column)
    if len(columns) != 1:
        problem = f'{path} has {len(columns)} columns "{column}"' if columns else f'{path} has no column "{column}"'
        raise ConfigError("--column", problem, did_you_mean(column, schema.names[:50]))
    kind = schema.field(columns[0]).type
    if str(kind.value_type if arrow().types.is_dictionary(kind) else kind) not in TEXTS:
        texts = [field.name for field in list(schema)[:50] if str(field.type) in TEXTS]
        hint = f"Texts are in: {', '.join(texts)}" if texts else "Choose a file that has texts"
        raise ConfigError("--column", f'"{column}" of {path} holds {str(kind)[:80]}, not text', hint)


def _values(column: Any) -> Iterator[bytes | None]:
    """Yield the values of an array of texts. Raises ArrowInvalid if its inside contradicts itself."""
    pyarrow = arrow()
    if pyarrow.types.is_dictionary(column.type):
        column.validate(full=True)
        texts = list(_values(column.dictionary))  # not decoded: an entry may be large, and in many rows
        yield from (None if index is None else texts[index] for index in column.indices.to_pylist())
        return
    binary = {pyarrow.string(): pyarrow.binary(), pyarrow.large_string(): pyarrow.large_binary()}
    binary[pyarrow.string_view()] = pyarrow.binary_view()
    if column.type in binary:
        column = column.view(binary[column.type])
    column.validate(full=True)
    yield from (value.as_py() for value in column)  # one by one: a batch may have 64 MB


def _reading(path: Path) -> AbstractContextManager[None]:
    errors = (arrow().ArrowException, OSError, MemoryError, ValueError, LookupError)
    return reading(path, errors, hint="Check that it is complete; get it again")


# The files of a dataset

NAMED_SPLIT = re.compile(rf"(?<![a-z])({'|'.join(SPLIT_NAMES)})(?![a-z])")
NUMBERED = re.compile(r"(.*)-(\d{5,})-of-(\d{5,})\.")
REVISION = re.compile(r"(?<![0-9a-f])[0-9a-f]{40}(?![0-9a-f])")
PINNED_URL = re.compile(r"@([0-9a-f]{40})/")
INFO, LARGEST_INFO = "dataset_info.json", 1 << 26  # bytes: a large dataset has some 200 for each of its files


def split_of(name: str) -> str | None:
    """Return the split that a file belongs to, by the last part of its path that names one."""
    for part in reversed(PurePosixPath(name.lower()).parts):
        if match := NAMED_SPLIT.search(part):
            return SPLIT_NAMES[match[1]]
    return None


def revision(location: str) -> str | None:
    """Return the commit of the Hub that a dataset is from, as its URL, path or description states it."""
    if named := REVISION.search(location) or REVISION.search(str(Path(location).resolve())):
        return named[0]
    for info in sorted(Path(location).glob(f"**/{INFO}")):
        try:
            if info.stat().st_size > LARGEST_INFO:
                raise DataError(info, f"more than {LARGEST_INFO:,} bytes are too many for a description", "Remove it")
            described = json.loads(read_file(info))
        except (OSError, ValueError, RecursionError) as error:
            raise DataError(info, f"cannot be read ({type(error).__name__})", "Restore or remove it") from None
        checksums = described.get("download_checksums") if isinstance(described, dict) else None
        for url in checksums if isinstance(checksums, dict) else ():
            if pinned := PINNED_URL.search(url):
                return pinned[1]
    return None


def _require_one(location: str, parts: Sequence[Part]) -> None:
    """Raise DataError if the files belong to several configurations."""
    roots = set()
    for part in parts:
        folders = PurePosixPath(part.name).parent.parts
        roots.add("/".join(folder for folder in folders if folder.lower() not in SPLIT_NAMES) or ".")
    if len(roots) > 1:
        some = ", ".join(sorted(roots)[:5])
        raise DataError(location, f"files of several configurations, in {len(roots)} folders ({some})", "Give one")


def _require_all(parts: Sequence[Part]) -> None:
    """Raise DataError if of NAME-00000-of-00003 and so on one is missing."""
    groups: dict[tuple[str, int], set[int]] = {}
    for part in parts:
        if match := NUMBERED.match(part.name):
            groups.setdefault((match[1], int(match[3])), set()).add(int(match[2]))
    for (name, count), numbers in groups.items():
        if len(numbers) < count:
            first = next(number for number in range(count) if number not in numbers)
            raise DataError(name, f"{len(numbers)} of its {count} files are here, not number {first}", "Get it again")
