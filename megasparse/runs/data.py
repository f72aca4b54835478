"""The data of a pretraining run: prepare texts, open shards and check them against the configuration."""

import argparse
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megasparse.config.schema import Config, ModelConfig
from megasparse.data.batches import TrainingBatches
from megasparse.data.corpora import CORPORA
from megasparse.data.corpora.chats import contains_chats
from megasparse.data.corpora.source import Source, find_parts, report_left_out
from megasparse.data.corpora.tables import JSON_SUFFIXES, JsonLinesCorpus
from megasparse.data.index import Index
from megasparse.data.index_file import INDEX_FILE, SEPARATOR, IndexFile, parse
from megasparse.data.prepare import prepare
from megasparse.data.tokenizers import NAMED, Tokenizer, build_tokenizer
from megasparse.data.urls import GIGABYTE, ShardCache
from megasparse.errors import DataError
from megasparse.files import read_file
from megasparse.settings.checks import require
from megasparse.training.checkpoints.checkpoint import tokenizer_copy
from megasparse.training.ranks import Ranks, RunHooks


@dataclass(frozen=True)
class RunData:
    """Tokenizer and shards of a run."""

    tokenizer: Tokenizer
    evaluation: Index
    mixture: list[tuple[Index, float]]

    @property
    def fingerprint(self) -> str:
        """Digest of the training data, of a mixture over fingerprints and weights."""
        if len(self.mixture) == 1:
            return self.mixture[0][0].fingerprint
        identity = [[index.fingerprint, weight] for index, weight in self.mixture]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()


def with_tokenizer(config: Config) -> Config:
    """Return the configuration with the copy of its tokenizer in the run's folder if the file is missing."""
    tokenizer = config.data.tokenizer
    if tokenizer in NAMED or Path(tokenizer).exists():
        return config
    tokenizer = tokenizer_copy(tokenizer, Path(config.run.directory))
    return config.changed(data={"tokenizer": tokenizer})


def from_data(config: Config) -> Config:
    """Return a configuration with the tokenizer of the shards and its vocabulary, unless they are set."""
    data, model = config.data, config.model
    copy = next(Path(data.path).glob("tokenizer.*"), None)
    if copy is not None and "tokenizer" not in data.model_fields_set:
        data = data.changed(tokenizer=str(copy))
    if data.tokenizer not in NAMED and "vocabulary" not in model.model_fields_set:
        vocabulary = max(model.vocabulary, build_tokenizer(data.tokenizer).vocabulary)
        model = model.changed(vocabulary=vocabulary)
    return config.changed(data=data, model=model)


def open_data(config: Config) -> RunData:
    """Open all folders that a run reads. The folders of a mixture are sorted by fingerprint: the training data depends
    neither on their paths nor on their order.
    """
    tokenizer = build_tokenizer(config.data.tokenizer)
    evaluation = open_folder(config.data.path, config, tokenizer)
    mixture = [(open_folder(path, config, tokenizer), weight) for path, weight in config.data.mixture.items()]
    mixture.sort(key=lambda part: (part[0].fingerprint, part[1]))
    return RunData(tokenizer, evaluation, mixture or [(evaluation, 1.0)])


def open_folder(path: str | Path, config: Config, tokenizer: Tokenizer) -> Index:
    """Open the index of a folder of shards. Raises DataError as `Index.load`, and ConfigError if a key of data, model
    or evaluation does not fit the folder.
    """
    index = Index.load(path, ShardCache(config.data.cache, int(config.data.cache_gb * GIGABYTE)))
    index.require_tokenizer(tokenizer)
    source_length = config.model.source.length if config.model.source else None
    index.require_length(config.data.sequence_length, source_length, config.evaluation.sequence_length)
    index.require_room(tokenizer, config.model.vocabulary, config.model.padding_token)
    _check_objectives(index, config.model, tokenizer)
    return index


def _check_objectives(index: Index, model: ModelConfig, tokenizer: Tokenizer) -> None:
    special, mask, order = tokenizer.special, model.masking.token, model.sentence_order
    ends, corpus = index.file.source.get(SEPARATOR, model.document_separator), CORPORA.get(index.file.corpus)
    expected = special.mask if special else tokenizer.vocabulary
    separator = special.separator if special else None
    require(
        (model.document_separator != ends, "model.document_separator",
         f"{json.dumps(model.document_separator)}, but conversations in {index.directory} end with {ends}",
         f"Set it to {ends}, or read the folder with --data"),
        (model.source is not None and index.record is None, "model.kind",
         f'"{model.kind}", but {index.directory} contains running text',
         "Prepare pairs of texts: megasparse prepare-data parallel"),
        (model.kind == "encoder" and mask < tokenizer.vocabulary and mask != (special and special.mask),
         "model.masking.token", f"{mask} is a token that may occur in text", f"Set it to {expected}"),
        (order is not None and corpus is not None and not corpus.SENTENCE_PAIRS, "model.sentence_order",
         f"given, but {index.directory} contains {index.file.corpus}",
         "Prepare pairs (megasparse prepare-data), or set it to null"),
        (order is not None and separator not in (None, order.separator), "model.sentence_order.separator",
         f"{order and order.separator}, but the separator in {index.directory} is {separator}",
         f"Set it to {separator}"),
    )  # fmt: skip


def training_batches(
    config: Config, run_data: RunData, ranks: Ranks, position: int, hooks: RunHooks
) -> TrainingBatches:
    data, training = config.data, config.training
    return TrainingBatches(
        run_data.mixture, "train", sequence_length=data.sequence_length, seed=config.run.seed, start=position,
        shuffle_shards=data.shuffle_shards, global_batch=training.global_batch, micro_batch=training.micro_batch,
        rank=ranks.data_rank, world_size=ranks.data_ranks, part=(ranks.sequence_rank, ranks.sequence_size),
        stop_waiting=hooks.stop_wanted, alive=hooks.alive,
    )  # fmt: skip


HELD_OUT = (5, 10, 20, 30)
"""Percentages of the bytes to hold out, at the end; the first that the last document fits into is used."""


def with_texts(config: Config, texts: str, ranks: Ranks) -> Config:
    """Return the configuration of a run on your own texts, which rank 0 prepares in RUN/data. All ranks call it.

    texts: file, folder or URL of text files (one document per file) or JSON lines with a field `text` or with
    conversations; of both, the kind with more bytes is read. The last 5 % of the bytes are held out, up to 30 % if the
    last document is long; if it is longer, all files form one running text. Otherwise tokens attend only within their
    document. A folder of shards becomes `data.path` unchanged.
    """
    output, documents = Path(texts), False
    if not (output / INDEX_FILE).exists():
        output = Path(config.run.directory) / "data"
        documents = ranks.on_first_rank(lambda: _prepare(texts, config, output))
    model, separator = config.model, parse(output / INDEX_FILE, IndexFile).source.get(SEPARATOR)
    if separator is None and documents and model.end_token is None:
        separator = build_tokenizer(config.data.tokenizer).separator
    if separator is not None:
        model = model.changed(document_separator=separator)
    return config.changed(model=model, data={"path": str(output)})


def _prepare(texts: str, config: Config, output: Path) -> bool:
    """Write the shards. Return True if the texts are separate documents, with a separator after each."""
    downloads, share, tokenizer = output / ".download", HELD_OUT[0], config.data.tokenizer
    parts = find_parts([texts], None, downloads, "files")
    records = [part for part in parts if part.name.lower().endswith(tuple(JSON_SUFFIXES))]
    others = [part for part in parts if part not in {*records}]
    size_of = lambda parts: sum(part.size if part.member else part.path.stat().st_size for part in parts)  # noqa: E731
    more, less = sorted((others, records), key=size_of, reverse=True)
    report_left_out(texts, len(more), [part.name for part in less], "only the kind with more bytes is read")
    source: Source
    if more is records:
        corpus, documents, flags, further = "jsonl", True, list[str](), dict[str, Any]()
        if contains_chats(records):
            start = config.model.start_token
            corpus, flags = "chats", ["--length", f"{config.data.sequence_length}"]
            flags += [] if start is None else ["--start-token", f"{start}"]
            files = hashlib.sha256(Source.open([texts], None, downloads, "files", records).sha256.encode())
            for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
                if (path := Path(tokenizer).with_name(name)).is_file():
                    files.update(read_file(path))
            further["files"] = files.hexdigest()
            rendered = {**further, "length": config.data.sequence_length, "start_token": start}
            if _is_prepared(output, rendered):
                return True
        lines_of_json = CORPORA[corpus]
        assert isinstance(lines_of_json, JsonLinesCorpus)
        for share in HELD_OUT:
            options = _options(corpus, texts, tokenizer, share, *flags) | further
            source = examined = lines_of_json.examine([texts], records, options, 1)
            if examined.documents()["validation"]:
                break
        else:
            problem = f"no document starts in its last {share} % of the bytes, which are held out"
            raise DataError(texts, problem, "Give more of them, or move the longest to the start")
    else:
        corpus, source = "text", Source.open([texts], None, downloads, "files", others)
        before_last = 1 - source.parts[-1].size / source.total_bytes
        shares = [percent for percent in HELD_OUT if before_last >= 1 - percent / 100]
        documents = bool(shares) and build_tokenizer(tokenizer).separator is not None
        share = shares[0] if shares else share
        options = _options(corpus, texts, tokenizer, share, *(["--documents"] if documents else []))
    sample, command = options.pop("sample_bytes"), "megasparse pretrain --data"
    prepare(corpus, source, output, options=options, sample_bytes=sample, shard_bytes=64 << 20, command=command)
    return documents


def _is_prepared(output: Path, settings: dict[str, Any]) -> bool:
    """True if all shards are there, with these settings: rendering conversations could take long."""
    try:
        earlier = Index.load(output).file.settings
    except DataError:
        return False
    return settings == {key: earlier.get(key) for key in settings}


def _options(corpus: str, texts: str, tokenizer: str, share: int, *flags: str) -> dict[str, Any]:
    """Return the options of `megasparse prepare-data CORPUS`, with defaults."""
    parser = argparse.ArgumentParser()
    CORPORA[corpus].add_arguments(parser)
    split = ["--split", f"{100 - share},{share},0"]
    options = vars(parser.parse_args(["--source", texts, "--tokenizer", tokenizer, *split, *flags]))
    return {key: value for key, value in options.items() if key not in ("source", "member")}
