"""What transformers calls in place of its own attention and masks, by the name "megasparse".

The mask stays a mask of the keys, (B, L), and the layer's q, k and v, projected by the pretrained weights, go to our
mechanisms. What a decoder has seen, its mechanisms keep in transformers' own cache.

B batch, L length, n new tokens, H heads, G heads of keys, D head dim, E width.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from megasparse.attention.contract import AttentionContext, Targets
from megasparse.attention.heads import Padding
from megasparse.errors import HubError
from megasparse.hub.replaced_layer import Mechanisms, Projected, ReplacedCacheLayer
from megasparse.ops.random import RngContext

NAME = "megasparse"


@dataclass
class Pass:
    """One forward pass of the model that was called, `owner`."""

    owner: nn.Module
    seed: int
    step: int
    targets: Targets | None
    given: RngContext | None = None
    """Draws to use in place of those of the model's own seed and passes."""
    losses: list[Tensor] = field(default_factory=list)

    def rng(self, batch: int, training: bool) -> RngContext:
        if self.given is not None:
            return self.given
        if not training:
            return RngContext.evaluation(self.seed, batch)
        return RngContext(self.seed, self.step, torch.arange(batch), training=True)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    megasparse_pass: Pass | None = None,
    megasparse_input: Tensor | None = None,
    megasparse_cache: ReplacedCacheLayer | None = None,
    scaling: float | None = None,
    position_ids: Tensor | None = None,
    output_attentions: bool = False,
    **given: Any,
) -> tuple[Tensor, None]:
    """Attention of a layer, as transformers calls it. query: (B, H, n, D), of the last n tokens. key, value: (B, G, L,
    D), with a cache of ours (B, G, n, D). Returns (B, n, H, D).

    attention_mask: (B, L) bool or None, as `key_mask` made it. Raises HubError for what no mechanism can do.
    """
    name = type(module).__name__
    if not isinstance(layer := getattr(module, NAME, None), Mechanisms) or megasparse_pass is None:
        raise HubError(name, "its attention is not replaced", "Call megasparse.hub.replace_attention on the model")
    assert megasparse_input is not None
    if output_attentions:
        raise HubError(name, "there is no matrix of attention weights to give", "Leave output_attentions out")
    if attention_mask is not None and attention_mask.dim() != 2:
        shape = tuple(attention_mask.shape)
        raise HubError(name, f"attention_mask has the shape {shape}", "Give one of the tokens, (batch, length)")
    batch, _, count, _ = query.shape
    seen = key.shape[2] if megasparse_cache is None else megasparse_cache.length + count
    if seen > layer.config.max_length:
        problem = f"{seen} tokens are more than the {layer.config.max_length} its attention was made for"
        raise HubError(name, problem, "Call replace_attention with that max_length")
    query, key, value = _like_ours(query, key, value, scaling)
    run = megasparse_pass
    read = Projected(megasparse_input, query, key, value)
    if megasparse_cache is not None:
        out = megasparse_cache.take(read, attention_mask)
    elif count < seen:
        out = _after(query, key, value, attention_mask)
    else:
        targets = run.targets if module.training and run.targets and len(run.targets.values) == batch else None
        context = AttentionContext(layer.layer, run.rng(batch, module.training), targets=targets)
        packed = attention_mask is None and layer.causal and position_ids is not None
        segments = _documents(position_ids, batch, count) if packed and position_ids is not None else None
        out, losses = layer.attend(read, Padding(attention_mask, segments), context)
        run.losses += losses
    return out.transpose(1, 2).contiguous(), None


def _like_ours(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Heads of keys and values for every head of queries, and queries for logits q·k/√D."""
    if scaling is not None and not math.isclose(ours := query.shape[3] ** -0.5, scaling, rel_tol=1e-6):
        query = query * (scaling / ours)
    if (group := query.shape[1] // key.shape[1]) > 1:
        key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    return query, key, value


def _after(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Full attention of the last n tokens (B, H, n, D) of those that a cache of transformers' holds."""
    count, length = query.shape[2], key.shape[2]
    place = torch.arange(length, device=query.device)
    visible = place <= place[length - count :, None]
    if mask is not None:
        visible = visible & (mask[:, None, None] | (place == place[length - count :, None]))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=visible)


def _documents(position_ids: Tensor, batch: int, length: int) -> Tensor | None:
    """Numbers of packed documents (B, L), each of which begins where positions do not go on; None for one document."""
    starts = F.pad(position_ids.diff(dim=1) != 1, (1, 0))
    return starts.cumsum(1).expand(batch, length) if bool(starts.any()) else None


def key_mask(*, attention_mask: Tensor | None = None, **given: Any) -> Tensor | None:
    """Mask of a model, as transformers calls it: (B, L) bool, true for real tokens, or None where all are."""
    return None if attention_mask is None or bool(attention_mask.all()) else attention_mask


ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, key_mask)
