"""A checksum of a tensor's bits, computed where the tensor is and without waiting for it."""

from __future__ import annotations

import torch

_ROW = 1 << 15  # words of 8 bytes, 256 KiB: what stays in a processor's cache
_ROWS_ON_DEVICE = 64  # rows at a time elsewhere, where a kernel's launch costs more than its memory
_MULTIPLIER = -7046029254386353131  # 0x9E3779B97F4A7C15: odd, and its bits are well mixed
_LOW = 0xFFFFFFFF


def scrambled(value: int) -> int:
    """A number of 64 bits, signed, that looks random: splitmix64 of ``value``.

    >>> scrambled(0) != scrambled(1), -(2**63) <= scrambled(7) < 2**63
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
            return self._mixed(words.view(1, -1))[0] * (scrambled(first) | 1)
        rows, rest = words[: full * _ROW].view(full, _ROW), words[full * _ROW :]
        last = self._mixed(rest.view(1, -1))[0] * (scrambled(first + full) | 1)
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
    """``scrambled(i) | 1`` for ``count`` numbers from ``first`` on, int64, computed on ``device``.

    >>> odd_weights(5, 2, torch.device("cpu")).tolist() == [scrambled(5) | 1, scrambled(6) | 1]
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
