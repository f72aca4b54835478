"""Routing attention (Roy et al. 2021): clusters around N centroids, moving averages of queries and keys."""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from megasparse.attention.band import BandAttention, BandSection, check_band
from megasparse.attention.contract import AttentionContext, AttentionInputs, AttentionOutput, MechanismSpec
from megasparse.attention.documents import Document, attend_in_clusters, clusters_by_document
from megasparse.attention.flops import Flops
from megasparse.attention.lha_hash import HashInputs, bucket_codes
from megasparse.config.attention import mechanism
from megasparse.config.schema import ModelConfig
from megasparse.config.section import Positive, Rate
from megasparse.ops.cluster_attention import ClusterIndices
from megasparse.ops.operator import at_least_fp32
from megasparse.ops.random import derive, normal

_TILE_ELEMENTS = 1 << 22  # similarities at a time


class RoutingAttentionConfig(BandSection):
    chunk: Positive = 64
    """Tokens per cluster; max_length/chunk centroids, rounded up."""
    window: Literal["band", "top_k"] = "band"
    """`band`: the last `chunk` tokens of the token's cluster, strictly causal. `top_k`: the paper's nearest tokens of
    each centroid. Later tokens can displace them: not strictly causal."""
    decay: Rate = 0.999
    """Decay of the centroids' moving average, per step."""

    def check(self, key: str, model: ModelConfig) -> None:
        check_band(key, self.window, self.local, self.sinks)


@mechanism("routing", RoutingAttentionConfig)
class RoutingAttention(BandAttention):
    """Routing attention, softmax(qkᵀ/√D)v inside clusters of spherical k-means: the nearest unit centroid μ is the one
    with the largest μ·q/|q| or μ·k/|k|.

    Decoders need one cluster per token, so their keys are the queries, as in the paper: logits q·q/|q| as in Reformer,
    and in the band a token attends to itself only if no other key is visible. The centroids, a persistent buffer, are
    updated once per step.
    """

    centroids: Tensor

    def __init__(self, config: RoutingAttentionConfig, spec: MechanismSpec):
        super().__init__(config, spec)
        self.shared_qk = spec.causal
        scale = 1.0 if self.shared_qk else spec.head_dim**-0.5
        self.rule = {"scale": scale, "exclude_self": self.shared_qk, "count_rounds": True}
        self.register_buffer("centroids", torch.zeros(spec.heads, self.buckets, spec.head_dim))  # (H, N, D)
        self._sums: Tensor | None = None  # (H, N, D + 1) float64: sum and count of the step's members
        if config.window == "top_k" and spec.causal:
            self.leak = "later tokens can displace the nearest; attention.routing.window = band is strictly causal"

    def initialise(self, seed: int, name: str) -> None:
        """Set random unit centroids, a pure function of seed, name and head."""
        rows = torch.arange(self.spec.heads * self.buckets).view(self.spec.heads, self.buckets)
        drawn = normal(derive(seed, "initial centroids", name), rows, self.spec.head_dim)
        self.centroids.copy_(F.normalize(drawn, dim=-1))

    def band_codes(self, inputs: AttentionInputs, position: int, context: AttentionContext) -> tuple[Tensor, None]:
        return self._codes(*self._sides(inputs, context))[0].unsqueeze(2), None

    def forward(self, x: Tensor, inputs: AttentionInputs, context: AttentionContext) -> AttentionOutput:
        routes = context.recompute.keep(lambda: self._decide(inputs, context))
        if self.config.window == "top_k":
            out, uncovered = attend_in_clusters(inputs, routes, self.rule["scale"], count_clusters=True)
            return AttentionOutput(out, statistics={"queries_in_no_cluster": uncovered})
        queries, keys = (codes.unsqueeze(2) for codes in routes)
        return self.attend(inputs, queries, None if inputs.causal else keys, context.part)

    @torch.no_grad()
    def _decide(self, inputs: AttentionInputs, context: AttentionContext) -> ClusterIndices:
        """Return, for the band, nearest centroids (B, H, L) of queries and of keys; for top_k, clusters. Checkpointed
        layers compute it twice, which doubles both sums and counts."""
        queries, keys = self._sides(inputs, context)
        if context.rng.training:
            self._remember(inputs, queries, keys, context)
        if self.config.window == "band":
            return self._codes(queries, keys)

        def nearest(side: HashInputs, document: Document) -> Tensor:
            """Return the tokens with the highest μ·x of every centroid, computed in tiles: (B, H, N, min(chunk, n))."""
            x = document.take(side.inputs[0]).transpose(-1, -2)
            centroids = side.weights[0][0].transpose(1, 2)
            tiles = centroids.to(x.dtype).split(max(1, _TILE_ELEMENTS // x[..., 0, :].numel()), dim=1)
            size = min(self.config.chunk, x.shape[-1])
            return torch.cat([(tile @ x).topk(size, dim=-1, sorted=False).indices for tile in tiles], dim=2)

        return clusters_by_document(inputs, lambda document: (nearest(queries, document), nearest(keys, document)))

    def _sides(self, inputs: AttentionInputs, context: AttentionContext) -> tuple[HashInputs, HashInputs]:
        """Return the vectors to compare with the centroids: unit queries and keys, in a decoder the same."""
        q, k = (F.normalize(at_least_fp32(x), dim=-1) for x in (inputs.q, inputs.k))
        weights = (context.part.local_part(self.centroids, 0).transpose(1, 2),)  # (H, D, N)
        if inputs.causal:
            joined = HashInputs((q,), (weights,))
            return joined, joined
        return HashInputs((q,), (weights,)), HashInputs((k,), (weights,))

    def _codes(self, queries: HashInputs, keys: HashInputs) -> tuple[Tensor, Tensor]:
        codes = bucket_codes(queries, self.buckets)
        return codes, codes if keys is queries else bucket_codes(keys, self.buckets)

    def _remember(
        self, inputs: AttentionInputs, queries: HashInputs, keys: HashInputs, context: AttentionContext
    ) -> None:
        if self._sums is None:
            shape = (*self.centroids.shape[:2], self.centroids.shape[2] + 1)
            self._sums = torch.zeros(shape, dtype=torch.float64, device=inputs.q.device)
        first = torch.arange(self.spec.heads, device=inputs.q.device)[:, None] * self.buckets
        first = context.part.local_part(first, 0)
        for x, codes in zip((queries.inputs[0], keys.inputs[-1]), self._codes(queries, keys), strict=True):
            members = F.pad(x.double(), (0, 1), value=1.0)  # (B, H, L, D + 1)
            members = inputs.without_padding(members)
            self._sums.flatten(0, 1).index_add_(0, (first + codes).flatten(), members.flatten(0, 2))

    @torch.no_grad()
    def after_step(self, applied: bool, sum_over_ranks: Callable[[Tensor], Tensor]) -> None:
        """Update the centroids, μ ← normalise(decay·μ + (1 − decay)·mean of the members), over queries and keys of all
        micro-batches and ranks of the step, if it was applied; keep centroids without members.
        """
        sums = self._sums
        self._sums = None
        if sums is None or not applied:
            return
        sums = sum_over_ranks(sums)
        count = sums[..., -1:]
        old = self.centroids.double()
        mean = sums[..., :-1] / count.clamp_min(1.0)
        moved = self.config.decay * old + (1.0 - self.config.decay) * mean
        length = moved.norm(dim=-1, keepdim=True)
        self.centroids.copy_(torch.where((count > 0) & (length > 0), moved / length, old))

    def flops(self, length: int) -> Flops:
        """Pairs in windows, and, forward only, products of q (and of a separate k) with N centroids."""
        codes = self.spec.heads * (1 if self.spec.causal else 2) * 2.0 * self.spec.head_dim * self.buckets
        work = self.spec.workload(length)
        chunk = self.config.chunk
        band = self.config.window == "band"
        keys = work.band(chunk, shared_codes=False) if band else work.clusters(self.buckets, chunk)
        return self.band_flops(keys, length) + Flops(codes)
