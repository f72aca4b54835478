"""A decoder's held-out code length: bits/dim, bits/byte, perplexities, accuracy, and the protocol they were found
by."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from megasparse.evaluation.bits_per_dim import Stream, score_seeds
from megasparse.evaluation.compress import png_bits_per_dim
from megasparse.evaluation.perplexity import BYTES, PIXELS, Counts, counts_of, measures
from megasparse.evaluation.pictures import image_shape
from megasparse.evaluation.protocol import Protocol
from megasparse.training.ranks import Ranks


def evaluate(
    decoder: Any, stream: Stream, protocol: Protocol, batch: int, limit: int | None, ranks: Ranks
) -> dict[str, Any]:
    """Score a split by a protocol: the measures of perplexity.measures for its tokenizer, "accuracy", "nats", "dims",
    "bytes", "words", "standard_deviation", "standard_deviations", "protocol"; of pixels also "png_bits_per_dim".

    dims: tokens that were scored. accuracy: share of them that the model held to be the likeliest. Over several hash
    seeds it is a mean, and nats are the mean code length (averaged probabilities would be an ensemble's), of which all
    measures are; the deviations are the sample standard deviations of each measure, and of the primary one, the first.
    The protocol also says whether the numbers are code lengths of the text, why a measure is null, and which layers
    are not strictly causal. Raises ConfigError for pixels that make no square image.
    """
    kind = protocol.tokenizer["name"]
    shape = image_shape(protocol.sequence_length) if kind == PIXELS else None
    scores = score_seeds(decoder, stream, protocol, batch, limit, ranks)
    dims = scores[0].dims
    counts = counts_of(protocol, dims, stream.tokens)
    nats, correct = (math.fsum(sums) / len(scores) for sums in zip(*((s.nats, s.correct) for s in scores), strict=True))
    found = measures(nats, counts, kind)
    each = [measures(score.nats, counts, kind) for score in scores]
    deviations = {name: _deviation([one[name] for one in each]) for name in found}
    own: dict[str, Any] = {
        "symbols": f"tokens of {kind}",
        "leaks": decoder.leaks,
        "code_length": protocol.lossless and not decoder.leaks,
        "context_start": "learned start vector",
        "split_dims": stream.tokens,
        "coverage": dims / stream.tokens,
        "left_out": {name: _reason(name, counts) for name, value in found.items() if value is None},
    }
    result: dict[str, Any] = found | {
        "accuracy": correct / dims,
        "nats": nats,
        "dims": dims,
        "bytes": counts.raw_bytes,
        "words": counts.words,
        "standard_deviation": next(iter(deviations.values())),
        "standard_deviations": deviations,
    }
    if shape is not None:
        own["symbols"] = f"sub-pixels of images of {shape.side}×{shape.side}, {shape.tokens} each"
        own["order"] = "rows from the top, pixels from the left, channels in turn"
        result["png_bits_per_dim"] = png_bits_per_dim(stream, shape.tokens, limit)
    return {**result, "protocol": {**asdict(protocol), **own}}


UNITS = {
    "bits_per_dim": "bits/dim",
    "bits_per_token": "bits/token",
    "bits_per_byte": "bits/byte",
    "token_perplexity": "token perplexity",
    "word_perplexity": "word perplexity",
    "png_bits_per_dim": "PNG files' bits/dim",
}


def summary(result: Mapping[str, Any]) -> str:
    """The line that megasparse evaluate prints."""
    protocol, found = result["protocol"], {name: result[name] for name in UNITS if result.get(name) is not None}
    if not protocol["lossless"]:  # cheap where words are predicted as unknown ones: not to be compared with compressors
        found.pop("bits_per_byte", None)
    if protocol["tokenizer"]["name"] == BYTES:  # a number of millions, which no model of words would have
        found.pop("word_perplexity", None)
    primary, *others = found
    parts = [f"{found[primary]:.4f} {UNITS[primary]}", f"accuracy {100 * result['accuracy']:.2f} %"]
    parts += [f"{UNITS[name]} {found[name]:.4f}" for name in others if found[name] != found[primary]]
    covered = f"{result['dims']:,} of {protocol['split_dims']:,} symbols of {protocol['split']}"
    windows = f"windows of {protocol['sequence_length']}, stride {protocol['stride']}"
    return f"{', '.join(parts)} ({covered}; {windows}; step {protocol['checkpoint_step']})"


def _reason(name: str, counts: Counts) -> str:
    count = {"bits_per_byte": counts.raw_bytes, "word_perplexity": counts.words}.get(name, counts.tokens)
    return counts.missing if count is None else "beyond the largest number"


def _deviation(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.stdev(known) if len(values) == len(known) > 1 else None
