"""A run on one's own texts: they are prepared with the model's tokenizer into the run's folder, once."""

import argparse
from pathlib import Path
from typing import Any

from megasparse.config.schema import Config
from megasparse.data.corpora import CORPORA
from megasparse.data.corpora.source import Source
from megasparse.data.corpora.tables import JSON_SUFFIXES
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
    downloads, share = output / ".download", HELD_OUT[0]
    if _are_json_lines(Path(texts)):
        corpus, documents = "jsonl", True
        options = _options(corpus, texts, tokenizer, share)
        source = CORPORA[corpus].open([texts], None, downloads, options, 1)
    else:
        corpus, source = "text", Source.open([texts], None, downloads, "files")
        before_last = 1 - source.parts[-1].size / source.total_bytes
        whole = [each for each in HELD_OUT if before_last >= 1 - each / 100]
        documents = bool(whole) and build_tokenizer(tokenizer).separator is not None
        share = whole[0] if whole else share
        options = _options(corpus, texts, tokenizer, share, *(["--documents"] if documents else []))
    sample, command = options.pop("sample_bytes"), "megasparse pretrain --data"
    prepare(corpus, source, output, options=options, sample_bytes=sample, shard_bytes=SHARD, command=command)
    return documents


def _are_json_lines(path: Path) -> bool:
    """Whether a file, or any file of a folder, is named as JSON lines are."""
    files = path.rglob("*") if path.is_dir() else [path]
    return any(file.name.lower().endswith(tuple(JSON_SUFFIXES)) for file in files)


def _options(corpus: str, texts: str, tokenizer: str, share: int, *flags: str) -> dict[str, Any]:
    """The options of `megasparse prepare-data CORPUS`, with their defaults."""
    parser = argparse.ArgumentParser()
    CORPORA[corpus].add_arguments(parser)
    split = ["--split", f"{100 - share},{share},0"]
    options = vars(parser.parse_args(["--source", texts, "--tokenizer", tokenizer, *split, *flags]))
    return {key: value for key, value in options.items() if key not in ("source", "member")}
