"""How well an encoder predicts masked tokens: mean nats, perplexity and accuracy over a split.

The split is cut into windows as in bits_per_dim, and each window's masks are a function of (seed, the window's start):
the same at every evaluation. It is no code length: each token is predicted from both its sides.
"""

import math
import statistics
from dataclasses import asdict
from typing import Any

from torch import Tensor

from megasparse.evaluation.bits_per_dim import Stream, score_seeds
from megasparse.evaluation.protocol import Protocol
from megasparse.ops.random import RngContext
from megasparse.training.ranks import Ranks


def evaluate(
    encoder: Any, stream: Stream, protocol: Protocol, batch: int, limit: int | None, ranks: Ranks
) -> dict[str, Any]:
    """Score a split by a protocol: {"loss", "perplexity", "accuracy", "nats", "dims", "standard_deviation",
    "protocol"}.

    dims: masked tokens that were scored. loss: mean nats of one; perplexity: exp(loss). Each seed hashes, and masks,
    anew: sums are over all of them, and the deviation is the sample standard deviation of their losses.
    With model.sentence_order also "sentence_order": {"loss", "accuracy", "pairs"}, the mean nats of a pair, half of
    which are swapped by the same draws, in a second pass.
    """
    scores = score_seeds(encoder, stream, protocol, batch, limit, ranks)
    nats, masked = math.fsum(s.nats for s in scores), sum(s.dims for s in scores)
    losses = [s.nats / s.dims for s in scores]
    own = {"masking": encoder.config.masking.model_dump(), "split_tokens": stream.tokens}
    order = {}
    if encoder.config.sentence_order is not None:
        order = {"sentence_order": _sentence_order(encoder, stream, protocol, batch, limit, ranks)}
    return {
        "loss": nats / masked,
        "perplexity": math.exp(nats / masked),
        "accuracy": sum(s.correct for s in scores) / masked,
        "nats": nats,
        "dims": masked,
        "standard_deviation": statistics.stdev(losses) if len(losses) > 1 else None,
        **order,
        "protocol": {**asdict(protocol), **own},
    }


def _sentence_order(
    encoder: Any, stream: Stream, protocol: Protocol, batch: int, limit: int | None, ranks: Ranks
) -> dict[str, Any]:
    scores = score_seeds(
        encoder, stream, protocol, batch, limit, ranks, lambda tokens, rng, skip: order_sums(encoder, tokens, rng)
    )
    pairs = sum(s.dims for s in scores)
    return {
        "loss": math.fsum(s.nats for s in scores) / max(1, pairs),
        "accuracy": sum(s.correct for s in scores) / max(1, pairs),
        "pairs": pairs,
    }


def order_sums(encoder: Any, tokens: Tensor, rng: RngContext) -> tuple[Tensor, Tensor, Tensor]:
    """Nats, number of right predictions, and number of the pairs among sequences (B, L), whose order is predicted."""
    nats, correct, scored = encoder.sentence_order_scores(tokens, rng)
    return nats[scored].double().sum(), correct[scored].sum(), scored.sum()


def summary(result: dict[str, Any]) -> str:
    """What megasparse evaluate prints."""
    protocol = result["protocol"]
    found = f"{result['loss']:.4f} nats a masked token, perplexity {result['perplexity']:.3f}"
    covered = f"{result['dims']:,} masked tokens of {protocol['split']}"
    windows = f"windows of {protocol['sequence_length']}, stride {protocol['stride']}"
    line = (
        f"{found}, accuracy {100 * result['accuracy']:.2f} % ({covered}; {windows}; step {protocol['checkpoint_step']})"
    )
    if order := result.get("sentence_order"):
        line += f"\nsentence order: {order['loss']:.4f} nats a pair, accuracy {100 * order['accuracy']:.2f} % "
        line += f"({order['pairs']:,} pairs)"
    return line
