"""Attention mechanisms as functions of projected queries, keys and values, as `torch.nn.functional` offers its own.

All functions take query (B, H, L, D), key and value (B, H, L, D), and as in torch's scaled_dot_product_attention:

- attn_mask: padding of the keys, (B, L) or (B, 1, 1, L). bool or integers: true or not 0 for real tokens. float: added
  to scores, 0 for real tokens and -inf, or -10,000 and less, for padding.
- dropout_p: dropout rate of the attention probabilities.
- is_causal: attend only to the query's position and earlier ones.
- scale: factor of q·k, by default 1/√D.
- enable_gqa: key and value have fewer heads, each used by H/G neighbouring heads of queries.

and as keyword arguments, next to the settings of the mechanism (see the reference of `model.attention`):

- cu_seqlens: (N + 1,), the limits of N documents packed in one sequence, B = 1. position_ids: (B, L), positions inside
  documents, instead. Tokens attend only within their document.
- max_length: longest sequence of the model in tokens, which determines the number of buckets; by default L.
- seed: seed of random draws. Give each layer of a model its own.
- step: in training, number of the step, for draws that change from step to step. None: the settings and the draws of
  evaluation, which never change.

Mistakes raise ConfigError or ValueError in one line.

Example:
    >>> query, key, value = torch.randn(3, 1, 8, 4096, 64)  # (batch, heads, length, head_dim) each
    >>> out = megasparse.functional.lsh_attention(query, key, value, is_causal=True, chunk=64, rounds=2)
    >>> out.shape
    torch.Size([1, 8, 4096, 64])
"""

import copy
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from megasparse.attention.contract import AttentionContext, AttentionOutput
from megasparse.attention.heads import Padding, build_mechanism, merge_heads, split_heads_by_mechanism
from megasparse.config.attention import MECHANISMS
from megasparse.config.messages import show
from megasparse.config.schema import ModelConfig
from megasparse.errors import ConfigError, did_you_mean
from megasparse.ops import opaque
from megasparse.ops.operator import autocast_off
from megasparse.ops.random import EVALUATION_STEP, RngContext
from megasparse.settings.checks import check_targets
from megasparse.settings.load import build_model_config

PADDED = -9000.0
"""Additive masks hide padding by this number or less: -inf, the least number of a dtype, or -10,000 in bf16."""

ARGUMENTS = {
    "model.attention.pattern[0]": "mechanism",
    "model.attention.{}.": "",
    "model.attention.": "",
    "model.": "",
    'kind to "decoder"': "causal to True",
    'kind to "encoder"': "causal to False",
}
"""Keys in the messages of a run's configuration -> names of arguments. {} is the mechanism."""


def lsh_attention(
    query: Tensor, key: Tensor | None, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, **options: Any,
) -> Tensor:  # fmt: skip
    """Attend inside the buckets of random rotations (Reformer). key=None: shared queries and keys, k = q/|q|."""
    options = {"shared_qk": key is None, **options}
    heads = _Heads(query, key, value, scale, enable_gqa)
    return _attend("lsh", heads, attn_mask, dropout_p, is_causal, options)[0]


def local_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, **options: Any,
) -> Tensor:  # fmt: skip
    """Attend to the query's chunk of positions and the previous one, if not causal also the next."""
    return _attend("local", _Heads(query, key, value, scale, enable_gqa), attn_mask, dropout_p, is_causal, options)[0]


def full_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, **options: Any,
) -> Tensor:  # fmt: skip
    """Attend to all tokens, with torch's kernels, and with documents and padding without an L × L mask."""
    return _attend("full", _Heads(query, key, value, scale, enable_gqa), attn_mask, dropout_p, is_causal, options)[0]


def yoso_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, enable_gqa: bool = False, **options: Any,
) -> Tensor:  # fmt: skip
    """Sum values by sampled hash collisions and normalise the sum (YOSO), without a softmax, scale or dropout."""
    return _attend("yoso", _Heads(query, key, value, None, enable_gqa), attn_mask, dropout_p, is_causal, options)[0]


def ngram_attention(
    query: Tensor, key: Tensor, value: Tensor, tokens: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = True, **options: Any,
) -> Tensor:  # fmt: skip
    """Attend to a window and to the tokens that followed earlier occurrences of the last n tokens; only causal.

    tokens: (B, L) int64, the token of each position. The learned bias of each round is 0.
    """
    bias = {"bias.bias": query.new_zeros(query.shape[1] * len(options.get("lengths", [4])))}
    heads = _Heads(query, key, value, options.pop("scale", None), options.pop("enable_gqa", False))
    return _attend("ngram", heads, attn_mask, dropout_p, is_causal, options, bias, tokens)[0]


def lha_attention(
    query: Tensor, key: Tensor, value: Tensor, parameters: Mapping[str, Tensor], attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, **options: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Attend inside the buckets of learned hash functions (LHA).

    parameters: name -> weight, `dict(layer.mechanisms["lha"].named_parameters())` of an `AttentionLayer` with the same
    settings. Returns the output and the loss that trains the hash functions; None if `step` is None.
    """
    heads = _Heads(query, key, value, options.pop("scale", None), options.pop("enable_gqa", False))
    return _attend("lha", heads, attn_mask, dropout_p, is_causal, options, parameters)


def smart_bird_attention(
    query: Tensor, key: Tensor, value: Tensor, parameters: Mapping[str, Tensor], attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, **options: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Attend to the keys with the largest products of a narrow sketch of the heads' queries and keys (Smart Bird).

    parameters and result: see `lha_attention`; the loss trains the sketch.
    """
    heads = _Heads(query, key, value, options.pop("scale", None), options.pop("enable_gqa", False))
    options = {"sketch": "heads", **options}
    if options["sketch"] != "heads":
        raise ConfigError("sketch", f"{show(options['sketch'])} reads the input of a layer", 'Set it to "heads"')
    return _attend("smart_bird", heads, attn_mask, dropout_p, is_causal, options, parameters)


def model_of(mechanism: str, settings: Mapping[str, Any], **model: Any) -> ModelConfig:
    """Return the configuration of a model of one layer whose heads all use a mechanism with these settings.

    model: keys of the section `model`. Raises ConfigError, with the names of the settings as keys.
    """
    if not isinstance(mechanism, str) or mechanism not in MECHANISMS:
        raise ConfigError("mechanism", f"unknown: {show(mechanism)}", did_you_mean(str(mechanism), MECHANISMS))
    section = {"objective": "attention", **settings} if mechanism == "smart_bird" else dict(settings)
    attention = {"pattern": [mechanism], mechanism: section, "dropout": model.pop("dropout")}
    values = {"layers": 1, "positions": {"kind": "none"}, **model, "attention": attention}
    try:
        config = build_model_config(values)
        check_targets(config, "model.attention")
        return config
    except ConfigError as error:
        texts = [error.key, error.problem, error.hint]
        for name, argument in ARGUMENTS.items():
            texts = [text.replace(name.format(mechanism), argument) for text in texts]
        raise ConfigError(*texts) from None


def padding_mask(mask: Tensor | None, batch: int, length: int) -> Tensor | None:
    """Return a padding mask as (B, L) bool, True for real tokens. Raises ValueError for another mask."""
    if mask is None:
        return None
    if mask.dim() == 4 and mask.shape[1] == mask.shape[2] == 1:
        mask = mask[:, 0, 0]
    if mask.shape != (batch, length):
        raise ValueError(f"mask of shape {(*mask.shape,)} is not a padding mask: give ({batch}, {length})")
    if not mask.is_floating_point():
        return mask != 0
    real = mask == 0
    others = mask[~(real | (mask <= PADDED))]
    if len(others):
        raise ValueError(f"mask contains {others[0].item():g}: give 0 for real tokens and -inf for padding, or bool")
    return real


def segments_of(
    batch: int, length: int, cu_seqlens: Tensor | None = None, position_ids: Tensor | None = None
) -> Tensor | None:
    """Return the number of each token's document, (B, L), or None. Raises ValueError if the arguments do not fit."""
    if cu_seqlens is not None:
        ends = cu_seqlens.flatten()[[0, -1]].tolist()
        if position_ids is not None:
            raise ValueError("cu_seqlens and position_ids both divide the tokens into documents: give one of them")
        if batch != 1 or ends != [0, length]:
            limits = f"go from {ends[0]} to {ends[1]} for {batch} x {length} tokens"
            raise ValueError(f"cu_seqlens {limits}: pack one sequence, (1, L), and give limits from 0 to L")
        tokens = torch.arange(length, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
        return torch.bucketize(tokens, cu_seqlens[1:], right=True)[None]
    if position_ids is None:
        return None
    if position_ids.shape not in ((batch, length), (1, length)):
        raise ValueError(f"position_ids of shape {(*position_ids.shape,)}: give ({batch}, {length})")
    starts = torch.ones_like(position_ids)
    starts[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    return starts.cumsum(1).expand(batch, length)


class _Heads:
    """Queries, keys and values (B, H, L, D) of all heads, scaled for mechanisms that scale by 1/√D."""

    def __init__(self, query: Tensor, key: Tensor | None, value: Tensor, scale: float | None, enable_gqa: bool):
        self.shared = key is None
        if scale is not None and self.shared:
            raise ValueError(f"scale = {scale} is given, but key = None: shared queries and keys have scale 1")
        key = query if key is None else key
        shapes = [(*x.shape,) for x in (query, key, value)]
        if query.dim() != 4 or key.dim() != 4 or key.shape != value.shape:
            raise ValueError(f"query, key and value have shapes {shapes}: give (B, H, L, D) each")
        if enable_gqa and not query.shape[1] % key.shape[1]:
            key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        if query.shape != key.shape:
            hint = "give (B, H, L, D) each; with enable_gqa=True the heads of key and value may be a divisor of H"
            raise ValueError(f"query, key and value have shapes {shapes}: {hint}")
        self.query = query if scale is None else query * (scale * query.shape[3] ** 0.5)
        self.key, self.value = key, value


class _Mechanism(nn.Module):
    def __init__(self, kind: str, config: ModelConfig):
        super().__init__()
        self.split = {kind: config.heads}
        self.mechanism = build_mechanism(kind, config, config.heads)

    def forward(self, heads: _Heads, padding: Padding, causal: bool, context: AttentionContext) -> AttentionOutput:
        mechanisms = dict.fromkeys(self.split, self.mechanism)
        projected = (heads.query, heads.key, heads.value)
        ((_, inputs, local),) = split_heads_by_mechanism(mechanisms, self.split, projected, padding, causal, context)
        with autocast_off(heads.query):
            output: AttentionOutput = self.mechanism(merge_heads(heads.query), inputs, local)
        return output


@lru_cache(maxsize=64)
def _mechanism(
    kind: str, settings: str, heads: int, head_dim: int, max_length: int, causal: bool, dropout: float
) -> _Mechanism:
    """Build a mechanism, its parameters on the meta device. settings: JSON."""
    width = {"d_model": heads * head_dim, "heads": heads, "head_dim": head_dim, "max_length": max_length}
    stack = "decoder" if causal else "encoder"
    config = model_of(kind, json.loads(settings), kind=stack, dropout=dropout, **width)
    with torch.device("meta"):
        return _Mechanism(kind, config)


def _attend(
    kind: str,
    heads: _Heads,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    options: dict[str, Any],
    parameters: Mapping[str, Tensor] | None = None,
    tokens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attend with a mechanism that has these parameters. Returns its output and its auxiliary loss."""
    names = {"cu_seqlens": None, "position_ids": None, "seed": 0, "step": None}
    settings = {name: value for name, value in options.items() if name not in names}
    cu_seqlens, position_ids, seed, step = ({**names, **options}[name] for name in names)
    tensors = {  # not by `|=`, which torch.compile rejects before torch 2.10
        **{"query": heads.query, "key": None if heads.shared else heads.key, "value": heads.value},
        **{"attn_mask": attn_mask, "tokens": tokens, "cu_seqlens": cu_seqlens, "position_ids": position_ids},
        **{f"parameters.{name}": weight for name, weight in (parameters or {}).items()},
    }
    constants: dict[str, Any] = {"kind": kind, "dropout_p": dropout_p, "is_causal": is_causal}
    constants["settings"] = settings
    if not torch.compiler.is_compiling():
        return _run({name: x for name, x in tensors.items() if x is not None}, seed, step, **constants)
    out, auxiliary = opaque.call(_run, constants, tensors, {}, heads.query.dtype, seed, step)
    return out, None if step is None else auxiliary


def _run(
    tensors: dict[str, Tensor], seed: int, step: int | None, *,
    kind: str, dropout_p: float, is_causal: bool, settings: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Compute `_attend`, for `opaque.call`."""
    settings = dict(settings)
    max_length = settings.pop("max_length", None)
    tokens = tensors.get("tokens")
    heads = _Heads(tensors["query"], tensors.get("key"), tensors["value"], None, False)
    batch, count, length, width = heads.query.shape
    if tokens is not None and tokens.shape != (batch, length):
        raise ValueError(f"tokens of shape {(*tokens.shape,)}: give ({batch}, {length})")
    if max_length is not None and length > max_length:
        raise ValueError(f"{length} tokens are more than max_length = {max_length}")
    chunk = settings.get("chunk", 64) if kind == "lsh" else 0  # sequences may be shorter than a chunk
    longest = max_length or max(length, chunk if isinstance(chunk, int) else 0)
    module = _mechanism(kind, json.dumps(settings, default=str), count, width, longest, is_causal, dropout_p)
    if module.mechanism.shared_qk != heads.shared:
        problem = f"{show(module.mechanism.shared_qk)}, but key is {'' if heads.shared else 'not '}None"
        raise ConfigError("shared_qk", problem, "Omit shared_qk, and pass key=None to use the queries as keys")
    documents = segments_of(batch, length, tensors.get("cu_seqlens"), tensors.get("position_ids"))
    padding = Padding(padding_mask(tensors.get("attn_mask"), batch, length), documents)
    training = step is not None or dropout_p > 0.0
    rng = RngContext(seed, EVALUATION_STEP if step is None else step, torch.arange(batch), training)
    arguments = heads, padding, is_causal, AttentionContext(0, rng, tokens=tokens)
    prefix = "parameters."
    parameters = {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
    expected = {name for name, _ in module.mechanism.named_parameters()}
    if different := expected ^ set(parameters):
        hint = f"Add or remove {sorted(different)[0]}"
        raise ConfigError("parameters", f"{kind} with these settings has {sorted(expected) or 'none'}", hint)
    if parameters:
        named = {f"mechanism.{name}": weight for name, weight in parameters.items()}
        module = copy.deepcopy(module)  # another thread may call it with other parameters
        output: AttentionOutput = torch.func.functional_call(module, named, arguments)
    else:
        output = module(*arguments)
    return output.out, output.auxiliary_loss
