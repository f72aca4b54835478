"""YOSO attention: a sum of values, weighted by sampled hash collisions (You Only Sample (Almost) Once).

m hashes, τ code bits, S kernel size.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from megasparse.attention.cache import Cache, KeyValueCache
from megasparse.attention.contract import Attention, AttentionContext, AttentionInputs, AttentionOutput, MechanismSpec
from megasparse.attention.flops import Flops, product
from megasparse.attention.sequence_part import WHOLE, SequencePart
from megasparse.config.attention import MechanismSection, mechanism
from megasparse.config.schema import ModelConfig
from megasparse.config.section import Positive
from megasparse.errors import ConfigError
from megasparse.ops.hash_table_attention import HashTableAttentionSpec, expected_attention, hash_table_attention
from megasparse.ops.hashing import sign_codes
from megasparse.ops.normalize import unit_vectors
from megasparse.ops.operator import at_least_fp32, wide_dtype


@dataclass
class YOSOCache(Cache):
    """Decoding cache. tables: (B, H, m, 2^τ, D), sums of values by key code, fp32 or wider; with the expectation
    instead tokens: unit keys and values. recent: (B, H, S − 1, D), the last values.
    """

    tables: Tensor | None
    tokens: KeyValueCache | None
    recent: Tensor


class YOSOAttentionConfig(MechanismSection):
    hashes: Positive = 32
    """Number m of hashes in training."""
    evaluation_hashes: Positive | None = None
    """Hashes in evaluation and generation; null means `hashes`."""
    expectation: bool = False
    """Use the exact weight (1 − acos(q·k)/π)^τ, in O(L²) time, instead of m samples of it (YOSO-E)."""
    code_bits: Positive | None = None
    """Number τ of sign bits per code. null means log2(max_length), in a decoder reduced (to 1 at least) until
    the hash tables are smaller than a key-value cache of max_length tokens."""
    norm_bound: Annotated[float, Field(gt=0)] | None = None
    """Bound T of squared lengths (Remark 2): queries become (q/√T, √(1 − |q|²/T), 0) and keys (k/√T, 0, √(1 − |k|²/T)),
    of length 1 with products q·k/T; longer ones are shortened to √T first. null divides each by its length."""
    projection: Literal["hadamard", "gaussian"] = "hadamard"
    """`hadamard`: fast, slightly biased. `gaussian`: dense projections, unbiased."""
    convolution: Positive | None = None
    """Kernel size (odd) of a depth-wise convolution of the values that is added to the output; null disables it."""
    chunk: Positive = 128
    """Decoders on a CPU only: tokens per chunk. Tables are updated per chunk; inside a chunk, pairs are compared."""

    no_probabilities = True

    def hash_rounds(self, training: bool) -> int:
        return self.hashes if training else self.evaluation_hashes or self.hashes

    @model_validator(mode="before")
    @classmethod
    def _no_softmax(cls, values: object) -> object:
        extra = [key for key in ("local", "sinks") if isinstance(values, dict) and key in values]
        if extra:
            hint = 'For a local window use convolution, or split the heads, {"local": 2, "yoso": 2}'
            raise ValueError(f"{extra[0]} needs a softmax, but YOSO has none and weights every token already. {hint}")
        return values

    def check(self, key: str, model: ModelConfig) -> None:
        if self.code_bits is not None and self.code_bits > 30:
            problem = f"{self.code_bits} bits do not fit a 32-bit code"
            raise ConfigError(f"{key}.code_bits", problem, "Set it to 30 or less, or to null")
        if self.convolution is not None and self.convolution % 2 == 0:
            problem = f"{self.convolution} is even, so the kernel is not centred"
            raise ConfigError(f"{key}.convolution", problem, f"Write {self.convolution + 1} instead")


@mechanism("yoso", YOSOAttentionConfig)
class YOSOAttention(Attention):
    """YOSO attention with normalised output (N-YOSO, Eq. 5 and 6): out_i = y_i/|y_i|, y_i = Σ_j B_ij v_j.

    B_ij is the share of m hashes in which q_i and k_j have equal τ sign bits. For q and k of length 1 its expectation
    is E[B_ij] = (1 − acos(q_i·k_j)/π)^τ. A query without a colliding key gets 0. With `expectation` the weight is
    E[B_ij] (YOSO-m-E). Parameters and τ are the same, so a trained model can switch to it or to more hashes.

    A decoder stores each hash's table of 2^τ buckets, m·2^τ·D numbers per head at any length; with `expectation` keys
    and values.

    Recomputing a layer recomputes its codes, whose storage would take 4·m bytes per token and head. A reversible
    recomputation restores q and k only up to rounding, which can flip a sign bit: at a relative error of 1e-7 in 3e-7
    of 9-bit codes, at 1e-6 in 2e-6.
    """

    normalises = True

    def __init__(self, config: YOSOAttentionConfig, spec: MechanismSpec):
        super().__init__(config, spec)
        bits = round(math.log2(spec.max_length))
        if spec.causal:  # largest τ with m·2^τ < 2·max_length
            bits = min(bits, ((2 * spec.max_length - 1) // config.hashes).bit_length() - 1)
        self.code_bits = config.code_bits or max(1, bits)
        self.convolution = None if config.convolution is None else _Convolution(spec.heads, config.convolution)

    def without_additions(self) -> "YOSOAttention":
        return self._changed(self.config.expectation)

    def exact(self) -> "YOSOAttention":
        return self._changed(expectation=True)

    def _changed(self, expectation: bool) -> "YOSOAttention":
        config = self.config.changed(expectation=expectation, convolution=None, code_bits=self.code_bits)
        return YOSOAttention(config, self.spec)

    def start_from_pretrained(self) -> None:
        if self.convolution is not None:
            nn.init.zeros_(self.convolution.weight)

    def codes(self, x: Tensor, hashes: int, context: AttentionContext) -> Tensor:
        """Return the codes (B, H, m, L) of queries or keys, which use the same hashes."""
        heads = context.heads(x.shape[1])
        key = context.key("yoso hash")
        return sign_codes(x.detach(), key, heads, hashes, self.code_bits, self.config.projection)

    def forward(self, x: Tensor, inputs: AttentionInputs, context: AttentionContext) -> AttentionOutput:
        q, k = self._unit(inputs)
        v = inputs.v
        mask = inputs.key_mask
        spec = HashTableAttentionSpec(self.code_bits, inputs.causal, self.config.chunk)
        if self.config.expectation:
            out, matches = expected_attention(q, k, v, spec, mask, inputs.segments)
        else:
            hashes = self.rounds(context.rng)
            codes = self.codes(q, hashes, context), self.codes(k, hashes, context)
            out, matches = hash_table_attention(q, k, v, *codes, spec, mask, inputs.segments)
        out = unit_vectors(out, inputs.q.dtype if self.convolution is None else None)
        if self.convolution is not None:
            out = out + self.convolution(inputs.v, mask, inputs.segments, inputs.causal, context.part)
        real = mask.sum() if mask is not None else matches[:, 0].numel()
        collisions = matches.sum() / (real * matches.shape[1])
        return AttentionOutput(out.to(inputs.q.dtype), statistics={"collisions": collisions})

    def _unit(self, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
        """Return queries and keys of length 1, (B, H, L, D), with `norm_bound` (B, H, L, D + 2)."""
        if self.config.norm_bound is None:
            return unit_vectors(inputs.q), unit_vectors(inputs.k)
        scaled = [at_least_fp32(x) / self.config.norm_bound**0.5 for x in (inputs.q, inputs.k)]
        short = [x / x.norm(dim=-1, keepdim=True).clamp_min(1.0) for x in scaled]
        of_q, of_k = ((1 - x.square().sum(-1, keepdim=True)).clamp_min(1e-12).sqrt() for x in short)
        zero = torch.zeros_like(of_q)
        return torch.cat([short[0], of_q, zero], dim=-1), torch.cat([short[1], zero, of_k], dim=-1)

    def flops(self, length: int) -> Flops:
        """Codes of q and k; 2·D to add a value to a table and to read it, and again for the gradient of v. Gradients of
        q and k: the cheaper of tables, 4·D² each, and the 1/2^τ of pairs that collide, 6·D each.
        """
        yoso = self.config
        work = self.spec.workload(length)
        dim = self.spec.head_dim
        if yoso.expectation:
            return work.pairs(work.visible)
        bit = 3.0 * math.log2(max(2, dim)) if yoso.projection == "hadamard" else 2.0 * dim
        gradient = min(8.0 * dim * dim, 6.0 * dim * work.visible / 2**self.code_bits)
        hashing = Flops(2 * self.code_bits * bit + 2.0 * dim, 2.0 * dim + gradient)
        return (hashing * yoso.hashes + product(2.0 * dim * (yoso.convolution or 0))) * work.heads

    def new_cache(self, batch: int, like: Tensor, rounds: int | None, part: SequencePart = WHOLE) -> YOSOCache:
        spec = self.spec.on_rank(part)
        width = self.spec.head_dim
        recent = like.new_zeros(batch, spec.heads, (self.config.convolution or 1) - 1, width)
        if self.config.expectation:
            tokens = KeyValueCache.empty(batch, spec, spec.max_length, like)
            if self.config.norm_bound is not None:
                tokens.k = F.pad(tokens.k, (0, 2))
            return YOSOCache(None, tokens, recent)
        hashes = rounds or self.config.hash_rounds(training=False)
        shape = batch, spec.heads, hashes, 1 << self.code_bits, width
        tables = torch.zeros(shape, dtype=wide_dtype(like), device=like.device)
        return YOSOCache(tables, None, recent)

    def fill_cache(self, x: Tensor, inputs: AttentionInputs, cache: YOSOCache, context: AttentionContext) -> None:
        self._take_in(self._unit(inputs)[1], inputs.v, cache, 0, context)

    def decode(
        self, x: Tensor, inputs: AttentionInputs, cache: YOSOCache, position: int, context: AttentionContext
    ) -> Tensor:
        q, k = self._unit(inputs)
        recent = cache.recent
        self._take_in(k, inputs.v, cache, position, context)
        if cache.tokens is not None:
            keys, values = (t[:, :, : position + 1].to(q.dtype) for t in (cache.tokens.k, cache.tokens.v))
            out, _ = expected_attention(q, keys, values, HashTableAttentionSpec(self.code_bits, causal=False))
        else:
            assert cache.tables is not None
            code = self.codes(q, cache.tables.shape[2], context).to(torch.int64)  # (B, H, m, 1)
            row = code[..., None].expand(*code.shape, cache.tables.shape[-1])
            out = cache.tables.gather(3, row).mean(2)
        out = unit_vectors(out)
        if self.convolution is not None:
            window = torch.cat([recent, inputs.v.to(recent.dtype)], dim=2)
            out = out + self.convolution(window, None, None, True, context.part)[:, :, -1:]
        return out.to(inputs.q.dtype)

    def _take_in(self, k: Tensor, v: Tensor, cache: YOSOCache, position: int, context: AttentionContext) -> None:
        """Add tokens from `position` on to the cache. k (of length 1) and v: (B, H, L, D)."""
        if cache.tokens is not None:
            cache.tokens.put(k, v, position)
        else:
            assert cache.tables is not None
            code = self.codes(k, cache.tables.shape[2], context).to(torch.int64)
            for table, number in zip(cache.tables.unbind(2), code.unbind(2), strict=True):  # per hash
                table.scatter_add_(2, number[..., None].expand(v.shape), v.to(table.dtype))
        cache.recent = torch.cat([cache.recent, v.to(cache.recent.dtype)], dim=2)[:, :, v.shape[2] :]


class _Convolution(nn.Module):
    """Depth-wise convolution over the sequence, one filter per head: out_i = Σ_s w_s v_(i + s − offset), over real
    tokens of the same document; offset S − 1 if causal (no later token), else S/2.
    """

    def __init__(self, heads: int, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, size))

    def forward(
        self, v: Tensor, mask: Tensor | None, segments: Tensor | None, causal: bool, part: SequencePart = WHOLE
    ) -> Tensor:
        """Convolve v (B, H, L, D), this rank's heads. Returns (B, H, L, D) in fp32 or wider; padding gets 0."""
        length = v.shape[2]
        size = self.weight.shape[1]
        before = size - 1 if causal else size // 2
        if mask is not None:
            v = v.masked_fill(~mask[:, None, :, None], 0.0)
        around = (before, size - 1 - before)
        padded = F.pad(v, (0, 0, *around))
        documents = None if segments is None else F.pad(segments, around, value=-1)
        weight = at_least_fp32(part.local_part(self.weight, 0))
        out = torch.zeros((), dtype=weight.dtype, device=v.device)
        for s in range(size):
            factor = weight[:, s, None, None]  # (H, 1, 1)
            if documents is not None and segments is not None:
                factor = factor * (documents[:, s : s + length] == segments)[:, None, :, None]  # (B, H, L, 1)
            out = out + factor * padded[:, :, s : s + length]
        return out if mask is None else out * mask[:, None, :, None]
