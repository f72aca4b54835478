"""Unit keys and their gradient on the device. B batch, H heads, L length, D head dim."""

import triton
import triton.language as tl

from megasparse.ops.kernels import load_rows, store_rows


@triton.jit
def _tokens(heads, length, blocks, TOKENS: tl.constexpr):
    """A program's batch element, head and tokens, and which of these there are."""
    row = tl.program_id(0) // blocks
    token = tl.program_id(0) % blocks * TOKENS + tl.arange(0, TOKENS)
    return (row // heads).to(tl.int64), (row % heads).to(tl.int64), token, token < length


@triton.jit
def _lengths(x, shortest):
    """|x| of each row (n, 1), and the divisor max(|x|, shortest)."""
    length = tl.sqrt(tl.sum(x * x, 1))[:, None]
    return length, tl.maximum(length, shortest)


@triton.jit
def _over(x, divisor):
    """x / divisor, 0 where that is 0."""
    return tl.where(divisor > 0, x / tl.where(divisor > 0, divisor, 1.0), 0.0)


@triton.jit
def unit(
    q, k, q_batch, q_head, q_stride, k_batch, k_head, k_stride, heads, length, blocks, shortest, D: tl.constexpr,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Compute k = q / max(|q|, shortest), of a zero vector 0."""
    batch, head, token, inside = _tokens(heads, length, blocks, TOKENS)
    x = load_rows(q + batch * q_batch + head * q_head, token, inside, q_stride, D, WIDTH).to(tl.float32)
    _, divisor = _lengths(x, shortest)
    store_rows(k + batch * k_batch + head * k_head, token, _over(x, divisor), inside, k_stride, D, WIDTH)


@triton.jit
def unit_gradient(
    q, grad_q, grad_k, dq, q_batch, q_head, q_stride, gq_batch, gq_head, gq_stride, gk_batch, gk_head, gk_stride,
    dq_batch, dq_head, dq_stride, heads, length, blocks, shortest, D: tl.constexpr, WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Compute dq = grad_q + (grad_k − u·(u·grad_k)) / |q| with u = q/|q|; grad_k/shortest for shorter queries, and 0 of
    a zero vector where shortest is 0. grad_q: None for 0.
    """
    batch, head, token, inside = _tokens(heads, length, blocks, TOKENS)
    x = load_rows(q + batch * q_batch + head * q_head, token, inside, q_stride, D, WIDTH).to(tl.float32)
    grad = load_rows(grad_k + batch * gk_batch + head * gk_head, token, inside, gk_stride, D, WIDTH).to(tl.float32)
    found, divisor = _lengths(x, shortest)
    u = _over(x, divisor)
    along = tl.where(found >= shortest, tl.sum(u * grad, 1)[:, None], 0.0)
    total = _over(grad - u * along, divisor)
    if grad_q is not None:
        total += load_rows(grad_q + batch * gq_batch + head * gq_head, token, inside, gq_stride, D, WIDTH).to(
            tl.float32
        )
    store_rows(dq + batch * dq_batch + head * dq_head, token, total, inside, dq_stride, D, WIDTH)
