"""A run on one's own texts: they are prepared with the model's tokenizer into the run's folder, once."""

import argparse
from pathlib import Path
from typing import Any

from megasparse.config.schema import Config
from megasparse.data.corpora import CORPORA
from megasparse.data.corpora.jsonl import SUFFIXES
from megasparse.data.corpora.source import Source
from megasparse.data.index_file import INDEX_FILE
from megasparse.data.prepare import prepare
from megasparse.data.tokenizers import build_tokenizer
from megasparse.errors import UserError
from megasparse.training.ranks import Ranks

HELD_OUT = (5, 10, 20, 30)
"""Percent of the bytes that may be held out, at the end: the first of these that leaves whole documents."""

SHARD = 64 << 20
"""Bytes of text in a shard, as megasparse prepare-data has it."""


def with_texts(config: Config, texts: str, ranks: Ranks) -> Config:
    """The configuration of a run on `texts`, which rank 0 prepares in RUN/data where they are not there yet. Every rank
    calls it.

    texts: text files, each a document, or JSON lines with a field `text`; a file, a folder, or a URL. The last 5 % of
    the bytes are held out, up to 30 % where documents are long; with fewer documents all are one running text.
    Documents do not see each other. A folder of shards is taken as `data.path`, as it is. Raises UserError, on all
    ranks, where the texts cannot be prepared.
    """
    if (Path(texts) / INDEX_FILE).exists():
        return config.model_copy(update={"data": config.data.model_copy(update={"path": texts})})
    output = Path(config.run.directory) / "data"
    problem, documents = None, True
    if ranks.rank == 0:
        try:
            documents = _prepare(texts, config.data.tokenizer, output)
        except UserError as error:
            problem = str(error)
    problem, documents = ranks.gather((problem, documents))[0]
    if problem is not None:
        raise UserError(problem)
    model = config.model
    if documents and model.document_separator is None:
        separator = build_tokenizer(config.data.tokenizer).separator
        model = model.model_copy(update={"document_separator": separator})
    data = config.data.model_copy(update={"path": str(output)})
    return config.model_copy(update={"model": model, "data": data})


def _prepare(texts: str, tokenizer: str, output: Path) -> bool:
    """Write the shards. Returns whether the texts are documents, each with a separator after it."""
    downloads = output / ".download"
    if _are_json_lines(Path(texts)):
        options = _options("jsonl", texts, tokenizer, "--split", _split(HELD_OUT[0]))
        corpus: Any = CORPORA["jsonl"]
        source: Source = corpus.open_source([texts], None, downloads, options, 1)
        _write("jsonl", source, output, options)
        return True
    source = Source.open([texts], None, downloads, "files")
    before_last = 1 - source.parts[-1].size / source.total_bytes
    share = next((share for share in HELD_OUT if before_last >= 1 - share / 100), None)
    documents = share is not None and build_tokenizer(tokenizer).separator is not None
    arguments = ["--split", _split(share or HELD_OUT[0]), *(["--documents"] if documents else [])]
    _write("text", source, output, _options("text", texts, tokenizer, *arguments))
    return documents


def _are_json_lines(path: Path) -> bool:
    """Whether a file, or any file of a folder, is named as JSON lines are."""
    files = path.rglob("*") if path.is_dir() else [path]
    return any(file.name.lower().endswith(tuple(SUFFIXES)) for file in files)


def _split(share: int) -> str:
    return f"{100 - share},{share},0"


def _options(corpus: str, texts: str, tokenizer: str, *arguments: str) -> dict[str, Any]:
    """The options of `megasparse prepare-data CORPUS`, with their defaults."""
    parser = argparse.ArgumentParser()
    CORPORA[corpus].add_arguments(parser)
    options = vars(parser.parse_args(["--source", texts, "--tokenizer", tokenizer, *arguments]))
    return {key: value for key, value in options.items() if key not in ("source", "member")}


def _write(corpus: str, source: Source, output: Path, options: dict[str, Any]) -> None:
    sample = options.pop("sample_bytes")
    prepare(
        corpus,
        source,
        output,
        options=options,
        sample_bytes=sample,
        shard_bytes=SHARD,
        command="megasparse pretrain --data",
    )
