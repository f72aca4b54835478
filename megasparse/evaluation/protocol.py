"""The protocol of an evaluation: what was scored, with which settings."""

from dataclasses import dataclass
from typing import Any

from megasparse.config.pattern import evaluation_rounds
from megasparse.config.schema import Config
from megasparse.data.index import Index
from megasparse.data.tokenizers import Tokenizer
from megasparse.errors import ConfigError
from megasparse.training.checkpoints.checkpoint import Checkpoint

OF_SOURCE = ("downsampling", "verified")
"""Facts about the data's source in its index that a score depends on; where the source lay is none."""


@dataclass(frozen=True)
class Protocol:
    """Everything that a score depends on."""

    split: str
    sequence_length: int
    stride: int
    score_from: int
    """Tokens at the start of each window that are not scored; 0 for text."""
    rounds: int | None
    """Hash rounds (YOSO: hashes) asked for in place of the configured ones."""
    configured_rounds: dict[str, int]
    """Hash rounds that the configuration has for evaluation, by mechanism."""
    seeds: list[int]
    """Seeds of the random draws, such as hash rotations: one pass over the split each."""
    precision: str
    checkpoint: str
    checkpoint_step: int
    data_fingerprint: str
    trained_on_fingerprint: str
    tokenizer: dict[str, str]
    """The tokenizer's name and sha256."""
    lossless: bool
    """Whether the text comes back from its tokens. Where not (unknown words), the numbers are no code length of it."""
    record: int | None
    """Tokens of a record of the data, such as an image; None for running text."""
    split_bytes: int | None
    """Bytes of the text that the split's tokens were made of; None where the index does not have it."""
    split_words: int | None
    """Reference words of that text; None where the index does not have it."""
    data_settings: dict[str, Any]
    """What the shards were made with, such as the down-sampling of images."""


def protocol_of(
    config: Config,
    checkpoint: Checkpoint,
    index: Index,
    tokenizer: Tokenizer,
    split: str,
    stride: int | None = None,
    rounds: int | None = None,
    hash_seeds: int = 1,
) -> Protocol:
    """The protocol of scoring a checkpoint on a split. stride: None takes the windows' whole length.

    index, tokenizer: those of the configuration, as runs.data.open_folder and restore.trained_tokenizer have
    checked. Raises ConfigError where windows would begin inside records; DataError where there is no such split.
    """
    length, chosen = config.data.sequence_length, index.split(split)
    if index.record is not None and stride not in (None, length):
        problem = f"{stride} tokens would begin a window inside one of the data's records of {index.record}"
        raise ConfigError("--stride", problem, "Leave it out")
    source = index.file.source
    return Protocol(
        split=split,
        sequence_length=length,
        stride=stride or length,
        score_from=config.model.score_from,
        rounds=rounds,
        configured_rounds=evaluation_rounds(config.model),
        seeds=[config.run.seed + i for i in range(hash_seeds)],
        precision=config.training.precision,
        checkpoint=str(checkpoint.path),
        checkpoint_step=checkpoint.step,
        data_fingerprint=index.fingerprint,
        trained_on_fingerprint=checkpoint.manifest["data_fingerprint"],
        tokenizer={"name": tokenizer.name, "sha256": tokenizer.sha256},
        lossless=tokenizer.lossless,
        record=index.record,
        split_bytes=chosen.raw_bytes,
        split_words=chosen.words,
        data_settings={**index.file.settings, **{key: source[key] for key in OF_SOURCE if key in source}},
    )
