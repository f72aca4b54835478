"""LSH attention (Reformer section 2): a token sees the tokens that random rotations put into its buckets.

B batch, H heads, R rounds, L length, D head dim, N buckets, M chunk.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megasparse.attention.contract import Attention, AttentionContext, AttentionOutput, Heads
from megasparse.attention.full import KeyValueCache
from megasparse.config.buckets import lsh_buckets
from megasparse.config.schema import LSHAttentionConfig
from megasparse.ops.bucketed_attention import Window, bucketed_attention
from megasparse.ops.hashing import angular_hash
from megasparse.ops.random import rotations


@dataclass
class LSHCache:
    """Keys, values and buckets of all tokens so far, and each bucket's last M tokens, oldest overwritten first.

    codes: (B, H, R, capacity). rank: (B, H, R, capacity), a token's number inside its bucket. last: (B, H, R, N, M)
    tokens; the token of rank k stands at k mod M. size: (B, H, R, N).
    """

    tokens: KeyValueCache
    codes: Tensor
    rank: Tensor
    last: Tensor
    size: Tensor


class LSHAttention(Attention):
    """Shared-QK attention inside hash buckets, rounds merged by log-sum-exp, a pair seen in N rounds counted once.

    The band window is strictly causal and decodes exactly from each bucket's last M tokens. The chunk window is the
    paper's.
    """

    shared_qk = True

    def __init__(self, config: LSHAttentionConfig, max_length: int):
        super().__init__()
        self.config = config
        self.factors = lsh_buckets(config, max_length)
        self.window = Window(config.window, min(config.chunk, max_length), config.same_bucket)
        self.max_length = max_length
        if config.window == "chunk":
            self.leak = (
                "the chunk window's borders depend on later tokens; attention.lsh.window = band is strictly causal"
            )

    def assign(self, q: Tensor, context: AttentionContext) -> Tensor:
        """The bucket of every token in every round: (B, H, R, L)."""
        draws = context.draws
        rounds = self.config.rounds if draws.training else self.config.evaluation_rounds or self.config.rounds
        heads = range(context.head_offset, context.head_offset + q.shape[1])
        key = draws.key(context.layer, "lsh rotation")
        matrices = rotations(key, heads, draws.rounds or rounds, q.shape[3], self.factors, q.device)
        return angular_hash(q, matrices, self.factors)

    def forward(self, x: Tensor, heads: Heads, context: AttentionContext) -> AttentionOutput:
        codes = context.memory.keep(lambda: self.assign(heads.q.detach(), context))
        out, _ = bucketed_attention(
            heads.q,
            heads.k,
            heads.v,
            codes,
            self.window,
            causal=heads.causal,
            count_rounds=self.config.count_rounds,
            key_mask=heads.key_mask,
            segments=heads.segments,
        )
        return AttentionOutput(out, None, {})

    def new_cache(self, batch: int, heads: int, head_dim: int, like: Tensor, rounds: int | None) -> LSHCache:
        rounds = rounds or self.config.evaluation_rounds or self.config.rounds
        shape, buckets = (batch, heads, rounds), math.prod(self.factors)
        tokens = KeyValueCache.empty(batch, heads, self.max_length, head_dim, like)
        codes, rank = (torch.zeros(*shape, self.max_length, dtype=torch.int64, device=like.device) for _ in range(2))
        last = torch.zeros(*shape, buckets, self.window.chunk, dtype=torch.int64, device=like.device)
        return LSHCache(tokens, codes, rank, last, torch.zeros(*shape, buckets, dtype=torch.int64, device=like.device))

    def fill_cache(self, heads: Heads, cache: LSHCache, context: AttentionContext) -> None:
        length = heads.k.shape[2]
        cache.tokens.k[:, :, :length], cache.tokens.v[:, :, :length] = heads.k, heads.v
        codes = self.assign(heads.q, context).to(torch.int64)
        cache.size.scatter_add_(-1, codes, torch.ones_like(codes))
        order = codes.argsort(dim=-1, stable=True)
        first = cache.size.cumsum(-1) - cache.size  # sorted index of each bucket's first token
        rank = torch.arange(length, device=codes.device) - first.gather(-1, codes.gather(-1, order))
        cache.codes[..., :length] = codes
        cache.rank[..., :length].scatter_(-1, order, rank)
        place = codes * self.window.chunk + cache.rank[..., :length] % self.window.chunk
        recent = cache.size.gather(-1, codes) - cache.rank[..., :length] <= self.window.chunk
        # Tokens that a later one of the bucket pushed out are sent where the newest token of the row goes, before it
        # does.
        table, token = cache.last.flatten(-2), torch.arange(length, device=codes.device).expand_as(codes)
        newest_place, newest = place[..., -1:], token[..., -1:]
        table.scatter_(-1, torch.where(recent, place, newest_place), torch.where(recent, token, newest))

    def decode(self, heads: Heads, cache: LSHCache, position: int, context: AttentionContext) -> Tensor:
        cache.tokens.k[:, :, position], cache.tokens.v[:, :, position] = heads.k[:, :, 0], heads.v[:, :, 0]
        if self.window.kind == "chunk":
            raise ValueError(f"LSH attention cannot decode token by token here: {self.leak}")
        code = self.assign(heads.q, context).to(torch.int64)  # (B, H, R, 1)
        chunk = self.window.chunk
        rank = cache.size.gather(-1, code)  # (B, H, R, 1): earlier tokens of the bucket
        # Of the bucket's last M tokens the new one is the M-th itself: M − 1 earlier ones are visible.
        back = torch.arange(1, chunk, device=code.device).expand(*code.shape[:-1], chunk - 1)
        seen = cache.last.gather(-2, code.unsqueeze(-1).expand(*code.shape, chunk)).squeeze(-2)
        seen = seen.gather(-1, (rank - back) % chunk)  # (B, H, R, M − 1), newest first
        valid = back <= rank
        score = self._score(heads, cache, seen, code, rank).masked_fill(~valid, -torch.inf).flatten(2)
        alone = ~valid.flatten(2).any(-1)[..., None]
        weight = torch.softmax(score.masked_fill(alone, 0.0), dim=-1).unsqueeze(2)
        out = (weight @ _gather(cache.tokens.v, seen).to(weight.dtype)).to(heads.v.dtype)
        self._append(cache, code, rank, position)
        return torch.where(alone[..., None], heads.v, out)

    def _score(self, heads: Heads, cache: LSHCache, seen: Tensor, code: Tensor, rank: Tensor) -> Tensor:
        """q·k − log N of the tokens `seen` in each round, (B, H, R, M − 1), fp32."""
        k = _gather(cache.tokens.k, seen).to(torch.promote_types(heads.q.dtype, torch.float32))
        score = (k @ heads.q.to(k.dtype).transpose(-1, -2)).view(seen.shape)
        if not self.config.count_rounds:
            return score
        flat = seen.flatten(2)[:, :, None].expand(-1, -1, seen.shape[2], -1)  # every seen token in every round
        same = cache.codes.gather(-1, flat) == code
        near = rank - cache.rank.gather(-1, flat) < self.window.chunk
        count = (same & near).sum(2).view(seen.shape)
        return score - count.clamp_min(1).to(score.dtype).log()

    def _append(self, cache: LSHCache, code: Tensor, rank: Tensor, position: int) -> None:
        cache.codes[..., position], cache.rank[..., position] = code[..., 0], rank[..., 0]
        place = code * self.window.chunk + rank % self.window.chunk
        cache.last.flatten(-2).scatter_(-1, place, torch.full_like(place, position))
        cache.size.scatter_add_(-1, code, torch.ones_like(code))


def _gather(x: Tensor, tokens: Tensor) -> Tensor:
    """Rows of x (B, H, L, D) at tokens (B, H, R, M): (B, H, R·M, D)."""
    index = tokens.flatten(2).unsqueeze(-1).expand(-1, -1, -1, x.shape[-1])
    return x.gather(2, index)
