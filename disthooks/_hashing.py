"""A text that says what an object was made of, equal in every process that made it alike: ranks compare such texts.

Random numbers of the codecs' own: a hash of a key and a counter, the same bits on every device.

There is no state to share or to advance but a count on the host, of the tensors that were encoded; so streams, threads
and kernels need not agree on anything, and torch's generators stay where they are.

A checksum of a tensor's bits, computed where the tensor is and without waiting for it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import os
from collections.abc import Callable, Mapping, Set
from typing import Any

import torch

# [Note: what ranks compare]
# `repr` is no ground to compare ranks on: the order of a set of strings depends on the hash seed of its process, a
# tensor shows its device and its values, an object without a repr shows its address. So each kind of value has its own
# text here. A tensor is described by its dtype alone: a mask that a user gives to a function is this rank's own, has
# the shape of this rank's part, and lies on this rank's device. Of an object that is none of the kinds known here only
# the class counts.


def describe(value: Any, _inside: tuple[int, ...] = ()) -> str:
    """What ``value`` was made of: scalars, containers, dataclasses, functions, partial functions, and their parts.

    >>> describe({"*.weight", "*.bias"})
    "{'*.bias', '*.weight'}"
    >>> describe(functools.partial(max, 2, default=torch.ones(3)))
    'partial(builtins.max, 2, default=tensor(torch.float32))'
    """
    if id(value) in _inside:  # it holds itself
        return "..."
    part = functools.partial(describe, _inside=(*_inside, id(value)))
    for kinds, text in _TEXTS:
        if isinstance(value, kinds):
            return text(value, part)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        shown = [field.name for field in dataclasses.fields(value) if field.repr]
        return f"{type(value).__qualname__}({', '.join(f'{name}={part(getattr(value, name))}' for name in shown)})"
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{getattr(named, '__module__', None) or ''}.{named.__qualname__}".lstrip(".")


def _partial(value: functools.partial[Any], part: Callable[[Any], str]) -> str:
    given = [*map(part, value.args), *(f"{name}={part(each)}" for name, each in value.keywords.items())]
    return f"partial({', '.join([part(value.func), *given])})"


_SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, os.PathLike)
_TEXTS: list[tuple[Any, Callable[[Any, Callable[[Any], str]], str]]] = [
    (_SCALARS, lambda value, part: repr(value)),
    (torch.Tensor, lambda value, part: f"tensor({value.dtype})"),
    (torch.device, lambda value, part: f"device({value.type})"),
    (functools.partial, _partial),
    (Mapping, lambda value, part: "{" + ", ".join(f"{part(k)}: {part(v)}" for k, v in value.items()) + "}"),
    (Set, lambda value, part: "{" + ", ".join(sorted(map(part, value))) + "}"),
    ((list, tuple), lambda value, part: "[" + ", ".join(map(part, value)) + "]"),
]


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


_ROW = 1 << 15  # words of 8 bytes, 256 KiB: what stays in a processor's cache
_ROWS_ON_DEVICE = 64  # rows at a time elsewhere, where a kernel's launch costs more than its memory
_MULTIPLIER = -7046029254386353131  # 0x9E3779B97F4A7C15: odd, and its bits are well mixed
_LOW = 0xFFFFFFFF


def splitmix64(value: int) -> int:
    """A number of 64 bits, signed, that looks random: splitmix64 of ``value``.

    >>> splitmix64(0) != splitmix64(1), -(2**63) <= splitmix64(7) < 2**63
    (True, True)
    """
    mask = (1 << 64) - 1
    x = (value + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return signed(x ^ (x >> 31))


def signed(value: int) -> int:
    """``value`` modulo 2**64, as an int64 tensor has it.

    >>> signed(2**64 - 1), signed(2**63)
    (-1, -9223372036854775808)
    """
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


class Checksums:
    """Checksums of tensors, in order and bit for bit: -0.0 is not 0.0, and one NaN is not another.

    Two tensors of one size that differ in up to 8 neighbouring bytes (an element, or a word of one) never have
    the same; others do with a probability of less than 1e-9. Memory for it is 1 MiB, on a GPU about 50 MiB; a
    tensor that is not contiguous is copied.

    >>> of = Checksums()
    >>> bool(of(torch.tensor([1.0, 2.0, 3.0])) == of(torch.tensor([1.0, 2.0, 3.0])))
    True
    >>> bool(of(torch.tensor([0.0])) == of(torch.tensor([-0.0])))
    False
    """

    def __init__(self, rows: int | None = None) -> None:
        self._rows = rows  # at a time; it changes no checksum
        self._weights: dict[torch.device, torch.Tensor] = {}

    @torch.no_grad()
    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """An int64 tensor without dimensions, on the device of ``tensor``, which is strided and of any dtype."""
        content = _bytes(tensor)
        block = 8 * _ROW * (self._rows or (1 if content.device.type == "cpu" else _ROWS_ON_DEVICE))
        if 0 < content.numel() <= block:
            return self._block(_words(content), 0)
        total = torch.zeros((), dtype=torch.int64, device=content.device)
        for start in range(0, content.numel(), block):
            total += self._block(_words(content[start : start + block]), start // (8 * _ROW))
        return total

    def _block(self, words: torch.Tensor, first: int) -> torch.Tensor:
        """Of some rows, of which the first is row ``first`` of its tensor: each row has an odd weight of its own."""
        full = words.numel() // _ROW
        if words.numel() <= _ROW:  # on the CPU, and for most parameters: a number is quicker than a tensor of one
            return self._mixed(words.view(1, -1))[0] * (splitmix64(first) | 1)
        rows, rest = words[: full * _ROW].view(full, _ROW), words[full * _ROW :]
        last = self._mixed(rest.view(1, -1))[0] * (splitmix64(first + full) | 1)
        return (self._mixed(rows) * odd_weights(first, full, words.device)).sum() + last

    def _mixed(self, rows: torch.Tensor) -> torch.Tensor:
        # Linear sums would lose much: two flipped signs cancel, since twice the highest bit is nothing. The shift
        # brings high bits down, without loss; then each place has an odd weight, so that order counts.
        mixed = rows * _MULTIPLIER
        mixed.bitwise_xor_((mixed >> 32).bitwise_and_(_LOW)).mul_(self._weights_on(rows.device)[: rows.shape[1]])
        return mixed.sum(1)

    def _weights_on(self, device: torch.device) -> torch.Tensor:
        if device not in self._weights:
            self._weights[device] = odd_weights(0, _ROW, device)
        return self._weights[device]


def odd_weights(first: int, count: int, device: torch.device) -> torch.Tensor:
    """``splitmix64(i) | 1`` for ``count`` numbers from ``first`` on, int64, computed on ``device``.

    >>> odd_weights(5, 2, torch.device("cpu")).tolist() == [splitmix64(5) | 1, splitmix64(6) | 1]
    True
    """
    x = torch.arange(first, first + count, device=device) + _MULTIPLIER
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        x = (x ^ (x >> shift & ((1 << (64 - shift)) - 1))) * signed(factor)
    return x | 1


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in their order, as uint8 of one dimension."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.contiguous().view(-1).view(torch.uint8)


def _words(content: torch.Tensor) -> torch.Tensor:
    """Some bytes as int64, with zeros up to a multiple of 8; copied where they lie askew."""
    short = -content.numel() % 8
    if short:
        content = torch.cat((content, content.new_zeros(short)))
    elif content.data_ptr() % 8:
        content = content.clone()
    return content.view(torch.int64)
