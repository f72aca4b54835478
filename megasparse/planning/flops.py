"""Floating point operations of training by formula: what the mechanisms and the products with weights take.

A sequence of an encoder–decoder is a source and a target.
"""

import sys
import time
from collections.abc import Iterator, Sequence

import torch

from megasparse.attention.contract import Attention, Passes, product
from megasparse.attention.cross import CrossAttention
from megasparse.attention.heads import build_mechanism, ranks_with_the_same_heads
from megasparse.config.attention import heads_of_layer
from megasparse.config.schema import GATED, ModelConfig, encoder_part
from megasparse.errors import ConfigError
from megasparse.training.ranks import Ranks

SIDE = 768
"""Rows and columns of the matrices that `product_speed` multiplies."""
SHARE = 0.3
"""Share of that speed which training on a CPU is assumed to reach."""
LONG = 7200.0
"""Seconds from which on a run is worth a warning."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def model_flops_per_token(model: ModelConfig, sequence_length: int) -> float:
    """Return the FLOPs per token of one forward and backward pass, for the model FLOPs utilisation.

    A product of matrices counts 2 operations per weight and token forward and 4 backward: 6·(weights in products).
    Attention adds 12·D in each head for each key that a query attends to on average (scores and values). What is
    recomputed in the backward, masked inside a block, or done elementwise (sorting, sampling) is not counted. For an
    encoder–decoder the mean over the tokens of source and target.

    Raises:
        ConfigError: a mechanism does not count its FLOPs.
    """
    return sum(passes.both for passes in flops_by_part(model, sequence_length).values())


def known_flops_per_token(model: ModelConfig, sequence_length: int) -> tuple[float, float] | tuple[()]:
    """Return the FLOPs per token of the model and of the hardware; nothing if a mechanism does not count them."""
    try:
        hardware = sum(hardware_flops_by_part(model, sequence_length).values())
        return model_flops_per_token(model, sequence_length), hardware
    except ConfigError:
        return ()


def hardware_flops_by_part(model: ModelConfig, sequence_length: int, ranks: int = 1) -> dict[str, float]:
    """Return the FLOPs per token with what the backward computes again, of attention, projections, feed-forward, head.

    Reversible and checkpointed layers run forward again; tiles (`feed_forward_tiles`, `loss_tiles`) run forward again
    one by one, in checkpointed layers a third time. Scores that a kernel computes again inside its own backward are not
    counted. ranks: ranks that share a sequence; what several of them compute for the same heads counts as often.
    """
    parts, activations = flops_by_part(model, sequence_length, ranks), model.activations
    again = 0.0 if activations == "stored" else 1.0
    # Groups of heads attend, and project their queries, keys and values, again in any backward.
    attend = again + (model.attention.head_groups > 1 and activations != "reversible")
    # A reversible backward knows the gradient of what it recomputes, so each tile is computed once more, not twice.
    tiled = 1.0 if model.feed_forward_tiles > 1 and activations != "reversible" else 0.0
    times = {"attention": attend, "projections": attend, "feed-forward": again + tiled, "head": model.loss_tiles > 1}
    return {part: passes.both + times[part] * passes.forward for part, passes in parts.items()}


def flops_by_part(model: ModelConfig, sequence_length: int, ranks: int = 1) -> dict[str, Passes]:
    """Return the FLOPs per token of attention without its projections, of projections, feed-forward and head."""
    if model.source is None:
        return {**_layers(model, sequence_length, ranks), "head": _head(model)}
    source = model.source.length
    target = sequence_length - source
    read, written = _layers(encoder_part(model), source, ranks), _layers(model, target, ranks)
    with torch.device("meta"):
        written["projections"] += CrossAttention(model).flops(source, target) * (model.layers / target)
    sums = {part: read[part] * source + written[part] * target for part in read} | {"head": _head(model) * target}
    return {part: passes * (1 / sequence_length) for part, passes in sums.items()}


def _layers(model: ModelConfig, length: int, ranks: int) -> dict[str, Passes]:
    """FLOPs per token of all layers of one stack."""
    projections, attention = Passes(), Passes()
    for mechanism in mechanisms_of(model):
        grouped = 1 if mechanism.shared_qk else 2  # values, and keys, which shared QK has not
        number = 2 + grouped * (model.key_heads or model.heads) / model.heads  # and queries, and output
        projections += product(2.0 * number * model.d_model * mechanism.spec.heads * mechanism.spec.head_dim)
        repeated = 1 if mechanism.shares_pairs else ranks_with_the_same_heads(mechanism, model, ranks)
        attention += mechanism.flops(length) * repeated
    products = 3 if model.feed_forward in GATED else 2
    feed_forward = product(2.0 * products * model.layers * model.d_model * model.d_ff)
    return {"attention": attention, "projections": projections, "feed-forward": feed_forward}


def _head(model: ModelConfig) -> Passes:
    streams = 2 if model.blocks == "reversible" and not model.tied_embeddings else 1  # side by side in the output head
    dense = model.d_model**2 if model.style == "bert" else 0  # before the output projection
    # An adaptive softmax counts its head only: how many tokens need a cluster too depends on the data.
    outputs = model.adaptive_cutoffs[0] + len(model.adaptive_cutoffs) if model.adaptive_cutoffs else model.vocabulary
    return product(2.0 * (streams * model.d_model * outputs + dense))


def mechanisms_of(model: ModelConfig) -> Iterator[Attention]:
    """Yield each mechanism of each layer, without memory."""
    with torch.device("meta"):
        for layer in range(model.layers):
            for kind, heads in heads_of_layer(model, layer).items():
                yield build_mechanism(kind, model, heads)


def product_speed(precision: str) -> float:
    """Return the FLOPs per second of this process in a product of matrices, the best of three."""
    matrix = torch.ones(SIDE, SIDE, dtype=DTYPES[precision])
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        matrix @ matrix
        best = min(best, time.perf_counter() - start)
    return 2.0 * SIDE**3 / best


def warn_if_long(flops: float, precision: str, changes: Sequence[str], ranks: Ranks) -> None:
    """Print a warning, on rank 0 of a run on CPUs, if the run will take hours.

    Args:
        flops: of all ranks, for all steps.
        changes: changes that make a run of this kind shorter.
    """
    if ranks.rank != 0 or ranks.device.type != "cpu":
        return
    speed, local_flops = product_speed(precision), flops / ranks.world_size
    seconds = local_flops / (SHARE * speed)
    if seconds < LONG:
        return
    quicker = [*changes, "a GPU"]
    if precision == "bf16" and (gain := product_speed("fp32") / speed) > 1.2:
        quicker.insert(0, f'training.precision="fp32", {gain:.1f} times as fast here')
    print(
        f"this run takes about {seconds / 3600:,.0f} hours on this machine: {local_flops:.1g} FLOPs a rank, at "
        f"{SHARE:.0%} of the {speed / 1e9:,.0f} GFLOP/s of its matrix products in {precision}. "
        f"Quicker: {'; '.join(quicker)}",
        file=sys.stderr,
        flush=True,
    )
