"""The mechanisms of one layer of a HuggingFace model, their part of its generation cache, and the function "megasparse"
that transformers calls in place of its own attention and masks.

The mask stays a mask of the keys, (B, L), and the layer's q, k and v, projected by the pretrained weights, go to the
mechanisms. B batch, L length, n new tokens, H heads, G heads of keys, D head dim, E width.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from megasparse.attention.contract import Attention, AttentionContext, AttentionInputs, Targets
from megasparse.attention.full import FullAttention
from megasparse.attention.heads import Padding, build_mechanism, split_heads_by_mechanism
from megasparse.config.attention import AttentionConfig, heads_of_layer
from megasparse.config.schema import ModelConfig
from megasparse.errors import HubError
from megasparse.ops.operator import autocast_off
from megasparse.ops.random import EVALUATION_STEP, RngContext

NAME = "megasparse"


class Projected(NamedTuple):
    """Inputs of a layer's mechanisms. x: (B, L, E), the layer's input. q, k, v: (B, H, L, D)."""

    x: Tensor
    q: Tensor
    k: Tensor
    v: Tensor

    def rows(self, numbers: Tensor, order: Tensor) -> "Projected":
        """The tokens `order` (n, m) of the sequences `numbers` (n,)."""
        rows = numbers[:, None]
        q, k, v = (x[rows, :, order].transpose(1, 2) for x in (self.q, self.k, self.v))
        return Projected(self.x[rows, order], q, k, v)


class Mechanisms(nn.ModuleDict):
    """The mechanisms of one layer, by kind, each of some of its heads."""

    def __init__(self, config: ModelConfig, layer: int):
        split = heads_of_layer(config, layer)
        super().__init__({kind: build_mechanism(kind, config, heads) for kind, heads in split.items()})
        self.config, self.layer, self.split = config, layer, split
        self.causal = config.kind == "decoder"

    def with_full_attention(self) -> "Mechanisms":
        """Full attention in the same place."""
        return Mechanisms(self.config.model_copy(update={"attention": AttentionConfig(pattern=["full"])}), self.layer)

    @property
    def attends_fully(self) -> bool:
        """True if all heads attend fully, by queries and keys of their own."""
        attention = next(iter(self.values()))
        return (
            len(self) == 1
            and isinstance(attention, FullAttention)
            and not (attention.shared_qk or attention.adds_positions)
        )

    def attend(self, inputs: Projected, padding: Padding, context: AttentionContext) -> tuple[Tensor, list[Tensor]]:
        """Outputs of all heads (B, H, L, D), and what the mechanisms learn from."""
        outs, losses = [], []
        for mechanism, heads, part in self.split_heads_by_mechanism(inputs.q, inputs.k, inputs.v, padding, context):
            with autocast_off(inputs.x):
                out, loss, *_ = mechanism(inputs.x, heads, part)
            outs.append(out)
            if loss is not None:
                losses.append(loss)
        return torch.cat(outs, dim=1), losses

    def split_heads_by_mechanism(
        self, q: Tensor, k: Tensor, v: Tensor, padding: Padding, context: AttentionContext, position: int = 0
    ) -> Iterator[tuple[Attention, AttentionInputs, AttentionContext]]:
        """Each mechanism, its share of all heads (B, H, L, D), and its context."""
        mechanisms = {kind: cast(Attention, self[kind]) for kind in self.split}
        shares = zip(k.split(list(self.split.values()), dim=1), mechanisms.values(), strict=True)
        keyed = [keys for keys, mechanism in shares if not mechanism.shared_qk]
        k = torch.cat(keyed, dim=1) if keyed else k[:, :0]
        for kind, heads, part_context in split_heads_by_mechanism(
            mechanisms, self.split, (q, k, v), padding, self.causal, context, position
        ):
            yield mechanisms[kind], heads, part_context


class _Group:
    """Sequences of a batch that have as many tokens each. caches: of each mechanism."""

    def __init__(self, layer: Mechanisms, numbers: Tensor, seed: int, like: Tensor):
        self.layer, self.numbers, self.seed, self.position = layer, numbers, seed, 0
        self.samples = numbers.cpu()
        self.caches = {kind: cast(Attention, layer[kind]).new_cache(len(numbers), like, None) for kind in layer.split}

    def context(self) -> AttentionContext:
        rng = RngContext(self.seed, EVALUATION_STEP, self.samples, training=False)
        return AttentionContext(self.layer.layer, rng)

    def prefill(self, inputs: Projected) -> Tensor:
        """Takes in the whole beginning of the sequences; returns its outputs (n, H, L, D)."""
        outs = []
        parts = self.layer.split_heads_by_mechanism(inputs.q, inputs.k, inputs.v, Padding(), self.context())
        for kind, (mechanism, heads, context) in zip(self.layer.split, parts, strict=True):
            with autocast_off(inputs.x):
                outs.append(mechanism(inputs.x, heads, context).out)
                mechanism.fill_cache(inputs.x, heads, self.caches[kind], context)
        self.position = inputs.q.shape[2]
        return torch.cat(outs, dim=1)

    def decode(self, inputs: Projected) -> Tensor:
        """Takes in one more token of each sequence; returns its outputs (n, H, 1, D)."""
        parts = inputs.q, inputs.k, inputs.v
        shares = self.layer.split_heads_by_mechanism(*parts, Padding(), self.context(), self.position)
        with autocast_off(inputs.x):
            outs = [
                mechanism.decode(inputs.x, heads, self.caches[kind], self.position, context)
                for kind, (mechanism, heads, context) in zip(self.layer.split, shares, strict=True)
            ]
        self.position += 1
        return torch.cat(outs, dim=1)

    def select(self, rows: Tensor, numbers: Tensor) -> "_Group":
        """Becomes the sequences `chosen`, with other numbers in the batch; each keeps its draws."""
        for cache in self.caches.values():
            cache.select(rows)
        self.samples, self.numbers = self.samples[rows.cpu()], numbers
        return self


class ReplacedCacheLayer(CacheLayerMixin):  # type: ignore[misc]
    """A layer of transformers' generation cache that holds the caches of mechanisms, in place of all keys and values.

    Padding may stand on either side of what fills it: each sequence is computed as if it stood alone.
    """

    is_sliding = False

    def __init__(self, layer: Mechanisms, seed: int):
        super().__init__()
        self.layer, self.seed, self.length = layer, seed, 0
        self.groups: list[_Group] = []

    @staticmethod
    def of(cache: Cache, number: int, layer: Mechanisms, seed: int) -> "ReplacedCacheLayer":
        """The cache of a layer of the model, made where the cache is still empty there. Raises HubError for a cache
        that cannot hold it.
        """
        while len(cache.layers) <= number:
            cache.layers.append(DynamicLayer())
        entry = cache.layers[number]
        if not isinstance(entry, ReplacedCacheLayer):
            if type(entry) is not DynamicLayer or entry.get_seq_length():
                problem = f"layer {number} of past_key_values is a {type(entry).__name__} that cannot be replaced"
                raise HubError(type(cache).__name__, problem, "Give an empty DynamicCache, or none")
            cache.layers[number] = entry = ReplacedCacheLayer(layer, seed)
        return entry

    def take(self, inputs: Projected, mask: Tensor | None) -> Tensor:
        """Takes in more tokens; returns their outputs (B, H, n, D). mask: (B, tokens so far), true for real ones."""
        before, count = self.length, inputs.q.shape[2]
        self.length += count
        if before == 0:
            return self._prefill(inputs, mask)
        if mask is not None and not bool(mask[:, before:].all()):
            problem = f"attention_mask hides tokens after the first {before}, which a cache holds"
            raise HubError("past_key_values", problem, "Give padded sequences in one call")
        out = torch.empty_like(inputs.q)
        for group in self.groups:
            for column in range(count):
                at = torch.full_like(group.numbers, column)[:, None]
                out[group.numbers, :, column] = group.decode(inputs.rows(group.numbers, at))[:, :, 0].to(out.dtype)
        return out

    def _prefill(self, inputs: Projected, mask: Tensor | None) -> Tensor:
        if mask is None:
            mask = torch.ones(inputs.x.shape[:2], dtype=torch.bool, device=inputs.x.device)
        lengths, order = mask.sum(1), (~mask).to(torch.int8).argsort(dim=1, stable=True)
        out = torch.zeros_like(inputs.q)
        for length in lengths.unique().tolist():
            numbers = (lengths == length).nonzero().squeeze(1)
            group, tokens = _Group(self.layer, numbers, self.seed, inputs.k), order[numbers, :length]
            if length:
                whole = tokens.numel() == mask.numel()
                outputs = group.prefill(inputs if whole else inputs.rows(numbers, tokens))
                out[numbers[:, None], :, tokens] = outputs.transpose(1, 2).to(out.dtype)
            self.groups.append(group)
        return out

    # What transformers asks of a layer of a cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the first tokens make the caches."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return the new keys and values alone; `take` takes them in."""
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.groups, self.length = [], 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Becomes the cache of the sequences `beam_idx`, (n,) int64 numbers of its own, repeats allowed."""
        groups = []
        for group in self.groups:
            same = beam_idx.to(group.numbers.device).unsqueeze(1) == group.numbers
            numbers = same.any(1).nonzero().squeeze(1)
            if len(numbers):
                groups.append((group, same[numbers].to(torch.int8).argmax(1), numbers))
        self.groups = [group.select(rows, numbers) for group, rows, numbers in groups]

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        batch = sum(len(group.numbers) for group in self.groups)
        self.reorder_cache(torch.arange(batch).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            problem = "tokens cannot be taken back out of a cache of hashed attention"
            raise HubError("past_key_values", problem, "Generate without assisted decoding")


@dataclass
class ReplacedPass:
    """One forward pass of the model that was called, `owner`."""

    owner: nn.Module
    seed: int
    step: int
    targets: Targets | None
    draws: RngContext | None = None
    """Draws to use in place of those of the model's own seed and passes."""
    losses: list[Tensor] = field(default_factory=list)

    def rng(self, batch: int, training: bool) -> RngContext:
        if self.draws is not None:
            return self.draws
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
    megasparse_pass: ReplacedPass | None = None,
    megasparse_input: Tensor | None = None,
    megasparse_cache: ReplacedCacheLayer | None = None,
    scaling: float | None = None,
    position_ids: Tensor | None = None,
    output_attentions: bool = False,
    **unused: Any,
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
    length = key.shape[2] if megasparse_cache is None else megasparse_cache.length + count
    if length > layer.config.max_length:
        problem = f"{length} tokens are more than the {layer.config.max_length} its attention was made for"
        raise HubError(name, problem, "Call replace_attention with that max_length")
    query, key, value = _like_ours(query, key, value, scaling)
    run = megasparse_pass
    read = Projected(megasparse_input, query, key, value)
    if megasparse_cache is not None:
        out = megasparse_cache.take(read, attention_mask)
    elif count < length:
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
    positions = torch.arange(length, device=query.device)
    visible = positions <= positions[length - count :, None]
    if mask is not None:
        visible = visible & (mask[:, None, None] | (positions == positions[length - count :, None]))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=visible)


def _documents(position_ids: Tensor, batch: int, length: int) -> Tensor | None:
    """Numbers of packed documents (B, L), each of which begins where positions do not go on; None for one document."""
    starts = F.pad(position_ids.diff(dim=1) != 1, (1, 0))
    return starts.cumsum(1).expand(batch, length) if bool(starts.any()) else None


def key_mask(*, attention_mask: Tensor | None = None, **unused: Any) -> Tensor | None:
    """Mask of a model, as transformers calls it: (B, L) bool, true for real tokens, or None where all are."""
    return None if attention_mask is None or bool(attention_mask.all()) else attention_mask


ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, key_mask)
