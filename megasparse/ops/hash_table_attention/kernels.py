"""Device code of YOSO attention: sums over runs of sorted tokens, read through windows.

The sources (the tokens that are summed) of a (row, hash) lie sorted by (bucket, position), so a bucket is a run and
what a target (the token that gets the sum) may see of it is a window [first, end) of sorted places. No program works
on a long run alone: a run is cut at the boundaries between spans, each span is summed by its own program, and the
sums of whole spans are joined by `join_spans`.

G rows (a batch element's head), m hashes, S spans, D head dim. Arrays of a (row, hash) come one after another:
buckets and order (G, m, length), first and end (G, m, targets' length).
"""

import triton
import triton.language as tl

from megasparse.ops.kernels import dot


@triton.jit
def _rows(x, row, valid, columns, D: tl.constexpr):
    """Rows (n) of x (..., D), 0 where not valid."""
    return tl.load(x + row[:, None] * D + columns[None, :], mask=valid[:, None] & (columns < D)[None, :], other=0.0)


@triton.jit
def _store_rows(x, row, valid, columns, value, ADD: tl.constexpr, D: tl.constexpr):
    """Rows (n) of x (..., D) = value, or what they are and value."""
    places, mask = x + row[:, None] * D + columns[None, :], valid[:, None] & (columns < D)[None, :]
    if ADD:
        value += tl.load(places, mask=mask, other=0.0)
    tl.store(places, value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def sum_runs(
    values, order, buckets, sums, tails, hashes, length, spans,
    D: tl.constexpr, WIDTH: tl.constexpr, SPAN: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute sums (G, m, length, D): for each sorted place, Σ values of its run from the later of the run's beginning
    and the span's up to and including it. tails (G, m, S, D): those of each span's last place.
    """
    program = tl.program_id(0)
    span, which = program % spans, (program // spans).to(tl.int64)
    row, base = which // hashes, which * length
    step, columns = tl.arange(0, TILE), tl.arange(0, WIDTH)
    carried = tl.zeros([WIDTH], tl.float32)
    stop = tl.minimum((span + 1) * SPAN, length)
    for begin in range(span * SPAN, stop, TILE):
        place = begin + step
        bucket = tl.load(buckets + base + place, mask=place < stop, other=0)
        before = tl.load(buckets + base + tl.maximum(place - 1, 0), mask=place < stop, other=0)
        run = tl.cumsum((bucket != before).to(tl.int32), axis=0)  # 0: the last one of the tile before
        token = row * length + tl.load(order + base + place, mask=place < stop, other=0)
        value = _rows(values, token, place < stop, columns, D)
        earlier = (run[:, None] == run[None, :]) & (step[:, None] >= step[None, :])
        total = dot(tl.where(earlier, 1.0, 0.0).to(value.dtype), value, PRECISION)
        total += tl.where((run == 0)[:, None], carried[None, :], 0.0)
        here = (place < stop)[:, None] & (columns < D)[None, :]
        places = sums + (base + place)[:, None] * D + columns[None, :]
        tl.store(places, total.to(sums.dtype.element_ty), mask=here)
        last = tl.minimum(begin + TILE, stop) - 1
        carried = tl.sum(tl.where((place == last)[:, None], total, 0.0), axis=0)
    tl.store(tails + (which * spans + span) * D + columns, carried, mask=columns < D)


@triton.jit
def join_spans(
    tails, buckets, length, spans, segments, parts, wide,
    SPAN: tl.constexpr, SEGMENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Join tails (G, m, S, wide), in place: to each span's tail those of the spans before that end in the same run.

    A program adds along the runs that end their first span in its segment of spans, to their very end.
    """
    program = tl.program_id(0)
    part, segment, which = program % parts, program // parts % segments, (program // parts // segments).to(tl.int64)
    columns = part * BLOCK + tl.arange(0, BLOCK)
    inside = columns < wide
    base = which * length
    span = segment * SEGMENT
    stop = tl.minimum(span + SEGMENT, spans)
    before = tl.load(buckets + base + tl.maximum(span * SPAN - 1, 0))
    mine = stop < 0  # no run yet
    running = tl.zeros([BLOCK], tl.float32)
    while span < spans:
        bucket = tl.load(buckets + base + tl.minimum((span + 1) * SPAN, length) - 1)
        joins = (span > 0) & (bucket == before)
        mine = (mine & joins) | ((joins == 0) & (span < stop))
        tail = tails + (which * spans + span) * wide + columns
        running = tl.where(joins, running, 0.0) + tl.load(tail, mask=inside & mine, other=0.0)
        tl.store(tail, running.to(tails.dtype.element_ty), mask=inside & mine & joins)
        before = bucket
        span = tl.where(mine | (span + 1 < stop), span + 1, spans)


@triton.jit
def find_windows(
    wanted, buckets, order, first, end, targets, length, blocks, steps,
    CAUSAL: tl.constexpr, REVERSED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find first, end (G, m, targets): where the sources of a target's bucket begin, and where those that it may see
    end.

    wanted: (G, m, targets) buckets, in order of position. CAUSAL: only sources at or before it. REVERSED: sources lie
    in reverse, and causal are those at or after it. steps: halvings, for length + 1 outcomes.
    """
    program = tl.program_id(0)
    which = (program // blocks).to(tl.int64)
    base = which * length
    target = program % blocks * BLOCK + tl.arange(0, BLOCK)
    here = target < targets
    bucket = tl.load(wanted + which * targets + target, mask=here, other=0)
    low, high = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32) + tl.where(here, length, 0)
    for _ in range(steps):
        middle, searching = (low + high) // 2, low < high
        found = tl.load(buckets + base + middle, mask=searching, other=0)
        below = searching & ((found > bucket) if REVERSED else (found < bucket))
        low, high = tl.where(below, middle + 1, low), tl.where(searching & (below == 0), middle, high)
    tl.store(first + which * targets + target, low, mask=here)
    high = tl.where(here, length, low)
    for _ in range(steps):
        middle, searching = (low + high) // 2, low < high
        seen = searching & (tl.load(buckets + base + middle, mask=searching, other=0) == bucket)
        if CAUSAL:
            position = tl.load(order + base + middle, mask=searching, other=0)
            seen = seen & ((position >= target) if REVERSED else (position <= target))
        low, high = tl.where(seen, middle + 1, low), tl.where(searching & (seen == 0), middle, high)
    tl.store(end + which * targets + target, low, mask=here)


@triton.jit
def read_sums(
    sums, tails, first, end, out, met, scale, met_scale, hashes, targets, length, spans, blocks,
    D: tl.constexpr, WIDTH: tl.constexpr, SPAN: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store (ADD: add) in out (G, targets, D) scale·Σ_h of the target's window: its last place's sum, and the tail of
    the span before where the run began there; in met (G, targets), or None, met_scale·Σ_h of the window's length.
    """
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    target, columns = program % blocks * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    here = target < targets
    total, many = tl.zeros([BLOCK, WIDTH], tl.float32), tl.zeros([BLOCK], tl.int32)
    for number in range(hashes):
        which = row * hashes + number
        begin = tl.load(first + which * targets + target, mask=here, other=0)
        last = tl.load(end + which * targets + target, mask=here, other=0) - 1
        span = last // SPAN
        many += last + 1 - begin
        total += _rows(sums, which * length + last, last >= begin, columns, D).to(tl.float32)
        total += _rows(tails, which * spans + span - 1, (last >= begin) & (begin < span * SPAN), columns, D)
    _store_rows(out, row * targets + target, here, columns, scale * total, ADD, D)
    if met is not None:
        count = met_scale * many.to(tl.float32)
        if ADD:
            count += tl.load(met + row * targets + target, mask=here, other=0.0)
        tl.store(met + row * targets + target, count, mask=here)


@triton.jit
def sum_products(
    left, right, order, buckets, products, hashes, length, spans, parts,
    D: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, SPAN: tl.constexpr, TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute products (G, m, S, D, D): Σ left_j·right_jᵀ over a span's sources in its last one's bucket."""
    program = tl.program_id(0)
    part, span, which = program % parts, program // parts % spans, (program // parts // spans).to(tl.int64)
    row, base = which // hashes, which * length
    step, rows = tl.arange(0, TILE), tl.arange(0, WIDTH)
    columns = part * COLUMNS + tl.arange(0, COLUMNS)
    stop = tl.minimum((span + 1) * SPAN, length)
    mine = tl.load(buckets + base + stop - 1)
    total = tl.zeros([WIDTH, COLUMNS], tl.float32)
    for begin in range(span * SPAN, stop, TILE):
        if tl.load(buckets + base + tl.minimum(begin + TILE, stop) - 1) == mine:
            place = begin + step
            here = (place < stop) & (tl.load(buckets + base + place, mask=place < stop, other=0) == mine)
            token = row * length + tl.load(order + base + place, mask=here, other=0)
            a, b = _rows(left, token, here, rows, D), _rows(right, token, here, columns, D)
            total += dot(tl.trans(a), b, PRECISION)
    place = (which * spans + span) * D * D + rows[:, None] * D + columns[None, :]
    valid = (rows < D)[:, None] & (columns < D)[None, :]
    tl.store(products + place, total.to(products.dtype.element_ty), mask=valid)


@triton.jit
def weighted_sums(
    target_left, target_order, first, end, left, right, order, products, out,
    hashes, targets, length, spans, blocks, parts,
    D: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute out (G, m, targets, D): Σ_j (target_left_i·left_j)·right_j over the target's window in each hash.

    A program has a block of targets in order of their own buckets, so their windows lie together. What of a window
    lies before its last boundary between spans is in `products`; the rest, less than a span, goes pair by pair.
    """
    program = tl.program_id(0)
    part, block, which = program % parts, program // parts % blocks, (program // parts // blocks).to(tl.int64)
    row = which // hashes
    base, columns = which * length, part * COLUMNS + tl.arange(0, COLUMNS)
    place = block * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(target_order + which * targets + place, mask=place < targets, other=0)
    begin = tl.load(first + which * targets + target, mask=place < targets, other=0)
    close = tl.load(end + which * targets + target, mask=place < targets, other=0)
    total = tl.zeros([BLOCK, COLUMNS], tl.float32)

    span = close // SPAN
    whole = (begin < span * SPAN) & (begin < close)
    begin = tl.where(whole, span * SPAN, begin)
    at = tl.min(tl.where(begin < close, begin, length), axis=0)
    while at < length:
        source = at + tl.arange(0, TILE)
        token = row * length + tl.load(order + base + source, mask=source < length, other=0)
        weight = tl.zeros([BLOCK, TILE], tl.float32)
        for start in range(0, WIDTH, DEPTH):
            some = start + tl.arange(0, DEPTH)
            a = _rows(target_left, row * targets + target, place < targets, some, D)
            weight += dot(a, tl.trans(_rows(left, token, source < length, some, D)), PRECISION)
        seen = (source[None, :] >= begin[:, None]) & (source[None, :] < close[:, None])
        b = _rows(right, token, source < length, columns, D)
        total += dot(tl.where(seen, weight, 0.0).to(b.dtype), b, PRECISION)
        at += TILE
        # Past the sources that nobody of this block sees
        at = tl.min(tl.where(at < close, tl.maximum(begin, at), length), axis=0)

    boundary = tl.min(tl.where(whole, span, spans + 1), axis=0)
    while boundary <= spans:
        for start in range(0, WIDTH, DEPTH):
            some = start + tl.arange(0, DEPTH)
            a = _rows(target_left, row * targets + target, whole & (span == boundary), some, D)
            b = _rows(products, (which * spans + boundary - 1) * D + some, some < D, columns, D)
            if a.dtype != tl.float32:  # sums of a long run may leave the range of fp16
                a, b = a.to(tl.bfloat16), b.to(tl.bfloat16)
            total += dot(a, b, PRECISION)
        boundary = tl.min(tl.where(whole & (span > boundary), span, spans + 1), axis=0)

    _store_rows(out, which * targets + target, place < targets, columns, total, False, D)


@triton.jit
def add_hashes(
    own, out, scale, hashes, targets, blocks,
    D: tl.constexpr, WIDTH: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store (ADD: add) in out (G, targets, D) scale·Σ_h own (G, m, targets, D)."""
    program = tl.program_id(0)
    row, columns = (program // blocks).to(tl.int64), tl.arange(0, WIDTH)
    target = program % blocks * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK, WIDTH], tl.float32)
    for number in range(hashes):
        total += _rows(own, (row * hashes + number) * targets + target, target < targets, columns, D).to(tl.float32)
    _store_rows(out, row * targets + target, target < targets, columns, scale * total, ADD, D)
