"""The data of a pretraining run: texts prepared for it, and shards opened and checked against its configuration."""

import argparse
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megasparse.config.schema import Config, ModelConfig
from megasparse.data.batches import TrainingBatches
from megasparse.data.corpora import CORPORA
from megasparse.data.corpora.records import RecordSource
from megasparse.data.corpora.source import Source, find_parts, report_left_out
from megasparse.data.corpora.tables import JSON_SUFFIXES, json_texts
from megasparse.data.index import Index
from megasparse.data.index_file import INDEX_FILE
from megasparse.data.prepare import prepare
from megasparse.data.tokenizers import NAMED, Tokenizer, build_tokenizer
from megasparse.data.urls import GIGABYTE, ShardCache
from megasparse.errors import ConfigError, UserError
from megasparse.training.ranks import Ranks, RunHooks


@dataclass(frozen=True)
class RunData:
    """What a run reads."""

    tokenizer: Tokenizer
    evaluation: Index
    """The folder of `data.path`."""
    mixture: list[tuple[Index, float]]
    """The folders trained on, each with its weight: those of `data.mixture`, or `data.path` alone."""

    @property
    def fingerprint(self) -> str:
        """The digest that decides, with the configuration, which tokens the run is trained on: that of the folder, or
        for a mixture a sha256 over the fingerprints of its folders, in order, and their weights.
        """
        if len(self.mixture) == 1:
            return self.mixture[0][0].fingerprint
        identity = [[index.fingerprint, weight] for index, weight in self.mixture]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()


def from_data(config: Config) -> Config:
    """Return a configuration with the tokenizer beside the shards and room for its vocabulary, unless they are set.

    Raises ConfigError for a tokenizer that cannot be read.
    """
    data, model = config.data, config.model
    copy = next(Path(data.path).glob("tokenizer.*"), None)
    if copy is not None and "tokenizer" not in data.model_fields_set:
        data = data.model_copy(update={"tokenizer": str(copy)})
    if data.tokenizer not in NAMED and "vocabulary" not in model.model_fields_set:
        vocabulary = max(model.vocabulary, build_tokenizer(data.tokenizer).vocabulary)
        model = model.model_copy(update={"vocabulary": vocabulary})
    return config.model_copy(update={"data": data, "model": model})


def open_data(config: Config) -> RunData:
    """Open all folders that a run reads. Raises what `open_folder` does.

    The folders of a mixture are put in the order of their content, so that what is trained on depends neither on their
    paths nor on the order they are written in.
    """
    tokenizer = build_tokenizer(config.data.tokenizer)
    evaluation = open_folder(config.data.path, config, tokenizer)
    folders = config.data.mixture.items()
    mixture = [(open_folder(path, config, tokenizer), weight) for path, weight in folders]
    mixture.sort(key=lambda part: (part[0].fingerprint, part[1]))
    return RunData(tokenizer, evaluation, mixture or [(evaluation, 1.0)])


def open_folder(path: str | Path, config: Config, tokenizer: Tokenizer) -> Index:
    """Open the index of a folder of shards, for the model and sequence length of a configuration.

    Raises DataError as `Index.load` does; ConfigError naming data.tokenizer, data.sequence_length, model.source.length,
    model.vocabulary, model.padding_token, model.masking.token or model.sentence_order where they do not fit the folder.
    """
    cache = ShardCache(config.data.cache, int(config.data.cache_gb * GIGABYTE))
    index = Index.load(path, cache)
    index.require_tokenizer(tokenizer)
    index.require_length(config.data.sequence_length, config.model.source.length if config.model.source else None)
    index.require_room(tokenizer, config.model.vocabulary, config.model.padding_token)
    _check_objectives(index, config.model, tokenizer)
    return index


def _check_objectives(index: Index, model: ModelConfig, tokenizer: Tokenizer) -> None:
    """Raise ConfigError where an encoder's ids are not the tokenizer's, or the folder has no pairs of texts."""
    special, mask, order = tokenizer.special, model.masking.token, model.sentence_order
    if model.source is not None and index.record is None:
        problem = f'"{model.kind}", but {index.directory} holds running text'
        raise ConfigError("model.kind", problem, "Prepare pairs of texts: megasparse prepare-data parallel")
    if model.kind == "encoder" and mask < tokenizer.vocabulary and (special is None or mask != special.mask):
        expected = special.mask if special else tokenizer.vocabulary
        raise ConfigError("model.masking.token", f"{mask} is a token that texts can have", f"Set it to {expected}")
    corpus = CORPORA.get(index.file.corpus)
    if order is not None and corpus is not None and not corpus.SENTENCE_PAIRS:
        problem = f"given, but {index.directory} holds {index.file.corpus}"
        raise ConfigError("model.sentence_order", problem, "Prepare pairs (megasparse prepare-data), or set it to null")
    if order is not None and special is not None and order.separator != special.separator:
        problem = f"{order.separator}, but that in {index.directory} is {special.separator}"
        raise ConfigError("model.sentence_order.separator", problem, f"Set it to {special.separator}")


def training_batches(
    config: Config, run_data: RunData, ranks: Ranks, position: int, hooks: RunHooks
) -> TrainingBatches:
    """Read this rank's steps from the global sample number `position` on. Raises what TrainingBatches does."""
    data, training = config.data, config.training
    return TrainingBatches(
        run_data.mixture, "train", sequence_length=data.sequence_length, seed=config.run.seed, start=position,
        shuffle_shards=data.shuffle_shards, global_batch=training.global_batch, micro_batch=training.micro_batch,
        rank=ranks.data_rank, world_size=ranks.data_ranks, part=(ranks.sequence_rank, ranks.sequence_size),
        stop_waiting=hooks.stop_wanted, alive=hooks.alive,
    )  # fmt: skip


HELD_OUT = (5, 10, 20, 30)
"""Percent of the bytes that may be held out, at the end: the first of these that leaves whole documents."""

SHARD = 64 << 20
"""Bytes of text in a shard, as megasparse prepare-data has it."""


def with_texts(config: Config, texts: str, ranks: Ranks) -> Config:
    """The configuration of a run on `texts`, which rank 0 prepares in RUN/data where they are not there yet. Every rank
    calls it.

    texts: text files, each a document, or JSON lines with a field `text`; a file, a folder, or a URL. Of a folder with
    both, those of more bytes are read, and the others are reported. The last 5 % of the bytes are held out, up to 30 %
    where documents are long; with fewer documents all are one running text. Documents do not see each other. A folder
    of shards is taken as `data.path`, as it is. Raises UserError, on all ranks, if the texts cannot be prepared.
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
    """Write the shards. Returns True if the texts are documents, each with a separator after it."""
    downloads, share = output / ".download", HELD_OUT[0]
    parts = find_parts([texts], None, downloads, "files")
    records = [part for part in parts if part.name.lower().endswith(tuple(JSON_SUFFIXES))]
    others = [part for part in parts if part not in {*records}]
    size_of = lambda parts: sum(path.stat().st_size for path in {part.path for part in parts})  # noqa: E731
    more, less = sorted((others, records), key=size_of, reverse=True)
    report_left_out(texts, len(more), [part.name for part in less], "of texts and JSON lines the more bytes are read")
    if more is records:
        corpus, documents = "jsonl", True
        options = _options(corpus, texts, tokenizer, share)
        source: Source = RecordSource.examine([texts], records, json_texts, options, 1)
    else:
        corpus, source = "text", Source.open([texts], None, downloads, "files", others)
        before_last = 1 - source.parts[-1].size / source.total_bytes
        shares = [percent for percent in HELD_OUT if before_last >= 1 - percent / 100]
        documents = bool(shares) and build_tokenizer(tokenizer).separator is not None
        share = shares[0] if shares else share
        options = _options(corpus, texts, tokenizer, share, *(["--documents"] if documents else []))
    sample, command = options.pop("sample_bytes"), "megasparse pretrain --data"
    prepare(corpus, source, output, options=options, sample_bytes=sample, shard_bytes=SHARD, command=command)
    return documents


def _options(corpus: str, texts: str, tokenizer: str, share: int, *flags: str) -> dict[str, Any]:
    """The options of `megasparse prepare-data CORPUS`, with their defaults."""
    parser = argparse.ArgumentParser()
    CORPORA[corpus].add_arguments(parser)
    split = ["--split", f"{100 - share},{share},0"]
    options = vars(parser.parse_args(["--source", texts, "--tokenizer", tokenizer, *split, *flags]))
    return {key: value for key, value in options.items() if key not in ("source", "member")}
