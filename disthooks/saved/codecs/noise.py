"""Random numbers of the codecs' own: a hash of a key and a counter, the same bits on every device.

There is no state to share or to advance but a count on the host, of the tensors that were encoded; so streams, threads
and kernels need not agree on anything, and torch's generators stay where they are.
"""

from __future__ import annotations

import hashlib
import itertools
import os

import torch

#: Multipliers of the 32-bit hash "lowbias32" (Ellis 2018, nullprogram.com/blog/2018/07/31), as signed numbers. A second
#: key goes in half way, so that no two tensors have the same numbers at other places.
MULTIPLIERS = (0x7FEB352D, 0x846CA68B - 2**32)
#: The lowest bit of either half of a word.
ODD = 0x0001_0001

_counts: dict[tuple[int, str], tuple[int, itertools.count[int]]] = {}


def key(device: torch.device) -> tuple[int, int]:
    """Two signed 32-bit numbers for the next tensor on ``device``: of this process's seed and its count there."""
    place = os.getpid(), str(device)  # a forked child draws its own
    known = _counts.get(place) or _counts.setdefault(place, (_seed(place[1]), itertools.count()))
    mixed = _mixed(known[0] + next(known[1]) * 0x9E37_79B9_7F4A_7C15)
    return _signed(mixed), _signed(mixed >> 32)


def _seed(device: str) -> int:
    # Hashed, so that the numbers are not those that torch's own generators draw from the same seed.
    known = f"{torch.initial_seed()} {os.environ.get('RANK', 0)} {device}"
    return int.from_bytes(hashlib.blake2b(known.encode(), digest_size=8).digest(), "little")


def _mixed(number: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators")."""
    number &= 2**64 - 1
    number = (number ^ number >> 30) * 0xBF58_476D_1CE4_E5B9 % 2**64
    number = (number ^ number >> 27) * 0x94D0_49BB_1331_11EB % 2**64
    return number ^ number >> 31


def _signed(number: int) -> int:
    return (number + 2**31) % 2**32 - 2**31


def noise(count: int, key: tuple[int, int], first: int, device: torch.device) -> torch.Tensor:
    """``count`` odd int16, for elements from ``first`` (even) on: over 2**16, evenly in (-1/2, 1/2), never either end.

    So an integer that gets one added and is rounded stays what it is, 0 among them. Elements 2 i and 2 i + 1 have the
    halves of word i, and words repeat after 2**32 of them.

    >>> noise(3, (1, 2), 0, torch.device("cpu"))[2:], noise(1, (1, 2), 2, torch.device("cpu"))
    (tensor([27463], dtype=torch.int16), tensor([27463], dtype=torch.int16))
    """
    words = torch.arange((count + 1) // 2, dtype=torch.int32, device=device)
    words.add_(_signed(key[0] + first // 2))
    _mix_down(words, 16).mul_(MULTIPLIERS[0]).bitwise_xor_(key[1])
    _mix_down(words, 15).mul_(MULTIPLIERS[1])
    _mix_down(words, 16).bitwise_or_(ODD)
    return words.view(torch.int16)[:count]


def _mix_down(words: torch.Tensor, by: int) -> torch.Tensor:
    # torch's shift of int32 repeats the sign.
    return words.bitwise_xor_((words >> by).bitwise_and_(2 ** (32 - by) - 1))
