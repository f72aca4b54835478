"""The data of a pretraining run, opened and checked against its configuration."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from megasparse.config.schema import Config, ModelConfig
from megasparse.data.batches import TrainingBatches
from megasparse.data.corpora import CORPORA
from megasparse.data.index import Index
from megasparse.data.remote import GIGABYTE, ShardCache
from megasparse.data.tokenizers import Tokenizer, build_tokenizer
from megasparse.errors import ConfigError
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
        own = special.mask if special else tokenizer.vocabulary
        raise ConfigError("model.masking.token", f"{mask} is a token that texts can have", f"Set it to {own}")
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
        run_data.mixture,
        data.split,
        sequence_length=data.sequence_length,
        seed=config.run.seed,
        shuffle_shards=data.shuffle_shards,
        global_batch=training.global_batch,
        micro_batch=training.micro_batch,
        rank=ranks.data_rank,
        world_size=ranks.data_ranks,
        part=(ranks.place, ranks.sequence_size),
        start=position,
        prefetch=data.prefetch,
        stop_waiting=hooks.stop_wanted,
        alive=hooks.alive,
    )
