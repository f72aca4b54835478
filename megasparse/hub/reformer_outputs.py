"""Outputs of HuggingFace's Reformer by layer. B batch, L length, H heads, R rounds, D head dim, V vocabulary."""

import copy
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megasparse.hub.compare import watched
from megasparse.hub.reformer_config import buckets
from megasparse.ops.random import RngContext, rotations

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.no_grad()
def outputs(
    model: "PreTrainedModel", bos: int, vocabulary: int, tokens: Tensor, seed: int
) -> Iterator[tuple[str, Tensor]]:
    """HuggingFace's own code on [BOS, tokens], with three things taken away in which its LSH layers are not ours:

    its rotations (here it has those that our evaluation draws from `seed`), the look over the ends of a hash round, and
    its precision. The last one because a token that sees nothing in any round has a log-sum-exp of −1e5 there, which
    fp32 rounds so coarsely that the rounds' shares sum to 1 only to 0.4 %: it computes in float64. In a model without
    LSH layers only the precision is another. The LM head's bias is added where transformers leaves it out.
    """
    twin: Any = copy.deepcopy(model).double().eval()
    length = tokens.shape[1]
    parts = {"embedding": twin.reformer.embeddings}
    for number, layer in enumerate(twin.reformer.encoder.layers):
        if hasattr(layer.attention.self_attention, "query_key"):
            _hash_as_ours(layer.attention.self_attention, buckets(model.config), number, seed)
        parts |= {f"layer {number} attention": layer.attention, f"layer {number} feed-forward": layer.feed_forward}
    _let_padding_have_no_position(twin.reformer.embeddings, length)
    read = torch.cat([torch.full_like(tokens[:, :1], bos), tokens[:, :-1]], dim=1)
    with watched(parts) as found:
        logits = twin(read, use_cache=False).logits
    if twin.lm_head.decoder.bias is None:
        logits = logits + twin.lm_head.bias
    yield from ((name, output[:, :length]) for name, output in found)
    yield "logits", logits[..., :vocabulary].float()


def _let_padding_have_no_position(embeddings: Any, length: int) -> None:
    """Let HuggingFace's fill up the last chunk where that goes beyond the last position; no token sees padding."""
    positions = embeddings.position_embeddings.forward

    def padded(position_ids: Tensor) -> Tensor:
        return F.pad(positions(position_ids[:, :length]), (0, 0, 0, position_ids.shape[1] - length))

    embeddings.position_embeddings.forward = padded
    embeddings.max_position_embeddings = sys.maxsize


def _hash_as_ours(layer: Any, factors: list[int], number: int, seed: int) -> None:
    """Give HuggingFace's LSH layer our rotations, and keep it from looking over the ends of a hash round.

    It lays all rounds end to end, and the ends together, and takes the chunk before a round's first one from there.
    Here such a chunk's tokens get the number −1, and the mask hides it.
    """
    drawn = rotations(
        RngContext.evaluation(seed, 1).key(number, "lsh rotation"),
        range(layer.num_attention_heads),
        layer.num_hashes,
        layer.attention_head_size,
        factors[::-1],
        torch.device("cpu"),
    )  # (H, R, D, sum of the factors' halves), our first factor first
    parts = drawn.split([factor // 2 for factor in factors[::-1]], dim=-1)
    ours = torch.cat(parts[::-1], dim=-1).permute(0, 2, 1, 3).double()
    layer.num_buckets, layer.hash_seed = factors if len(factors) > 1 else factors[0], None
    draw, look, mask = layer._hash_vectors, layer._look_adjacent, layer._compute_attn_mask

    def hash_vectors(vectors: Tensor, *rest: Any, **named: Any) -> Tensor:
        with _Drawn(ours.to(vectors.device)):
            return draw(vectors, *rest, **named)

    def look_adjacent(vectors: Tensor, before: int, after: int) -> Tensor:
        windows = look(vectors, before, after)
        if vectors.ndim == 4:  # token numbers (B, H, chunks of all rounds, chunk)
            windows[:, :, :: vectors.shape[2] // layer.num_hashes, : vectors.shape[3]] = -1
        return windows

    def compute_mask(queries: Tensor, keys: Tensor, *rest: Any) -> Tensor:
        seen, there = mask(queries, keys.clamp_min(0), *rest), (keys >= 0).unsqueeze(-2)
        return there if seen is None else seen & there

    layer._hash_vectors, layer._look_adjacent, layer._compute_attn_mask = hash_vectors, look_adjacent, compute_mask


class _Drawn(TorchFunctionMode):
    """While it is entered, torch.randn gives what it was made with."""

    def __init__(self, drawn: Tensor):
        super().__init__()
        self.drawn = drawn

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.randn:
            assert tuple(args[0]) == tuple(self.drawn.shape)
            return self.drawn
        return func(*args, **(kwargs or {}))
