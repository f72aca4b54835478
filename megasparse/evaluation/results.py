"""Restore models from checkpoints, and evaluate a split by kind of model, with the protocol of the evaluation.

The result of a decoder is a code length, in the units that papers compare:

    bits/token (bits/dim) = nats / (ln 2 · tokens)          token perplexity = exp(nats / tokens)
    bits/byte = nats / (ln 2 · bytes of the text)           word perplexity = exp(nats / reference words of the text)

Only bits/byte and word perplexity compare models with different tokenizers. An encoder predicts masked tokens, from
both sides, so its loss is not a code length; the masks are a function of (seed, the window's start). An encoder–decoder
predicts its targets.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from megasparse.config.schema import Config, ModelConfig, evaluation_rounds
from megasparse.data.index import Index
from megasparse.data.tokenizers import Tokenizer, build_tokenizer
from megasparse.errors import ConfigError, rank_variable
from megasparse.evaluation.bits_per_dim import Score, Scorer, Stream, Windows, of_model, score
from megasparse.evaluation.images import image_shape, png_bits_per_dim
from megasparse.model.build import Model, build_model, empty_model
from megasparse.ops.random import RngContext
from megasparse.settings.load import build_config
from megasparse.training.checkpoints.checkpoint import Checkpoint, load_weights, open_newest
from megasparse.training.ranks import Ranks, start_ranks


def restore(directory: str | Path, overrides: Sequence[str] = ()) -> tuple[Model, Config, Checkpoint, Ranks]:
    """Load the model of a checkpoint, or of a run's newest one, in the precision and on the device of its run, on every
    rank. Several ranks use `parallel.sequence` of the configuration; a single rank processes whole sequences.
    """
    checkpoint = open_newest(Path(directory), build=empty_model)
    values, alone = checkpoint.config.model_dump(mode="json"), rank_variable("WORLD_SIZE", 1) == 1
    if alone:
        values["parallel"]["sequence"] = 1
    else:
        values["run"]["engine"] = "deepspeed"  # required for sequence parallelism
    config = build_config(values, overrides)
    run = config.run.model_copy(update={"engine": "torch" if alone else "deepspeed"})
    ranks = start_ranks(run, config.parallel.sequence)
    model = build_model(config.model, config.run.seed)
    return load_for_evaluation(model, checkpoint, config.training.precision, ranks), config, checkpoint, ranks


def load_for_evaluation(model: Any, checkpoint: Checkpoint, precision: str, ranks: Ranks) -> Any:
    """Return the model with a checkpoint's weights, in a precision, on the device of its rank."""
    load_weights(model, checkpoint)
    if precision == "bf16":
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
    return model.to(ranks.device).eval()


def trained_tokenizer(config: Config, checkpoint: Checkpoint) -> Tokenizer:
    """Return the tokenizer of a configuration, which must be the checkpoint's."""
    tokenizer, trained = build_tokenizer(config.data.tokenizer), checkpoint.manifest["tokenizer"]
    if tokenizer.identity != trained:
        names = [f'"{x.get("name")}" (sha256 {x.get("sha256", "")[:12]}…)' for x in (tokenizer.identity, trained)]
        problem = f"{names[0]}, but the checkpoint was trained with {names[1]}"
        raise ConfigError("data.tokenizer", problem, "Set it to the tokenizer of the training")
    return tokenizer


@dataclass(frozen=True)
class Scoring:
    """Options of scoring a split, see `megasparse.evaluate`."""

    split: str = "test"
    stride: int | None = None
    rounds: int | None = None
    hash_seeds: int = 1
    batch: int = 1
    limit: int | None = None
    allow_leaking_attention: bool = False


@dataclass(frozen=True)
class Protocol:
    """All settings that a score depends on."""

    split: str
    sequence_length: int
    stride: int
    score_from: int
    """Tokens at the start of each window that are not scored; 0 for text."""
    rounds: int | None
    """Hash rounds (YOSO: hashes) requested instead of the configured ones."""
    configured_rounds: dict[str, int]
    """Mechanism -> hash rounds configured for evaluation."""
    seeds: list[int]
    """Seeds of the random draws, for one pass over the split per seed."""
    precision: str
    checkpoint: str
    checkpoint_step: int
    data_fingerprint: str
    trained_on_fingerprint: str
    tokenizer: dict[str, str]
    lossless: bool
    """True if the text can be decoded from its tokens. Otherwise (unknown words) scores are not code lengths."""
    record: int | None
    """Tokens per record, such as an image; None for running text."""
    split_bytes: int | None
    split_words: int | None
    """Bytes and reference words of the split's text; None if missing in the index."""
    data_settings: dict[str, Any]


def protocol_of(
    config: Config, checkpoint: Checkpoint, index: Index, tokenizer: Tokenizer, scoring: Scoring
) -> Protocol:
    """Return the protocol of scoring a checkpoint on a split. Raises ConfigError if windows would start inside records,
    DataError if the data lacks the split.
    """
    length, section = config.evaluation_length, index.split(scoring.split)
    stride = scoring.stride
    if index.record is not None and stride not in (None, length):
        raise ConfigError("--stride", f"{stride} starts windows inside records of {index.record} tokens", "Remove it")
    source: dict[str, Any] = {
        key: index.file.source[key] for key in ("downsampling", "verified") if key in index.file.source
    }
    return Protocol(
        split=scoring.split,
        sequence_length=length,
        stride=stride or length,
        score_from=config.model.score_from,
        rounds=scoring.rounds,
        configured_rounds=evaluation_rounds(config.model),
        seeds=[config.run.seed + i for i in range(scoring.hash_seeds)],
        precision=config.training.precision,
        checkpoint=str(checkpoint.path),
        checkpoint_step=checkpoint.step,
        data_fingerprint=index.fingerprint,
        trained_on_fingerprint=checkpoint.manifest["data_fingerprint"],
        tokenizer=tokenizer.identity,
        lossless=tokenizer.lossless,
        record=index.record,
        split_bytes=section.raw_bytes,
        split_words=section.words,
        data_settings={**index.file.settings, **source},
    )


def score_seeds(
    model: Any,
    stream: Stream,
    protocol: Protocol,
    batch: int,
    limit: int | None,
    ranks: Ranks,
    scorer: Scorer | None = None,
) -> list[Score]:
    """Score a split once per seed of the protocol, by default with the model's token scores."""
    scorer = scorer or of_model(model, ranks.sequence)
    windows = Windows(protocol.sequence_length, protocol.stride, protocol.score_from, batch, limit)
    settings: dict[str, Any] = {"rounds": protocol.rounds, "ranks": ranks, "progress": ranks.rank == 0}
    return [score(scorer, stream, windows, seed, **settings) for seed in protocol.seeds]


# Decoders: code length

LARGEST = 700.0  # exp of a larger number overflows float64
BYTES, PIXELS = "bytes", "pixels"


def measures(
    nats: float, tokens: int, raw_bytes: int | None, words: int | None, tokenizer: str
) -> dict[str, float | None]:
    """Return the usual measures for the tokenizer, the primary one first. None if the count is unknown or a perplexity
    overflows, as for text with almost no words.
    """

    def bits(count: int | None) -> float | None:
        return None if count is None else nats / (math.log(2.0) * count)

    def perplexity(count: int | None) -> float | None:
        return None if count is None or nats > LARGEST * count else math.exp(nats / count)

    primary = "bits_per_dim" if tokenizer in (BYTES, PIXELS) else "bits_per_token"
    values = {primary: bits(tokens)}
    if tokenizer == PIXELS:
        return values
    values["bits_per_byte"] = bits(raw_bytes)
    if tokenizer != BYTES:
        values["token_perplexity"] = perplexity(tokens)
    return values | {"word_perplexity": perplexity(words)}


def evaluate_decoder(
    decoder: Any, stream: Stream, protocol: Protocol, batch: int, limit: int | None, ranks: Ranks
) -> dict[str, Any]:
    """Score a split with a decoder by a protocol.

    Returns the measures of `measures` for the tokenizer, "accuracy", "nats", "dims" (scored tokens), "bytes", "words",
    "standard_deviation" (of the primary measure), "standard_deviations" (of all), "protocol", and for pixels
    "png_bits_per_dim". Over several hash seeds accuracy and nats are means, not an ensemble's. "protocol" also reports
    if the numbers are code lengths, the reason for each null, and non-causal layers.
    """
    kind = protocol.tokenizer["name"]
    shape = image_shape(protocol.sequence_length) if kind == PIXELS else None
    scores = score_seeds(decoder, stream, protocol, batch, limit, ranks)
    dims = scores[0].dims
    raw_bytes, words = dims if kind == BYTES else None, None
    missing = f"known only for the whole split, of which {dims:,} of {stream.tokens:,} tokens were scored"
    if dims == stream.tokens:
        raw_bytes = (raw_bytes if protocol.split_bytes is None else protocol.split_bytes) or None
        words = protocol.split_words or None
        missing = "the index of the data does not contain it"
    nats, correct = (math.fsum(sums) / len(scores) for sums in zip(*((s.nats, s.correct) for s in scores), strict=True))
    numbers = measures(nats, dims, raw_bytes, words, kind)
    by_seed = [measures(score.nats, dims, raw_bytes, words, kind) for score in scores]
    deviations = {name: _deviation([values[name] for values in by_seed]) for name in numbers}
    known = {"bits_per_byte": raw_bytes, "word_perplexity": words}
    reasons = _no_code_length(decoder, protocol, ranks)
    facts: dict[str, Any] = {
        "symbols": f"tokens of {kind}",
        "leaks": decoder.leaks,
        "code_length": not reasons,
        "no_code_length": reasons,
        "context_start": "learned start vector",
        "split_dims": stream.tokens,
        "coverage": dims / stream.tokens,
        "left_out": {
            name: missing if known.get(name, dims) is None else "beyond the largest number"
            for name, value in numbers.items()
            if value is None
        },
    }
    result: dict[str, Any] = numbers | {
        "accuracy": correct / dims,
        "nats": nats,
        "dims": dims,
        "bytes": raw_bytes,
        "words": words,
        "standard_deviation": next(iter(deviations.values())),
        "standard_deviations": deviations,
    }
    if shape is not None:
        facts["symbols"] = f"sub-pixels of images of {shape.side}×{shape.side}, {shape.tokens} each"
        facts["order"] = "rows from the top, pixels from the left, channels in turn"
        result["png_bits_per_dim"] = png_bits_per_dim(stream, shape.tokens, limit)
    return {**result, "protocol": {**asdict(protocol), **facts}}


def _no_code_length(decoder: Any, protocol: Protocol, ranks: Ranks) -> list[str]:
    """Return the reasons why scores are not code lengths of the text. They are if tests show that no later token
    changes a bit of an earlier prediction, as for strictly causal mechanisms of the package, except some with packed
    documents or padding.
    """
    special = [key for key in ("document_separator", "padding_token") if getattr(decoder.config, key) is not None]
    reasons = list(decoder.leaks)
    if not protocol.lossless:
        reasons.append("the tokenizer is not lossless")
    if protocol.score_from:
        reasons.append(f"the first {protocol.score_from} tokens of each window are not scored")
    if ranks.sequence is not None:
        reasons.append("bit-exact causality is not tested for sequences split over ranks")
    for layer, mechanism in decoder.mechanisms():
        name = type(mechanism).__name__
        if not type(mechanism).__module__.startswith("megasparse."):
            reasons.append(f"layer {layer}: bit-exact causality is not tested for {name}")
        elif special and mechanism.computed_by_document:
            reasons.append(f"layer {layer}: a later model.{special[0]} changes the rounding of {name}")
    return reasons


UNITS = {
    "bits_per_dim": "bits/dim",
    "bits_per_token": "bits/token",
    "bits_per_byte": "bits/byte",
    "token_perplexity": "token perplexity",
    "word_perplexity": "word perplexity",
    "png_bits_per_dim": "PNG files' bits/dim",
}


def decoder_summary(result: Mapping[str, Any]) -> str:
    """Return the line that megasparse evaluate prints."""
    protocol, values = result["protocol"], {name: result[name] for name in UNITS if result.get(name) is not None}
    if not protocol["lossless"]:  # predicting unknown words is cheap, so this cannot be compared with compressors
        values.pop("bits_per_byte", None)
    if protocol["tokenizer"]["name"] == BYTES:  # in the millions, not comparable with word models
        values.pop("word_perplexity", None)
    primary, *further = values
    parts = [f"{values[primary]:.4f} {UNITS[primary]}", f"accuracy {100 * result['accuracy']:.2f} %"]
    parts += [f"{UNITS[name]} {values[name]:.4f}" for name in further if values[name] != values[primary]]
    covered = f"{result['dims']:,} of {protocol['split_dims']:,} symbols"
    return f"{', '.join(parts)} ({covered} {_windows(protocol)})"


def _deviation(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return statistics.stdev(numbers) if len(values) == len(numbers) > 1 else None


# Encoders: masked tokens. Encoder–decoders: target tokens


def evaluate_predictions(
    model: Any, stream: Stream, protocol: Protocol, batch: int, limit: int | None, ranks: Ranks
) -> dict[str, Any]:
    """Score a split with an encoder or encoder–decoder by a protocol.

    Returns "loss" (mean nats per token without label smoothing), "perplexity", "accuracy", "nats", "dims" (masked
    tokens, or targets with their end tokens), "standard_deviation" (of the losses) and "protocol". nats and dims of an
    encoder are sums over seeds, which mask other tokens. With model.sentence_order also "sentence_order": "loss" (nats
    per pair), "accuracy" and "pairs", of a second pass in which half of the pairs are swapped.
    """
    config: ModelConfig = model.config
    scores = score_seeds(model, stream, protocol, batch, limit, ranks)
    losses, total = [sums.nats / sums.dims for sums in scores], sum(sums.dims for sums in scores)
    facts: dict[str, Any] = {"split_tokens": stream.tokens}
    order = {}
    if config.source is None:
        nats, dims = math.fsum(sums.nats for sums in scores), total
        loss = nats / dims
        facts |= {"masking": config.masking.model_dump()}
        if config.sentence_order is not None:
            orders = score_seeds(model, stream, protocol, batch, limit, ranks, partial(order_sums, model))
            pairs = sum(sums.dims for sums in orders)
            order_nats, correct = math.fsum(sums.nats for sums in orders), sum(sums.correct for sums in orders)
            section = {"loss": order_nats / max(1, pairs), "accuracy": correct / max(1, pairs), "pairs": pairs}
            order = {"sentence_order": section}
    else:
        loss, dims = math.fsum(losses) / len(losses), scores[0].dims
        nats = loss * dims
        facts |= {"leaks": model.leaks, "context_start": "learned start vector", "source_length": config.source.length}
    return {
        "loss": loss,
        "perplexity": math.exp(loss),
        "accuracy": math.fsum(sums.correct for sums in scores) / total,
        "nats": nats,
        "dims": dims,
        "standard_deviation": _deviation(losses),
        **order,
        "protocol": {**asdict(protocol), **facts},
    }


def order_sums(encoder: Any, tokens: Tensor, rng: RngContext, skip: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Score the order of the pairs among sequences (B, L), as a `Scorer`."""
    nats, correct, scored = encoder.sentence_order_scores(tokens, rng)
    return nats[scored].double().sum(), correct[scored].sum(), scored.sum()


def prediction_summary(result: Mapping[str, Any]) -> str:
    protocol = result["protocol"]
    kind = "target" if "source_length" in protocol else "masked"
    head = f"{result['loss']:.4f} nats per {kind} token, perplexity {result['perplexity']:.3f}"
    line = f"{head}, accuracy {100 * result['accuracy']:.2f} % ({result['dims']:,} {kind} tokens {_windows(protocol)})"
    if order := result.get("sentence_order"):
        line += f"\nsentence order: {order['loss']:.4f} nats per pair, accuracy {100 * order['accuracy']:.2f} % "
        line += f"({order['pairs']:,} pairs)"
    return line


def _windows(protocol: Mapping[str, Any]) -> str:
    windows = f"windows of {protocol['sequence_length']}, stride {protocol['stride']}"
    return f"of {protocol['split']}; {windows}; step {protocol['checkpoint_step']}"
