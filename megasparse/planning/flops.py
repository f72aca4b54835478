"""Floating point operations of training, by formula: the sum of what the mechanisms and the products of weights take.

A sequence of an encoder–decoder is a source and a target.
"""

from collections.abc import Iterator

import torch

from megasparse.attention.contract import Attention
from megasparse.attention.costs import Passes, product
from megasparse.attention.cross import CrossAttention
from megasparse.attention.heads import build_mechanism
from megasparse.config.parts import decoder_part, encoder_part
from megasparse.config.pattern import heads_of_layer
from megasparse.config.schema import GATED, ModelConfig
from megasparse.errors import ConfigError


def model_flops_per_token(model: ModelConfig, sequence_length: int) -> float:
    """FLOPs a token of one forward and backward pass, for the model FLOPs utilisation.

    A product of matrices counts 2 operations a weight and token forward and 4 backward: 6·(weights in products).
    Attention adds 12·D in each head for each key a query sees on average (scores and values). What is recomputed in the
    backward, masked inside a block, or done elementwise (sorting, sampling) is not counted. An encoder–decoder's is the
    mean over the tokens of source and target. Raises ConfigError for a mechanism that does not count its FLOPs.
    """
    head, feed_forward, others = _parts(model, sequence_length)
    return (head + feed_forward + others).both


def hardware_flops_per_token(model: ModelConfig, sequence_length: int) -> float:
    """`model_flops_per_token` and what the backward computes once more, for the hardware FLOPs utilisation.

    Reversible and checkpointed layers run forward again, but for the codes that reversible ones keep; what is cut into
    tiles (`feed_forward_tiles`, `loss_tiles`) runs forward again tile by tile, in layers that are recomputed a third
    time. Scores that a kernel computes again inside its own backward are not counted.
    """
    head, feed_forward, others = _parts(model, sequence_length)
    layers = 0.0 if model.activations == "stored" else 1.0
    again = layers * (feed_forward.forward + others.forward)
    if model.activations == "reversible":
        again -= _kept(model, sequence_length)
    if model.feed_forward_tiles > 1:
        again += feed_forward.forward
    if model.loss_tiles > 1:
        again += head.forward
    return (head + feed_forward + others).both + again


def known_flops_per_token(model: ModelConfig, sequence_length: int) -> tuple[float, float] | tuple[()]:
    """Of the model and of the hardware, as above; empty where a mechanism does not count its FLOPs."""
    try:
        return model_flops_per_token(model, sequence_length), hardware_flops_per_token(model, sequence_length)
    except ConfigError:
        return ()


def _parts(model: ModelConfig, sequence_length: int) -> tuple[Passes, Passes, Passes]:
    """FLOPs a token of the output head, of the feed-forwards, and of the rest of the layers."""
    if model.source is None:
        return _head(model), _feed_forward(model), _attention(model, sequence_length)
    source = model.source.length
    target, encoder = sequence_length - source, encoder_part(model)
    crossing = _cross_attention(model).flops(source, target) * model.layers
    others = _attention(encoder, source) * source + _attention(model, target) * target + crossing
    feed_forward = _feed_forward(encoder) * source + _feed_forward(model) * target
    head, share = _head(model) * target, 1 / sequence_length
    return head * share, feed_forward * share, others * share


def _kept(model: ModelConfig, sequence_length: int) -> float:
    """FLOPs a token of the codes that reversible layers do not compute again."""
    if model.source is None:
        return sum(mechanism.kept_flops(sequence_length).forward for mechanism in _mechanisms(model))
    source = model.source.length
    target = sequence_length - source
    crossing = model.layers * _cross_attention(model).kept_flops(source, target).forward
    whole = source * _kept(encoder_part(model), source) + target * _kept(decoder_part(model), target) + crossing
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


def _attention(model: ModelConfig, sequence_length: int) -> Passes:
    """Attention of all layers, with its projections, but without cross-attention."""
    total = Passes()
    for mechanism in _mechanisms(model):
        grouped = 1 if mechanism.shared_qk else 2  # values, and keys, which shared QK has not
        projections = 2 + grouped * (model.key_heads or model.heads) / model.heads  # and queries, and output
        width = mechanism.spec.heads * mechanism.spec.head_dim
        total += product(2.0 * projections * model.d_model * width) + mechanism.flops(sequence_length)
    return total


def _mechanisms(model: ModelConfig) -> Iterator[Attention]:
    """Each mechanism of each layer, without memory."""
    with torch.device("meta"):
        for layer in range(model.layers):
            for kind, heads in heads_of_layer(model, layer).items():
                yield build_mechanism(kind, model, heads)


def _cross_attention(model: ModelConfig) -> CrossAttention:
    with torch.device("meta"):
        return CrossAttention(model)
