"""Floating point operations of training by formula, for attention mechanisms and products with weights.

A sequence of an encoder–decoder consists of source and target.
"""

import sys
import time
from collections.abc import Iterator, Sequence

import torch

from megasparse.attention.contract import Attention
from megasparse.attention.cross import CrossAttention
from megasparse.attention.flops import Flops, product
from megasparse.attention.heads import build_mechanism, head_dim, ranks_with_the_same_heads
from megasparse.config.schema import GATED, ModelConfig, encoder_part, heads_of_layer
from megasparse.errors import ConfigError
from megasparse.training.ranks import Ranks

SIDE = 768
"""Rows and columns of the matrices that `product_speed` multiplies."""
SHARE = 0.3
"""Assumed fraction of `product_speed` that training on a CPU reaches."""
LONG = 7200.0
"""Predicted seconds of a run above which a warning is printed."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def model_flops_per_token(model: ModelConfig, sequence_length: int) -> float:
    """Return the FLOPs per token of one forward and backward pass, for the model FLOPs utilisation.

    A matrix product counts 2 operations per weight and token in the forward and 4 in the backward. Attention adds 12·D
    per head and visible key (scores and values), averaged over queries. Recomputation, masked scores inside a block,
    and elementwise work are not counted. For an encoder–decoder the result is the mean over the tokens of source and
    target. Raises ConfigError if a mechanism does not count its FLOPs.
    """
    return sum(passes.both for passes in flops_by_part(model, sequence_length).values())


def known_flops_per_token(model: ModelConfig, sequence_length: int) -> tuple[float, float] | tuple[()]:
    """Return model and hardware FLOPs per token; empty if a mechanism does not count them."""
    try:
        hardware = sum(hardware_flops_by_part(model, sequence_length).values())
        return model_flops_per_token(model, sequence_length), hardware
    except ConfigError:
        return ()


def hardware_flops_by_part(model: ModelConfig, sequence_length: int, ranks: int = 1) -> dict[str, float]:
    """Return FLOPs per token including recomputation, for attention, projections, feed-forward and head.

    Reversible and checkpointed layers rerun the forward, in `checkpoint_layers` twice except in the last; tiles
    (`feed_forward_tiles`, `loss_tiles`) rerun it one by one, in layers that are checkpointed whole once more. Scores
    recomputed inside a kernel's backward are not counted. ranks: sequence-parallel degree; work replicated on several
    ranks is counted on each.
    """
    parts, activations = flops_by_part(model, sequence_length, ranks, hardware=True), model.activations
    stored = -(-model.layers // model.checkpoint_layers)  # layers whose input is stored
    rerun = 0.0 if activations == "stored" else 2.0 - stored / model.layers
    tiled_share = sum(tiled_layers(model, ranks)) / model.layers
    # A reversible backward knows the output gradient when it recomputes, so each tile is recomputed only once.
    tiled = 1.0 - tiled_share if model.feed_forward_tiles > 1 and activations != "reversible" else 0.0
    times = {"attention": rerun, "projections": rerun, "feed-forward": rerun + tiled, "head": model.loss_tiles > 1}
    flops = {part: passes.both + times[part] * passes.forward for part, passes in parts.items()}
    keys = 2 * head_dim(model) * (model.key_heads or model.heads)  # projected before the backward's first tile
    flops["projections"] += 2.0 * model.d_model * keys * model.layers * tiled_share
    return flops


def tiled_layers(model: ModelConfig, ranks: int) -> list[bool]:
    """Return True for each layer that is recomputed tile by tile on ranks that share sequences."""
    whole = model.kind != "decoder" or model.attention.head_groups > 1 or model.attention.dropout > 0.0
    whole = whole or model.feed_forward_tiles == 1 or model.padding_token is not None
    if whole or not model.activations.startswith("checkpoint"):
        return [False] * model.layers
    group = model.heads // (model.key_heads or model.heads)
    with torch.device("meta"):
        kinds = {kind for layer in range(model.layers) for kind in heads_of_layer(model, layer)}
        tiled = {kind for kind in kinds if build_mechanism(kind, model, model.heads).attends_prefix(group, ranks)}
    splits = [heads_of_layer(model, layer) for layer in range(model.layers)]
    return [split.keys() <= tiled and not any(n // group % ranks for n in split.values()) for split in splits]


def flops_by_part(model: ModelConfig, length: int, ranks: int = 1, hardware: bool = False) -> dict[str, Flops]:
    """Return FLOPs per token of each part. hardware: include operations that head groups repeat."""
    if model.source is None:
        return {**_layers(model, length, ranks, hardware), "head": _head(model)}
    source = model.source.length
    target = length - source
    read, written = (_layers(*part, ranks, hardware) for part in ((encoder_part(model), source), (model, target)))
    with torch.device("meta"):
        written["projections"] += CrossAttention(model).flops(source, target) * (model.layers / target)
    sums = {part: read[part] * source + written[part] * target for part in read} | {"head": _head(model) * target}
    return {part: passes * (1 / length) for part, passes in sums.items()}


def _layers(model: ModelConfig, length: int, ranks: int, hardware: bool) -> dict[str, Flops]:
    """Return FLOPs per token of all layers of one stack. hardware: see `flops_by_part`."""
    projections, attention = Flops(), Flops()
    groups = model.attention.head_groups if hardware else 1
    # The backward of head groups recomputes all, as a reversible one does anyway, and projects q, k and v once more.
    again, reread = groups > 1 and model.activations != "reversible", groups > 1
    for mechanism in mechanisms_of(model):
        grouped = 1 if mechanism.shared_qk else 2  # values, and keys unless shared with queries
        heads, head = mechanism.spec.heads, product(2.0 * model.d_model * mechanism.spec.head_dim)
        read = heads + grouped * max(groups, heads * (model.key_heads or model.heads) / model.heads)  # queries too
        projections += head * (read + heads) + Flops(0.0, head.forward * ((read + heads) * again + read * reread))
        repeated = 1 if mechanism.shares_pairs else ranks_with_the_same_heads(mechanism, model, ranks)
        passes = mechanism.flops(length) * repeated
        attention += passes + Flops(0.0, passes.forward * again)
    if model.ngrams and (width := model.ngrams.width or model.d_model) != model.d_model:
        projections += product(2.0 * model.d_model * len(model.ngrams.lengths) * width)
    products = 3 if model.feed_forward in GATED else 2
    feed_forward = product(2.0 * products * model.layers * model.d_model * model.d_ff)
    return {"attention": attention, "projections": projections, "feed-forward": feed_forward}


def _head(model: ModelConfig) -> Flops:
    streams = 2 if model.blocks == "reversible" and not model.tied_embeddings else 1  # concatenated in the output head
    dense = model.d_model**2 if model.style == "bert" else 0  # before the output projection
    # Of an adaptive softmax only the head is counted, because the use of clusters depends on the data.
    outputs = model.adaptive_cutoffs[0] + len(model.adaptive_cutoffs) if model.adaptive_cutoffs else model.vocabulary
    return product(2.0 * (streams * model.d_model * outputs + dense))


def mechanisms_of(model: ModelConfig) -> Iterator[Attention]:
    """Yield all mechanisms of all layers, on the meta device."""
    with torch.device("meta"):
        for layer in range(model.layers):
            for kind, heads in heads_of_layer(model, layer).items():
                yield build_mechanism(kind, model, heads)


def product_speed(precision: str) -> float:
    """Return the FLOPs per second of a matrix product in this process, the best of three."""
    matrix = torch.ones(SIDE, SIDE, dtype=DTYPES[precision])
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        matrix @ matrix
        best = min(best, time.perf_counter() - start)
    return 2.0 * SIDE**3 / best


def warn_if_long(flops: float, precision: str, changes: Sequence[str], ranks: Ranks) -> None:
    """Print a warning on rank 0 if a run on CPUs will take hours. flops: of all steps over all ranks."""
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
        f"this run will take about {seconds / 3600:,.0f} hours on this machine: {local_flops:.1g} FLOPs per rank at "
        f"{SHARE:.0%} of the {speed / 1e9:,.0f} GFLOP/s of matrix products in {precision}. "
        f"Faster: {'; '.join(quicker)}",
        file=sys.stderr,
        flush=True,
    )
