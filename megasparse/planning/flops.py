"""Floating point operations of training, by formula: the sum of what the mechanisms and the products of weights take.

A sequence of an encoder–decoder is a source and a target.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch

from megasparse.attention.contract import Attention
from megasparse.attention.costs import Passes, product
from megasparse.attention.cross import CrossAttention
from megasparse.attention.heads import build_mechanism, ranks_with_the_same_heads
from megasparse.config.parts import decoder_part, encoder_part
from megasparse.config.pattern import heads_of_layer
from megasparse.config.schema import GATED, ModelConfig
from megasparse.errors import ConfigError


@dataclass(frozen=True)
class Parts:
    """What the parts of a model take: attention without its projections."""

    head: Passes
    feed_forward: Passes
    projections: Passes
    attention: Passes

    def __mul__(self, times: float) -> "Parts":
        return Parts(*(getattr(self, part.name) * times for part in fields(self)))

    def __add__(self, other: "Parts") -> "Parts":
        return Parts(*(getattr(self, part.name) + getattr(other, part.name) for part in fields(self)))


def model_flops_per_token(model: ModelConfig, sequence_length: int) -> float:
    """FLOPs a token of one forward and backward pass, for the model FLOPs utilisation.

    A product of matrices counts 2 operations a weight and token forward and 4 backward: 6·(weights in products).
    Attention adds 12·D in each head for each key a query sees on average (scores and values). What is recomputed in the
    backward, masked inside a block, or done elementwise (sorting, sampling) is not counted. An encoder–decoder's is the
    mean over the tokens of source and target. Raises ConfigError for a mechanism that does not count its FLOPs.
    """
    parts = _parts(model, sequence_length)
    return (parts.head + parts.feed_forward + parts.projections + parts.attention).both


def hardware_flops_per_token(model: ModelConfig, sequence_length: int, ranks: int = 1) -> float:
    """`model_flops_per_token` and what the backward computes once more, for the hardware FLOPs utilisation.

    Reversible and checkpointed layers run forward again, but for the codes that reversible ones keep; what is cut into
    tiles (`feed_forward_tiles`, `loss_tiles`) runs forward again tile by tile, in checkpointed layers a third time.
    Scores that a kernel computes again inside its own backward are not counted. ranks: those that share a sequence;
    where several have the same heads, what each of them repeats counts as often.
    """
    return sum(hardware_flops_by_part(model, sequence_length, ranks).values())


def known_flops_per_token(model: ModelConfig, sequence_length: int) -> tuple[float, float] | tuple[()]:
    """Of the model and of the hardware, as above; empty where a mechanism does not count its FLOPs."""
    try:
        return model_flops_per_token(model, sequence_length), hardware_flops_per_token(model, sequence_length)
    except ConfigError:
        return ()


def hardware_flops_by_part(model: ModelConfig, sequence_length: int, ranks: int = 1) -> dict[str, float]:
    """`hardware_flops_per_token` of attention, of the codes that it hashes by, projections, feed-forward and head."""
    parts, activations = _parts(model, sequence_length, ranks), model.activations
    again = 0.0 if activations == "stored" else 1.0
    # Groups of heads attend again in any backward, and read their queries, keys and values twice there.
    attend = again + (model.attention.head_groups > 1 and activations != "reversible")
    codes = _codes(model, sequence_length, ranks)
    hashed = codes * (1.0 if activations == "reversible" else 1.0 + again)
    projected = parts.projections.both + attend * parts.projections.forward + _grouped_projections(model, attend)
    # A reversible backward knows the gradient of what it recomputes, so each tile is computed once more, not twice.
    tiled = 1.0 if model.feed_forward_tiles > 1 and activations != "reversible" else 0.0
    return {
        "attention": parts.attention.both + attend * parts.attention.forward - codes * (1.0 + attend),
        "hashing": hashed,
        "projections": projected,
        "feed-forward": parts.feed_forward.both + (again + tiled) * parts.feed_forward.forward,
        "head": parts.head.both + (parts.head.forward if model.loss_tiles > 1 else 0.0),
    }


def _parts(model: ModelConfig, sequence_length: int, ranks: int = 1) -> Parts:
    """FLOPs a token."""
    if model.source is None:
        return Parts(_head(model), _feed_forward(model), *_attention(model, sequence_length, ranks))
    source, nothing = model.source.length, Passes()
    target, encoder = sequence_length - source, encoder_part(model)
    crossing = _cross_attention(model).flops(source, target) * model.layers
    read = Parts(nothing, _feed_forward(encoder), *_attention(encoder, source, ranks)) * source
    written = Parts(_head(model), _feed_forward(model), *_attention(model, target, ranks)) * target
    return (read + written + Parts(nothing, nothing, nothing, crossing)) * (1 / sequence_length)


def _codes(model: ModelConfig, sequence_length: int, ranks: int) -> float:
    """FLOPs a token of the codes in a forward pass, which reversible layers do not compute again."""
    if model.source is None:
        return sum(
            mechanism.kept_flops(sequence_length).forward * ranks_with_the_same_heads(mechanism, model, ranks)
            for mechanism in mechanisms_of(model)
        )
    source = model.source.length
    target = sequence_length - source
    crossing = model.layers * _cross_attention(model).kept_flops(source, target).forward
    stacks = ((source, encoder_part(model)), (target, decoder_part(model)))
    whole = sum(length * _codes(stack, length, ranks) for length, stack in stacks) + crossing
    return whole / sequence_length


def _head(model: ModelConfig) -> Passes:
    streams = 2 if model.blocks == "reversible" and not model.tied_embeddings else 1  # side by side in the output head
    dense = model.d_model**2 if model.style == "bert" else 0  # before the output projection
    # An adaptive softmax counts its head alone: how many tokens need a cluster too depends on the data.
    outputs = model.adaptive_cutoffs[0] + len(model.adaptive_cutoffs) if model.adaptive_cutoffs else model.vocabulary
    return product(2.0 * (streams * model.d_model * outputs + dense))


def _feed_forward(model: ModelConfig) -> Passes:
    products = 3 if model.feed_forward in GATED else 2
    return product(2.0 * products * model.layers * model.d_model * model.d_ff)


def _attention(model: ModelConfig, sequence_length: int, ranks: int) -> tuple[Passes, Passes]:
    """The projections of all layers, and attention between them, but without cross-attention."""
    projections, attention = Passes(), Passes()
    for mechanism in mechanisms_of(model):
        grouped = 1 if mechanism.shared_qk else 2  # values, and keys, which shared QK has not
        number = 2 + grouped * (model.key_heads or model.heads) / model.heads  # and queries, and output
        width = mechanism.spec.heads * mechanism.spec.head_dim
        projections += product(2.0 * number * model.d_model * width)
        attention += mechanism.flops(sequence_length)
        if (copies := ranks_with_the_same_heads(mechanism, model, ranks)) > 1:
            attention += (mechanism.flops(sequence_length) - mechanism.shared_flops(sequence_length)) * (copies - 1)
    return projections, attention


def _grouped_projections(model: ModelConfig, attend: float) -> float:
    """FLOPs a token that groups of heads project beside what all heads at once do: queries, keys and values once more
    in the backward, and keys and values of heads that several groups share in each of these. attend: forward passes
    in the backward.
    """
    groups, found = model.attention.head_groups, 0.0
    if groups == 1 or model.source is not None:
        return 0.0
    for mechanism in mechanisms_of(model):
        heads, each = mechanism.spec.heads, 2.0 * model.d_model * mechanism.spec.head_dim
        shared = model.heads // (model.key_heads or model.heads)
        keyed = (1 if mechanism.shared_qk else 2) * heads / shared
        repeated = keyed * (max(1, shared * groups // heads) - 1)
        found += each * (heads + keyed + repeated + (3.0 + attend) * repeated)
    return found


def mechanisms_of(model: ModelConfig) -> Iterator[Attention]:
    """Each mechanism of each layer, without memory."""
    with torch.device("meta"):
        for layer in range(model.layers):
            for kind, heads in heads_of_layer(model, layer).items():
                yield build_mechanism(kind, model, heads)


def _cross_attention(model: ModelConfig) -> CrossAttention:
    with torch.device("meta"):
        return CrossAttention(model)
