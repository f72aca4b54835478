"""Floating point operations of training, by formula.

E d_model, F d_ff, H heads, D head dim, V vocabulary, T sequence length, S source length, R rounds, M window, N buckets.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megasparse.attention.contract import Attention
from megasparse.attention.full import FullAttention
from megasparse.attention.heads import build_mechanism, head_dim
from megasparse.attention.yoso import YOSOAttention
from megasparse.config.attention import AttentionConfig
from megasparse.config.buckets import lsh_buckets
from megasparse.config.parts import encoder_part
from megasparse.config.pattern import heads_of_layer
from megasparse.config.schema import ModelConfig


def model_flops_per_token(model: ModelConfig, sequence_length: int) -> float:
    """FLOPs a token of one forward and backward pass, for the model FLOPs utilisation.

    A product of matrices counts 2 operations a weight and token forward and 4 backward: 6·(weights in products).
    Attention adds 12·D in each head for each key a query sees on average (scores and values). What is recomputed in the
    backward, masked inside a block, or done elementwise (sorting, sampling) is not counted. An encoder–decoder's is the
    mean over the tokens of source and target.
    """
    if model.source is None:
        return _head(model) + _stack(model, sequence_length)
    source = model.source.length
    target = sequence_length - source
    whole = source * _stack(encoder_part(model), source) + target * (_head(model) + _stack(model, target))
    return (whole + model.layers * _cross_attention(model, source, target)) / sequence_length


def hardware_flops_per_token(model: ModelConfig, sequence_length: int) -> float:
    """The same with what is computed again: reversible and checkpointed layers' forward, a third of their FLOPs; and
    that of a tiled feed-forward or loss, tile by tile. Kernels that compute scores again in their backward do so inside
    the count of a pass.
    """
    model_flops = model_flops_per_token(model, sequence_length)
    shares = _shares(model, sequence_length)
    decoded = shares[0][0]
    again = _head(model) / 3 * decoded if model.loss_tiles > 1 else 0.0
    if model.activations != "stored":
        again += (model_flops - _head(model) * decoded) / 3
    if model.feed_forward_tiles > 1:
        again += sum(share * 4.0 * part.layers * part.d_model * part.d_ff for share, part in shares)
    return model_flops + again


def _shares(model: ModelConfig, sequence_length: int) -> list[tuple[float, ModelConfig]]:
    """Each stack, the one that tells first, and its share of a sequence's tokens."""
    source = model.source.length if model.source else 0
    stacks = [(1 - source / sequence_length, model)]
    return [*stacks, (source / sequence_length, encoder_part(model))] if model.source else stacks


def _head(model: ModelConfig) -> float:
    streams = 2 if model.blocks == "reversible" and not model.tied_embeddings else 1  # side by side in the output head
    dense = model.d_model**2 if model.style == "bert" else 0  # before the output projection
    # Of an adaptive softmax its head alone: how many tokens need a cluster too is the data's.
    outputs = model.adaptive_cutoffs[0] + len(model.adaptive_cutoffs) if model.adaptive_cutoffs else model.vocabulary
    return 6.0 * (streams * model.d_model * outputs + dense)


def _stack(model: ModelConfig, sequence_length: int) -> float:
    """Of all layers, but for cross-attention."""
    total = 6.0 * 2 * model.layers * model.d_model * model.d_ff
    for layer in range(model.layers):
        for kind, heads in heads_of_layer(model, layer).items():
            with torch.device("meta"):
                mechanism = build_mechanism(kind, model, heads)
            layer_of = Layer(model, mechanism, heads, sequence_length)
            projections = 3 if mechanism.shared_qk else 4  # queries, keys, values, output; shared QK has no keys
            total += 6.0 * projections * model.d_model * heads * layer_of.head_dim
            total += ATTENTION["full" if isinstance(mechanism, FullAttention) else kind](layer_of).both
    return total


def _cross_attention(model: ModelConfig, source: int, target: int) -> float:
    """Of one layer and a whole sequence: queries and outputs of the target, keys and values of the source, and the
    pairs of the two; hashed, as LSH with separate queries and keys in a two-sided window.
    """
    assert model.source is not None
    lsh, width = model.attention.lsh, model.heads * head_dim(model)
    projections = 12.0 * model.d_model * width * (source + target)
    if model.source.cross_attention == "full":
        return projections + 12.0 * width * source * target
    buckets = sum(lsh_buckets(lsh, max(model.max_length, model.source.length)))
    keys = min(2 * lsh.chunk, source)
    return projections + lsh.rounds * width * (12.0 * keys * target + buckets * (source + target))


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
    return (layer.pairs(smyrf.chunk) + Passes(layer.heads * 2 * 2.0 * (layer.head_dim + 2))) * smyrf.rounds


def _routing(layer: Layer) -> Passes:
    """The window, and the products of q and of a k of its own with N centroids, forward only."""
    routing = layer.config.routing
    count = math.ceil(layer.model.max_length / routing.chunk)
    keys = layer.band(routing.chunk, False) if routing.window == "band" else layer.clusters(count, routing.chunk)
    return layer.pairs(keys) + Passes(layer.heads * (1 if layer.causal else 2) * 2.0 * layer.head_dim * count)


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
