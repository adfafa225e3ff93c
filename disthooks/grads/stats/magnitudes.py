"""Count how many elements have a magnitude in each of 386 bins."""

# [Note: bins of magnitudes]
# The bins of the histogram are the same in every step, every run and on every rank, so counts of ranks add up and are
# exact. The first bits of a float after its sign are its exponent and the first digits of its mantissa. Shifted to the
# right, they are an integer that says the octave and the quarter of the octave: the bin, without a logarithm or a
# search. The codes of float32 and float64 differ, so each dtype is counted by its own codes, and the counts are put
# into the same bins afterwards.

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from disthooks.grads.stats.base import onto

_LOWEST, _HIGHEST = -64, 32  # the powers of two between which octaves have bins
_PARTS = 4  # bins in an octave
BINS = (_HIGHEST - _LOWEST) * _PARTS + 2
# For each dtype: the integer of the same size, how far its bits are shifted so that the exponent and two digits of the
# mantissa are left, and the bias of the exponent. See [Note: bins of magnitudes].
_BITS = {torch.float32: (torch.int32, 21, 127), torch.float64: (torch.int64, 50, 1023)}
_WINDOW = 256  # bins that one pass counts on the CPU: torch counts uint8 in 0.6 of the time of int16


def edges() -> torch.Tensor:
    """The edges of the bins, a float64 vector of ``BINS + 1``: 0, 2**-64, 1.25 * 2**-64, ... 2**32, infinity.

    >>> edges()[[0, 1, 2, 5, -2, -1]].tolist() == [0.0, 2.0**-64, 1.25 * 2.0**-64, 2.0**-63, 2.0**32, float("inf")]
    True
    """
    octaves = torch.arange(_LOWEST, _HIGHEST, dtype=torch.float64).exp2()
    parts = 1 + torch.arange(_PARTS, dtype=torch.float64) / _PARTS
    ends = torch.tensor([2.0**_HIGHEST, torch.inf], dtype=torch.float64)
    return torch.cat([torch.zeros(1, dtype=torch.float64), (octaves[:, None] * parts).flatten(), ends])


def first_code(dtype: torch.dtype) -> int:
    """The code of the second bin, which begins at 2**-64. See [Note: bins of magnitudes]."""
    return (_BITS[dtype][2] + _LOWEST) * _PARTS


class Room:
    """Memory of the CPU that is used again for each block.

    Fresh memory for each block takes longer to get from the system than to fill.
    """

    def __init__(self) -> None:
        self._memory: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def of(self, shape: Sequence[int], dtype: torch.dtype, what: str = "") -> torch.Tensor:
        """A tensor of ``shape``, with any contents, valid until the next call for the same ``what`` and dtype."""
        size, had = math.prod(shape), self._memory.get((what, dtype))
        if had is None or had.numel() < size:
            had = self._memory[what, dtype] = torch.empty(size, dtype=dtype)
        return had[:size].view(shape)


class MagnitudeCounter:
    """Counts magnitudes by their codes, in the same bins for all dtypes and devices."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, torch.device], torch.Tensor] = {}
        self._room = Room()

    def add(self, row: int, block: torch.Tensor, padding: int = 0, largest: float = math.inf) -> torch.Tensor:
        """Count the magnitudes of ``block`` in a row; returns how many are in the first bin."""
        integer, shift, _ = _BITS[block.dtype]
        under = first_code(block.dtype) - 1  # the code that stands for the first bin; the other bins follow
        bits, magnitude = block.view(integer), (1 << 8 * block.itemsize - 1 - shift) - 1
        if block.is_cpu:
            signed = torch.bitwise_right_shift(bits, shift, out=self._room.of(bits.shape, integer))
            codes = self._room.of(bits.shape, torch.int16).copy_(signed).bitwise_and_(magnitude)
            highest = under + BINS - 1
            if largest < math.inf:  # not NaN, whose sign may be any
                highest = int(torch.tensor(largest, dtype=block.dtype).view(integer)) >> shift
            found = self._bins(codes, under, highest)
        else:
            codes = bits.bitwise_right_shift(shift).bitwise_and_(magnitude).clamp_(under, under + BINS - 1)
            # The size of bincount's result depends on the largest code: on an accelerator the host would wait for it.
            # histc counts in float32, which has all integers up to 2**24 only: a block has no more elements.
            found = torch.histc(codes.float(), bins=BINS, min=under, max=under + BINS).double()
        found[0] -= padding
        key = (row, block.device)
        if key in self._counts:
            self._counts[key] += found
        else:
            self._counts[key] = found
        return found[0]

    def _bins(self, codes: torch.Tensor, under: int, highest: int) -> torch.Tensor:
        """The counts of all bins on the CPU: in one pass, or two if the magnitudes span many octaves."""
        found = torch.zeros(BINS, dtype=torch.float64)
        # The window begins so high that it has the highest code. Codes below it are counted with its first one.
        begin = min(max(highest - _WINDOW + 1, under), under + BINS - _WINDOW)
        found[begin - under :][:_WINDOW] = self._window(codes, begin, begin + _WINDOW - 1)
        if begin > under and int(found[begin - under]):
            below = self._window(codes, under, begin)[: begin - under]
            found[: begin - under] = below
            found[begin - under] -= below.sum()
        return found

    def _window(self, codes: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """How many codes are ``begin`` or less, each of the next ones, and ``end`` or more."""
        inside = torch.clamp(codes, begin, end, out=self._room.of(codes.shape, codes.dtype, "inside"))
        narrow = self._room.of(codes.shape, torch.uint8).copy_(inside)  # of each code its remainder by 256
        return torch.bincount(narrow.flatten(), minlength=_WINDOW).roll(-(begin % _WINDOW))

    def counts(self, many: int, device: torch.device) -> torch.Tensor:
        """The counts of each of ``many`` rows: float64 of shape (many, BINS) on ``device``."""
        total = torch.zeros(many, BINS, dtype=torch.float64, device=device)
        for (row, _), counts in self._counts.items():
            total[row] += onto(counts, device)
        return total
