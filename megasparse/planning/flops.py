"""Floating point operations of training, by formula.

E d_model, F d_ff, H heads, D head dim, V vocabulary, T sequence length, S source length, R rounds, M window, N buckets.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from megasparse.attention.contract import Attention
from megasparse.attention.full import FullAttention
from megasparse.attention.heads import build_mechanism, head_dim
from megasparse.attention.yoso import YOSOAttention
from megasparse.config.attention import AttentionConfig
from megasparse.config.buckets import lsh_buckets
from megasparse.config.parts import decoder_part, encoder_part
from megasparse.config.pattern import heads_of_layer
from megasparse.config.schema import ModelConfig


def model_flops_per_token(model: ModelConfig, sequence_length: int) -> float:
    """FLOPs a token of one forward and backward pass, for the model FLOPs utilisation.

    A product of matrices counts 2 operations a weight and token forward and 4 backward: 6·(weights in products).
    Attention adds 12·D in each head for each key a query sees on average (scores and values). What is recomputed in the
    backward, masked inside a block, or done elementwise (sorting, sampling) is not counted. An encoder–decoder's is the
    mean over the tokens of source and target.
    """
    head, feed_forward, others = _parts(model, sequence_length)
    return (head + feed_forward + others).both


def hardware_flops_per_token(model: ModelConfig, sequence_length: int) -> float:
    """As `model_flops_per_token`, with what the backward computes once more, for the hardware FLOPs utilisation.

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


def _parts(model: ModelConfig, sequence_length: int) -> tuple["Passes", "Passes", "Passes"]:
    """FLOPs a token of the output head, of the feed-forwards, and of what else the layers have."""
    if model.source is None:
        return _head(model), _feed_forward(model), _attention(model, sequence_length)
    source = model.source.length
    target, encoder = sequence_length - source, encoder_part(model)
    crossing = _cross_attention(model, source, target) * model.layers
    others = _attention(encoder, source) * source + _attention(model, target) * target + crossing
    feed_forward = _feed_forward(encoder) * source + _feed_forward(model) * target
    head, share = _head(model) * target, 1 / sequence_length
    return head * share, feed_forward * share, others * share


def _kept(model: ModelConfig, sequence_length: int) -> float:
    """FLOPs a token of the codes that reversible layers do not compute again."""
    if model.source is None:
        return sum(KEPT[kind](layer).forward for kind, layer in _mechanisms(model, sequence_length) if kind in KEPT)
    source = model.source.length
    target = sequence_length - source
    crossing = model.layers * _cross_hashing(model, source, target).forward
    whole = source * _kept(encoder_part(model), source) + target * _kept(decoder_part(model), target) + crossing
    return whole / sequence_length


def _head(model: ModelConfig) -> "Passes":
    streams = 2 if model.blocks == "reversible" and not model.tied_embeddings else 1  # side by side in the output head
    dense = model.d_model**2 if model.style == "bert" else 0  # before the output projection
    # Of an adaptive softmax its head alone: how many tokens need a cluster too is the data's.
    outputs = model.adaptive_cutoffs[0] + len(model.adaptive_cutoffs) if model.adaptive_cutoffs else model.vocabulary
    return product(2.0 * (streams * model.d_model * outputs + dense))


def _feed_forward(model: ModelConfig) -> "Passes":
    return product(2.0 * 2 * model.layers * model.d_model * model.d_ff)


def _attention(model: ModelConfig, sequence_length: int) -> "Passes":
    """Of all layers, with its projections, but for cross-attention."""
    total = Passes()
    for kind, layer in _mechanisms(model, sequence_length):
        projections = 3 if layer.mechanism.shared_qk else 4  # queries, keys, values, output; shared QK has no keys
        total += product(2.0 * projections * model.d_model * layer.heads * layer.head_dim) + ATTENTION[kind](layer)
    return total


def _mechanisms(model: ModelConfig, sequence_length: int) -> Iterator[tuple[str, "Layer"]]:
    """Each mechanism of each layer, by what it computes: "full" where `full_below` has it attend fully."""
    for number in range(model.layers):
        for kind, heads in heads_of_layer(model, number).items():
            with torch.device("meta"):
                mechanism = build_mechanism(kind, model, heads)
            own = "full" if isinstance(mechanism, FullAttention) else kind
            yield own, Layer(model, mechanism, heads, sequence_length)


def _cross_attention(model: ModelConfig, source: int, target: int) -> "Passes":
    """Of one layer and a whole sequence: queries and outputs of the target, keys and values of the source, and the
    pairs of the two; hashed, as LSH with separate queries and keys in a two-sided window.
    """
    assert model.source is not None
    width = model.heads * head_dim(model)
    projections = product(4.0 * model.d_model * width * (source + target))
    if model.source.cross_attention == "full":
        return projections + product(4.0 * width * source * target)
    lsh = model.attention.lsh
    keys = min(2 * lsh.chunk, source)
    return projections + product(4.0 * keys * target * lsh.rounds * width) + _cross_hashing(model, source, target)


def _cross_hashing(model: ModelConfig, source: int, target: int) -> "Passes":
    assert model.source is not None
    lsh = model.attention.lsh
    if model.source.cross_attention == "full":
        return Passes()
    buckets = sum(lsh_buckets(lsh, max(model.max_length, model.source.length)))
    return Passes(float(lsh.rounds * model.heads * head_dim(model) * buckets * (source + target)))


@dataclass(frozen=True)
class Passes:
    """What a forward pass takes, and a backward."""

    forward: float = 0.0
    backward: float = 0.0

    @property
    def both(self) -> float:
        return self.forward + self.backward

    def __add__(self, other: "Passes") -> "Passes":
        return Passes(self.forward + other.forward, self.backward + other.backward)

    def __mul__(self, times: float) -> "Passes":
        return Passes(self.forward * times, self.backward * times)


def product(operations: float) -> Passes:
    """A product of matrices that takes so many operations forward; its two gradients take as many each."""
    return Passes(operations, 2 * operations)


@dataclass(frozen=True)
class Layer:
    """The heads of one mechanism in a layer, at a sequence length."""

    model: ModelConfig
    mechanism: Attention
    heads: int
    length: int

    @property
    def config(self) -> AttentionConfig:
        return self.model.attention

    @property
    def causal(self) -> bool:
        return self.model.kind != "encoder"

    @property
    def head_dim(self) -> int:
        return head_dim(self.model)

    @property
    def visible(self) -> float:
        """Mean number of keys that a query may see."""
        return (self.length + 1) / 2 if self.causal else self.length

    def pairs(self, keys: float) -> Passes:
        """12·H·D·(keys a query sees), 4 of them forward."""
        return product(4.0 * self.heads * self.head_dim * min(keys, self.visible))

    def band(self, window: int, shared_codes: bool) -> float:
        """The last M keys of the bucket. Both ways: M − 1 more of codes that queries and keys share, else M more."""
        return window if self.causal else 2 * window - shared_codes

    def chunks(self, chunk: int) -> float:
        """Mean over queries of their own chunk's keys and the chunk before's; both ways: the chunk after's too."""
        full, rest = divmod(self.length, chunk)
        own = full * chunk * chunk + rest * rest
        before = chunk * max(0, self.length - chunk)
        if self.causal:
            return ((own + self.length) / 2 + before) / self.length
        return (own + 2 * before) / self.length

    def clusters(self, count: int, size: int) -> float:
        """Mean keys of a query in `count` clusters of `size` queries and keys each."""
        size = min(size, self.length)
        return count * size * ((size + 1) / 2 if self.causal else size) / self.length


def _local(layer: Layer) -> Passes:
    """Relative positions have scores of their own: 6·D more a key."""
    local = layer.config.local
    return layer.pairs(layer.chunks(local.chunk)) * (1.5 if local.relative else 1.0)


def lsh_window(layer: Layer) -> float:
    """Keys of a query in a round, where its bucket has as many."""
    lsh = layer.config.lsh
    return layer.band(lsh.chunk, lsh.shared_qk) if lsh.window == "band" else layer.chunks(lsh.chunk)


def lsh_hashing(layer: Layer) -> Passes:
    """Forward only, of what has codes of its own: in each round 2·D products with each of half as many rotation vectors
    as there are buckets (Σ of the factors).
    """
    lsh = layer.config.lsh
    hashed = 1 if lsh.shared_qk else 2
    buckets = sum(lsh_buckets(lsh, layer.model.max_length))
    return Passes(float(lsh.rounds * hashed * layer.heads * layer.head_dim * buckets))


def lha_window(layer: Layer) -> float:
    """Keys of a query, where its bucket has as many."""
    lha = layer.config.lha
    buckets = math.ceil(layer.model.max_length / lha.chunk)
    size = math.floor(math.sqrt(2) * layer.model.max_length / buckets)
    return layer.band(lha.chunk, False) if lha.window == "band" else layer.clusters(buckets, size)


def lha_hashing(layer: Layer) -> Passes:
    """Both hash functions (random ones forward only), and the utilities that they learn, forward only: the scores of a
    sample of queries twice, with the sums over N buckets for the keys; or of all queries; or random features of q and k
    and their products with the buckets' sums.
    """
    lha, dim = layer.config.lha, layer.head_dim
    buckets = math.ceil(layer.model.max_length / lha.chunk)
    if lha.hash == "random":
        return Passes(layer.heads * 2 * 2.0 * dim * buckets)
    weights = dim * buckets + (dim * dim if lha.hash == "mlp" else 0)
    sample = min(lha.samples, layer.length)
    utility = {
        "sampled": sample * (4.0 * dim + 2.0 * buckets),
        "exact": 4.0 * dim * layer.visible,
        "features": 4.0 * lha.features * (dim + buckets),
    }[lha.utility]
    return (product(2 * 2.0 * weights) + Passes(utility)) * layer.heads


def _yoso(layer: Layer) -> Passes:
    """Codes of q and k; 2·D to add a value to a table and to read it, and again for the gradient of v; those of q and k
    by tables, 4·D² each, or by the 1/2^τ of pairs that collide at random, 6·D each: the cheaper, or the one configured.
    """
    yoso, dim = layer.config.yoso, layer.head_dim
    if yoso.expectation:
        return layer.pairs(layer.visible)
    assert isinstance(layer.mechanism, YOSOAttention)
    bits = layer.mechanism.code_bits
    bit = 3.0 * math.log2(max(2, dim)) if yoso.projection == "hadamard" else 2.0 * dim
    gradients = {"tables": 8.0 * dim * dim, "pairs": 6.0 * dim * layer.visible / 2**bits}
    gradient = gradients.get(yoso.backward, min(gradients.values()))
    hashing = Passes(2 * bits * bit + 2.0 * dim, 2.0 * dim + gradient)
    return (hashing * yoso.hashes + product(2.0 * dim * (yoso.convolution or 0))) * layer.heads


def sketching(layer: Layer) -> Passes:
    """Smart Bird's sketch, one of all heads, beside its K keys: 12·d a key, 2·d more to choose by, its projections of
    an input without gradient (4 a weight), and its objective's output over the vocabulary or the labels.
    """
    bird = layer.config.smart_bird
    outputs = layer.model.vocabulary if bird.objective == "token" else 0
    attended = product(4.0 * layer.visible) + Passes(2.0 * layer.visible)
    weights = 3 * layer.model.d_model
    return (attended + Passes(2.0 * weights, 2.0 * weights) + product(2.0 * outputs)) * bird.sketch_dim


def _smyrf(layer: Layer) -> Passes:
    """In each round one cluster, and a projection of q and of k, two numbers longer, to a line."""
    smyrf = layer.config.smyrf
    return layer.pairs(smyrf.chunk) * smyrf.rounds + _smyrf_hashing(layer)


def _smyrf_hashing(layer: Layer) -> Passes:
    return Passes(layer.heads * 2 * 2.0 * (layer.head_dim + 2)) * layer.config.smyrf.rounds


def _routing(layer: Layer) -> Passes:
    """The window, and the products of q and of a k of its own with N centroids, forward only."""
    routing = layer.config.routing
    count = math.ceil(layer.model.max_length / routing.chunk)
    keys = layer.band(routing.chunk, False) if routing.window == "band" else layer.clusters(count, routing.chunk)
    return layer.pairs(keys) + _routing_hashing(layer)


def _routing_hashing(layer: Layer) -> Passes:
    count = math.ceil(layer.model.max_length / layer.config.routing.chunk)
    return Passes(layer.heads * (1 if layer.causal else 2) * 2.0 * layer.head_dim * count)


def _sparse_transformer(layer: Layer) -> Passes:
    """The last s positions (both ways: s on either side) and every s-th one."""
    stride = layer.config.sparse_transformer.stride or round(math.sqrt(layer.model.max_length))
    return layer.pairs(stride * (1 if layer.causal else 2) + layer.visible / stride)


def _longformer(layer: Layer) -> Passes:
    """Neighbouring blocks and the G global tokens; both ways: G queries see all keys, G more a query on average."""
    longformer = layer.config.longformer
    return layer.pairs(layer.chunks(longformer.chunk) + longformer.globals * (1 if layer.causal else 2))


def _bigbird(layer: Layer) -> Passes:
    """As Longformer, in global blocks, and random blocks."""
    bird = layer.config.bigbird
    blocks = bird.random + bird.globals * (1 if layer.causal else 2)
    return layer.pairs(layer.chunks(bird.chunk) + blocks * bird.chunk)


def _performer(layer: Layer) -> Passes:
    """Features of q and of k, 6·D each a feature, and 12·D a feature in place of a key; causal: pairs inside a chunk,
    whose scores are products of features.
    """
    performer, dim = layer.config.performer, layer.head_dim
    inside = (min(performer.chunk, layer.length) + 1) / 2 if layer.causal else 0.0
    return product(layer.heads * (8.0 * dim * performer.features + 2.0 * (performer.features + dim) * inside))


def _linformer(layer: Layer) -> Passes:
    """k projected keys, and the projections of keys and of values, 6·D each a projected one."""
    return product(layer.heads * 8.0 * layer.head_dim * layer.config.linformer.projected)


ATTENTION: dict[str, Callable[[Layer], Passes]] = {
    "full": lambda layer: layer.pairs(layer.visible),
    "local": _local,
    "lsh": lambda layer: layer.pairs(lsh_window(layer)) * layer.config.lsh.rounds + lsh_hashing(layer),
    "lha": lambda layer: layer.pairs(lha_window(layer)) + lha_hashing(layer),
    "yoso": _yoso,
    "smart_bird": lambda layer: layer.pairs(layer.config.smart_bird.keys) + sketching(layer),
    "smyrf": _smyrf,
    "routing": _routing,
    "random": lambda layer: layer.pairs(layer.band(layer.config.random.chunk, True)),
    "sparse_transformer": _sparse_transformer,
    "longformer": _longformer,
    "bigbird": _bigbird,
    "performer": _performer,
    "linformer": _linformer,
}
"""FLOPs a token of a mechanism's heads, beside the projections of every mechanism."""

KEPT: dict[str, Callable[[Layer], Passes]] = {
    "lsh": lsh_hashing,
    "smyrf": _smyrf_hashing,
    "routing": _routing_hashing,
}
"""The part of it that finds codes, which reversible layers keep for the backward."""
