"""The mechanisms of one layer of a Hugging Face model, their part of its generation cache, and the attention function
"megasparse" that transformers calls.

The mask remains a mask of the keys, (B, L). The layer's q, k and v, projected by the pretrained weights, are the inputs
of the mechanisms. B batch, L length, n new tokens, H heads, G key heads, D head dim, E width.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from megasparse.attention.cache import CachedTokens
from megasparse.attention.contract import (
    Attention,
    AttentionContext,
    AttentionInputs,
    IndexedTokens,
    Targets,
)
from megasparse.attention.full import FullAttention
from megasparse.attention.heads import Padding, build_mechanism, split_heads_by_mechanism
from megasparse.attention.sinks import merge
from megasparse.config.attention import AttentionConfig
from megasparse.config.schema import ModelConfig, heads_of_layer
from megasparse.errors import HubError
from megasparse.hub.versions import USE_TESTED
from megasparse.ops.gathered_attention import gathered_attention
from megasparse.ops.operator import autocast_off
from megasparse.ops.random import RngContext

NAME = "megasparse"
IGNORED = -100
"""Label that the loss ignores, as in Hugging Face models."""
_PAIRS = 1 << 24
"""Largest number of query-key pairs in a mask."""


class Projected(NamedTuple):
    """Inputs of a layer's mechanisms. x: (B, L, E), the layer's input. q, k, v: (B, H, L, D)."""

    x: Tensor
    q: Tensor
    k: Tensor
    v: Tensor


class _Part(NamedTuple):
    """A mechanism with the newest n tokens."""

    mechanism: Attention
    newest: IndexedTokens


class Mechanisms(nn.ModuleDict):
    """The mechanisms of one layer, by kind, with the heads split among them."""

    def __init__(self, config: ModelConfig, layer: int):
        split = heads_of_layer(config, layer)
        super().__init__({kind: build_mechanism(kind, config, heads) for kind, heads in split.items()})
        self.config, self.layer, self.split = config, layer, split
        self.causal = config.kind == "decoder"

    def use_statistics(self, applied: bool) -> None:
        """Update centroids with the statistics of the previous pass, or drop these."""
        for mechanism in self.values():
            cast(Attention, mechanism).after_step(applied, lambda sums: sums)

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.use_statistics(True)  # the statistics are not saved
        super()._save_to_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.use_statistics(False)

    def with_full_attention(self) -> "Mechanisms":
        return Mechanisms(self.config.changed(attention=AttentionConfig(pattern=["full"])), self.layer)

    @property
    def attends_fully(self) -> bool:
        """True if all heads use full attention with separate queries and keys."""
        return all(_attends_fully(attention) for attention in self.values())

    def attend(self, inputs: Projected, padding: Padding, context: AttentionContext) -> tuple[Tensor, list[Tensor]]:
        """Return the outputs of all heads (B, H, L, D), and the auxiliary losses."""
        outs, losses = [], []
        for mechanism, heads, part in self.split_heads_by_mechanism(inputs.q, inputs.k, inputs.v, padding, context):
            with autocast_off(inputs.x):
                out, loss, *_ = mechanism(inputs.x, heads, part)
            outs.append(out)
            if loss is not None:
                losses.append(loss)
        return torch.cat(outs, dim=1), losses

    def index(self, inputs: Projected, context: AttentionContext, position: int) -> list[_Part]:
        """Index the newest tokens for each mechanism."""
        parts = []
        for mechanism, heads, local in self.split_heads_by_mechanism(
            inputs.q, inputs.k, inputs.v, Padding(), context, position
        ):
            with autocast_off(inputs.x):
                newest = mechanism.index(inputs.x, heads, local)
            if newest.entries is not None and newest.entries.is_floating_point():
                newest = newest._replace(entries=newest.entries.to(inputs.x.dtype))
            if mechanism.shared_qk:  # its keys are unit queries, which the cache of keys does not contain
                newest = newest._replace(entries=heads.k.detach().transpose(1, 2).flatten(2))  # (B, n, H·D)
            parts.append(_Part(mechanism, newest))
        return parts

    def attend_cached(
        self,
        parts: list[_Part],
        k: Tensor,
        v: Tensor,
        index: Sequence[Tensor | None],
        tokens: CachedTokens,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend from the newest n tokens to a cache, (B, H, n, D). k, v: (B, G, L, D). index: of all tokens. sinks:
        (H,).
        """
        repeats, real, outs, first = sum(self.split.values()) // k.shape[1], tokens.real, [], 0
        for part, entries in zip(parts, index, strict=True):
            mechanism = part.mechanism
            q = part.newest.inputs.q
            heads = q.shape[1]
            local_heads = slice(first, first + heads)
            if local_heads.start % repeats == local_heads.stop % repeats == 0:
                keys, values = (x[:, local_heads.start // repeats : local_heads.stop // repeats] for x in (k, v))
            else:
                keys, values = (x.repeat_interleave(repeats, dim=1)[:, local_heads] for x in (k, v))
            first, sink = local_heads.stop, None if sinks is None else sinks[local_heads]
            with autocast_off(q):
                if _attends_fully(mechanism):
                    outs.append(_after(q, keys, values, real, sinks=sink))
                elif (chosen := mechanism.choose(part.newest, entries, tokens)) is not None:
                    out, lse = _gathered(q, keys, values, chosen)
                    if sink is not None:
                        out = out * torch.sigmoid(lse - sink[:, None])[..., None].to(out.dtype)
                    outs.append(out)
                elif sink is not None:
                    problem = "chooses no keys, so that the model's learned sinks (s_aux) cannot be added"
                    hint = "Use full, local, LSH without shared_qk, LHA, smart_bird or ranked attention"
                    raise HubError(type(mechanism).__name__, problem, hint)
                else:
                    outs.append(_again(part, keys, values, entries, real))
        return torch.cat(outs, dim=1) if len(outs) > 1 else outs[0]

    def split_heads_by_mechanism(
        self, q: Tensor, k: Tensor, v: Tensor, padding: Padding, context: AttentionContext, position: int = 0
    ) -> Iterator[tuple[Attention, AttentionInputs, AttentionContext]]:
        """Yield each mechanism, its heads of (B, H, L, D), and its context."""
        mechanisms = {kind: cast(Attention, self[kind]) for kind in self.split}
        if any(mechanism.shared_qk for mechanism in mechanisms.values()):
            shares = zip(k.split(list(self.split.values()), dim=1), mechanisms.values(), strict=True)
            k = torch.cat([k[:, :0], *(keys for keys, mechanism in shares if not mechanism.shared_qk)], dim=1)
        for kind, heads, part_context in split_heads_by_mechanism(
            mechanisms, self.split, (q, k, v), padding, self.causal, context, position
        ):
            yield mechanisms[kind], heads, part_context


def _attends_fully(attention: nn.Module) -> bool:
    return isinstance(attention, FullAttention) and not (attention.shared_qk or attention.changes_keys)


class IndexedLayer(DynamicLayer):  # type: ignore[misc]
    """A layer of transformers' generation cache with an index for the mechanisms' selection of keys.

    Its tensors have spare capacity, so that most tokens are appended without a copy. capacity: number of tokens of a
    static cache, allocated at once.
    """

    def __init__(self, capacity: int | None = None) -> None:
        super().__init__()
        self.capacity, self.stores = capacity, dict[str, Tensor]()
        self.index: Tensor | None = None  # (B, L, w)

    @staticmethod
    def of(cache: Cache, number: int, needs_index: bool) -> None:
        """Replace an empty layer of a cache by an IndexedLayer."""
        while len(cache.layers) <= number:
            cache.layers.append(DynamicLayer())
        layer: Any = cache.layers[number]
        if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) and not layer.get_seq_length():
            cache.layers[number] = IndexedLayer()
        elif not isinstance(layer, IndexedLayer) and (needs_index or type(layer) is not DynamicLayer):
            problem = f"layer {number} of past_key_values is a {type(layer).__name__} without an index of its tokens"
            hint = 'Use cache_implementation="dynamic", with one attn_implementation while the cache fills'
            raise HubError(type(cache).__name__, problem, hint)

    @staticmethod
    def of_static(cache: Cache) -> None:
        """Replace the empty static layers of a cache, which return keys and values of tokens to come."""
        for number, layer in enumerate(cast(list[Any], cache.layers)):
            if type(layer) is StaticLayer and not layer.get_seq_length():
                cache.layers[number] = IndexedLayer(layer.max_cache_len)
            elif type(layer) is StaticSlidingWindowLayer and not layer.get_seq_length():
                cache.layers[number] = DynamicSlidingWindowLayer(layer.max_cache_len)

    def offload(self) -> None:
        """Move keys and values to CPU memory, but not the index, which is small and is extended next."""
        DynamicLayer.offload(self)
        self.stores = {name: store for name, store in self.stores.items() if name == "index"}

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            super().update(key_states[..., :0, :], value_states[..., :0, :])
        self.keys = self._append("keys", cast(Tensor, self.keys), key_states)
        self.values = self._append("values", cast(Tensor, self.values), value_states)
        return self.keys, self.values

    def append_index(self, entries: Tensor) -> Tensor:
        """Append the newest tokens' entries (B, n, w). Return all tokens' entries."""
        old = entries[:, :0] if self.index is None else self.index
        self.index = self._append("index", old, entries)
        return self.index

    def reset(self) -> None:
        self.keys = self.values = self.index = None
        self.is_initialized = False

    def crop(self, *args: Any) -> None:
        super().crop(*args)  # of the new length, or since transformers 5.15 of the negated number of tokens to remove
        self._change_index(lambda index: index[:, : self.get_seq_length()])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(cast(Any, beam_idx))
        self._change_index(lambda index: index.index_select(0, beam_idx.to(index.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._change_index(lambda index: index.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._change_index(lambda index: index[indices])

    def _change_index(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.index is not None:
            self.index = change(self.index)

    def _append(self, name: str, old: Tensor, new: Tensor) -> Tensor:
        """Append `new` (..., n, w) to `old` (..., L, w) in a tensor with spare capacity."""
        length, store = old.shape[-2] if old.numel() else 0, self.stores.get(name)
        total = length + new.shape[-2]
        if self.capacity is not None and total > self.capacity:
            problem = f"is static, with room for {self.capacity} tokens, not {total}"
            raise HubError("past_key_values", problem, "Use a larger max_cache_len")
        if new.requires_grad:
            return torch.cat([old, new], dim=-2)
        moved = store is None or old.data_ptr() != store.data_ptr() or old.stride() != store.stride()
        if store is None or moved or store.shape[-2] < total or len(store) != len(new):
            room = self.capacity or total + max(16, total // 32)
            store = self.stores[name] = new.new_empty(*new.shape[:-2], room, new.shape[-1])
            if length:
                store[..., :length, :] = old
        store[..., length:total, :] = new
        return store[..., :total, :]


def cache_name(model: nn.Module) -> str:
    """Return the name of the generation cache of a model, which depends on transformers' version."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class InterfaceCall(NamedTuple):
    """Arguments of one self-attention's call of transformers' attention interface.

    query: (B, H, n, D), the last n tokens. key, value: (B, G, L, D), all tokens. attention_mask: (B, L) bool or None.
    sinks: (H,), a learned sink per head, the score of a key without a value (s_aux of gpt-oss).
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    attention_mask: Tensor | None
    sliding_window: int | None
    sinks: Tensor | None
    others: dict[str, Any]

    @property
    def name(self) -> str:
        return type(self.module).__name__


@dataclass
class ReplacedPass:
    """One forward pass of `owner`, the model that was called."""

    owner: nn.Module
    seed: int
    step: int
    targets: Targets | None
    position_ids: Tensor | None = None
    draws: RngContext | None = None
    """Replaces the model's seed and pass number."""
    losses: list[Tensor] = field(default_factory=list)
    calls: list[InterfaceCall] | None = None
    """If set, the pass only records its calls of the attention interface."""
    _of_layers: dict[Any, Any] = field(default_factory=dict)
    """Values that all layers of the pass share."""

    def rng(self, batch: int, training: bool) -> RngContext:
        if self.draws is not None:
            return self.draws
        if training:
            return RngContext(self.seed, self.step, torch.arange(batch), training=True)
        if batch not in self._of_layers:
            self._of_layers[batch] = RngContext.evaluation(self.seed, batch)
        return cast(RngContext, self._of_layers[batch])

    def record(self, call: InterfaceCall) -> Tensor:
        """Record a call. Returns its values as outputs, (B, H, n, D)."""
        assert self.calls is not None
        self.calls.append(call)
        return call.value.repeat_interleave(call.query.shape[1] // call.value.shape[1], dim=1)

    def documents(self, call: InterfaceCall) -> Tensor | None:
        """Return the numbers (B, L) of packed documents, which start at jumps of positions; None for one."""
        batch, _, count, _ = call.query.shape
        if call.attention_mask is not None or self.position_ids is None or count != call.key.shape[2]:
            return None
        starts = F.pad(self.position_ids.diff(dim=1) != 1, (1, 0))  # (1 or B, L)
        return starts.cumsum(1).expand(batch, count) if bool(starts.any()) else None

    def tokens(self, length: int, count: int, real: Tensor | None, device: torch.device) -> CachedTokens:
        """Return the tokens of a cache, of which the newest `count` are queries."""
        key = length, count, id(real), device
        if key not in self._of_layers:
            self._of_layers[key] = CachedTokens.of(length, count, real, device)
        return cast(CachedTokens, self._of_layers[key])


class _LayerCall:
    """Call of a layer with mechanisms: `prefill` attends from whole sequences, `extend` to a cache."""

    def __init__(self, call: InterfaceCall, layer: Mechanisms, run: ReplacedPass, x: Tensor, cache: Cache | None):
        batch, heads, count, _ = call.query.shape
        self.call = call
        self.layer = layer
        self.run = run
        self.cached: Any = None if cache is None else cache.layers[layer.layer]
        self.segments = run.documents(call)
        self.training = call.module.training
        self.length = call.key.shape[2]
        self.position = self.length - count
        if self.length > layer.config.max_length:
            problem = f"{self.length} tokens are more than the max_length = {layer.config.max_length} of its attention"
            raise HubError(call.name, problem, "Call replace_attention with a larger max_length")
        self.repeats = heads // call.key.shape[1]
        newest = call.key[:, :, self.position :].repeat_interleave(self.repeats, dim=1)  # (B, H, n, D)
        self.inputs = Projected(x, call.query, newest, newest)  # an index reads no values
        targets = run.targets if self.training and run.targets and len(run.targets.values) == batch else None
        grouped = all(size % self.repeats == 0 for size in layer.split.values())
        rng = run.rng(batch, self.training)
        self.context = AttentionContext(layer.layer, rng, targets=targets, repeats=self.repeats if grouped else 1)

    def attend(self) -> Tensor:
        """Return the outputs of the newest n tokens, (B, H, n, D)."""
        if self.position and getattr(self.cached, "packed", False):
            problem = "contains several packed documents, and new tokens would attend to all of them"
            raise HubError("past_key_values", problem, "Use one cache per document")
        parts = list[_Part]()
        index = list[Tensor | None]()
        if isinstance(self.cached, IndexedLayer):
            parts = self.layer.index(self.inputs, self.context, self.position)
            index = _indexed(self.cached, parts, self.position)
        if self.position and self.training and not self.layer.attends_fully:
            problem = f"contains {self.position} tokens, but a model in training attends only to its input"
            raise HubError("past_key_values", problem, "Call model.eval(), or pass the whole sequence and no cache")
        mask = self.call.attention_mask
        if self.call.sinks is not None and not self.layer.attends_fully:
            if self.training or self.segments is not None:
                problem = "has learned sinks (s_aux), which mechanisms add neither in training nor for packed documents"
                raise HubError(self.call.name, problem, "Call model.eval() and pass one document per row")
            if not parts:
                parts = self.layer.index(self.inputs, self.context, self.position)
                index = [part.newest.entries for part in parts]
            if mask is None:
                mask = torch.ones(len(self.inputs.x), self.length, dtype=torch.bool, device=self.inputs.x.device)
            return self.extend(parts, index, mask)
        if not self.position:
            return self.prefill()
        if parts:
            return self.extend(parts, index, mask)
        if not self.layer.attends_fully:
            problem = f"got no cache that megasparse can read from transformers {transformers.__version__}"
            raise HubError(self.call.name, problem, USE_TESTED)
        return _after(self.call.query, self.call.key, self.call.value, mask, sinks=self.call.sinks)

    def prefill(self) -> Tensor:
        """Attend from whole sequences. The pass gets the auxiliary losses."""
        segments = self.segments if self.layer.causal else None
        if self.cached is not None:
            self.cached.packed = segments is not None
        inputs = self.inputs._replace(v=self.call.value.repeat_interleave(self.repeats, dim=1))
        padding = Padding(self.call.attention_mask, segments)
        out, losses = self.layer.attend(inputs, padding, self.context)
        self.run.losses += losses
        if self.call.sinks is None:
            return out
        _, query, key, value, mask, *_ = self.call
        return _after(query, key, value, mask, None, segments, self.call.sinks)

    def extend(self, parts: list[_Part], index: Sequence[Tensor | None], real: Tensor | None) -> Tensor:
        """Attend from the newest tokens to a cache. index: of all tokens."""
        key, value = self.call.key, self.call.value
        tokens = self.run.tokens(self.length, self.length - self.position, real, key.device)
        return self.layer.attend_cached(parts, key, value, index, tokens, self.call.sinks)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None,
    megasparse_pass: ReplacedPass | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention function of a layer, called by transformers with the tensors of `InterfaceCall`. options:
    sliding_window, output_attentions and s_aux of transformers, and the layer's input and cache from hooks. Returns (B,
    n, H, D).
    """
    x = options.pop("megasparse_input", None)
    cache = options.pop("megasparse_cache", None)
    window = options.pop("sliding_window", None)
    sinks = options.pop("s_aux", None)
    call = InterfaceCall(module, query, key, value, attention_mask, window, sinks, options)
    run = megasparse_pass
    layer = getattr(module, NAME, None)
    if run is not None and run.calls is not None:
        return run.record(call).transpose(1, 2), None
    if run is None or not (isinstance(layer, Mechanisms) or window):
        raise HubError(call.name, "its attention is not replaced", "Load its folder by megasparse.hub.load_replaced")
    if options.get("output_attentions"):
        raise HubError(call.name, "mechanisms compute no matrix of attention weights", "Leave output_attentions out")
    if attention_mask is not None and attention_mask.dim() != 2:
        shape = tuple(attention_mask.shape)
        raise HubError(call.name, f"attention_mask has shape {shape}", "Use a mask of the tokens, (batch, length)")
    factor = 1.0 if scaling is None else scaling * query.shape[3] ** 0.5
    if factor != 1.0:
        call = call._replace(query=query * factor)
    if isinstance(layer, Mechanisms):
        out = _LayerCall(call, layer, run, x, cache).attend()
    else:
        segments = run.documents(call)
        out = _after(call.query, key, value, attention_mask, window, segments, sinks)
    return out.transpose(1, 2).contiguous(), None


def _indexed(cached: IndexedLayer, parts: list[_Part], position: int) -> list[Tensor | None]:
    """Add the newest tokens to the index of a layer, one byte tensor with the entries of all mechanisms. Return the
    index of all tokens, (B, L, w) per mechanism.
    """
    newest = [part.newest.entries for part in parts]
    entries = [x.contiguous().view(torch.uint8) for x in newest if x is not None]
    if not entries:
        return [None for _ in parts]
    before = 0 if cached.index is None else cached.index.shape[1]
    if before != position:
        problem = f"has an index of {before} of its {position} tokens: another attn_implementation read the others"
        raise HubError("past_key_values", problem, "Start with an empty cache, or keep one attn_implementation")
    whole = cached.append_index(torch.cat(entries, dim=-1) if len(entries) > 1 else entries[0])
    split = iter(whole.split([x.shape[-1] for x in entries], dim=-1)) if len(entries) > 1 else iter([whole])
    columns = (x if len(entries) == 1 else x.contiguous() for x in split)
    return [None if x is None else next(columns).view(x.dtype) for x in newest]


def _gathered(q: Tensor, k: Tensor, v: Tensor, chosen: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Attend to the keys of `Attention.choose`. Returns output and log-sum-exp."""
    if q.dtype in (torch.float32, torch.float64):  # half precision rounds each part as the whole pass, see `choose`
        shape = [max(sizes) for sizes in zip(*(index.shape[:3] for index in chosen), strict=True)]
        chosen = (torch.cat([index.expand(*shape, -1) for index in chosen], dim=-1),)
    parts = [gathered_attention(q, k, v, index, scale=q.shape[3] ** -0.5) for index in chosen]
    return parts[0] if len(parts) == 1 else merge(parts)


def _again(part: _Part, k: Tensor, v: Tensor, entries: Tensor | None, real: Tensor | None) -> Tensor:
    """Recompute all tokens for a mechanism that does not select keys, and return the newest."""
    q = part.newest.inputs.q
    before = k.shape[2] - q.shape[2]
    if real is None and (skip := part.mechanism.skipped(before)).stop > skip.start:
        k, v = (torch.cat([x[:, :, : skip.start], x[:, :, skip.stop :]], dim=2) for x in (k, v))
        before -= skip.stop - skip.start
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    if entries is None:
        q = F.pad(q, (0, 0, before, 0))
    else:
        k = entries.unflatten(2, (q.shape[1], -1)).transpose(1, 2)
        q = torch.cat([k[:, :, :before], q], dim=2)
    x, inputs = q.new_empty(len(q), 0), AttentionInputs(q, k, v, real, None, causal=True)
    return part.mechanism(x, inputs, part.newest.context).out[:, :, before:]


def _after(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    window: int | None = None,
    segments: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Full attention of the last n tokens (B, H, n, D) to a cache, or attention to the last `window` tokens. key,
    value: (B, G, L, D). mask: bool, its last L columns are used. segments: (B, L) document numbers. sinks: (H,).
    """
    count, length, outs = query.shape[2], key.shape[2], []
    position = torch.arange(length, device=query.device)
    for first in range(length - count, length, step := max(1, _PAIRS // length)):
        end, low = min(first + step, length), 0 if window is None else max(0, first - window + 1)
        rows, columns = position[first:end, None], position[low:end]
        visible = columns <= rows
        if window is not None:
            visible = visible & (rows - columns < window)
        if mask is not None:
            visible = visible & mask[:, None, None, -length:][..., low:end] | (rows == columns)
        if segments is not None:
            visible = visible & (segments[:, None, first:end, None] == segments[:, None, None, low:end])
        q = query[:, :, first - length + count : end - length + count]
        k, v = (x[:, :, low:end].to(q.dtype) for x in (key, value))  # torch.autocast leaves values in bf16
        if sinks is not None:  # a key 0, whose bias is its score, with the value 0
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
            visible = torch.zeros_like(visible, dtype=q.dtype).masked_fill(~visible, -torch.inf)
            visible = visible.expand(len(q), q.shape[1], -1, -1)
            sink = sinks.to(q.dtype)[:, None, None].expand(*visible.shape[:3], 1)
            visible = torch.cat([visible, sink], dim=-1)
        grouped = query.shape[1] > key.shape[1]
        outs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=grouped))
    return torch.cat(outs, dim=2)


def share_of_batch(labels: Tensor | None, accumulated: Tensor | int | None) -> Tensor | float:
    """Return the weight of a batch's auxiliary loss: transformers' Trainer divides the task's losses by `accumulated`
    (`num_items_in_batch`), the labels of all batches whose gradients it adds.
    """
    return 1.0 if accumulated is None or labels is None else (labels != IGNORED).sum() / accumulated


def key_mask(*, attention_mask: Tensor | None, **unused: Any) -> Tensor | None:
    """Mask function of a model, called by transformers: (B, L) bool, True for real tokens, or None if all are."""
    return None if attention_mask is None or bool(attention_mask.all()) else attention_mask


ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, key_mask)
