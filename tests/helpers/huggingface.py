"""HuggingFace's Reformer attention layers as a reference, and ours with the same weights."""

import torch
from transformers.models.reformer.configuration_reformer import ReformerConfig
from transformers.models.reformer.modeling_reformer import LSHSelfAttention

from megasparse.attention.contract import AttentionContext
from megasparse.attention.heads import AttentionLayer, Padding
from megasparse.ops.random import RngContext
from tests.helpers.models import attention, small

WIDTH, HEADS = 32, 2


def theirs_lsh(causal, chunk, rounds, buckets):
    own = {"lsh_attn_chunk_length": chunk, "num_hashes": rounds, "num_buckets": buckets, "lsh_num_chunks_after": 0}
    size = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "attention_head_size": WIDTH // HEADS}
    return LSHSelfAttention(ReformerConfig(is_decoder=causal, **size, **own)).eval()


def ours(kind, settings, causal, **weights):
    """Our layer with the weights given by name; its output projection changes nothing."""
    config = small(attention=attention(kind, **{kind: settings}), kind="decoder" if causal else "encoder", layers=1)
    layer = AttentionLayer(config, 0)
    with torch.no_grad():
        layer.output.weight.copy_(torch.eye(WIDTH))
        for name, linear in weights.items():
            getattr(layer, name).weight.copy_(linear.weight)
    return layer


def run(layer, x, seed=5):
    context = AttentionContext(0, RngContext.evaluation(seed, len(x)))
    return layer(x, context, Padding()).out


def without_wrap(layer, chunks):
    """Keeps a HuggingFace layer from looking over the ends of a round of so many chunks.

    It takes the chunk before the first one from the end: the last chunk of the round before (and the other way round).
    Here such a chunk's tokens get the number −1, and the mask hides it.
    """
    look, mask = layer._look_adjacent, layer._compute_attn_mask

    def look_adjacent(vectors, before, after):
        windows = look(vectors, before, after)
        if vectors.ndim == 4:  # token numbers (B, H, chunks of all rounds, C)
            parts = windows.unflatten(3, (before + 1 + after, -1))
            for i in range(before):
                parts[:, :, 0::chunks, i] = -1
            for i in range(after):
                parts[:, :, chunks - 1 :: chunks, -1 - i] = -1
        return windows

    def compute_mask(queries, keys, *rest):
        seen, there = mask(queries, keys, *rest), (keys >= 0).unsqueeze(-2)
        return there if seen is None else seen & there

    layer._look_adjacent, layer._compute_attn_mask = look_adjacent, compute_mask
    return layer
