"""How well an encoder–decoder predicts its targets: mean nats, perplexity and accuracy of a target token over a
split."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from megasparse.evaluation.bits_per_dim import Stream, score_seeds
from megasparse.evaluation.protocol import Protocol
from megasparse.training.ranks import Ranks


def evaluate(
    model: Any, stream: Stream, protocol: Protocol, batch: int, limit: int | None, ranks: Ranks
) -> dict[str, Any]:
    """Score a split by a protocol: {"loss", "perplexity", "accuracy", "nats", "dims", "standard_deviation",
    "protocol"}.

    dims: target tokens, those that end the targets among them, padding not. loss: mean nats of one, without label
    smoothing; perplexity: exp(loss). Over several hash seeds all are of the mean code length; the deviation is the
    sample standard deviation of the losses.
    """
    scores = score_seeds(model, stream, protocol, batch, limit, ranks)
    dims = scores[0].dims
    losses = [each.nats / dims for each in scores]
    own = {
        "leaks": model.leaks,
        "context_start": "learned start vector",
        "source_length": model.config.source.length,
        "split_tokens": stream.tokens,
    }
    loss = math.fsum(losses) / len(losses)
    return {
        "loss": loss,
        "perplexity": math.exp(loss),
        "accuracy": math.fsum(each.correct for each in scores) / (dims * len(scores)),
        "nats": loss * dims,
        "dims": dims,
        "standard_deviation": statistics.stdev(losses) if len(losses) > 1 else None,
        "protocol": {**asdict(protocol), **own},
    }


def summary(result: Mapping[str, Any]) -> str:
    """The line that megasparse evaluate prints."""
    protocol = result["protocol"]
    found = f"{result['loss']:.4f} nats a target token, perplexity {result['perplexity']:.3f}"
    covered = f"{result['dims']:,} target tokens of {protocol['split']}, step {protocol['checkpoint_step']}"
    return f"{found}, accuracy {100 * result['accuracy']:.2f} % ({covered})"
