"""Hashes of numbers and of tensors: SplitMix64, random numbers made by a hash, and checksums.

Every function gives the same bits on every device and in every process, and none waits for a device. No generator is
shared or advanced: a random number is the hash of a key and of the element's index. So streams, threads and kernels
need no common order, and torch's own generators do not advance.
"""

# [Note: hashes in int64]
# Not every device has arithmetic for uint64 in torch. An int64 tensor that overflows wraps around modulo 2**64, so
# addition and multiplication give the same bits as for unsigned numbers. Only the shift to the right differs: torch
# repeats the sign bit, so a mask after each shift clears the bits that came in. A constant above 2**63 is written as
# the signed number with the same bits (`signed64`).

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
from collections.abc import Iterator
from typing import cast

import torch

from disthooks._tensors import bitless

# -- SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators")

#: 2**64 over the golden ratio: odd, and its bits are well mixed. SplitMix64 adds it for each number that it draws.
GOLDEN = 0x9E37_79B9_7F4A_7C15
_ROUNDS = ((30, 0xBF58_476D_1CE4_E5B9), (27, 0x94D0_49BB_1331_11EB))
_LOW = 0xFFFF_FFFF


def signed64(value: int) -> int:
    """``value`` modulo 2**64, as an int64 tensor holds it.

    >>> signed64(2**64 - 1), signed64(2**63)
    (-1, -9223372036854775808)
    """
    return (value + 2**63) % 2**64 - 2**63


def mix64(number: int) -> int:
    """Mix the bits of ``number`` by SplitMix64's finaliser; the result is unsigned."""
    number %= 2**64
    for shift, factor in _ROUNDS:
        number = (number ^ number >> shift) * factor % 2**64
    return number ^ number >> 31


def mix64_(numbers: torch.Tensor) -> torch.Tensor:
    """Mix int64 ``numbers`` in place as :func:`mix64` does; see [Note: hashes in int64].

    >>> signed64(mix64(12345)) == mix64_(torch.tensor([12345])).item()
    True
    """
    for shift, factor in _ROUNDS:
        numbers.bitwise_xor_((numbers >> shift).bitwise_and_(2 ** (64 - shift) - 1)).mul_(signed64(factor))
    return numbers.bitwise_xor_((numbers >> 31).bitwise_and_(2**33 - 1))


def splitmix64(value: int) -> int:
    """The signed 64-bit number that SplitMix64 draws from the seed ``value``.

    >>> splitmix64(0) != splitmix64(1), -(2**63) <= splitmix64(7) < 2**63
    (True, True)
    """
    return signed64(mix64(value + GOLDEN))


def odd_weights(first: int, count: int, device: torch.device) -> torch.Tensor:
    """``splitmix64(i) | 1`` for ``count`` numbers from ``first`` on, int64, computed on ``device``.

    >>> odd_weights(5, 2, torch.device("cpu")).tolist() == [splitmix64(5) | 1, splitmix64(6) | 1]
    True
    """
    return mix64_(torch.arange(first, first + count, device=device) + signed64(GOLDEN)) | 1


# -- the random numbers with which codecs round

#: Multipliers of the 32-bit hash "lowbias32" (Ellis 2018, nullprogram.com/blog/2018/07/31), as signed numbers. A second
#: key is mixed in between them. Otherwise two tensors could have the same numbers, shifted by some elements.
MULTIPLIERS = (0x7FEB352D, 0x846CA68B - 2**32)
#: The lowest bit of either half of a word.
ODD = 0x0001_0001

_counts: dict[tuple[int, str], tuple[int, itertools.count[int]]] = {}


def draw_key(device: torch.device) -> tuple[int, int]:
    """Two signed 32-bit numbers for the next tensor on ``device``, from this process's seed and its count there."""
    place = os.getpid(), str(device)  # a forked child draws keys of its own
    if place not in _counts:
        # The text is hashed, so that the numbers differ from those that torch's generators draw from the same seed.
        text = f"{torch.initial_seed()} {os.environ.get('RANK', 0)} {device}"
        seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
        _counts.setdefault(place, (seed, itertools.count()))  # another thread may have been first
    seed, count = _counts[place]
    mixed = mix64(seed + next(count) * GOLDEN)
    return _signed32(mixed), _signed32(mixed >> 32)


@contextlib.contextmanager
def keys_as_before() -> Iterator[None]:
    """A context manager: the keys that are drawn inside are drawn again after it, as if nobody had drawn them.

    >>> device = torch.device("cpu")
    >>> with keys_as_before():
    ...     first = draw_key(device)
    >>> draw_key(device) == first
    True
    """
    # Python 3.14 copies no count, so each is asked for its next number, and begins again at it.
    before = {place: (seed, next(count)) for place, (seed, count) in _counts.items()}
    _counts.update({place: (seed, itertools.count(number)) for place, (seed, number) in before.items()})
    try:
        yield
    finally:
        _counts.clear()
        _counts.update({place: (seed, itertools.count(number)) for place, (seed, number) in before.items()})


def _signed32(number: int) -> int:
    return (number + 2**31) % 2**32 - 2**31


def rounding_noise(count: int, key: tuple[int, int], first: int, device: torch.device) -> torch.Tensor:
    """``count`` odd int16 numbers, for the elements from ``first`` (an even index) on.

    Divided by 2**16 they are uniform in (-1/2, 1/2) and never reach either end. So an integer, such as 0, stays the
    same if such a number is added and the sum is rounded. Elements 2 i and 2 i + 1 have the two halves of word i, and
    the words repeat after 2**32 of them.

    >>> rounding_noise(3, (1, 2), 0, torch.device("cpu"))[2:], rounding_noise(1, (1, 2), 2, torch.device("cpu"))
    (tensor([27463], dtype=torch.int16), tensor([27463], dtype=torch.int16))
    """
    words = torch.arange((count + 1) // 2, dtype=torch.int32, device=device)
    words.add_(_signed32(key[0] + first // 2))
    _mix_down(words, 16).mul_(MULTIPLIERS[0]).bitwise_xor_(key[1])
    _mix_down(words, 15).mul_(MULTIPLIERS[1])
    _mix_down(words, 16).bitwise_or_(ODD)
    return words.view(torch.int16)[:count]


def _mix_down(words: torch.Tensor, by: int) -> torch.Tensor:
    # See [Note: hashes in int64]; the same holds for int32.
    return words.bitwise_xor_((words >> by).bitwise_and_(2 ** (32 - by) - 1))


# -- checksums of tensors

# [Note: how a checksum is made]
# A checksum is a weighted sum of the tensor's 8-byte words, because a sum can be computed in any order, on any device,
# in blocks that fit into memory. A plain sum would miss many differences: two flipped signs cancel each other, because
# twice the highest bit is 0 modulo 2**64. So each word is multiplied by an odd number, and its high bits are mixed into
# the low ones; both steps are invertible. Then the word is multiplied by the odd weight of its column, and each row of
# words by the odd weight of its row, so that the order of the words changes the sum. An odd factor is invertible modulo
# 2**64, so a difference in a single word always changes the sum.

_ROW = 1 << 15  # words of 8 bytes: a row of 256 KiB stays in the cache of a CPU
_ROWS_ON_DEVICE = 64  # rows at a time on other devices, where launching a kernel costs more than the memory


class Checksums:
    """Computes checksums of tensors from their bits: -0.0 differs from 0.0, and NaNs with other bits differ.

    Two tensors of one size that differ only in 8 neighbouring bytes (an element, or a word of one) never have the same
    checksum. Any other two have it with a probability of less than 1e-9. A checksum takes 1 MiB of memory, on a GPU
    about 50 MiB, and a copy of a tensor that is not contiguous. See [Note: how a checksum is made].

    >>> checksum = Checksums()
    >>> bool(checksum(torch.tensor([1.0, 2.0, 3.0])) == checksum(torch.tensor([1.0, 2.0, 3.0])))
    True
    >>> bool(checksum(torch.tensor([0.0])) == checksum(torch.tensor([-0.0])))
    False
    """

    def __init__(self, rows: int | None = None) -> None:
        self._rows = rows  # the number of rows that are summed at a time; it does not change a checksum
        self._weights: dict[torch.device, torch.Tensor] = {}

    @torch.no_grad()
    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """The checksum of ``tensor`` (strided, any dtype): an int64 tensor without dimensions, on its device.

        All tensors without bits have the same one, which is a number. See [Note: tensors without bits] in _tensors.py.
        """
        if type(tensor) in bitless.kinds:
            return cast(torch.Tensor, 0)
        content = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
        block = 8 * _ROW * (self._rows or (1 if content.device.type == "cpu" else _ROWS_ON_DEVICE))
        if 0 < content.numel() <= block:
            return self._block(_words(content), 0)
        total = torch.zeros((), dtype=torch.int64, device=content.device)
        for start in range(0, content.numel(), block):
            total += self._block(_words(content[start : start + block]), start // (8 * _ROW))
        return total

    def _block(self, words: torch.Tensor, first: int) -> torch.Tensor:
        full = words.numel() // _ROW
        # One row, as on the CPU and for most parameters: a weight that is a number is faster than a tensor of one.
        if words.numel() <= _ROW:
            return self._sum_rows(words.view(1, -1))[0] * (splitmix64(first) | 1)
        rows, rest = words[: full * _ROW].view(full, _ROW), words[full * _ROW :]
        last = self._sum_rows(rest.view(1, -1))[0] * (splitmix64(first + full) | 1)
        return (self._sum_rows(rows) * odd_weights(first, full, words.device)).sum() + last

    def _sum_rows(self, rows: torch.Tensor) -> torch.Tensor:
        if rows.device not in self._weights:
            self._weights[rows.device] = odd_weights(0, _ROW, rows.device)
        mixed = rows * signed64(GOLDEN)
        mixed.bitwise_xor_((mixed >> 32).bitwise_and_(_LOW)).mul_(self._weights[rows.device][: rows.shape[1]])
        return mixed.sum(1)


# [Note: a sum over elements]
# A checksum is of one tensor as it lies in memory. To compare a gradient that one rank has with one that several ranks
# have parts of, each element is hashed with its place in the whole, and the hashes are added: modulo 2**64 the sums of
# the parts add up to the sum of the whole, in any order.


class ElementSums:
    """Sums of hashed elements: of parts of a tensor they add up to that of the whole. See [Note: a sum over elements].

    A difference in a single element always changes the sum; any other does, with a probability of 1 - 2**-60.

    >>> of, whole = ElementSums(), torch.arange(6.0)
    >>> int(of(whole)) == int(of(whole[:2]) + of(whole[2:], 2))
    True
    """

    def __init__(self) -> None:
        self._weights: dict[torch.device, torch.Tensor] = {}

    @torch.no_grad()
    def __call__(self, tensor: torch.Tensor, first: int = 0, places: torch.Tensor | None = None) -> torch.Tensor:
        """The sum, an int64 tensor without dimensions on the tensor's device."""
        content = tensor.detach().resolve_conj().resolve_neg().contiguous()
        content = torch.view_as_real(content) if content.is_complex() else content
        parts = 2 if tensor.is_complex() else 1  # elements of an element
        kinds = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
        bits = content.view(-1).view(kinds[content.element_size()])
        if bits.device not in self._weights:
            self._weights[bits.device] = odd_weights(0, _ROW, bits.device)
        weights = self._weights[bits.device]
        if places is not None:
            each = (places.reshape(-1, 1) * parts + torch.arange(parts, device=bits.device)).view(-1)
            rows = mix64_(each // _ROW + signed64(GOLDEN)) | 1
            return self._mixed(bits).mul_(weights[each % _ROW]).mul_(rows).sum()
        total = torch.zeros((), dtype=torch.int64, device=bits.device)
        at, done = first * parts, 0
        while done < bits.numel():
            column = at % _ROW
            words = self._mixed(bits[done : done + _ROW - column])
            total += words.mul_(weights[column : column + words.numel()]).sum() * (splitmix64(at // _ROW) | 1)
            at, done = at + words.numel(), done + words.numel()
        return total

    def _mixed(self, bits: torch.Tensor) -> torch.Tensor:
        words = bits.to(torch.int64) * signed64(GOLDEN)
        return words.bitwise_xor_((words >> 32).bitwise_and_(_LOW))


def _words(content: torch.Tensor) -> torch.Tensor:
    """Some bytes as int64, with zeros up to a multiple of 8; a copy if they are not aligned to 8 bytes."""
    short = -content.numel() % 8
    if short:
        content = torch.cat((content, content.new_zeros(short)))
    elif content.data_ptr() % 8:
        content = content.clone()
    return content.view(torch.int64)
