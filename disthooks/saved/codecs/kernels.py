"""Triton kernels of the codecs: one pass over the data, no wait. Only ``blocks.py`` imports them, if there is a GPU.

**A tile.** A program takes whole blocks, 2048 elements in all, with 128 threads. Each thread has 16 elements: 64 bytes
of float32 (32 of bfloat16), loaded 16 bytes at a time. A Hopper multiprocessor needs about 22 KB in flight to keep the
memory busy (4.8 TB/s of an H200 times 0.6 us, divided by 132 multiprocessors). With 64 registers for each thread it
runs 1024 threads, which have 64 KB (32 KB) in flight. The few threads that hold a row find its largest element by
shuffles, without a second read.

**Arithmetic.** An element of bfloat16 that becomes 8 bits moves 3 bytes. At 70% of 4.8 TB/s there is time for 26
instructions for each element, 13 of them in the integer unit. So two elements share one hash. Rounding adds
1.5 * 2**23, after which the low bits are the integer, instead of a conversion. The elements are multiplied by 1 / s
instead of divided by s. Elements that are not finite are handled in a branch that only tiles with such elements take.

**Exactness.** The codes have the bits of those of ``blocks.py``, ``_hashing.py`` and ``quantize.py``: division rounds
to nearest, and the launch forbids fusing a product and a sum. Only the last tile may be not full. All other tiles have
no masks, because masks would make loads narrow. Offsets count from the first element of the tile, whose index has 64
bits.
"""

# ruff: noqa: SIM108 (Triton takes statements; an `if` on a constant is decided at compile time)

from __future__ import annotations

import triton
import triton.language as tl

_INF = tl.constexpr(0x7F800000)
_SIZE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _mixed_down(x, BY: tl.constexpr):
    return x ^ (x.to(tl.uint32, bitcast=True) >> BY).to(tl.int32, bitcast=True)


@triton.jit
def _words(counter, key, M0: tl.constexpr, M1: tl.constexpr, ODD: tl.constexpr):
    """The noise of ``_hashing.py``: a word with the numbers of two elements in its halves."""
    x = _mixed_down(counter, 16) * M0
    x = _mixed_down(x ^ key, 15) * M1
    return _mixed_down(x, 16) | ODD


@triton.jit
def _between_halves(bits):
    """The signed number of the 16 bits from bit 7 on, over 2**16.

    The bits become the mantissa of a number in [1, 2), from which 1.5 is subtracted.
    """
    return ((bits & 0x007FFF80) ^ 0x3FC00000).to(tl.float32, bitcast=True) - 1.5


@triton.jit
def _widened(x):
    if x.dtype == tl.bfloat16:  # the bits of a bfloat16 are the upper half of the float32
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def _narrowed(x, dtype: tl.constexpr, HARDWARE: tl.constexpr):
    if dtype == tl.bfloat16 and not HARDWARE:
        bits = x.to(tl.int32, bitcast=True)
        even = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
        even = tl.where((bits & _SIZE) > _INF, 0x7FC0, even)
        return even.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def _limited(v, size, top, broken, MOST: tl.constexpr, NAN: tl.constexpr):
    """``blocks.limited``. ``size`` has the bits of |x|; an infinity gets the sign of ``v``."""
    if broken:
        kept = tl.minimum(tl.maximum(v, -top), top)
        infinite = tl.where(v < 0, -MOST, MOST)
        v = tl.where(size < _INF, kept, tl.where(size == _INF, infinite, NAN))
    else:
        v = tl.minimum(tl.maximum(v, -MOST), MOST)
    return v


@triton.jit
def _float8(v, M: tl.constexpr, BIAS: tl.constexpr, HARDWARE: tl.constexpr):
    """The bits of ``v`` as a float8 with M bits of mantissa, rounded to nearest, ties to even, also if subnormal.

    |v| is at most the largest number of the float8.
    """
    if HARDWARE:
        if M == 3:
            return v.to(tl.float8e4nv).to(tl.int8, bitcast=True)
        else:
            return v.to(tl.float8e5).to(tl.int8, bitcast=True)
    bits = v.to(tl.int32, bitcast=True)
    size = bits & _SIZE
    odd = (size >> (23 - M)) & 1
    normal = (size + odd + ((1 << (22 - M)) - 1 - (BIAS << 23))) >> (23 - M)
    # In a sum with this power of two, the lowest bit of the mantissa is the lowest bit of a subnormal float8.
    one: tl.constexpr = (BIAS + 24 - M) << 23
    moved = size.to(tl.float32, bitcast=True) + (2.0 ** (BIAS + 24 - M - 127))
    code = tl.where(size < ((BIAS + 1) << 23), moved.to(tl.int32, bitcast=True) - one, normal)
    code = tl.where(size > _INF, 0x7F, code | ((bits >> 24) & 0x80))
    return code.to(tl.int8)


@triton.jit
def _encode_tile(
    x_ptr, codes_ptr, scales_ptr, left, counter, key,
    BLOCK: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, MASKED: tl.constexpr,
    BITS: tl.constexpr, M: tl.constexpr, BIAS: tl.constexpr, HARDWARE: tl.constexpr, STOCHASTIC: tl.constexpr,
    MOST: tl.constexpr, LESS: tl.constexpr, NAN: tl.constexpr, LIMIT: tl.constexpr, TINY: tl.constexpr,
    M0: tl.constexpr, M1: tl.constexpr, ODD: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, ROWS)
    halves = tl.arange(0, HALF)[None, :]
    columns = tl.arange(0, 2 * HALF)[None, :]
    pairs = rows[:, None] * (BLOCK // 2) + halves
    at = rows[:, None] * BLOCK + columns
    if MASKED:
        there = (at < left) & (columns < BLOCK)
        x = tl.load(x_ptr + at, mask=there, other=0.0)
    else:
        x = tl.load(x_ptr + at)
    # A thread holds both elements of a pair, so the reshape from rows to pairs moves no data.
    even, odd = tl.split(tl.reshape(_widened(x), [ROWS, HALF, 2]))
    size_even = even.to(tl.int32, bitcast=True) & _SIZE
    size_odd = odd.to(tl.int32, bitcast=True) & _SIZE
    # The maximum is of integers, because a maximum of floats ignores nans. The bits of nans are the largest integers.
    largest = tl.max(tl.maximum(size_even, size_odd), axis=1)
    special = largest >= _INF
    broken = tl.max(special.to(tl.int32), axis=0) > 0
    if broken:
        finite_even = tl.where(size_even < _INF, size_even, 0)
        largest = tl.max(tl.maximum(finite_even, tl.where(size_odd < _INF, size_odd, 0)), axis=1)
    top = tl.where(special, LESS, MOST)
    scales = tl.div_rn(tl.minimum(largest.to(tl.float32, bitcast=True), LIMIT), top)
    scales = tl.maximum(scales, TINY)
    inverse = tl.div_rn(tl.full([ROWS], 1.0, tl.float32), scales)[:, None]
    even, odd = even * inverse, odd * inverse
    if STOCHASTIC:
        words = _words(pairs + counter, key, M0, M1, ODD)
        even += _between_halves(words << 7)
        odd += _between_halves(words >> 9)
    even = _limited(even, size_even, top[:, None], broken, MOST, NAN)
    odd = _limited(odd, size_odd, top[:, None], broken, MOST, NAN)
    if BITS == 4:
        low = (even + 12582920.0).to(tl.int32, bitcast=True) & 15  # 1.5 * 2**23 + 8
        high = (odd + 12582920.0).to(tl.int32, bitcast=True) & 15
        codes = (low | (high << 4)).to(tl.uint8)
        if MASKED:
            tl.store(codes_ptr + pairs, codes, mask=(pairs * 2 < left) & (halves < BLOCK // 2))
        else:
            tl.store(codes_ptr + pairs, codes)
    else:
        if M:
            codes = tl.join(_float8(even, M, BIAS, HARDWARE), _float8(odd, M, BIAS, HARDWARE))
        else:
            even = (even + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
            odd = (odd + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
            codes = tl.join(even, odd)
        codes = tl.reshape(codes, [ROWS, 2 * HALF])
        if MASKED:
            tl.store(codes_ptr + at, codes, mask=there)
        else:
            tl.store(codes_ptr + at, codes)
    signed = tl.where(special, -scales, scales)
    if MASKED:
        tl.store(scales_ptr + rows, signed, mask=rows * BLOCK < left)
    else:
        tl.store(scales_ptr + rows, signed)


@triton.jit(do_not_specialize=["n", "key0", "key1"])
def encode(
    x_ptr, codes_ptr, scales_ptr, n, key0, key1,
    BLOCK: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
    BITS: tl.constexpr, M: tl.constexpr, BIAS: tl.constexpr, HARDWARE: tl.constexpr, STOCHASTIC: tl.constexpr,
    MOST: tl.constexpr, LESS: tl.constexpr, NAN: tl.constexpr, LIMIT: tl.constexpr, TINY: tl.constexpr,
    M0: tl.constexpr, M1: tl.constexpr, ODD: tl.constexpr,
):  # fmt: skip
    """Encode ``n`` elements as codes, and a scale for each BLOCK of elements. A program takes ROWS blocks."""
    row = tl.program_id(0).to(tl.int64) * ROWS
    first = row * BLOCK
    counter = (row * (BLOCK // 2)).to(tl.int32) + key0
    x_ptr += first
    codes_ptr += first // 2 if BITS == 4 else first
    scales_ptr += row
    left = tl.minimum(n - first, ROWS * BLOCK).to(tl.int32)
    if HALF * 2 == BLOCK:
        if left == ROWS * BLOCK:
            _encode_tile(x_ptr, codes_ptr, scales_ptr, left, counter, key1, BLOCK, HALF, ROWS, False, BITS, M, BIAS,
                         HARDWARE, STOCHASTIC, MOST, LESS, NAN, LIMIT, TINY, M0, M1, ODD)  # fmt: skip
        else:
            _encode_tile(x_ptr, codes_ptr, scales_ptr, left, counter, key1, BLOCK, HALF, ROWS, True, BITS, M, BIAS,
                         HARDWARE, STOCHASTIC, MOST, LESS, NAN, LIMIT, TINY, M0, M1, ODD)  # fmt: skip
    else:
        _encode_tile(x_ptr, codes_ptr, scales_ptr, left, counter, key1, BLOCK, HALF, ROWS, True, BITS, M, BIAS,
                     HARDWARE, STOCHASTIC, MOST, LESS, NAN, LIMIT, TINY, M0, M1, ODD)  # fmt: skip


@triton.jit
def _unscaled(v, scales, broken, MOST: tl.constexpr):
    out = v * tl.abs(scales)
    if broken:
        out = tl.where((scales < 0) & (tl.abs(v) >= MOST), v * float("inf"), out)
        out = tl.where(v < -MOST, float("nan"), out)
    return out


@triton.jit
def _wide(code, broken, M: tl.constexpr, BIAS: tl.constexpr):
    """The number of ``code``: an int8 if M is 0, otherwise the bits of a float8 with M bits of mantissa."""
    if M:
        bits = code.to(tl.int32)
        v = ((bits & 0x7F) << (23 - M)).to(tl.float32, bitcast=True) * (2.0**BIAS)  # exact, also for subnormal numbers
        v = (v.to(tl.int32, bitcast=True) | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True)
        if broken:
            v = tl.where((bits & 0x7F) == 0x7F, float("nan"), v)
        return v
    else:
        return code.to(tl.int8, bitcast=True).to(tl.float32)


@triton.jit
def _decode_tile(
    codes_ptr, scales_ptr, out_ptr, left,
    BLOCK: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, MASKED: tl.constexpr,
    BITS: tl.constexpr, M: tl.constexpr, BIAS: tl.constexpr, HARDWARE: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, ROWS)
    halves = tl.arange(0, HALF)[None, :]
    columns = tl.arange(0, 2 * HALF)[None, :]
    pairs = rows[:, None] * (BLOCK // 2) + halves
    at = rows[:, None] * BLOCK + columns
    there = (at < left) & (columns < BLOCK)
    if MASKED:
        scales = tl.load(scales_ptr + rows, mask=rows * BLOCK < left, other=1.0)
    else:
        scales = tl.load(scales_ptr + rows)
    broken = tl.min(scales, axis=0) < 0
    if BITS == 4:
        if MASKED:
            codes = tl.load(codes_ptr + pairs, mask=(pairs * 2 < left) & (halves < BLOCK // 2), other=0).to(tl.int32)
        else:
            codes = tl.load(codes_ptr + pairs).to(tl.int32)
        v = tl.join((codes & 15) - 8, ((codes >> 4) & 15) - 8).to(tl.float32)
        v = tl.reshape(v, [ROWS, 2 * HALF])
    else:
        if MASKED:
            codes = tl.load(codes_ptr + at, mask=there, other=0)
        else:
            codes = tl.load(codes_ptr + at)
        v = _wide(codes, broken, M, BIAS)
    out = _narrowed(_unscaled(v, scales[:, None], broken, MOST), out_ptr.dtype.element_ty, HARDWARE)
    if MASKED:
        tl.store(out_ptr + at, out, mask=there)
    else:
        tl.store(out_ptr + at, out)


@triton.jit(do_not_specialize=["n"])
def decode(
    codes_ptr, scales_ptr, out_ptr, n,
    BLOCK: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
    BITS: tl.constexpr, M: tl.constexpr, BIAS: tl.constexpr, HARDWARE: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """The elements of codes and scales that ``encode`` has made."""
    row = tl.program_id(0).to(tl.int64) * ROWS
    first = row * BLOCK
    codes_ptr += first // 2 if BITS == 4 else first
    scales_ptr += row
    out_ptr += first
    left = tl.minimum(n - first, ROWS * BLOCK).to(tl.int32)
    if HALF * 2 == BLOCK:
        if left == ROWS * BLOCK:
            _decode_tile(codes_ptr, scales_ptr, out_ptr, left, BLOCK, HALF, ROWS, False, BITS, M, BIAS,
                         HARDWARE, MOST)  # fmt: skip
        else:
            _decode_tile(codes_ptr, scales_ptr, out_ptr, left, BLOCK, HALF, ROWS, True, BITS, M, BIAS,
                         HARDWARE, MOST)  # fmt: skip
    else:
        _decode_tile(codes_ptr, scales_ptr, out_ptr, left, BLOCK, HALF, ROWS, True, BITS, M, BIAS,
                         HARDWARE, MOST)  # fmt: skip


@triton.jit
def _ones(word):
    """Each byte of ``word`` as 1 if it is not 0. A mask may have been made of bytes of 255.

    No carry goes from one byte to the next.
    """
    return ((((word & 0x7F7F7F7F) + 0x7F7F7F7F) | word) >> 7) & 0x01010101


@triton.jit
def _last_word(bools_ptr, at, n):
    """The bools ``at``, ..., ``at + 3`` as the bytes of a word. Those from ``n`` on do not exist and count as 0."""
    word = tl.load(bools_ptr + at, mask=at < n, other=0).to(tl.int32)
    for k in tl.static_range(1, 4):
        word |= tl.load(bools_ptr + at + k, mask=at + k < n, other=0).to(tl.int32) << (8 * k)
    return word


@triton.jit(do_not_specialize=["n"])
def pack(bools_ptr, packed_ptr, n, run, WORDS: tl.constexpr):
    """Pack ``n`` bools into ``run`` bytes, a multiple of 16. Byte i has the bools i, i + run, ..., i + 7 run.

    A program makes WORDS words of four bytes.
    """
    first = tl.program_id(0).to(tl.int64) * WORDS
    words = first + tl.arange(0, WORDS)
    there = words < run // 4
    word_ptr = tl.pointer_type(tl.int32)
    packed = _ones(tl.load(bools_ptr.to(word_ptr) + words, mask=there, other=0))
    for k in tl.static_range(1, 7):
        packed |= _ones(tl.load((bools_ptr + k * run.to(tl.int64)).to(word_ptr) + words, mask=there, other=0)) << k
    last = 7 * run.to(tl.int64)
    if last + (first + WORDS) * 4 <= n:
        packed |= _ones(tl.load((bools_ptr + last).to(word_ptr) + words, mask=there, other=0)) << 7
    else:
        packed |= _ones(_last_word(bools_ptr, last + words * 4, n)) << 7
    tl.store(packed_ptr.to(word_ptr) + words, packed, mask=there)


@triton.jit(do_not_specialize=["n"])
def unpack(packed_ptr, bools_ptr, n, run, WORDS: tl.constexpr):
    """The ``n`` bools that ``pack`` has packed into ``run`` bytes."""
    first = tl.program_id(0).to(tl.int64) * WORDS
    words = first + tl.arange(0, WORDS)
    there = words < run // 4
    word_ptr = tl.pointer_type(tl.int32)
    packed = tl.load(packed_ptr.to(word_ptr) + words, mask=there, other=0)
    for k in tl.static_range(0, 7):
        tl.store((bools_ptr + k * run.to(tl.int64)).to(word_ptr) + words, (packed >> k) & 0x01010101, mask=there)
    last = 7 * run.to(tl.int64)
    bits = (packed >> 7) & 0x01010101
    if last + (first + WORDS) * 4 <= n:
        tl.store((bools_ptr + last).to(word_ptr) + words, bits, mask=there)
    else:
        for k in tl.static_range(0, 4):
            at = last + words * 4 + k
            tl.store(bools_ptr + at, (bits >> (8 * k)).to(tl.uint8), mask=there & (at < n))
