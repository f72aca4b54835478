"""Dense definitions of operators, to test against. B batch, H heads, L length, D head dim, F features, V vocabulary."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megasparse.ops import bucketed_attention as windows
from megasparse.ops import gathered_attention as gathered
from megasparse.ops import hash_table_attention as hash_tables
from megasparse.ops import hashing, sketch
from megasparse.ops import local_attention as local
from megasparse.ops.bucketed_attention import BucketedAttentionSpec, Codes, Window
from megasparse.ops.bucketed_attention.spec import split_codes
from megasparse.ops.hash_table_attention import HashTableAttentionSpec
from megasparse.ops.hashing import Kind, code_dtype
from megasparse.ops.local_attention import LocalAttentionSpec, RelativeVectors
from megasparse.ops.normalize import SHORTEST
from megasparse.ops.operator import at_least_fp32
from megasparse.ops.random import PairDropout, normal, random_bits
from megasparse.ops.sketch import KeyChoiceSpec, Noise


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, dtype: torch.dtype) -> Tensor:
    """Compute weight·(x − mean)/√(variance + eps) + bias; without a bias weight·x/√(mean(x²) + eps)."""
    if bias is None:
        return (weight.to(x.dtype) * x / ((x * x).mean(-1, keepdim=True) + eps).sqrt()).to(dtype)
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred * centred).mean(-1, keepdim=True)
    return (weight.to(x.dtype) * centred / (variance + eps).sqrt() + bias.to(x.dtype)).to(dtype)


def unit_keys(q: Tensor) -> tuple[Tensor, Tensor]:
    """Return q and k = q / max(|q|, SHORTEST), in the dtype of q."""
    length = (q * q).sum(-1, keepdim=True).sqrt()
    return q, q / length.clamp_min(SHORTEST)


def counting_sort(keys: Tensor, bits: int, ordered: Tensor | None = None, reverse: bool = False) -> Tensor:
    """Positions ordered by (key, position): keys (rows, L), below 2^bits; (rows, L) int32."""
    order = [sorted(range(len(row)), key=lambda i: (row[i], i)) for row in keys.tolist()]
    found = torch.tensor(order, dtype=torch.int32, device=keys.device).view(keys.shape)
    found = found.flip(-1) if reverse else found
    if ordered is not None:
        ordered.copy_(keys.gather(-1, found.long()))
    return found


def token_scores(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Score tokens; the third column is the cross-entropy with (1 − smoothing)·onehot + smoothing/V."""
    logits = at_least_fp32(logits)
    cost = -torch.log_softmax(logits, dim=-1)  # of every id
    vocabulary = torch.arange(cost.shape[-1], device=cost.device)
    onehot = targets[:, None] == vocabulary
    likeliest = torch.where(cost == cost.min(-1, keepdim=True).values, vocabulary, len(vocabulary)).min(-1).values
    columns = [cost.masked_fill(~onehot, 0.0).sum(-1), (likeliest == targets).to(cost.dtype)]
    if smoothing:
        columns.append(((onehot * (1 - smoothing) + smoothing / len(vocabulary)) * cost).sum(-1))
    return torch.stack(columns, dim=-1)


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    projection: Tensor,
    *,
    causal: bool,
    scale: float,
    key_mask: Tensor | None = None,
    segments: Tensor | None = None,
) -> Tensor:
    """Compute out_i = Σ_j A_ij v_j / Σ_j A_ij over the visible keys, A_ij = φ(√scale·q_i)·φ(√scale·k_j) (Performer,
    Eq. 4–5).

    φ: positive features of `projection` (H, F, D). Sums of exponentials are taken in log space, pair by pair. A query
    that sees no real key gets 0."""
    length = q.shape[2]
    logs = [
        torch.einsum("bhld,hfd->bhlf", x * scale**0.5, projection.to(x.dtype)) - scale * (x * x).sum(-1)[..., None] / 2
        for x in (q, k)
    ]
    score = torch.logsumexp(logs[0][:, :, :, None] + logs[1][:, :, None], dim=-1)  # (B, H, L, L): log A·F
    seen = torch.ones(1, length, length, dtype=torch.bool, device=q.device)
    if causal:
        seen = seen.tril()
    if key_mask is not None:
        seen = seen & key_mask[:, None, :]
    if segments is not None:
        seen = seen & (segments[:, None, :] == segments[:, :, None])
    blind = ~seen.any(-1)[:, None, :, None]
    score = score.masked_fill(~seen[:, None], -torch.inf).masked_fill(blind, 0.0)
    return (torch.softmax(score, dim=-1) @ v).masked_fill(blind, 0.0)


def positive_features(x: Tensor, projection: Tensor) -> Tensor:
    """Compute φ(x) = exp(−|x|²/2)/√F · exp(ωx), (B, H, L, F), unstabilised (Choromanski et al. 2020, Lemma 1)."""
    products = torch.einsum("bhld,hfd->bhlf", x, projection.to(x.dtype))
    return torch.exp(-(x**2).sum(-1, keepdim=True) / 2) / math.sqrt(projection.shape[1]) * torch.exp(products)


def expected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: HashTableAttentionSpec,
    key_mask: Tensor | None = None,
    segments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """W_ij = (1 − acos(q_i·k_j)/π)^τ (Eq. 4) where j is visible to i; q, k of length 1 or 0."""
    angle = torch.acos((q @ k.transpose(-1, -2)).clamp(-1.0, 1.0))
    seen = visible_pairs((q.shape[2], k.shape[2]), spec.causal, key_mask, segments, q.device)
    return weighted_sum(q, k, v, (1 - angle / math.pi) ** spec.code_bits * seen, spec.code_bits)


def utilities(kernel: Tensor, in_query: Tensor, in_key: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ψ_i[b] ∝ Σ_{j in b} A_ij (LHA Eq. 11) and ψ′_j[b] ∝ Σ_{i in b} A_ij (Eq. 14), each with sum 1.

    kernel: (B, H, Lq, Lk), exp(q·k/√D); A is it with rows that sum to 1. in_query, in_key: (B, H, L, N), 1 where a
    token is in a bucket, else 0. A token that attends to no bucket has 0. Returns (B, H, Lq, N) and (B, H, Lk, N)."""
    attention = kernel / kernel.sum(-1, keepdim=True)
    queries = torch.einsum("bhij,bhjn->bhin", attention, in_key)
    keys = torch.einsum("bhij,bhin->bhjn", attention, in_query)
    totals = (x.sum(-1, keepdim=True) for x in (queries, keys))
    found = [torch.where(total > 0, x / total, 0.0) for x, total in zip((queries, keys), totals, strict=True)]
    return found[0], found[1]


def bucketed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    codes: Tensor | Codes | None,
    spec: BucketedAttentionSpec,
    key_mask: Tensor | None = None,
    segments: Tensor | None = None,
    *,
    dropout: PairDropout | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `bucketed_attention` densely."""
    length = q.shape[2]
    of_queries, key_codes = split_codes(codes)
    if of_queries is None:
        of_queries = torch.zeros(*q.shape[:2], 1, length, dtype=torch.int64, device=q.device)
    shown = visible(of_queries, spec.window, spec.causal, key_mask, segments, key_codes)
    if spec.exclude_self:
        shown = shown & ~torch.eye(length, dtype=torch.bool, device=q.device)
    counts = shown.sum(2)  # (B, H, L, L)
    score = (q * spec.scale) @ k.transpose(-1, -2)  # (B, H, L, L)
    if spec.pair_shard is None:
        weight = (counts > 0).to(q.dtype).log() if spec.count_rounds else counts.to(q.dtype).log()
    else:  # a shard's weight of a pair is (its rounds that select the pair)/N
        in_shard = (shown & _in_shard(of_queries, spec, key_mask, segments)[..., None]).sum(2)
        weight = (in_shard.to(q.dtype) / counts.clamp_min(1) if spec.count_rounds else in_shard.to(q.dtype)).log()
        counts = in_shard
    logits = score + weight
    real = torch.ones_like(q[:, :1, :, 0], dtype=torch.bool) if key_mask is None else key_mask[:, None]
    if spec.self_at_last and (spec.exclude_self or key_codes is not None):
        self_only = (counts.sum(-1) == 0) & real
        itself = torch.eye(length, dtype=torch.bool, device=q.device) & self_only[..., None]
        logits = torch.where(itself, score, logits)
    no_visible_key = (logits == -torch.inf).all(-1)  # padding: avoid NaN gradients of a softmax over −∞
    probability = torch.softmax(logits.masked_fill(no_visible_key[..., None], 0.0), dim=-1)
    lse = torch.logsumexp(logits.masked_fill(no_visible_key[..., None], 0.0), dim=-1)
    if dropout is not None:
        probability = probability * dense_dropout(dropout, length, q.dtype)
    return (probability @ v).masked_fill(no_visible_key[..., None], 0.0), lse.masked_fill(no_visible_key, -torch.inf)


def visible(
    codes: Tensor,
    window: Window,
    causal: bool,
    key_mask: Tensor | None = None,
    segments: Tensor | None = None,
    key_codes: Tensor | None = None,
) -> Tensor:
    """Return (B, H, R, L, L) bool, True if key j (last) is visible to query i in round r, including i = j."""
    batch, heads, rounds, length = codes.shape
    real = torch.ones(batch, length, dtype=torch.bool, device=codes.device) if key_mask is None else key_mask
    document = torch.zeros(batch, length, dtype=torch.int64, device=codes.device) if segments is None else segments
    position = torch.arange(length, device=codes.device)
    earlier = position[None, :] <= position[:, None]  # [i, j]: j at or before i
    together = document[:, :, None] == document[:, None, :]
    together = together & real[:, :, None] & real[:, None, :]
    together = together[:, None, None].expand(batch, heads, rounds, length, length)
    if key_codes is not None:
        return _visible_by_key_rank(codes, key_codes, window.chunk, causal, together)
    same = (codes[..., :, None] == codes[..., None, :]) & together
    if window.kind == "band":
        rank = (same & earlier).sum(-1)  # number of tokens in i's bucket at or before i
        shown = same & ((rank[..., :, None] - rank[..., None, :]).abs() < window.chunk)
        return shown & earlier if causal else shown
    # Sorted position: number of preceding real tokens in the order (document, bucket, position).
    key = (document[:, None, None].expand_as(codes), codes, position.expand_as(codes))
    before = torch.zeros_like(together)
    for part in reversed(key):
        left = part[..., None, :]
        right = part[..., :, None]
        before = (left < right) | ((left == right) & before)
    chunk = (before & real[:, None, None, None, :]).sum(-1) // window.chunk
    distance = chunk[..., :, None] - chunk[..., None, :]
    shown = (distance == 0) | (distance == 1)
    if window.ahead:
        shown = shown | (distance == -1)
    shown = shown & (same if window.same_bucket else together)
    return shown & earlier if causal else shown


def _visible_by_key_rank(codes: Tensor, key_codes: Tensor, chunk: int, causal: bool, together: Tensor) -> Tensor:
    """Return pairs of a query with the last M keys of its bucket at or before it and, if not causal, the next M."""
    position = torch.arange(codes.shape[-1], device=codes.device)
    between = (position[:, None] < position[None, :])[None]  # [j, j']: j before j'
    same = (codes[..., :, None] == key_codes[..., None, :]) & together
    shown = torch.zeros_like(same)
    for i in range(codes.shape[-1]):
        in_bucket = same[..., i, :]  # (B, H, R, L)
        back = in_bucket & (position <= i)
        ahead = in_bucket & (position > i)
        closer = (back[..., None, :] & between).sum(-1)  # keys of the bucket after j, up to i
        shown[..., i, :] = back & (closer < chunk)
        if not causal:
            closer = (ahead[..., None, :] & between.transpose(-1, -2)).sum(-1)
            shown[..., i, :] |= ahead & (closer < chunk)
    return shown


def _in_shard(codes: Tensor, spec: BucketedAttentionSpec, key_mask: Tensor | None, segments: Tensor | None) -> Tensor:
    """Return (B, H, R, L) bool, True for queries in the shard of the order by (document, bucket, position)."""
    order = codes.argsort(dim=-1, stable=True)
    for mask in (segments, None if key_mask is None else ~key_mask):
        if mask is not None:
            first = mask[:, None, None].expand_as(codes).gather(-1, order).to(torch.int64)
            order = order.gather(-1, first.argsort(dim=-1, stable=True))
    places = spec.places(codes.shape[-1])
    rank_in_order = order.argsort(-1)
    return (rank_in_order >= places.start) & (rank_in_order < places.stop)


def gathered_attention(
    q: Tensor, k: Tensor, v: Tensor, index: Tensor, *, scale: float, dropout: PairDropout | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `gathered_attention` densely; n_ij is the number of occurrences of key j in row i of the index."""
    k, v, index = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v, index))
    keys = torch.arange(k.shape[2], device=k.device)
    count = (index[..., None] == keys).sum(3).to(q.dtype)  # (B|1, H, Lq, Lk)
    logits = scale * (q @ k.transpose(-1, -2)) + count.log()  # (B, H, Lq, Lk)
    no_visible_key = (logits == -torch.inf).all(-1)  # avoid NaN gradients of a softmax over −∞
    logits = logits.masked_fill(no_visible_key[..., None], 0.0)
    probability = torch.softmax(logits, dim=-1)
    if dropout is not None:
        probability = probability * dense_dropout(dropout, k.shape[2], q.dtype)
    out = (probability @ v).masked_fill(no_visible_key[..., None], 0.0)
    lse = torch.logsumexp(logits, dim=-1).masked_fill(no_visible_key, -torch.inf)
    return out, lse


def hash_table_attention(
    q: Tensor, k: Tensor, v: Tensor, q_codes: Tensor, k_codes: Tensor, spec: HashTableAttentionSpec,
    key_mask: Tensor | None = None, segments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute `hash_table_attention` densely."""
    q, k, v = (x.to(torch.promote_types(v.dtype, torch.float32)) for x in (q, k, v))
    weight = (q_codes[..., :, None] == k_codes[..., None, :]).to(q.dtype).mean(2)
    visible = visible_pairs((q.shape[2], k.shape[2]), spec.causal, key_mask, segments, q.device)
    return weighted_sum(q, k, v, weight * visible, spec.code_bits)


def visible_pairs(
    lengths: tuple[int, int],
    causal: bool,
    key_mask: Tensor | None,
    segments: Tensor | None,
    device: torch.device,
) -> Tensor:
    """Return the mask of visible pairs, (B or 1, 1, Lq, Lk) bool."""
    visible = torch.ones(1, 1, *lengths, dtype=torch.bool, device=device)
    if causal:
        visible = visible.tril()
    if key_mask is not None:
        visible = visible & key_mask[:, None, :, None] & key_mask[:, None, None, :]
    if segments is not None:
        visible = visible & (segments[:, None, :, None] == segments[:, None, None, :])
    return visible


def weighted_sum(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, code_bits: int) -> tuple[Tensor, Tensor]:
    """Return Wv and W1, with ∂W_ij/∂(q_i·k_j) DEFINED as τ/2·W_ij (YOSO Eq. 12 and 19, with the τ of Eq. 11)."""
    weight = weight.detach()
    score = q @ k.transpose(-1, -2)
    with_gradient = weight * (1 + code_bits / 2 * (score - score.detach()))
    return with_gradient @ v, weight.sum(-1)


def sketched_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, key_mask: Tensor | None = None, segments: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `sketched_attention` densely."""
    q, k, v = (x.to(torch.promote_types(q.dtype, torch.float32)) for x in (q, k, v))
    alpha, visible = sketched_weights(q, k, causal, key_mask, segments)
    score = (q @ k.transpose(-1, -2)) / q.shape[2] ** 0.5  # (B, L, L)
    lse = score.masked_fill(~visible, -1e300 if q.dtype == torch.float64 else -1e38).logsumexp(-1)
    return alpha @ v, lse.masked_fill(~visible.any(-1), -torch.inf)


def chosen_keys(
    q: Tensor, k: Tensor, spec: KeyChoiceSpec, noise: Noise | None, lse: Tensor | None = None,
    key_mask: Tensor | None = None, segments: Tensor | None = None, first_query: int = 0,
) -> Tensor:  # fmt: skip
    """Compute `chosen_keys` densely. lse is unused: α is computed from q and k."""
    masks = key_mask, segments
    alpha, visible = sketched_weights(q.double(), k.double(), spec.causal, *masks, noise is None, first_query)
    drawn = None if noise is None else uniform(noise, k.shape[1])
    sampling = "top_k" if noise is None else spec.sampling
    return best_keys(alpha, visible, spec.count, sampling=sampling, uniform=drawn).to(torch.int32)


def uniform(noise: Noise, keys: int) -> Tensor:
    """Return u of every pair, (B, H, Lq, keys) float64, from the 2^23 numbers (n + ½)/2^23."""
    tiles = range(0, keys, sketch.KEYS)
    heads = [
        torch.cat([random_bits(noise.tile(h, t // sketch.KEYS), noise.rows, sketch.KEYS) for t in tiles], -1)
        for h in range(len(noise.heads))
    ]
    return ((torch.stack(heads, 1)[..., :keys] >> 9) + 2**22 + 0.5).double() / 2**23


def sketched_weights(
    q: Tensor,
    k: Tensor,
    causal: bool,
    key_mask: Tensor | None = None,
    segments: Tensor | None = None,
    rounded: bool = False,
    first_query: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return α_ij = softmax_j(q_i·k_j/√d), 0 for invisible pairs, and the mask of visible pairs: (B, Lq, L) each.

    rounded: round q_i·k_j/√d to the nearest multiple of 1/256, as without noise. The queries (B, Lq, d) are at
    positions from `first_query` on.
    """
    batch, queries, width = q.shape
    visible = torch.ones(batch, queries, k.shape[1], dtype=torch.bool, device=q.device)
    rows = slice(first_query, first_query + queries)
    if causal:
        visible = visible.tril(first_query)
    if key_mask is not None:
        visible = visible & key_mask[:, rows, None] & key_mask[:, None, :]
    if segments is not None:
        visible = visible & (segments[:, rows, None] == segments[:, None, :])
    score = (q @ k.transpose(-1, -2)) / width**0.5  # (B, Lq, L)
    score = (torch.round(score * 256) / 256 if rounded else score).masked_fill(~visible, -torch.inf)
    largest = score.amax(-1, keepdim=True).detach().clamp_min(torch.finfo(score.dtype).min)
    weight = torch.exp(score - largest)
    return weight / weight.sum(-1, keepdim=True).clamp_min(torch.finfo(weight.dtype).tiny), visible


def best_keys(alpha: Tensor, visible: Tensor, count: int, *, sampling: str, uniform: Tensor | None) -> Tensor:
    """Choose the K visible keys with the highest s_ij = u_ij·p_ij in each row (Smart Bird Eq. 2 and 3), (B, H, L, K);
    −1 if there are fewer. Ties go to the first.

    uniform: u, (B, H, L, L); None means u = 1 for one head.
    """
    p = {
        "inverse_log_squared": (1 / alpha.log()) ** 2,
        "inverse_log": (1 / alpha.log()).abs(),
        "raw": alpha,
        "top_k": alpha,
        "random": torch.ones_like(alpha),
    }[sampling]
    score = p[:, None] if uniform is None else uniform * p[:, None]
    score = score.masked_fill(~visible[:, None], -1.0)
    order = torch.sort(score, dim=-1, descending=True, stable=True)
    index = order.indices.masked_fill(order.values < 0, -1)
    return torch.cat([index, index.new_full((*index.shape[:-1], count), -1)], dim=-1)[..., :count]


def relative_local_attention(
    q: Tensor, k: Tensor, v: Tensor, relative: RelativeVectors, spec: LocalAttentionSpec,
    key_mask: Tensor | None = None, segments: Tensor | None = None, *, dropout: PairDropout | None = None,
) -> Tensor:  # fmt: skip
    """Compute `relative_local_attention` densely."""
    out_dtype = q.dtype
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, k, v, r, u, w = (x.to(dtype) for x in (q, k, v, *relative))
    batch, heads, length, _ = q.shape
    real = torch.ones(batch, length, dtype=torch.bool, device=q.device) if key_mask is None else key_mask
    document = torch.zeros_like(real, dtype=torch.int64) if segments is None else segments
    position = torch.arange(length, device=q.device)
    # Index of each token among real tokens in the order of (document, position).
    first = document[:, None, :]
    second = document[:, :, None]
    before = (first < second) | ((first == second) & (position < position[:, None]))
    number = (before & real[:, None]).sum(-1)
    distance = number[:, :, None] - number[:, None, :]  # (B, L, L)
    chunks_back = number[:, :, None] // spec.chunk - number[:, None, :] // spec.chunk
    visible = (chunks_back <= 1) & (chunks_back >= (0 if spec.causal else -1))
    visible = visible & (first == second) & real[:, :, None] & real[:, None, :]
    if spec.causal:
        visible = visible & (position <= position[:, None])
    row = (2 * spec.chunk - 1 - distance).clamp(0, r.shape[1] - 1)  # row of r
    of_distance = torch.einsum("bhid,hed->bhie", q + w[:, None], r)  # (B, H, L, E)
    of_position = of_distance.gather(3, row[:, None].expand(-1, heads, -1, -1))  # (B, H, L, L)
    score = ((q + u[:, None]) @ k.transpose(-1, -2) + of_position) * spec.scale  # (B, H, L, L)
    no_visible_key = ~real[:, None, :, None]
    score = score.masked_fill(~visible[:, None], -torch.inf).masked_fill(no_visible_key, 0.0)
    probability = torch.softmax(score, dim=-1)
    if dropout is not None:
        probability = probability * dense_dropout(dropout, length, dtype)
    return (probability @ v).masked_fill(no_visible_key, 0.0).to(out_dtype)


def angular_hash(x: Tensor, rotations: Tensor, factors: list[int]) -> Tensor:
    """Compute `angular_hash` by its definition."""
    rotated = torch.einsum("bhld,hrds->bhrls", x.double(), rotations.double())
    code = torch.zeros(rotated.shape[:-1], dtype=torch.int64, device=x.device)
    for part, factor in zip(rotated.split([n // 2 for n in factors], dim=-1), factors, strict=True):
        code = code * factor + torch.cat([part, -part], dim=-1).argmax(dim=-1)
    return code.to(code_dtype(math.prod(factors)))


def sign_codes(x: Tensor, key: int, heads: range, hashes: int, code_bits: int, kind: Kind) -> Tensor:
    """Compute Σ_t 2^t·[r_t·x >= 0] for every head and hash, see `sign_codes`."""
    codes = torch.empty(x.shape[0], x.shape[1], hashes, x.shape[2], dtype=torch.int64, device=x.device)
    for number, head in enumerate(heads):
        for hash_ in range(hashes):
            normals = hyperplanes(key, head, hash_, code_bits, x.shape[3], kind).to(x.device)
            bits = (x[:, number].double() @ normals.T >= 0).long()  # (B, L, τ)
            codes[:, number, hash_] = (bits * 2 ** torch.arange(code_bits, device=x.device)).sum(-1)
    return codes.to(code_dtype(1 << code_bits))


def hyperplanes(key: int, head: int, hash_: int, code_bits: int, width: int, kind: Kind) -> Tensor:
    """Return the normals (τ, D) of one head's hash, float64."""
    if kind == "gaussian":
        return normal(key, torch.tensor(head * 65536 + hash_), code_bits * width).view(code_bits, width).double()
    power = 1 << (width - 1).bit_length()
    matrix = hadamard_matrix(power)
    normals = []
    for bit in range(code_bits):
        row = head * 65536 + (hash_ // power) * code_bits + bit
        signs = torch.where(random_bits(key, torch.tensor(row), 3 * power) < 0, -1.0, 1.0).double()
        first, second, third = (torch.diag(d) for d in signs.view(3, power))
        normals.append((matrix @ third @ matrix @ second @ matrix @ first)[hash_ % power, :width])
    return torch.stack(normals)


def hadamard_matrix(power: int) -> Tensor:
    """Return Sylvester's matrix, H_2n = [[H_n, H_n], [H_n, −H_n]], float64."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < power:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def dense_dropout(dropout: PairDropout, count: int, dtype: torch.dtype) -> Tensor:
    """Return the factors of all pairs of queries and `count` keys, (B, H, Lq, Lk)."""
    return dropout.factors(dropout.queries.unsqueeze(-1), dropout.keys(count), dtype)


def use_definitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let operators compute their definition instead of blockwise torch."""
    for operator, definition in {
        windows.bucketed_attention: bucketed_attention,
        gathered.gathered_attention: gathered_attention,
        hash_tables.hash_table_attention: hash_table_attention,
        hashing.angular_hash: angular_hash,
        hashing.sign_codes: sign_codes,
        local.relative_local_attention: relative_local_attention,
        sketch.sketched_attention: sketched_attention,
    }.items():
        monkeypatch.setattr(operator, "blocks", definition)

    def keys(q: Tensor, k: Tensor, count: int, sight: Any, first_query: int) -> Tensor:
        spec = KeyChoiceSpec(count, sight.causal, "top_k")
        return chosen_keys(q, k, spec, None, None, sight.key_mask, sight.segments, first_query)

    def drawn(
        q: Tensor, k: Tensor, spec: KeyChoiceSpec, noise: Noise, lse: Tensor | None, sight: Any, first_query: int
    ) -> Tensor:
        return chosen_keys(q, k, spec, noise, lse, sight.key_mask, sight.segments, first_query)

    monkeypatch.setattr(sketch, "top_keys", keys)
    monkeypatch.setattr(sketch, "drawn_keys", drawn)
