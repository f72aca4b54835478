"""Learning-to-hash attention (LHA): a query attends to the keys in its bucket, assigned by learned hash functions.

The loss of the hash functions is the divergence of their buckets from the attention utility of a sample (Eq. 13), in
O(S·L + U·N) time and memory: a bucket's members are the tokens whose score exceeds a threshold, which is estimated from
U tokens. C sampled keys.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils import skip_init

from megasparse.attention.band import SHIFTED, BandAttention, BandSection, check_band, check_shifted_keys
from megasparse.attention.contract import AttentionContext, AttentionInputs, AttentionOutput, Buckets, MechanismSpec
from megasparse.attention.documents import Document, attend_in_clusters, clusters_by_document, documents
from megasparse.attention.far_attention import InWindow, best_far, collision_loss, drawn_positions
from megasparse.attention.flops import Flops, product
from megasparse.attention.lha_hash import (
    HashFunctions,
    HashInputs,
    Weights,
    bucket_codes,
    bucket_members,
    hash_functions,
    hash_inputs,
    in_buckets,
    in_largest,
    merged,
    merged_parts,
    scores_of,
)
from megasparse.config.attention import mechanism
from megasparse.config.schema import ModelConfig
from megasparse.config.section import Positive
from megasparse.errors import ConfigError
from megasparse.ops import hash_learning
from megasparse.ops.bucketed_attention import Codes
from megasparse.ops.cluster_attention import ClusterIndices
from megasparse.ops.hash_learning import Draws
from megasparse.ops.linear_attention import orthogonal_projections
from megasparse.ops.operator import Linear, at_least_fp32, implementation
from megasparse.ops.positions import sinusoids
from megasparse.ops.random import Key, random_bits


class Assignment(NamedTuple):
    """Buckets of all tokens, (B, H, L); with the joint hash the same for queries and keys. members: for the top_k
    window, clusters equal to the buckets of every document.
    """

    query_codes: Tensor
    key_codes: Tensor
    members: ClusterIndices | None = None


class HashExample(NamedTuple):
    """Training tokens of the query hash (side 0) or the key hash (side 1): inputs as in `HashInputs.inputs`, target
    utilities (B, H, T, N), current buckets (B, H, T), and the number of tokens that each represents.
    """

    side: int
    inputs: tuple[Tensor, ...]
    utility: Tensor
    codes: Tensor
    weight: float


SAMPLES = 256
"""Queries per step (sampled: per document) that train the hash. The error of the mean divergence falls with the square
root of this number; using all queries would cost as much as full attention."""
SAMPLED_KEYS = 1024
"""Keys per document that train the hash, and draws per query, with sampled utilities; all if a document is shorter."""
FEATURES = 256
"""Positive random features per head, drawn again every step, with utility = "features"."""
WEIGHT = 0.05
"""Weight λ of Eq. 19: the loss is (1 − λ)·task + λ·mean(KL_Q + KL_K)."""


class LHAAttentionConfig(BandSection):
    hash: Literal["mlp", "linear", "random"] = "mlp"
    """H_Q and H_K: two-layer MLPs (best in the paper), linear, or an untrained random projection."""
    chunk: Positive = 64
    """N/B, tokens per bucket; max_length/chunk buckets, rounded up. Width of the band; top_k multiplies it by √2."""
    window: Literal["band", "top_k"] = "band"
    """`band`: the last N/B tokens of the token's (argmax) bucket, strictly causal; in an encoder N/B on either side.
    `top_k`: the paper's ⌊√2·N/B⌋ best queries and keys of every bucket, which later tokens can displace."""
    joint: bool = True
    """Decoders: assign a token's query and key to one bucket, by H_Q(q) + H_K(k) (the paper's Eq. 18). false: separate
    buckets, as in encoders, so that a query can match unlike keys; use it with pretrained queries and keys."""
    shifted_keys: bool = False
    """Decoders with joint and a band only: each token gets the key and the bucket of the previous token and so attends
    to the tokens that followed similar ones, at any distance. The first key of a document is 0, in bucket 0. Such
    layers do not use rotary positions."""
    count_buckets: bool = True
    """With top_k only: include a pair that shares N buckets once. false: N times, as in the paper's Algorithm 1."""
    utility: Literal["sampled", "features", "collisions"] = "sampled"
    """Target of the hash. `sampled`: the utilities ψ and ψ′ of some queries and keys per step. `features`: their
    estimate by 256 positive random features (Eq. 15 to 17). `collisions`, not in the paper: softmax(H_Q) and
    softmax(H_K) of some queries and their best keys beyond the window and the sinks should draw the same bucket, with
    all buckets used equally; in decoders with joint = false."""
    psi: Literal["best", "argmax"] = "best"
    """Not with collisions: ψ sums over each bucket's best members, as many of every bucket, or over the tokens with the
    highest score there (Eq. 11), by which one bucket that holds all tokens is perfect and is soon found."""
    sinusoidal_positions: bool = False
    """Add sinusoidal positions to the queries and keys of every such layer, as the paper does for WikiText-103."""
    project_positions: bool = False
    """With sinusoidal_positions: positions of width d_model, projected by each layer to its heads, separately for
    queries and keys, as in the released code. false: positions of width head_dim, added without projection."""
    normalize: bool = False
    """Layer-normalise the queries and keys of each head, without gain and bias, as in the released code."""

    def check(self, key: str, model: ModelConfig) -> None:
        check_band(key, self.window, self.local, self.sinks)
        check_shifted_keys(key, self, model, joint=True)
        if self.utility == "collisions" and self.joint and model.kind != "encoder":
            problem = '"collisions" needs separate hashes of queries and keys, but joint = true adds them'
            raise ConfigError(f"{key}.utility", problem, 'Set joint to false, or utility to "sampled"')
        if self.project_positions and not self.sinusoidal_positions:
            problem = "true projects positions, but sinusoidal_positions is false"
            raise ConfigError(f"{key}.project_positions", problem, "Set it to false, or sinusoidal_positions to true")

    @property
    def causal_only(self) -> str | None:  # type: ignore[override]
        return SHIFTED if self.shifted_keys else None

    @property
    def joined(self) -> str | None:
        return "project_positions projects to all heads" if self.project_positions else None


@mechanism("lha", LHAAttentionConfig)
class LHAAttention(BandAttention):
    """Softmax attention inside the buckets of learned hash functions, h_Q(q) = h_K(k) (LHA Eq. 7).

    The hash functions H_Q and H_K learn each bucket's attention utility, its share of a token's full attention (Eq. 13
    to 17), from queries and keys without gradient.
    """

    has_auxiliary_loss = True
    auxiliary_weight = WEIGHT

    def __init__(self, config: LHAAttentionConfig, spec: MechanismSpec):
        super().__init__(config, spec)
        sides = ("query", "key") if config.project_positions else ()
        linear = {"bias": False, "device": torch.get_default_device()}
        projections = {side: skip_init(Linear, spec.d_model, spec.heads * spec.head_dim, **linear) for side in sides}
        self.position_projections = nn.ModuleDict(projections)
        self.bucket_size = math.floor(math.sqrt(2) * spec.max_length / self.buckets)
        self.changes_keys = config.sinusoidal_positions or config.normalize
        self.rule = {"scale": spec.head_dim**-0.5, "exclude_self": False, "count_rounds": True}
        self.hash = HashFunctions(config.hash, spec, self.buckets)
        if config.hash != "random":
            self.task_weight = 1.0 - WEIGHT
        if config.window == "top_k" and spec.causal:
            self.leak = "later tokens can displace a bucket's best; attention.lha.window = band is strictly causal"

    def forward(self, x: Tensor, inputs: AttentionInputs, context: AttentionContext) -> AttentionOutput:
        assigned = context.recompute.keep(lambda: self.assign(inputs, context))
        if assigned.members is None:
            key_codes = None if self._joint(inputs) else assigned.key_codes.unsqueeze(2)
            shifted = self.shift(inputs, assigned.query_codes.unsqueeze(2), key_codes)
            output = self.attend(*shifted, context.part)
            if not inputs.causal:
                output = output._replace(statistics=_balance(inputs, assigned, self.buckets))
        else:
            out, uncovered = attend_in_clusters(inputs, assigned.members, self.rule["scale"], self.config.count_buckets)
            output = AttentionOutput(out, statistics={"queries_in_no_bucket": uncovered})
        if self.config.hash == "random" or not context.rng.training:
            return output
        loss, learned = self.learn(x, inputs, context, assigned)
        return output._replace(auxiliary_loss=loss, statistics={**output.statistics, **learned})

    def prepare(self, q: Tensor, k: Tensor, first: int) -> tuple[Tensor, Tensor]:
        config = self.config
        if config.project_positions:
            table = sinusoids(first, q.shape[2], self.spec.d_model, q.device).to(q.dtype)
            projected = (self.position_projections[side](table) for side in ("query", "key"))
            of_queries, of_keys = (x.unflatten(-1, (-1, q.shape[3])).transpose(0, 1) for x in projected)  # (H, L, D)
            q = q + of_queries
            k = k + of_keys
        elif config.sinusoidal_positions:
            positions = sinusoids(first, q.shape[2], q.shape[3], q.device).to(q.dtype)
            q = q + positions
            k = k + positions
        if config.normalize:
            q, k = (F.layer_norm(x, x.shape[-1:], eps=1e-6).to(x.dtype) for x in (q, k))
        return q, k

    @torch.no_grad()
    def assign(self, inputs: AttentionInputs, context: AttentionContext) -> Assignment:
        joint = self._joint(inputs)
        weights = self.hash(inputs.q, context)
        queries, keys = hash_inputs(inputs.q.detach(), inputs.k.detach(), joint, hash_functions(weights, joint))
        query_codes = bucket_codes(queries, self.buckets)
        key_codes = query_codes if joint else bucket_codes(keys, self.buckets)
        if self.config.window == "band":
            return Assignment(query_codes, key_codes)

        def members(hashed: HashInputs, document: Document) -> Tensor:
            vectors = tuple(document.take(x) for x in hashed.inputs)
            return bucket_members(HashInputs(vectors, hashed.weights), self.buckets, self.bucket_size)

        def best_members(document: Document) -> ClusterIndices:
            best = members(queries, document)
            return best, best if joint else members(keys, document)

        return Assignment(query_codes, key_codes, clusters_by_document(inputs, best_members))

    def _joint(self, inputs: AttentionInputs) -> bool:
        return inputs.causal and self.config.joint

    def band_codes(self, inputs: AttentionInputs, position: int, context: AttentionContext) -> Codes:
        assigned = self.assign(inputs, context)
        return assigned.query_codes.unsqueeze(2), None if self._joint(inputs) else assigned.key_codes.unsqueeze(2)

    def buckets_of(self, inputs: AttentionInputs, context: AttentionContext) -> Buckets:
        _, queries, keys = self.shift(inputs, *self.band_codes(inputs, 0, context))
        keys = queries if keys is None else keys
        return Buckets(queries.squeeze(2), keys.squeeze(2), self.buckets)

    def learn(
        self, x: Tensor, inputs: AttentionInputs, context: AttentionContext, assigned: Assignment | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the auxiliary loss, λ·mean(KL_Q + KL_K) over real tokens, heads and layers (second summand of Eq. 19)
        or `_collisions`, and its statistics. assigned: the buckets, if already computed.
        """
        if self.config.utility == "collisions":
            return self._collisions(inputs, context)
        assigned = assigned or self.assign(inputs, context)
        weights = self.hash(inputs.q, context)
        functions = training_functions(weights, self._joint(inputs), inputs.q)
        token_key, draw_key = map(context.key, ("lha sample", "lha keys"))
        features = self.features(inputs.q, context) if self.config.utility == "features" else None
        tensors = (inputs.q.detach(), inputs.k.detach(), assigned.query_codes, assigned.key_codes)
        examples = chain.from_iterable(
            self._examples(
                [document.take(x) for x in tensors], self._joint(inputs), functions, token_key, draw_key, features
            )
            for document in documents(inputs.key_mask, inputs.segments)
        )
        flat = [*weights[0], *weights[1]]
        learn = torch.is_grad_enabled() and any(w.requires_grad for w in flat)
        kl, others = _Divergence.apply(examples, functions, _real(inputs), learn, *flat)
        queries, keys = kl.detach().unbind()
        attended, negative = others.unbind()
        statistics = {
            "kl_queries": queries,
            "kl_keys": keys,
            "attention_utility": attended[0],
            "negative_entropy_queries": negative[0],
            "negative_entropy_keys": negative[1],
        }
        return WEIGHT / self.spec.layers * kl.sum(), statistics

    def features(self, q: Tensor, context: AttentionContext) -> Tensor:
        """Return the rows ω of the random features, (H, F, D)."""
        heads = context.heads(q.shape[1])
        return orthogonal_projections(context.key("lha features"), heads, FEATURES, q.shape[3], q.device)

    def _examples(
        self, tensors: Sequence[Tensor], joint: bool, functions: Sequence[tuple[Weights, ...]], token_key: Key,
        draw_key: Key, features: Tensor | None,
    ) -> Iterator[HashExample]:  # fmt: skip
        """Yield the examples of a document. U tokens are drawn evenly without replacement for all heads and sequences.
        The first S are queries and the first C keys; the utilities of queries come from separate draws of keys.

        tensors: queries and keys (B, H, L, D) and their codes (B, H, L).
        """
        all_q, all_k, *codes = tensors
        scale = self.rule["scale"]
        length = all_q.shape[2]
        device = all_q.device
        tokens = drawn_positions(token_key, length, _sample_size(self.buckets), device)
        q = all_q.index_select(2, tokens)
        k = all_k.index_select(2, tokens)
        if length <= SAMPLED_KEYS:
            first = 0
            draws = Draws(k, tokens, torch.zeros(length, device=device))
        else:
            bits = random_bits(draw_key, torch.arange(SAMPLED_KEYS, device=device), 1).squeeze(-1)
            middles = torch.arange(0.5 / SAMPLED_KEYS, 1, 1 / SAMPLED_KEYS, dtype=torch.float64, device=device)
            points = middles.add(bits, alpha=2.0**-32 / SAMPLED_KEYS)
            draws = hash_learning.draw_keys(q[:, :, :SAMPLES], all_k, points, scale=scale)
            q = torch.cat([hash_learning.at_tokens(all_q, draws.tokens), q], dim=2)
            first = SAMPLED_KEYS
            k = torch.cat([draws.k, k], dim=2)
        q = at_least_fp32(q)  # of the drawn keys, then, from `first` on, of the U tokens
        k = at_least_fp32(k)
        queries = slice(first, first + min(SAMPLES, length))
        drawn = slice(min(SAMPLED_KEYS, length))
        keys = slice(first, first + drawn.stop)
        sides = hash_inputs(q, k, joint, functions)
        sizes = (self.buckets, max(1, round(self.bucket_size * len(tokens) / length)))

        def members(hashed: HashInputs, first: int, count: int) -> Tensor:
            if self.config.psi == "argmax":
                return in_largest(hashed, self.buckets, count)
            return in_buckets(hashed, *sizes, first, count)

        in_key = members(sides[1], first, max(drawn.stop, queries.stop) if joint else drawn.stop)
        samples = [HashInputs(tuple(x[:, :, first:] for x in side.inputs), side.weights) for side in sides]
        in_query = in_key[:, :, queries] if joint else members(samples[0], 0, min(SAMPLES, length))

        def example(side: int, part: slice, utility: Tensor) -> HashExample:
            vectors = tuple(x[:, :, part] for x in samples[side].inputs)
            of_part = codes[side].index_select(2, tokens[part])
            return HashExample(side, vectors, utility, of_part, length / (len(tokens[:SAMPLES]), drawn.stop)[side])

        draws = draws._replace(k=k[:, :, drawn])
        rule = {"scale": scale, "features": features}
        utility, normalizer = hash_learning.sampled_queries(q[:, :, queries], draws, in_key[:, :, drawn], **rule)
        yield example(0, slice(SAMPLES), utility)
        received = hash_learning.sampled_keys(q[:, :, queries], k[:, :, keys], normalizer, in_query, **rule)
        yield from (example(1, part, utility) for part, utility in received)

    def teaching_rate(self, parameter: str, progress: float = 0.0) -> float | None:
        """Return None in decoders unless the target is `collisions`, because the utility includes later tokens."""
        if self.config.hash == "random" or (self.spec.causal and self.config.utility != "collisions"):
            return None
        return 1e-2 if self.config.utility == "collisions" else 3e-3

    def _collisions(self, inputs: AttentionInputs, context: AttentionContext) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the weighted `collision_loss` of sampled queries and their best keys beyond window and sinks."""
        width = self.window.chunk
        queries = drawn_positions(context.key("lha sample"), inputs.q.shape[2], SAMPLES, inputs.q.device)
        in_window: InWindow | None = (lambda q, k: (q - k).abs() < width) if self.local else None
        share, best = best_far(inputs, queries, self.sinks, in_window, self.rule["scale"])
        q = inputs.q.detach()
        k = inputs.k.detach()
        best_keys = k.gather(2, best.flatten(2).unsqueeze(-1).expand(-1, -1, -1, k.shape[3]))  # (B, H, S·K, D)
        of_q, of_k = self.hash(inputs.q, context)
        of_best = scores_of((best_keys,), (of_k,)).unflatten(2, best.shape[2:])  # (B, H, S, K, N)
        query_scores = scores_of((q[:, :, queries],), (of_q,))
        key_scores = scores_of((k[:, :, queries],), (of_k,))
        real = None if inputs.key_mask is None else inputs.key_mask[:, queries]
        loss = collision_loss(query_scores, key_scores, share, of_best, real)
        return loss * (WEIGHT / self.spec.layers), {"collision_loss": loss.detach()}

    def exact(self) -> "LHAAttention | None":
        if not self.shifted_keys:
            return None
        everything = self.config.changed(local=True, chunk=self.spec.max_length, hash="random")
        return LHAAttention(everything, self.spec)

    def flops(self, length: int) -> Flops:
        """Pairs in windows, assuming buckets of equal size, plus the hash functions."""
        work = self.spec.workload(length)
        band = self.config.window == "band"
        keys = work.band(self.config.chunk, False) if band else work.clusters(self.buckets, self.bucket_size)
        return self.band_flops(keys, length) + self._hashing_flops(length)

    def _hashing_flops(self, length: int) -> Flops:
        """Both hash functions, plus training them on a sample, forward only.

        Of the sample: hash functions (with the joint hash both for each token) of S queries and C keys, with gradients,
        and of the opposite side's tokens; both functions of the U tokens; scores of S queries and all keys; scores of S
        queries and C keys, twice; sums of their attention over N buckets, for both sides.
        """
        heads = self.spec.heads
        dim = self.spec.head_dim
        buckets = self.buckets
        if self.config.hash == "random":
            return Flops(heads * 2 * 2.0 * dim * buckets)
        weights = dim * buckets + (dim * dim if self.config.hash == "mlp" else 0)
        queries = min(SAMPLES, length)
        keys = min(SAMPLED_KEYS, length)
        if self.config.utility == "collisions":
            return (product(2 * 2.0 * weights) + Flops(queries * 2.0 * dim)) * heads
        joint = self.spec.causal and self.config.joint
        tokens = min(length, _sample_size(buckets))
        hashed = 2.0 * weights * (1 + joint) * (queries + keys)
        width = FEATURES if self.config.utility == "features" else dim
        pairs = queries * keys * (2 * 2.0 * width + 2 * 2.0 * buckets)
        received = queries * length * 2.0 * dim if keys < length else 0.0
        sample = product(hashed) + Flops(hashed + 2.0 * weights * 2 * tokens + pairs + received)
        return (Flops(2 * 2.0 * weights) + sample * (1 / length)) * heads


def _real(inputs: AttentionInputs) -> Tensor | int:
    batch, count, length = inputs.q.shape[:3]
    return count * (batch * length if inputs.key_mask is None else inputs.key_mask.sum().clamp_min(1))


def _balance(inputs: AttentionInputs, codes: Assignment, buckets: int) -> dict[str, Tensor]:
    """Return the share of non-empty buckets, over documents and heads, with more than twice as many queries as keys or
    the reverse (section 3.2); and the share of queries whose bucket contains no key.
    """
    queries = codes.query_codes.long()
    keys = codes.key_codes.long()
    if inputs.segments is not None:
        first = inputs.segments.unsqueeze(1) * buckets
        documents_in_row = 1 if inputs.segments.is_meta else int(inputs.segments.max()) + 1  # at most
        queries = queries + first
        keys = keys + first
        buckets = buckets * documents_in_row
    real = queries.new_ones(()) if inputs.key_mask is None else inputs.key_mask.unsqueeze(1).long()
    counts = [
        torch.zeros(*x.shape[:2], buckets, dtype=torch.int64, device=x.device).scatter_add_(-1, x, real.expand_as(x))
        for x in (queries, keys)
    ]
    imbalanced = (counts[0] > 2 * counts[1]) | (counts[1] > 2 * counts[0])
    nonempty = (counts[0] + counts[1] > 0).sum()
    return {
        "bucket_imbalance": imbalanced.sum() / nonempty.clamp_min(1),
        "queries_in_no_bucket": counts[0].masked_fill(counts[1] > 0, 0).sum() / _real(inputs),
    }


def _sample_size(buckets: int) -> int:
    """U: 4 tokens per bucket, but at least S and C."""
    return max(SAMPLED_KEYS, SAMPLES, 4 * buckets)


def training_functions(weights: tuple[Weights, Weights], joint: bool, q: Tensor) -> list[tuple[Weights, ...]]:
    """Return `hash_functions` as leaves of a graph, in fp32 or wider; networks on a GPU `merged`."""
    sides = hash_functions(weights, joint)[: 2 - joint]
    if len(weights[0]) == 4 and implementation(q, largest_width=None) == "triton":
        sides = [(merged(functions),) for functions in sides]
    leaves = [tuple(tuple(at_least_fp32(w.detach()).requires_grad_() for w in f) for f in side) for side in sides]
    return [leaves[0], leaves[-1]]


class _Divergence(torch.autograd.Function):
    """Divergence whose forward also computes the gradient, tile by tile, so scores and targets are never stored.

    Return (2,), of queries and of keys: Σ KL(ψ ‖ softmax(H)) / count over all examples' tokens and heads (Eq. 13); and
    (2, 2), without gradients: Σ ψ[bucket] / count of both sides, then Σ ψ·ln ψ / count, the negative entropy (Figure
    4). weights: of H_Q, then of H_K, which get the gradients, if `learn`.
    """

    @staticmethod
    def forward(
        ctx: Any, examples: Iterable[HashExample], functions: list[tuple[Weights, ...]], count: Tensor | int,
        learn: bool, *weights: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        leaves = [list(chain.from_iterable(side)) for side in functions]
        totals: list[list[Tensor]] = [[], []]  # of either side the sums, then the gradients of its leaves
        for side, inputs, utility, codes, weight in examples:
            with torch.set_grad_enabled(learn):
                scores = scores_of(inputs, functions[side])
            sums, error = hash_learning.divergence(scores.detach(), utility, codes, weight, learn)
            terms = [sums.double()]
            if error is not None:
                terms += torch.autograd.grad(scores, leaves[side], error.to(scores.dtype))
            totals[side] = list(torch._foreach_add(totals[side], terms)) if totals[side] else terms
        for total, side_leaves in zip(totals, leaves, strict=True):
            if not total:  # no real token
                total += [weights[0].new_zeros(3, dtype=torch.float64), *map(torch.zeros_like, side_leaves)]
        ctx.save_for_backward(*(x for total in totals for x in total[1:]))
        ctx.joint = functions[0] is functions[1]
        ctx.shapes = [w.shape for w in weights]
        ctx.dtype = weights[0].dtype
        ctx.count = count
        ctx.merged = len(leaves[0]) * (2 - ctx.joint) < len(weights)
        means = torch.stack([total[0] for total in totals]).to(leaves[0][0].dtype) / count
        divergences = means[:, 0]
        others = means[:, 1:].T
        ctx.mark_non_differentiable(others)
        return divergences, others

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # under gradient checkpointing it can be read once
        half = len(saved) // 2
        sides = zip((grad / ctx.count).unbind(), (saved[:half], saved[half:]), strict=True)
        grads = [list(torch._foreach_mul(side, factor)) for factor, side in sides]
        if not ctx.merged:
            grads = [[x.to(ctx.dtype) for x in side] for side in grads]
        if ctx.joint:
            grads = [list(torch._foreach_add(*grads))]
        if ctx.merged:
            grads = [merged_parts(side, 2 // len(grads)) for side in grads]
        flat = zip(chain.from_iterable(grads), ctx.shapes, strict=True)
        return None, None, None, None, *(x.to(ctx.dtype).reshape(shape) for x, shape in flat)
