"""Layer normalisation and its gradients on the device, and RMS normalisation: neither centred nor with a bias. A
program holds whole rows of E = `width` numbers, in fp32.
"""

import triton
import triton.language as tl


@triton.jit
def _normalised(x, inside, width, eps, CENTRED: tl.constexpr):
    """(x − mean)/√(variance + eps) of a row, 0 outside, and 1/√(variance + eps)."""
    centred = tl.where(inside, x - tl.sum(x, 0) / width, 0.0) if CENTRED else x
    scale = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / width + eps)
    return centred * scale, scale


@triton.jit(do_not_specialize=["eps"])
def norm(x, weight, bias, out, width, eps, CENTRED: tl.constexpr, WIDTH: tl.constexpr):
    columns = tl.arange(0, WIDTH)
    inside = columns < width
    here = tl.program_id(0).to(tl.int64) * width + columns
    row, _ = _normalised(tl.load(x + here, mask=inside, other=0).to(tl.float32), inside, width, eps, CENTRED)
    gain = tl.load(weight + columns, mask=inside, other=0).to(tl.float32)
    result = row * gain
    if CENTRED:
        result += tl.load(bias + columns, mask=inside, other=0).to(tl.float32)
    tl.store(out + here, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["eps", "programs"])
def norm_gradient(x, weight, grad, dx, sums, rows, width, programs, eps, CENTRED: tl.constexpr, WIDTH: tl.constexpr):
    """Compute dx (rows, E), and each program's sums over its rows of the weights' gradients, (programs, 1 or 2, E)."""
    columns = tl.arange(0, WIDTH)
    inside = columns < width
    gain = tl.load(weight + columns, mask=inside, other=0).to(tl.float32)
    to_weight, to_bias = tl.zeros([WIDTH], tl.float32), tl.zeros([WIDTH], tl.float32)
    row = tl.program_id(0)
    while row < rows:
        here = row.to(tl.int64) * width + columns
        unit, scale = _normalised(tl.load(x + here, mask=inside, other=0).to(tl.float32), inside, width, eps, CENTRED)
        slope = tl.load(grad + here, mask=inside, other=0).to(tl.float32)
        to_weight += slope * unit
        to_bias += slope
        slope *= gain
        along = tl.sum(slope * unit, 0) / width
        mean = tl.sum(slope, 0) / width if CENTRED else 0.0
        change = scale * (slope - mean - unit * along)
        tl.store(dx + here, change.to(dx.dtype.element_ty), mask=inside)
        row += programs
    place = sums + tl.program_id(0).to(tl.int64) * (1 + CENTRED) * width + columns
    tl.store(place, to_weight, mask=inside)
    if CENTRED:
        tl.store(place + width, to_bias, mask=inside)
