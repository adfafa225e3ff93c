"""Triton kernels that read gradients once for all facts and for the histogram. Only ``fused.py`` imports them.

**A chunk.** A program reads 32,768 elements of one gradient, so the facts of a gradient have the same bits whichever
gradients are read beside it. One launch reads all gradients of a dtype; a table has their addresses. A launch for each
of thousands of gradients would take the host longer than the reading takes the device.

**Arithmetic.** Each thread adds its elements in float64, so nothing overflows, no square vanishes, and a long sum loses
no digits. The threads' numbers are added once for each chunk. "m2" is the sum of squared distances to the first element
of the chunk, less a correction, so a mean far from zero cancels no digits.

**Histogram.** Triton counts bins by ballots, in a time that grows with the number of bins. So a chunk counts 128 of the
386 bins: those around its largest elements, the lowest bin and the highest bin. Tiles that have other elements, which
are rare, are counted in all bins. See [Note: bins of magnitudes] in magnitudes.py.
"""

# ruff: noqa: SIM108 (Triton takes statements; an `if` on a constant is decided at compile time)

from __future__ import annotations

import triton
import triton.language as tl

_INF = tl.constexpr(0x7F800000)
_SIZE = tl.constexpr(0x7FFFFFFF)
_FACTS = tl.constexpr(8)  # sum, m2, squares, abs, zeros, nonfinite, high, low: the order of `fused.FACTS`


@triton.jit
def _widened(x):
    if x.dtype == tl.bfloat16:  # the bits of a bfloat16 are the upper half of the float32
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def _bins(size, FIRST: tl.constexpr, BINS: tl.constexpr):
    """The bin of each magnitude, whose bits are ``size``."""
    return tl.minimum(tl.maximum((size >> 21) - (FIRST - 1), 0), BINS - 1)


@triton.jit
def _lane_sums(x, DEEP: tl.constexpr, LANES: tl.constexpr):
    return tl.sum(tl.reshape(tl.sum(x, axis=1), [DEEP, LANES]), axis=0)


@triton.jit
def _lane_maxima(x, DEEP: tl.constexpr, LANES: tl.constexpr):
    return tl.max(tl.reshape(tl.max(x, axis=1), [DEEP, LANES]), axis=0)


@triton.jit
def _tile(
    x_ptr, left, pivot, base, sums, counts, extremes, narrow, wide,
    DEEP: tl.constexpr, LANES: tl.constexpr, WIDE: tl.constexpr, MASKED: tl.constexpr,
    COUNTED: tl.constexpr, FIRST: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, DEEP * LANES)[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
    if MASKED:
        x = _widened(tl.load(x_ptr + at, mask=at < left, other=0.0))
    else:
        x = _widened(tl.load(x_ptr + at))
    size = x.to(tl.int32, bitcast=True) & _SIZE
    exact = x.to(tl.float64)
    away = exact - pivot
    high, low = x, -x
    if MASKED:
        away = tl.where(at < left, away, 0.0)
        high = tl.where(at < left, high, -float("inf"))
        low = tl.where(at < left, low, -float("inf"))
    away_sum, away_squares, squares, sizes = sums
    away_sum += _lane_sums(away, DEEP, LANES)
    away_squares += _lane_sums(away * away, DEEP, LANES)
    squares += _lane_sums(exact * exact, DEEP, LANES)
    sizes += _lane_sums(tl.abs(exact), DEEP, LANES)
    # Three counts in one integer: a thread has 256 elements of a chunk at most.
    special = tl.where(size == 0, 1, tl.where(size > _INF, 0x100400, tl.where(size == _INF, 0x400, 0)))
    counts += _lane_sums(special, DEEP, LANES)
    highest, lowest = extremes
    highest = tl.maximum(highest, _lane_maxima(high, DEEP, LANES))
    lowest = tl.maximum(lowest, _lane_maxima(low, DEEP, LANES))
    if COUNTED:
        bins = tl.reshape(_bins(size, FIRST, BINS), [DEEP * LANES * WIDE], can_reorder=True)
        is_inside = (bins > base) & (bins < base + 127)
        is_end = (bins == 0) | (bins == BINS - 1)
        if tl.min((is_inside | is_end).to(tl.int32), axis=0) > 0:
            slots = tl.where(bins == 0, 0, tl.where(bins == BINS - 1, 127, bins - base))
            narrow += tl.histogram(slots, 128)
        else:
            wide += tl.histogram(bins, 512)
    sums = (away_sum, away_squares, squares, sizes)
    return sums, counts, (highest, lowest), narrow, wide


@triton.jit(do_not_specialize=["copies", "rows"])
def read(
    table_ptr, owners_ptr, partials_ptr, counts_ptr, copies, rows,
    DTYPE: tl.constexpr, ALIGNED: tl.constexpr, COUNTED: tl.constexpr, DEEP: tl.constexpr, LANES: tl.constexpr,
    WIDE: tl.constexpr, TILES: tl.constexpr, FIRST: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """The facts of each chunk, and the bins of its magnitudes added to the counts of its gradient's row.

    An entry of the table has the address of a gradient, its size, its first chunk and its row of counts.
    """
    TILE: tl.constexpr = DEEP * LANES * WIDE
    chunk = tl.program_id(0).to(tl.int64)
    entry = table_ptr + tl.load(owners_ptr + chunk) * 4
    begin = (chunk - tl.load(entry + 2)) * (TILE * TILES)
    left = tl.minimum(tl.load(entry + 1) - begin, TILE * TILES).to(tl.int32)
    x_ptr = tl.load(entry).to(tl.pointer_type(DTYPE)) + begin
    if ALIGNED:
        x_ptr = tl.multiple_of(x_ptr, 16)
    first = _widened(tl.load(x_ptr))
    pivot = tl.where((first.to(tl.int32, bitcast=True) & _SIZE) < _INF, first, 0.0).to(tl.float64)
    base = 0
    if COUNTED:
        some = tl.arange(0, LANES)
        size = _widened(tl.load(x_ptr + some, mask=some < left, other=0.0)).to(tl.int32, bitcast=True) & _SIZE
        top = tl.max(_bins(tl.where(size < _INF, size, 0), FIRST, BINS), axis=0)
        top = tl.where(top == 0, 208, top)  # 2**-12, if all are zeros
        base = tl.minimum(tl.maximum(top - 96, 0), BINS - 128)  # 24 octaves below that element, and eight above it
    none = tl.zeros([LANES], tl.float64)
    least = tl.full([LANES], -float("inf"), tl.float32)
    sums, counts, extremes = (none, none, none, none), tl.zeros([LANES], tl.int32), (least, least)
    narrow, wide = tl.zeros([128], tl.int32), tl.zeros([512], tl.int32)
    at = 0
    while at + TILE <= left:
        sums, counts, extremes, narrow, wide = _tile(
            x_ptr + at, TILE, pivot, base, sums, counts, extremes, narrow, wide,
            DEEP, LANES, WIDE, False, COUNTED, FIRST, BINS)  # fmt: skip
        at += TILE
    rest = left - at
    missing = 0
    if rest > 0:
        sums, counts, extremes, narrow, wide = _tile(
            x_ptr + at, rest, pivot, base, sums, counts, extremes, narrow, wide,
            DEEP, LANES, WIDE, True, COUNTED, FIRST, BINS)  # fmt: skip
        missing = TILE - rest  # elements that do not exist were counted as zeros
    away_sum, away_squares, squares, sizes = sums
    highest, lowest = extremes
    away = tl.sum(away_sum, axis=0)
    inside = tl.sum(away_squares, axis=0) - away * away / left
    is_nan = tl.max(counts, axis=0) >= 0x100000
    out = partials_ptr + chunk * _FACTS
    tl.store(out, away + pivot * left)
    tl.store(out + 1, tl.where(inside < 0, 0.0, inside))
    tl.store(out + 2, tl.sum(squares, axis=0))
    tl.store(out + 3, tl.sum(sizes, axis=0))
    tl.store(out + 4, (tl.sum(counts & 0x3FF, axis=0) - missing).to(tl.float64))
    tl.store(out + 5, tl.sum((counts >> 10) & 0x3FF, axis=0).to(tl.float64))
    tl.store(out + 6, tl.where(is_nan, float("nan"), tl.max(highest, axis=0)).to(tl.float64))
    tl.store(out + 7, tl.where(is_nan, float("nan"), tl.max(lowest, axis=0)).to(tl.float64))
    if COUNTED:
        # Integers are added in any order with the same result. Programs use several copies, so that few of them meet.
        row_ptr = counts_ptr + ((chunk % copies) * rows + tl.load(entry + 3)) * BINS
        slots = tl.arange(0, 128)
        bins = tl.where(slots == 0, 0, tl.where(slots == 127, BINS - 1, slots + base))
        narrow -= tl.where(slots == 0, missing, 0)
        tl.atomic_add(row_ptr + bins, narrow.to(tl.int64), mask=narrow != 0, sem="relaxed")
        all_bins = tl.arange(0, 512)
        tl.atomic_add(row_ptr + all_bins, wide.to(tl.int64), mask=(wide != 0) & (all_bins < BINS), sem="relaxed")


@triton.jit(do_not_specialize=["gradients"])
def merge(table_ptr, partials_ptr, out_ptr, gradients, CHUNK: tl.constexpr, LANES: tl.constexpr):
    """The facts of each gradient from those of its chunks: a row for each fact, a column for each gradient."""
    gradient = tl.program_id(0).to(tl.int64)
    entry = table_ptr + gradient * 4
    size, first = tl.load(entry + 1), tl.load(entry + 2)
    chunks = (size + CHUNK - 1) // CHUNK
    lanes = tl.arange(0, LANES)
    none = tl.zeros([LANES], tl.float64)
    least = tl.full([LANES], -float("inf"), tl.float64)
    total, inside, squares, sizes, zeros, nonfinite, nans = none, none, none, none, none, none, none
    highest, lowest = least, least
    begin = 0
    while begin < chunks:
        at = (first + begin + lanes) * _FACTS
        there = begin + lanes < chunks
        total += tl.load(partials_ptr + at, mask=there, other=0.0)
        inside += tl.load(partials_ptr + at + 1, mask=there, other=0.0)
        squares += tl.load(partials_ptr + at + 2, mask=there, other=0.0)
        sizes += tl.load(partials_ptr + at + 3, mask=there, other=0.0)
        zeros += tl.load(partials_ptr + at + 4, mask=there, other=0.0)
        nonfinite += tl.load(partials_ptr + at + 5, mask=there, other=0.0)
        high = tl.load(partials_ptr + at + 6, mask=there, other=-float("inf"))
        nans += tl.where(high != high, 1.0, 0.0)
        highest = tl.maximum(highest, high)
        lowest = tl.maximum(lowest, tl.load(partials_ptr + at + 7, mask=there, other=-float("inf")))
        begin += LANES
    added = tl.sum(total, axis=0)
    mean = added / size
    # To the "m2" of the chunks comes a term for the distances between their means (decision 53).
    between = none
    begin = 0
    while begin < chunks:
        there = begin + lanes < chunks
        width = tl.minimum(size - (begin + lanes).to(tl.int64) * CHUNK, CHUNK)
        width = tl.where(there, width, 1).to(tl.float64)
        part = tl.load(partials_ptr + (first + begin + lanes) * _FACTS, mask=there, other=0.0) / width - mean
        between += tl.where(there, part * part * width, 0.0)
        begin += LANES
    is_nan = tl.sum(nans, axis=0) > 0
    out = out_ptr + gradient
    tl.store(out, added)
    tl.store(out + gradients, tl.sum(inside, axis=0) + tl.sum(between, axis=0))
    tl.store(out + 2 * gradients, tl.sum(squares, axis=0))
    tl.store(out + 3 * gradients, tl.sum(sizes, axis=0))
    tl.store(out + 4 * gradients, tl.sum(zeros, axis=0))
    tl.store(out + 5 * gradients, tl.sum(nonfinite, axis=0))
    tl.store(out + 6 * gradients, tl.where(is_nan, float("nan"), tl.max(highest, axis=0)))
    tl.store(out + 7 * gradients, tl.where(is_nan, float("nan"), tl.max(lowest, axis=0)))
