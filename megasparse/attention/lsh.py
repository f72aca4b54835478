"""LSH attention (Reformer, section 2): a token attends to the tokens in its buckets, assigned by random rotations."""

import math
from typing import Any, Literal

import torch
from torch import Tensor

from megasparse.attention.band import SHIFTED, BandAttention, BandSection, check_band, check_shifted_keys
from megasparse.attention.contract import AttentionContext, AttentionInputs, AttentionOutput, Buckets, MechanismSpec
from megasparse.attention.flops import Flops
from megasparse.config.attention import mechanism
from megasparse.config.schema import ModelConfig
from megasparse.config.section import Positive
from megasparse.errors import ConfigError
from megasparse.ops.bucketed_attention import Codes, Window
from megasparse.ops.hashing import angular_hash, code_gap
from megasparse.ops.random import rotations


class LSHAttentionConfig(BandSection):
    shared_qk: bool = True
    """Keys are q/|q|, as in the paper. false: separate queries and keys, hashed alike (the LSH baseline of LHA)."""
    rounds: Positive = 2
    """Hash rounds while training."""
    evaluation_rounds: Positive | None = None
    """Hash rounds in evaluation and generation; null means `rounds`."""
    chunk: Positive = 64
    """M: the window, in tokens of the sorted order."""
    buckets: Positive | list[Positive] | None = None
    """Buckets per round: an even number, or two even factors whose product it is (each hashed by its own rotation).
    null means the paper's 2·max_length/chunk, in two factors above 128."""
    evaluation_buckets: Positive | list[Positive] | None = None
    """Buckets in evaluation and generation, more if windows are longer than in training; null means `buckets`."""
    window: Literal["band", "chunk"] = "band"
    """`band`: the last M tokens of the token's bucket, strictly causal; in an encoder M on either side. `chunk`: the
    paper's window, a token's chunk and the previous one. Later tokens move chunk borders: not strictly causal."""
    same_bucket: bool = True
    """Restrict attention to tokens of the same bucket (the paper). false: the whole window, as in Hugging Face."""
    count_rounds: bool = True
    """Include a pair that N rounds select once (log N of appendix A). false: N times, as in Hugging Face."""
    shifted_keys: bool = False
    """Decoders with shared_qk and a band only: each token gets the key and the buckets of the previous token and so
    attends to the tokens that followed equal ones, at any distance. The first key of a document is 0, in bucket 0. Such
    layers do not use rotary positions."""

    def hash_rounds(self, training: bool) -> int:
        return self.rounds if training else self.evaluation_rounds or self.rounds

    @property
    def causal_only(self) -> str | None:  # type: ignore[override]
        return SHIFTED if self.shifted_keys else None

    def check(self, key: str, model: ModelConfig) -> None:
        if self.chunk > model.max_length:
            problem = f"{self.chunk} is longer than model.max_length = {model.max_length}"
            raise ConfigError(f"{key}.chunk", problem, f"Set it to {model.max_length} or less")
        if self.window == "band" and not self.same_bucket:
            problem = 'false with window = "band" is not causal: later tokens move the borders of the window'
            raise ConfigError(f"{key}.same_bucket", problem, 'Set same_bucket to true, or window to "chunk"')
        if self.window == "chunk" and not self.shared_qk:
            problem = '"chunk" needs one order, but with shared_qk = false queries and keys have different buckets'
            raise ConfigError(f"{key}.window", problem, 'Set window to "band", or shared_qk to true')
        check_band(key, self.window, False, self.sinks)  # local = true is allowed with chunks too
        check_shifted_keys(key, self, model, shared_qk=True)
        _check_buckets(f"{key}.buckets", self.buckets)
        _check_buckets(f"{key}.evaluation_buckets", self.evaluation_buckets)


LARGEST_SINGLE = 128
"""Hashing into n buckets costs n/2 products per token: above this size, two rotations with n1·n2 = n cost far less."""


def _check_buckets(key: str, buckets: int | list[int] | None) -> None:
    factors = buckets if isinstance(buckets, list) else [buckets] if buckets else []
    if isinstance(buckets, list) and len(factors) not in (1, 2):
        raise ConfigError(key, f"{factors} has {len(factors)} factors", "Give a number, or two factors")
    odd = [factor for factor in factors if factor % 2]
    if odd:
        problem = f"{odd[0]} is odd, but a rotation R gives the buckets [xR; -xR], an even number"
        raise ConfigError(key, problem, f"Write {odd[0] + 1} instead")
    if isinstance(buckets, int) and _factors(buckets) is None:
        problem = f"{buckets} is not a product of two even numbers, and one rotation of that size would cost too much"
        raise ConfigError(key, problem, "Use a multiple of 4")


def lsh_buckets(lsh: LSHAttentionConfig, max_length: int, training: bool) -> list[int]:
    """Return the buckets per round as one or two even factors, each hashed by a separate rotation; null gives the
    paper's 2·max_length/chunk, rounded up to a number with such factors.
    """
    buckets = lsh.buckets if training else lsh.evaluation_buckets or lsh.buckets
    if isinstance(buckets, list):
        return list(buckets)
    if buckets is not None:
        factors = _factors(buckets)
        assert factors is not None, "rejected by _check_buckets"
        return factors
    count = 2 * math.ceil(max_length / lsh.chunk)
    while (factors := _factors(count)) is None or factors[-1] > 2 * factors[0]:
        count += 2
    return factors


def _factors(count: int) -> list[int] | None:
    """Return [count], or above LARGEST_SINGLE its two closest even factors; None if there are none."""
    if count <= LARGEST_SINGLE:
        return [count]
    if count % 4:
        return None
    smaller = next(f for f in range(math.isqrt(count), 1, -1) if f % 2 == 0 and count % f == 0 and count // f % 2 == 0)
    return [smaller, count // smaller]


@mechanism("lsh", LSHAttentionConfig)
class LSHAttention(BandAttention):
    """Softmax attention inside the buckets of random rotations (Reformer).

    Rounds are merged by log-sum-exp. With shared QK, as in the paper, k = q/|q|, the logits are q·k, and a token
    attends to itself only if no other key is visible. With separate QK, as in the LHA paper's LSH, the logits are
    q·k/√D, the same rotations hash queries and keys, and a token may attend to itself.

    With shifted keys, k_j = q_{j−1}/|q_{j−1}|, in the buckets of q_{j−1}, and a token may attend to itself. Equal
    queries select the tokens that followed them, as induction heads do (Olsson et al. 2022), before any training.
    """

    def __init__(self, config: LSHAttentionConfig, spec: MechanismSpec):
        super().__init__(config, spec)
        self.shared_qk = config.shared_qk
        self.factors = lsh_buckets(config, spec.max_length, training=True)
        self.evaluation_factors = lsh_buckets(config, spec.max_length, training=False)
        self.buckets = max(math.prod(self.factors), math.prod(self.evaluation_factors))
        scale = 1.0 if self.shared_qk else spec.head_dim**-0.5
        excludes_self = self.shared_qk and not self.shifted_keys
        self.rule = {"scale": scale, "exclude_self": excludes_self, "count_rounds": config.count_rounds}
        self.window = Window(config.window, min(config.chunk, spec.max_length), config.same_bucket)
        self._rotations: tuple[Any, Tensor] | None = None  # cached: evaluation never redraws them
        if config.window == "chunk":
            self.leak = "later tokens move the borders of chunks; attention.lsh.window = band is strictly causal"

    def assign(self, inputs: AttentionInputs, context: AttentionContext) -> Codes:
        codes = angular_hash(*self._hashed(inputs, context))
        if not self.shared_qk:
            queries, keys = codes.chunk(2)
            return queries, keys
        return codes, None

    def _hashed(self, inputs: AttentionInputs, context: AttentionContext) -> tuple[Tensor, Tensor, list[int]]:
        """Return the vectors to hash, with separate QK queries and keys, the rotations and factors."""
        factors = self.factors if context.rng.training else self.evaluation_factors
        heads = context.heads(inputs.q.shape[1])
        width = inputs.q.shape[3]
        draws = context.key("lsh rotation"), heads, self.rounds(context.rng), width, factors, inputs.q.device
        drawn = self._rotations  # read once: threads may share a mechanism
        if drawn is None or drawn[0] != draws:
            drawn = draws, rotations(*draws)
            self._rotations = drawn
        vectors = inputs.q if self.shared_qk else torch.cat([inputs.q, inputs.k])  # (B or 2·B, H, L, D)
        return vectors.detach(), drawn[1], factors

    def selection_gap(self, inputs: AttentionInputs, context: AttentionContext) -> float:
        return code_gap(*self._hashed(inputs, context))

    def band_codes(self, inputs: AttentionInputs, position: int, context: AttentionContext) -> Codes:
        return self.assign(inputs, context)

    def buckets_of(self, inputs: AttentionInputs, context: AttentionContext) -> Buckets:
        _, queries, keys = self.shift(inputs, *self.assign(inputs, context))
        keys = queries if keys is None else keys
        return Buckets(queries.flatten(1, 2), keys.flatten(1, 2), self.buckets)

    def forward(self, x: Tensor, inputs: AttentionInputs, context: AttentionContext) -> AttentionOutput:
        codes = context.recompute.keep(lambda: self.assign(inputs, context))
        return self.attend(*self.shift(inputs, *codes), context.part)

    def exact(self) -> "LSHAttention | None":
        if not self.shifted_keys:
            return None
        window = {"local": True, "chunk": self.spec.max_length}
        hashes = {"rounds": 1, "evaluation_rounds": None, "buckets": 2, "evaluation_buckets": None}
        return LSHAttention(self.config.changed(**window, **hashes), self.spec)

    def flops(self, length: int) -> Flops:
        """Pairs in windows. Codes, forward only: in each round 2·D for each of half as many rotation vectors as the sum
        of the bucket factors, for queries and, with separate QK, for keys.
        """
        hashed = 1 if self.shared_qk else 2
        width = self.spec.heads * self.spec.head_dim
        codes = float(self.config.rounds * hashed * width * sum(self.factors))
        work = self.spec.workload(length)
        chunk = self.config.chunk
        keys = work.band(chunk, self.shared_qk) if self.config.window == "band" else work.chunks(chunk)
        return self.band_flops(keys, length, self.config.rounds) + Flops(codes)

    def cached_rounds(self, rounds: int | None) -> int:
        return rounds or self.config.hash_rounds(training=False)
