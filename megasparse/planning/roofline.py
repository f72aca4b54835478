"""The least time that a GPU could take for an attention mechanism: by its arithmetic, and by what it must move.

H heads, L length, D head dim, E width of the layer's input, R rounds, M window, N buckets, m hashes, τ code bits,
K keys, d width of the sketch, s bytes of a number in the model's dtype.

A token's share is counted, of all heads of a layer. `row` is H·D·s bytes, a vector of every head; `number` is 4·H, a
token's place or softmax statistic of every head, `code` 2·H, its bucket. Each input is read once in every round that
gathers it, each output written once, everything else stays on the chip; pairs are those that see each other, in buckets
filled equally. A kernel that recomputes, pads or reads again therefore falls short, by what these cost it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megasparse.attention.full import FullAttention
from megasparse.attention.heads import build_mechanism
from megasparse.attention.yoso import YOSOAttention
from megasparse.config.buckets import lsh_buckets
from megasparse.config.schema import ModelConfig
from megasparse.planning.flops import (
    ATTENTION,
    Layer,
    Passes,
    lha_hashing,
    lha_window,
    lsh_hashing,
    lsh_window,
    sketching,
)
from megasparse.training.reporting.monitor import PEAK_TFLOPS


@dataclass(frozen=True)
class Peaks:
    """Of one device: dense FLOP/s in half precision and in IEEE fp32, bytes/s of its memory."""

    half: float
    single: float
    bandwidth: float

    def seconds(self, flops: float, moved: float, dtype: torch.dtype) -> float:
        peak = self.half if dtype in (torch.bfloat16, torch.float16) else self.single
        return max(flops / peak, moved / self.bandwidth)


PEAKS = {
    "A100-SXM4-80GB": Peaks(PEAK_TFLOPS["A100"] * 1e12, 19.5e12, 2.04e12),
    "H100 80GB HBM3": Peaks(PEAK_TFLOPS["H100"] * 1e12, 67e12, 3.35e12),
    "H200": Peaks(PEAK_TFLOPS["H200"] * 1e12, 67e12, 4.8e12),
}
"""By a part of the name that torch.cuda.get_device_name gives; NVIDIA's data sheets of the SXM modules."""


def peaks_of(device_name: str) -> Peaks | None:
    return next((peaks for part, peaks in PEAKS.items() if part in device_name), None)


@dataclass(frozen=True)
class Work:
    """Of one operator, a token: FLOPs, and bytes moved."""

    flops: Passes
    moved: Passes


def layer_of(kind: str, model: ModelConfig, length: int) -> Layer:
    """All heads of a layer with this mechanism."""
    with torch.device("meta"):
        return Layer(model, build_mechanism(kind, model, model.heads), model.heads, length)


def least_seconds(kind: str, layer: Layer, batch: int, dtype: torch.dtype, peaks: Peaks) -> Passes:
    """Least time of a layer's attention of `batch` sequences, without its projections, in each pass: the larger of
    FLOPs/peak and bytes/bandwidth.
    """
    parts = operators(kind, layer, dtype.itemsize).values()
    tokens = batch * layer.length
    return Passes(
        *(
            peaks.seconds(
                tokens * sum(getattr(part.flops, direction) for part in parts),
                tokens * sum(getattr(part.moved, direction) for part in parts),
                dtype,
            )
            for direction in ("forward", "backward")
        )
    )


def operators(kind: str, layer: Layer, size: int) -> dict[str, Work]:
    """Each operator of a mechanism by its name; size: s. KeyError for a mechanism that has no kernels."""
    return OPERATORS["full" if isinstance(layer.mechanism, FullAttention) else kind](layer, _Sizes(layer, size))


@dataclass(frozen=True)
class _Sizes:
    layer: Layer
    size: int

    @property
    def row(self) -> float:
        return float(self.layer.heads * self.layer.head_dim * self.size)

    @property
    def number(self) -> float:
        return 4.0 * self.layer.heads

    @property
    def code(self) -> float:
        return 2.0 * self.layer.heads

    def softmax(self, rounds: int, ordered: bool) -> Passes:
        """Forward: in each round q, k, v and, where it has one, their order; out and log-sum-exp once. Backward: in
        each round dout too; log-sum-exp, and out for out·dout, once; dq, dk, dv.
        """
        order = self.number if ordered else 0.0
        once = self.row + self.number
        return Passes(rounds * (3 * self.row + order) + once, rounds * (4 * self.row + order) + once + 3 * self.row)

    def sort(self, orders: int) -> Work:
        """Codes to an order of tokens."""
        return Work(Passes(), Passes(orders * (self.code + self.number)))


def _whole(kind: str) -> Callable[[Layer, _Sizes], dict[str, Work]]:
    """One operator that computes all of a mechanism, in the order that the tokens have."""
    return lambda layer, sizes: {"attention": Work(ATTENTION[kind](layer), sizes.softmax(1, ordered=False))}


def _lsh(layer: Layer, sizes: _Sizes) -> dict[str, Work]:
    """A query sees the keys of its window that are in its bucket, one of N that are filled equally."""
    lsh = layer.config.lsh
    buckets = math.prod(lsh_buckets(lsh, layer.model.max_length))
    hashed = 1 if lsh.shared_qk else 2
    keys = min(lsh_window(layer), max(1.0, layer.visible / buckets))
    return {
        "hashing": Work(lsh_hashing(layer), Passes(hashed * (sizes.row + lsh.rounds * sizes.code))),
        "sort": sizes.sort(hashed * lsh.rounds),
        "attention": Work(layer.pairs(keys) * lsh.rounds, sizes.softmax(lsh.rounds, ordered=True)),
    }


def _lha(layer: Layer, sizes: _Sizes) -> dict[str, Work]:
    """As LSH in one round. The hash functions read q and k, and what they learn reads both again."""
    lha = layer.config.lha
    learned = 1 if lha.hash == "random" else 2
    hashed = 1 if layer.causal else 2
    keys = min(lha_window(layer), max(1.0, layer.visible * lha.chunk / layer.model.max_length))
    return {
        "hashing": Work(lha_hashing(layer), Passes(learned * 2 * sizes.row + hashed * sizes.code)),
        "sort": sizes.sort(hashed),
        "attention": Work(layer.pairs(keys), sizes.softmax(1, ordered=True)),
    }


def _yoso(layer: Layer, sizes: _Sizes) -> dict[str, Work]:
    """Codes of q and k, m of each. Then for each hash v, and in the backward q, k, v and dout, with both codes; tables
    of 2^τ·D sums written once; out, and in the backward out, dq, dk and dv.
    """
    yoso, row, code = layer.config.yoso, sizes.row, sizes.code
    if yoso.expectation:
        return _whole("yoso")(layer, sizes)
    assert isinstance(layer.mechanism, YOSOAttention)
    table = 2.0**layer.mechanism.code_bits * layer.head_dim * sizes.number / layer.length
    hashes = Passes(row + 2 * code + table, 4 * row + 2 * code + table) * yoso.hashes
    codes = Passes(2 * row + 2 * yoso.hashes * code)
    return {"attention": Work(ATTENTION["yoso"](layer), hashes + codes + Passes(row, 4 * row))}


def _smart_bird(layer: Layer, sizes: _Sizes) -> dict[str, Work]:
    """The sketch reads the layer's input, in the backward again, and writes K numbers a query and head. K keys and
    values are gathered, q read and out written; in the backward also q and dout of as many queries a key.
    """
    bird, row, number = layer.config.smart_bird, sizes.row, sizes.number
    keys = min(bird.keys, layer.visible)
    index, read = keys * number, (layer.model.d_model + 6.0 * bird.sketch_dim) * sizes.size
    gather = Passes(2 * keys * row + 2 * row + index + number, 4 * keys * row + 6 * row + 2 * index + number)
    return {
        "sketch": Work(sketching(layer), Passes(read + index, read)),
        "gather": Work(layer.pairs(bird.keys), gather),
    }


OPERATORS: dict[str, Callable[[Layer, _Sizes], dict[str, Work]]] = {
    "full": _whole("full"),
    "local": _whole("local"),
    "lsh": _lsh,
    "lha": _lha,
    "yoso": _yoso,
    "smart_bird": _smart_bird,
}
"""Mechanisms that have kernels, or torch's."""
