"""The sketch and the keys chosen from it, by the implementation that suits the device.

B batch, H heads, L length, Lq queries, d width of the sketch, K keys a query chooses.
"""

from types import ModuleType

import torch
from torch import Tensor

from megasparse.ops.autocast import without_autocast
from megasparse.ops.backend import MOST_PAIRS, implementation
from megasparse.ops.sketch import blockwise, reference
from megasparse.ops.sketch.draws import Noise
from megasparse.ops.sketch.specification import KeyChoiceSpec

WIDEST = 16
"""The largest d that the kernels take: a thread keeps all coordinates of its rows in registers."""


@without_autocast
def sketched_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, key_mask: Tensor | None = None, segments: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute h_i = Σ_j α_ij v_j with α_ij = exp(q_i·k_j/√d − lse_i), one head (Smart Bird Eq. 1).

    q, k, v: (B, L, d). key_mask: (B, L) bool, true for real tokens. segments: (B, L) document numbers.
    Returns h (B, L, d) and lse (B, L), the log of the sum, in fp32 at least; padding gets 0 and −∞.
    """
    h, lse = _module(q).sketched_attention(q, k, v, causal=causal, key_mask=key_mask, segments=segments)
    return h, lse


@without_autocast
@torch.no_grad()
def chosen_keys(
    q: Tensor,
    k: Tensor,
    spec: KeyChoiceSpec,
    noise: Noise | None,
    lse: Tensor | None = None,
    key_mask: Tensor | None = None,
    segments: Tensor | None = None,
    first_query: int = 0,
) -> Tensor:
    """The K visible keys of the highest score s_ij = u_ij·p_ij in each row (Smart Bird Eq. 2 and 3), best first.

    q: (B, Lq, d), the queries from position `first_query` on. k: (B, Lk, d). lse: that of `sketched_attention`, which
    only the inverse logarithms need. p_ij: a function of α_ij, by spec.sampling.
    noise: u is uniform in (0, 1), a function of (key, global head, global sample, i, j). None is u = 1 for all heads: p
    increases with α whatever its kind, so the products q·k/√d rank the keys by themselves. They are first rounded to
    multiples of 1/256: weights within 0.4 % of each other tie, so that keys that differ by rounding alone (the same
    token seen in the same company) go by position however q and k were computed, in decoding as in the whole pass.
    α = 1 is p = ∞: that key is chosen whatever u is, the limit of α → 1. Of equal scores the smaller position wins.
    Returns (B, H, Lq, K) int32, H = 1 without noise; −1 where fewer than K keys are visible.
    """
    # The kernels take q and k in float64 too.
    module = _module(q.float(), 1 if noise is None else len(noise.heads))
    index: Tensor = module.chosen_keys(q, k, spec, noise, lse, key_mask, segments, first_query)
    return index


@without_autocast
@torch.no_grad()
def exact_projection(x: Tensor, weight: Tensor) -> Tensor:
    """Compute x·Wᵀ of x (B, L, E) and weight (d, E) in float64, (B, L, d): every row by itself, so that equal tokens
    tie, and go by their position, however many are projected at a time. Decoding would else choose others of them than
    the whole pass.
    """
    floats = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    if len(weight) <= WIDEST and implementation(x, floats, largest_width=None) == "triton":
        from megasparse.ops.sketch import gpu

        return gpu.exact_projection(x, weight)
    return blockwise.exact_projection(x, weight)


def _module(q: Tensor, heads: int = 1) -> ModuleType:
    name = implementation(q, largest_width=WIDEST, most_rows=MOST_PAIRS // heads)
    if name == "triton":
        from megasparse.ops.sketch import gpu

        return gpu
    return blockwise if name == "blockwise" else reference
