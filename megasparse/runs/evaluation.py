"""The evaluation of a pretrained model on a split of its data, whatever kind of model it is."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megasparse.data.reader import EvaluationStream
from megasparse.evaluation import results
from megasparse.evaluation.bits_per_dim import refuse_leaks
from megasparse.evaluation.restore import restore_on_ranks, trained_tokenizer
from megasparse.model.decoder import Causal
from megasparse.model.encoder import Encoder
from megasparse.runs.data import open_folder

MEASURES: dict[str, Any] = {
    "decoder": (results.evaluate_decoder, results.decoder_summary),
    "encoder": (results.evaluate_encoder, results.encoder_summary),
    "encoder_decoder": (results.evaluate_encoder_decoder, results.encoder_decoder_summary),
}
"""Kind of a model -> the functions that score a split and that print the numbers."""


def evaluate_split(
    directory: str | Path,
    data: str | Path | None = None,
    *,
    split: str = "test",
    overrides: Sequence[str] = (),
    stride: int | None = None,
    rounds: int | None = None,
    hash_seeds: int = 1,
    batch: int = 1,
    limit: int | None = None,
    allow_leaking_attention: bool = False,
) -> tuple[dict[str, Any], str]:
    """Evaluate a checkpoint. Returns its numbers with their protocol, and a summary of a few lines.

    directory: a checkpoint, or a run's folder, whose newest checkpoint is taken. data: a folder of shards, by default
    the one that the run was trained on. stride: new tokens per window. rounds: hash rounds in place of the configured
    ones. hash_seeds: repeat with so many draws of the rotations. limit: score only so many windows. Where several ranks
    were started, each calls this and has the same result: they share out the windows, and `parallel.sequence` of them
    the tokens of each.
    Raises UserError where a decoder's attention sees later tokens, unless this is allowed; CheckpointError, DataError
    and ConfigError for what is missing, damaged or does not fit.

        >>> numbers, summary = evaluate_split("runs/quickstart", limit=2)
        >>> numbers["bits_per_dim"] > 0
        True
    """
    model, config, checkpoint, ranks = restore_on_ranks(directory, overrides)
    if isinstance(model, Causal) and not allow_leaking_attention:
        refuse_leaks(model.leaks)
    tokenizer = trained_tokenizer(config, checkpoint)
    index = open_folder(data or config.data.path, config, tokenizer)
    if isinstance(model, Encoder) and config.model.masking.whole_words:
        model.set_word_starts(tokenizer.word_starts())
    protocol = results.protocol_of(config, checkpoint, index, tokenizer, split, stride, rounds, hash_seeds)
    evaluate, summary = MEASURES[config.model.kind]
    result = evaluate(model, EvaluationStream(index, split), protocol, batch, limit, ranks)
    return result, summary(result)
