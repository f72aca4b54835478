"""Checks of assumptions behind strict causality: which sums on a GPU depend on the positions of their terms, and which
outputs of attention change when later tokens change.

B batch, H heads, L length, D head dim.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import torch
import triton
import triton.language as tl
from torch import Tensor

from megasparse.ops.bucketed_attention import BucketedAttentionSpec, Window, bucketed_attention
from megasparse.ops.kernels import dot, launch
from tools.bench.jobs import Report
from tools.bench.operators import Outputs, Problem, implementation


@triton.jit
def _products(a, b, out, TILES: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute out (n, D) = a·b for fp32 a (n, 128·TILES), which is passed in registers like probabilities, and b."""
    row, k, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, 128), tl.arange(0, D)
    total = tl.zeros([ROWS, D], tl.float32)
    for tile in range(TILES):
        x = tl.load(a + row[:, None] * (128 * TILES) + tile * 128 + k[None, :])
        y = tl.load(b + (tile * 128 + k[:, None]) * D + d[None, :])
        total += dot(x.to(b.dtype.element_ty), y, PRECISION)
    tl.store(out + row[:, None] * D + d[None, :], total)


@triton.jit
def _sums(x, out, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    row, k = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, 128)
    tl.store(out + row, tl.sum(tl.load(x + row[:, None] * 128 + k[None, :]), 1))


@triton.jit
def _powers(x, out, NUMBERS: tl.constexpr):  # type: ignore[no-untyped-def]
    position = tl.program_id(0) * NUMBERS + tl.arange(0, NUMBERS)
    tl.store(out + position, tl.exp2(tl.load(x + position)))


def powers(x: Tensor) -> Tensor:
    """Return 2^x, computed by a kernel; the number of elements must be a multiple of 128."""
    out = torch.empty_like(x)
    launch(_powers, (len(x) // 128,), x=x, out=out, NUMBERS=128, num_warps=4)
    return out


Product = Callable[[Tensor, Tensor], Tensor]


def product_by(dtype: torch.dtype, precision: str, rows: int) -> Product:
    """Return products by tl.dot with tiles of `rows` by 128, which use wgmma on Hopper in half precision (64 rows)."""

    def product(a: Tensor, b: Tensor) -> Tensor:
        out = torch.empty(len(a), 64, device=a.device)
        settings = {"TILES": a.shape[1] // 128, "ROWS": rows, "D": 64, "PRECISION": precision}
        launch(_products, (len(a) // rows,), a=a, b=b.to(dtype), out=out, **settings, num_warps=4)
        return out

    return product


def product_by_cublas(dtype: torch.dtype) -> Product:
    def product(a: Tensor, b: Tensor) -> Tensor:
        return torch.bmm(a.to(dtype).unflatten(0, (-1, 64)), b.to(dtype).expand(len(a) // 64, -1, -1)).flatten(0, 1)

    return product


PRODUCTS: dict[str, tuple[Product, int]] = {
    f"tl.dot {name}, {rows} rows": (product_by(dtype, precision, rows), 128)
    for name, dtype, precision in (
        ("bf16", torch.bfloat16, "ieee"), ("fp16", torch.float16, "ieee"), ("tf32", torch.float32, "tf32"),
        ("fp32", torch.float32, "ieee"),
    )
    for rows in (64, 16)
} | {
    f"bmm {name}": (product_by_cublas(dtype), 192)
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32))
}  # fmt: skip
"""Name -> product and number of terms per sum."""


def order_facts(product: Product, terms: int, device: torch.device, rows: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield (change, result, result after the change); they are equal if sums do not depend on the change."""

    def numbers(*shape: int) -> Tensor:
        if device.type == "meta":
            return torch.empty(shape, device=device)
        exponent = torch.randint(-12, 13, shape, device=device).float()
        return torch.randn(shape, device=device) * torch.exp2(exponent)

    def moved(x: Tensor, source: Tensor) -> Tensor:
        return x.index_select(-1, source)

    a, b, k = numbers(rows, terms), numbers(terms, 64), torch.arange(terms, device=device)
    plain = product(a, b)
    fixed = torch.arange(rows, device=device) % 16 == 0
    mixed = torch.where(fixed[:, None], a, numbers(rows, terms))
    yield "other rows", plain[::16], product(mixed, b)[::16]
    for shift in (1, 8, 37):
        yield f"place of the row, {shift} later", plain, product(a.roll(shift, 0), b).roll(-shift, 0)
    for size in (4, 8, 16, 32):
        order = torch.stack([size * g + torch.randperm(size) for g in range(terms // size)]).flatten().to(device)
        yield f"order inside aligned {size}s", plain, product(moved(a, order), b[order])
    groups = torch.randperm(terms // 16).repeat_interleave(16) * 16 + torch.arange(16).repeat(terms // 16)
    yield "order of aligned 16s", plain, product(moved(a, groups.to(device)), b[groups.to(device)])
    for size, shift in ((16, 16), (16, 48), (8, 8), (8, 16), (16, 8), (16, 1), (8, 1)):
        some = a.masked_fill(k >= size, 0.0)
        fact = f"{size} terms, zeros elsewhere, {shift} later"
        yield fact, product(some, b), product(some.roll(shift, 1), b.roll(shift, 0))
    first, second = a.masked_fill(k >= 16, 0.0), a.masked_fill((k < 16) | (k >= 32), 0.0)
    both = product(first + second, b)
    moved_rows = torch.cat([b[:48], b[16:32], b[64:]])
    yield "two 16s, the second 32 later", both, product(first + second.roll(32, 1), moved_rows)
    if terms == 128:
        zeros, other = torch.zeros_like(a), numbers(terms, 64)
        yield "two 16s, the second in the next tile", both, product(torch.cat([first, second], 1), torch.cat([b, b]))
        yield "a tile of zeros after", plain, product(torch.cat([a, zeros], 1), torch.cat([b, other]))
        yield "a tile of zeros before", plain, product(torch.cat([zeros, a], 1), torch.cat([other, b]))


def order_rows(device: torch.device, rows: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the name of a check and two results, for every product, for sums, and for powers of two."""
    torch.backends.cuda.matmul.allow_tf32 = False
    for name, (product, terms) in PRODUCTS.items():
        for fact, one, other in order_facts(product, terms, device, rows):
            yield f"{name}: {fact}", one, other
    x = torch.empty(rows, 128, device=device).normal_()
    some = torch.cat([x[:, :16], torch.zeros_like(x[:, 16:])], 1)
    for tile in (64, 16):

        def sums(x: Tensor, tile: int = tile) -> Tensor:
            out = torch.empty(len(x), device=device)
            launch(_sums, (len(x) // tile,), x=x, out=out, ROWS=tile, num_warps=4)
            return out

        yield f"tl.sum, {tile} rows: place of the row", sums(x), sums(x.roll(5, 0)).roll(-5, 0)
        yield f"tl.sum, {tile} rows: aligned 16s rotated", sums(x), sums(x.roll(16, 1))
        for shift in (16, 5):
            fact = f"16 terms, zeros elsewhere, {shift} later"
            yield f"tl.sum, {tile} rows: {fact}", sums(some), sums(some.roll(shift, 1))
    steps = torch.arange(-126, 130, device=device).clamp_max(127).float()
    yield "exp2 of an integer is a power of two", powers(steps), torch.ldexp(torch.ones_like(steps), steps.int())
    fraction = torch.arange(-(1 << 12), 0, device=device) / (1 << 12)  # exact, and so is its sum with an integer
    yield "exp2(f − 8) = exp2(f)·2^−8", powers(fraction - 8), powers(fraction) / 256


def order(report: Report, device: torch.device, rows: int) -> None:
    """Report which sums depend on the positions of their terms, by the number of results that change."""
    report.quiet = True  # two hundred rows
    for name, one, other in order_rows(device, rows):
        report.add(name, {"changed": int((one != other).sum()), "of": one.numel()})


CAUSAL: dict[str, tuple[int, BucketedAttentionSpec]] = {
    "lsh": (64, BucketedAttentionSpec(Window("band", 128), True, 0.125)),
    "lha": (64, BucketedAttentionSpec(Window("band", 128), True, 0.125, exclude_self=False)),
    "n-grams": (4, BucketedAttentionSpec(Window("band", 63), True, 0.125, self_at_last=False)),
    "local": (0, BucketedAttentionSpec(Window("chunk", 128), True, 0.125, exclude_self=False)),
}
"""Mechanism -> tokens per bucket (0: no buckets), and settings."""


def causal_rows(
    device: torch.device, length: int, dim: int, places: Sequence[int]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the name of a mechanism and its outputs before a position, without and with changes from there on."""
    problem = Problem(length, dim, device)

    def outputs(name: str, heads: Sequence[Tensor], codes: Tensor | None) -> Outputs:
        buckets = (codes, codes.flip(2)) if name == "lha" and codes is not None else codes
        with implementation("triton"):
            return bucketed_attention(heads[0], heads[1], heads[2], buckets, CAUSAL[name][1])

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        heads = [x.to(dtype) for x in problem.heads()]
        for name, (tokens, _) in CAUSAL.items():
            rounds = 1 if name == "n-grams" else 2
            codes = problem.integers(max(2, length // tokens), 1, 2, rounds, length).short() if tokens else None
            before = outputs(name, heads, codes)
            for t in places:
                late = torch.arange(length, device=device) >= t
                mixed = [torch.where(late[:, None], 1.7 * x.flip(2), x) for x in heads]
                after = outputs(name, mixed, None if codes is None else torch.where(late, codes.flip(3), codes))
                for x, y in zip(before, after, strict=True):
                    yield f"{name}, {str(dtype).removeprefix('torch.')}", x[:, :, :t], y[:, :, :t]


def causal(report: Report, device: torch.device, length: int, dim: int, places: Sequence[int]) -> None:
    """Report the number and size of changes in outputs when queries, keys, values and codes of later tokens change."""
    for name, pairs in groupby(causal_rows(device, length, dim, places), lambda row: row[0]):
        changed, numbers, largest = 0, 0, 0.0
        for _, x, y in pairs:
            difference = torch.where(x == y, 0.0, (x - y).abs().float())
            changed, numbers = changed + int((x != y).sum()), numbers + x.numel()
            largest = max(largest, float(difference.max()))
        report.add(name, {"changed": changed, "of": numbers, "largest": largest})
