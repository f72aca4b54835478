"""Floating point operations of training, by formula.

E d_model, F d_ff, H heads, D head dim, V vocabulary, T sequence length, R rounds, M window, C local chunk.
"""

from megasparse.config.buckets import lsh_buckets
from megasparse.config.schema import ModelConfig


def model_flops_per_token(model: ModelConfig, sequence_length: int) -> float:
    """FLOPs a token of one forward and backward pass, for the model FLOPs utilisation.

    A product of matrices counts 2 operations a weight and token forward and 4 backward: 6·(weights in products).
    Attention adds 12·H·D for each key a query sees on average (scores and values). What is recomputed in the backward,
    masked inside a block, or done elementwise is not counted.
    """
    layers = [model.attention.pattern[i % len(model.attention.pattern)] for i in range(model.layers)]
    streams = 2 if model.blocks == "reversible" and not model.tied_embeddings else 1  # side by side in the output head
    total = 6.0 * streams * model.d_model * model.vocabulary + model.layers * 12.0 * model.d_model * model.d_ff
    for kind in layers:
        total += _projections(kind, model) + _attention(kind, model, sequence_length)
    return total


def _width(model: ModelConfig) -> int:
    return model.heads * (model.head_dim or model.d_model // model.heads)


def _projections(kind: str, model: ModelConfig) -> float:
    """6·E·H·D for each of queries, keys, values and output; shared QK has no keys of its own."""
    shared = kind == "lsh" or (kind == "full" and model.attention.full.shared_qk)
    return 6.0 * (3 if shared else 4) * model.d_model * _width(model)


def _attention(kind: str, model: ModelConfig, length: int) -> float:
    """12·H·D·(keys a query sees on average).

    full:  (T + 1)/2.
    local: the earlier part of its own chunk and the chunk before, 1.5·C for T much longer than C.
    lsh:   in each round a band of M keys, or 1.5·M of the paper's chunk window; and the hashing, forward only:
           2·D products with each of half as many rotation vectors as there are buckets (Σ of the factors).
    """
    width = _width(model)
    if kind == "full":
        return 12.0 * width * (length + 1) / 2
    if kind == "local":
        return 12.0 * width * _local_keys(length, model.attention.local.chunk)
    lsh = model.attention.lsh
    keys = min(lsh.chunk, (length + 1) / 2) if lsh.window == "band" else _local_keys(length, lsh.chunk)
    hashing = width * sum(lsh_buckets(lsh, model.max_length))
    return lsh.rounds * (12.0 * width * keys + hashing)


def _local_keys(length: int, chunk: int) -> float:
    """Mean over positions of: the earlier positions of the own chunk, itself, and the whole chunk before."""
    chunks, rest = divmod(length, chunk)
    own = chunks * chunk * (chunk + 1) / 2 + rest * (rest + 1) / 2
    before = chunk * max(0, length - chunk)
    return (own + before) / length
