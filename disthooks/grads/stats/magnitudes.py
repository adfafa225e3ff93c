"""Count how many elements have a magnitude in each of 386 bins."""

# [Note: bins of magnitudes]
# The bins of the histogram are the same in every step, every run and on every rank, so counts of ranks add up and are
# exact. The first bits of a float after its sign are its exponent and the first digits of its mantissa. Shifted to the
# right, they are an integer that says the octave and the quarter of the octave: the bin, without a logarithm or a
# search. The codes of float32 and float64 differ, so each dtype is counted by its own codes, and the counts are put
# into the same bins afterwards.

from __future__ import annotations

import torch

from disthooks.grads.stats.base import onto

_LOWEST, _HIGHEST = -64, 32  # the powers of two between which octaves have bins
_PARTS = 4  # bins in an octave
BINS = (_HIGHEST - _LOWEST) * _PARTS + 2
# For each dtype: the integer of the same size, how far its bits are shifted so that the exponent and two digits of the
# mantissa are left, and the bias of the exponent. See [Note: bins of magnitudes].
_BITS = {torch.float32: (torch.int32, 21, 127), torch.float64: (torch.int64, 50, 1023)}


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


class MagnitudeCounter:
    """Counts magnitudes by their codes; :meth:`counts` puts the codes of all dtypes and devices into the same bins."""

    def __init__(self) -> None:
        self._codes: dict[tuple[int, torch.device, torch.dtype], torch.Tensor] = {}

    def add(self, row: int, sizes: torch.Tensor) -> torch.Tensor:
        """Count ``sizes`` in a row; returns how many have each code.

        Args:
            row: the row that they are added to.
            sizes: magnitudes, float32 or float64. They are overwritten.
        """
        dtype = sizes.dtype
        # How many elements have each code of an exponent and two digits.
        integer, shift, bias = _BITS[dtype]
        code, many = sizes.view(integer).bitwise_right_shift_(shift).flatten(), (2 * bias + 2) * _PARTS
        if code.is_cpu:
            found = torch.bincount(code.short(), minlength=many)  # of int16 it is twice as fast as of int32
        else:
            # The size of bincount's result depends on the largest code: on an accelerator the host would wait for it.
            # histc counts in float32, which has all integers up to 2**24 only: a block has no more elements.
            found = torch.histc(code.float(), bins=many, min=0, max=many).double()
        key = (row, code.device, dtype)
        if key in self._codes:
            self._codes[key] += found
        else:
            self._codes[key] = found
        return found

    def counts(self, many: int, device: torch.device) -> torch.Tensor:
        """The counts of each of ``many`` rows: float64 of shape (many, BINS) on ``device``."""
        total = torch.zeros(many, BINS, dtype=torch.float64, device=device)
        for (row, _, dtype), counts in self._codes.items():
            first = first_code(dtype)
            last = first + BINS - 2
            under, over = counts[:first].sum(), counts[last:].sum()
            total[row] += onto(torch.cat([under[None], counts[first:last], over[None]]).double(), device)
        return total
