"""Hashes of numbers and of tensors: SplitMix64, random numbers made by a hash, and checksums.

Every function gives the same bits on every device and in every process, and none waits for a device. There is no
generator to share or to advance: a random number is the hash of a key and of the element's index, so streams, threads
and kernels need not agree on an order, and torch's own generators stay where they are.
"""

# [Note: hashes in int64]
# torch has no arithmetic for uint64 on every device. An int64 tensor that overflows wraps around modulo 2**64, so
# addition and multiplication give the bits that unsigned numbers would. Only the shift to the right differs: torch
# repeats the sign bit, so each shift is followed by a mask that clears the bits that came in. Constants above 2**63
# have to be written as the signed number with the same bits (`signed64`).

from __future__ import annotations

import hashlib
import itertools
import os

import torch

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
#: key goes in half way, so that no two tensors have the same numbers at other places.
MULTIPLIERS = (0x7FEB352D, 0x846CA68B - 2**32)
#: The lowest bit of either half of a word.
ODD = 0x0001_0001

_counts: dict[tuple[int, str], tuple[int, itertools.count[int]]] = {}


def draw_key(device: torch.device) -> tuple[int, int]:
    """Two signed 32-bit numbers for the next tensor on ``device``, from this process's seed and its count there."""
    place = os.getpid(), str(device)  # a forked child draws keys of its own
    seed, count = _counts.get(place) or _counts.setdefault(place, (_seed(place[1]), itertools.count()))
    mixed = mix64(seed + next(count) * GOLDEN)
    return _signed32(mixed), _signed32(mixed >> 32)


def _seed(device: str) -> int:
    # The text is hashed, so that the numbers are not those that torch's own generators draw from the same seed.
    text = f"{torch.initial_seed()} {os.environ.get('RANK', 0)} {device}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _signed32(number: int) -> int:
    return (number + 2**31) % 2**32 - 2**31


def rounding_noise(count: int, key: tuple[int, int], first: int, device: torch.device) -> torch.Tensor:
    """``count`` odd int16, for elements from ``first`` (even) on: over 2**16, evenly in (-1/2, 1/2), never either end.

    So an integer that gets one added and is rounded stays what it is, 0 among them. Elements 2 i and 2 i + 1 have the
    halves of word i, and words repeat after 2**32 of them.

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
    # See [Note: hashes in int64]; int32 is no different.
    return words.bitwise_xor_((words >> by).bitwise_and_(2 ** (32 - by) - 1))


# -- checksums of tensors

# [Note: how a checksum is made]
# A checksum is a weighted sum of the tensor's 8-byte words, because sums can be computed in any order, on any device,
# in blocks that fit into memory. A plain sum would lose much: two flipped signs cancel, since twice the highest bit is
# nothing. So each word is multiplied by an odd number and its high bits are brought down, neither of which loses a bit;
# then it gets the odd weight of its column, and each row of words the odd weight of its row, so that order counts.
# An odd factor is invertible modulo 2**64: a single word that differs always changes the sum.

_ROW = 1 << 15  # words of 8 bytes, 256 KiB: a row stays in a processor's cache
_ROWS_ON_DEVICE = 64  # rows at a time elsewhere, where the launch of a kernel costs more than its memory


class Checksums:
    """Checksums of tensors, in order and bit for bit: -0.0 is not 0.0, and one NaN is not another.

    Two tensors of one size that differ in up to 8 neighbouring bytes (an element, or a word of one) never have
    the same; others do with a probability of less than 1e-9. Memory for it is 1 MiB, on a GPU about 50 MiB; a
    tensor that is not contiguous is copied. See [Note: how a checksum is made].

    >>> checksum = Checksums()
    >>> bool(checksum(torch.tensor([1.0, 2.0, 3.0])) == checksum(torch.tensor([1.0, 2.0, 3.0])))
    True
    >>> bool(checksum(torch.tensor([0.0])) == checksum(torch.tensor([-0.0])))
    False
    """

    def __init__(self, rows: int | None = None) -> None:
        self._rows = rows  # how many are summed at a time; it changes no checksum
        self._weights: dict[torch.device, torch.Tensor] = {}

    @torch.no_grad()
    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """An int64 tensor without dimensions, on the device of ``tensor``, which is strided and of any dtype."""
        content = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
        block = 8 * _ROW * (self._rows or (1 if content.device.type == "cpu" else _ROWS_ON_DEVICE))
        if 0 < content.numel() <= block:
            return self._block(_words(content), 0)
        total = torch.zeros((), dtype=torch.int64, device=content.device)
        for start in range(0, content.numel(), block):
            total += self._block(_words(content[start : start + block]), start // (8 * _ROW))
        return total

    def _block(self, words: torch.Tensor, first: int) -> torch.Tensor:
        """The sum of some rows, of which the first is row ``first`` of its tensor."""
        full = words.numel() // _ROW
        if words.numel() <= _ROW:  # on the CPU, and for most parameters: a number is quicker than a tensor of one
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


def _words(content: torch.Tensor) -> torch.Tensor:
    """Some bytes as int64, with zeros up to a multiple of 8; copied where they are not aligned to 8 bytes."""
    short = -content.numel() % 8
    if short:
        content = torch.cat((content, content.new_zeros(short)))
    elif content.data_ptr() % 8:
        content = content.clone()
    return content.view(torch.int64)
