"""Small models for tests."""

import itertools
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megasparse.attention.contract import AttentionContext, AttentionInputs, RecomputeCache, Targets
from megasparse.attention.heads import MultiHeadAttention, build_mechanism
from megasparse.config.attention import MECHANISMS, AttentionConfig
from megasparse.config.schema import ModelConfig, PositionsConfig
from megasparse.model.embedding import NgramEmbedding
from megasparse.ops.operator import autocast_off
from megasparse.ops.random import RngContext

AXIAL = PositionsConfig(kind="axial", axial_shape=[8, 16], axial_dims=[12, 20])

SMALL: dict[str, dict[str, Any]] = {
    "local": {"chunk": 8},
    "lsh": {"chunk": 8, "rounds": 2},
    "lha": {"chunk": 8},
    "yoso": {"hashes": 8, "code_bits": 4, "chunk": 16},
    "smart_bird": {"keys": 6},
    "ranked": {"keys": 6, "sketch_dim": 8, "buckets": 8, "probes": 3, "chunk": 8},
    "smyrf": {"chunk": 8},
    "routing": {"chunk": 8},
    "random": {"chunk": 8},
    "sparse_transformer": {"stride": 8},
    "longformer": {"chunk": 8, "globals": 3},
    "bigbird": {"chunk": 8, "random": 2},
    "performer": {"features": 32, "chunk": 16},
    "linformer": {"projected": 16},
    "ngram": {"lengths": [1, 3], "chunk": 8},
    "linear": {"projections": 16},
    "sinkhorn": {"chunk": 8},
    "clustered": {"clusters": 6, "keys": 5, "bits": 16},
}
"""Settings of each mechanism that make 128 tokens many windows."""

PARTS: dict[str, Any] = {
    "norm": "rms", "feed_forward": "swiglu", "feed_forward_biases": False, "key_heads": 1, "attention_biases": "qkv",
    "query_key_norm": True, "logit_scale": 0.5, "tied_embeddings": True,
    "positions": {"kind": "rotary", "base": 500.0, "scaling": {"kind": "yarn", "factor": 4.0, "original_length": 64}},
}  # fmt: skip
"""Parts of today's decoders, all at once, for 2 heads."""

BERT: dict[str, Any] = {"style": "bert", "blocks": "ordinary", "activations": "stored", "tied_embeddings": True}
"""Settings that `style` bert needs, in an encoder."""

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "full shared": ("full", {"shared_qk": True}),
    "local relative": ("local", {"relative": True}),
    "lsh 4 rounds, factorised": ("lsh", {"rounds": 4, "buckets": [4, 8]}),
    "lsh 4 rounds, few buckets": ("lsh", {"rounds": 4, "buckets": 2}),
    "lsh 3 rounds, few buckets, not counted": ("lsh", {"rounds": 3, "buckets": 4, "count_rounds": False}),
    "lsh chunk": ("lsh", {"window": "chunk", "rounds": 1}),
    "lsh separate": ("lsh", {"shared_qk": False}),
    "lsh shifted": ("lsh", {"shifted_keys": True, "local": True}),
    "lha linear, sinusoidal": ("lha", {"hash": "linear", "sinusoidal_positions": True}),
    "lha projected, normalized": ("lha", {"sinusoidal_positions": True, "project_positions": True, "normalize": True}),
    "lha shifted": ("lha", {"shifted_keys": True, "local": True}),
    "lha random": ("lha", {"hash": "random"}),
    "lha top_k": ("lha", {"window": "top_k"}),
    "yoso expectation": ("yoso", {"expectation": True}),
    "yoso gaussian, convolution": ("yoso", {"projection": "gaussian", "convolution": 5}),
    "smart_bird top_k": ("smart_bird", {"sampling": "top_k"}),
    "smart_bird random": ("smart_bird", {"sampling": "random"}),
    "smart_bird transformer": ("smart_bird", {"sketch": "transformer"}),
    "smart_bird draws": ("smart_bird", {"evaluation": "draws"}),
    "smart_bird heads": ("smart_bird", {"sketch": "heads", "objective": "attention"}),
    "smart_bird local, sinks": ("smart_bird", {"local": True, "chunk": 8, "sinks": 3}),
    "ranked members, sinks": ("ranked", {"members": 4, "sinks": 3}),
    "routing top_k": ("routing", {"window": "top_k"}),
    "local sinks": ("local", {"sinks": 3}),
    "lsh local, sinks": ("lsh", {"local": True, "sinks": 3}),
    "lsh separate, local": ("lsh", {"local": True, "shared_qk": False}),
    "lha local, sinks": ("lha", {"local": True, "sinks": 10}),
    "lha separate": ("lha", {"local": True, "joint": False, "utility": "collisions"}),
    "routing local": ("routing", {"local": True}),
    "routing sinks": ("routing", {"sinks": 1}),
    "ngram one round, sinks": ("ngram", {"lengths": [2], "sinks": 3}),
}
"""Settings of a mechanism that take another path than its defaults."""


def attention(*pattern: Any, **sections: dict[str, Any]) -> AttentionConfig:
    """Small settings of every mechanism; sections: changes by kind, such as lsh={"rounds": 4}."""
    merged = {kind: {**SMALL.get(kind, {}), **sections.get(kind, {})} for kind in {*SMALL, *sections}}
    return AttentionConfig.model_validate({"pattern": list(pattern), **merged})


def named(name: str, dropout: float = 0.0, **changes: Any) -> AttentionConfig:
    """The configuration of a mechanism, or of a variant, that every layer has. dropout: of attention probabilities,
    where it has any. changes: of its section."""
    kind, settings = VARIANTS.get(name, (name, {}))
    found = attention(kind, **{kind: {**settings, **changes}})
    return found if getattr(found, kind).no_probabilities else found.model_copy(update={"dropout": dropout})


def kind_of(name: str) -> str:
    return VARIANTS.get(name, (name, {}))[0]


def all_names() -> list[str]:
    return [*MECHANISMS, *(name for name, (kind, _) in VARIANTS.items() if kind in MECHANISMS)]


def can_be_causal(kind: str) -> bool:
    return getattr(AttentionConfig(), kind).bidirectional_only is None


def causal_names() -> list[str]:
    return [name for name in all_names() if can_be_causal(kind_of(name))]


def encoder_names() -> list[str]:
    return [name for name in all_names() if getattr(named(name), kind_of(name)).causal_only is None]


NGRAMS: dict[str, Any] = {"lengths": [1, 2, 4], "rows": 50, "width": 7}
"""Tables of `model.ngrams`, with a projection."""

PATHS = {
    "full": "torch's scaled_dot_product_attention, and its masks by blocks",
    "local": "chunks of positions",
    "local relative": "the operator with distances",
    "lsh": "bucketed attention of shared codes, a token itself as last resort, rounds counted",
    "lsh local, sinks": "a window as a round, and sinks, merged by log-sum-exp",
    "lsh shifted": "keys and buckets of the token before",
    "lha": "bucketed attention of codes of queries and of keys, and hashes that learn",
    "yoso": "hash tables",
    "smart_bird": "a sketch that chooses keys, and gathered attention",
    "ranked": "buckets that propose keys, and a sketch that ranks them",
    "smyrf": "clusters of a document",
    "longformer": "blocks and global tokens",
    "performer": "linear attention",
    "linformer": "a projected sequence",
    "ngram": "codes that all heads share, from tokens",
}
"""The mechanisms and variants that `make test` runs, each with the code path that it adds; the others are slow."""

BOTH_WAYS = {
    "full": "masks without the causal one",
    "lsh": "buckets and windows that look ahead",
    "yoso": "tables of whole sequences",
}
"""Names of PATHS that run in an encoder too, with the code path that it adds."""


def by_path(arguments: str, values: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrise a test by names, or by tuples that start with one, as (name, causal) does; those not in PATHS are
    marked slow, and so are encoders of names that can be in a decoder and are not in BOTH_WAYS."""
    cases = [value if isinstance(value, tuple) else (value,) for value in values]
    stacks = {"True": "causal", "False": "both"}
    ids = [", ".join(stacks.get(str(part), str(part)) for part in case) for case in cases]
    quick = [
        case[0] in PATHS and (False not in case[1:2] or case[0] in BOTH_WAYS or not can_be_causal(kind_of(case[0])))
        for case in cases
    ]
    marks = [() if each else pytest.mark.slow for each in quick]
    parameters = [pytest.param(*case, marks=mark, id=name) for case, mark, name in zip(cases, marks, ids, strict=True)]
    return pytest.mark.parametrize(arguments, parameters)


CASES = [(name, True) for name in causal_names()] + [(name, False) for name in encoder_names()]
EVERY = by_path("name,causal", CASES)
"""Every mechanism and variant, in a decoder where it can be in one, and in an encoder."""


NUMBERS = {"fp32": (torch.float32, 1), "bf16": (torch.bfloat16, 1), "fp16, two threads": (torch.float16, 2)}
"""Numbers that libraries multiply by other code, and threads by which they sum in another order."""


def by_path_and_numbers(names: Iterable[str]) -> pytest.MarkDecorator:
    """Parametrise a test by name, dtype and threads. The names of `by_path` run in bf16, every third also in fp32; the
    other pairs are marked slow."""
    parameters, count = [], itertools.count()
    for case in by_path("name", names).args[1]:
        quick = () if case.marks else ("bf16", "fp32") if next(count) % 3 == 0 else ("bf16",)
        for number, values in NUMBERS.items():
            marks = () if number in quick else pytest.mark.slow
            parameters.append(pytest.param(*case.values, *values, marks=marks, id=f"{case.id}-{number}"))
    return pytest.mark.parametrize("name,dtype,threads", parameters, indirect=["threads"])


def in_stack(causal: bool) -> dict[str, Any]:
    return {"kind": "decoder" if causal else "encoder"}


@cache
def strict_names() -> list[str]:
    return [n for n in causal_names() if build_mechanism(kind_of(n), small(attention=named(n)), 2).leak is None]


def small(pattern: tuple[Any, ...] = ("local", "lsh", "full"), **changes: Any) -> ModelConfig:
    """128 positions, 32 wide, 2 heads, 3 layers; any field can be changed."""
    settings: dict[str, Any] = dict(max_length=128, layers=3, d_model=32, d_ff=64, heads=2, positions=AXIAL)
    return ModelConfig(**{**settings, "attention": attention(*pattern), **changes})


def small_pair(pattern: tuple[Any, ...] = ("local", "lsh", "full"), **changes: Any) -> ModelConfig:
    """An encoder–decoder of `small` stacks of 3 and 2 layers: 40 tokens of source, id 258 is padding.

    changes: any field; source: any of its own."""
    source = {"length": 40, "layers": 2, "attention": attention("full", "lsh"), **changes.pop("source", {})}
    settings = {"kind": "encoder_decoder", "vocabulary": 260, "padding_token": 258, **changes, "source": source}
    return small(pattern, **settings)


def padded_pairs(batch: int, target: int, source: int = 40, padding: int = 258, seed: int = 0) -> Tensor:
    """Records (batch, source + target) of random tokens, the later sequences with more and more padding at the ends."""
    tokens = random_tokens(batch, source + target, seed=seed)
    for row in range(batch):
        tokens[row, source - 3 * row : source] = padding
        tokens[row, source + target - 5 * row :] = padding
    return tokens


def randomise(module: nn.Module, scale: float = 1.0, seed: int = 0) -> torch.Generator:
    """Give all parameters normal numbers of this deviation. Returns their generator, for more of them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(scale * torch.randn(weight.shape, generator=generator))
    return generator


def with_tables(model: Any) -> Any:
    """Give the n-gram tables of all stacks, initially 0, random rows. Returns the model."""
    for module in model.modules():
        if isinstance(module, NgramEmbedding):
            randomise(module)
    return model


def layer_of(name: str, dropout: float = 0.0, **changes: Any) -> MultiHeadAttention:
    """An attention layer of random weights, in a decoder where the mechanism can be in one."""
    kind = {} if can_be_causal(kind_of(name)) else {"kind": "encoder", "vocabulary": 260}
    layer = MultiHeadAttention(small(attention=named(name, dropout), **kind, **changes), layer=0)
    randomise(layer, 1 / 6)
    return layer


class Single:
    """One mechanism by itself on random inputs: 2 sequences, 2 heads, 16 wide, as in `small`."""

    def __init__(
        self, name: str, causal: bool, dropout: float = 0.0, settings: Mapping[str, Any] | None = None, **changes: Any
    ):
        """Build it. settings: more of its section. changes: of the model."""
        self.kind, self.causal = kind_of(name), causal
        config = small(attention=named(name, dropout, **settings or {}), **in_stack(causal), **changes)
        self.mechanism: Any = build_mechanism(self.kind, config, config.heads)
        if hasattr(self.mechanism, "initialise"):
            self.mechanism.initialise(0, "")
        generator = torch.Generator().manual_seed(11)
        with torch.no_grad():
            for parameter in self.mechanism.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * max(parameter.shape[-1], 4) ** -0.5)

    def inputs(self, length: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """Return x (2, L, 32), and q, k, v (2, 2, L, 16)."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(2, length, 32, generator=generator)
        q, k, v = (torch.randn(2, 2, length, 16, generator=generator) for _ in range(3))
        return [t.to(dtype) for t in (x, q, k, v)]

    def __call__(
        self,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        training: bool = False,
        step: int = 0,
        samples: Tensor | None = None,
        recompute: RecomputeCache | None = None,
        head_offset: int = 0,
        targets: Targets | None = None,
        tokens: Tensor | None = None,
        **masks: Tensor,
    ) -> Any:
        if self.mechanism.shared_qk:
            k = torch.nn.functional.normalize(q, dim=-1)
        samples = torch.arange(len(q)) if samples is None else samples
        rng = RngContext(0, step, samples, training) if training else RngContext.evaluation(0, len(q))
        tokens = known_tokens(len(q), q.shape[2]) if tokens is None else tokens
        context = AttentionContext(0, rng, head_offset, recompute or RecomputeCache(), targets, tokens=tokens)
        dropped = self.mechanism.pair_dropout(q, context)
        inputs = AttentionInputs(q, k, v, masks.get("key_mask"), masks.get("segments"), self.causal, dropped)
        with autocast_off(q):  # as attention layers do
            return self.mechanism(x, inputs, context)


def known_tokens(batch: int, length: int) -> Tensor:
    """Tokens of a decoder, the same in each sequence; few symbols, so many n-grams are equal."""
    row = torch.cat([torch.full((1, 1), -1), random_tokens(1, length - 1, 3)], dim=1)
    return row.expand(batch, -1).clone()


def random_tokens(batch: int, length: int, vocabulary: int = 256, seed: int = 0) -> Tensor:
    return torch.randint(0, vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


def training_draws(batch: int, step: int = 0) -> RngContext:
    return RngContext(0, step, torch.arange(batch), training=True)


def padded_and_packed(length: int) -> dict[str, Tensor]:
    """Masks of 2 sequences of two documents each, the second one with padding behind."""
    mask = torch.ones(2, length, dtype=torch.bool)
    mask[1, length // 2 + 1 :] = False
    return {"key_mask": mask, "segments": (torch.arange(length) >= length // 3).long().expand(2, -1)}
