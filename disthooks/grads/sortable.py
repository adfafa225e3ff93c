"""Numbers as int64 of the same order, so that a MAX over ranks keeps NaN and can tell whose number it took."""

# [Note: MAX of integers keeps NaN]
# A MAX of floating-point numbers may drop a NaN: backends differ in that. And it cannot tell which rank's number it
# took. So measures that need the largest number over the ranks send int64. The bits of a float64 compare like integers
# once those of negative numbers are turned around, and NaN gets a key above that of infinity. 40 bits of the key and 24
# bits for the place of the rank in one int64 say both how large the largest is and who has it. The smallest number is
# the largest of the negatives.

from __future__ import annotations

import torch

_NAN = 0x7FF8 << 48
_FLIP = 0x7FFF_FFFF_FFFF_FFFF
_PLACE_BITS = 24
_PLACES = 2**_PLACE_BITS - 1

#: The key below that of every number: a rank that has no number gives it.
NO_NUMBER = -(2**63)


def to_sortable(values: torch.Tensor) -> torch.Tensor:
    """int64 keys of the same order as the float64 ``values``, with NaN above all of them.

    >>> from_sortable(to_sortable(torch.tensor([-2.5, 0.0, float("inf"), float("nan")], dtype=torch.float64))).tolist()
    [-2.5, 0.0, inf, nan]
    """
    bits = values.double().view(torch.int64)
    keys: torch.Tensor = bits ^ ((bits >> 63) & _FLIP)
    return torch.where(values.isnan(), _NAN, keys)


def from_sortable(keys: torch.Tensor) -> torch.Tensor:
    """The float64 values that ``keys`` were made of; NaN for :data:`NO_NUMBER`."""
    bits: torch.Tensor = keys ^ ((keys >> 63) & _FLIP)
    return bits.view(torch.float64)


def with_rank(values: torch.Tensor, position: int) -> torch.Tensor:
    """Keys of ``values``, rounded to 28 binary digits, that also tell this rank's place among the ranks.

    Of two ranks with the same value the first one wins.

    >>> pairs = [(0.5, 3), (1.5, 7), (1.5, 9)]
    >>> keys = torch.stack([with_rank(torch.tensor(value), rank) for value, rank in pairs])
    >>> rank_of(keys.amax()).item()
    7
    """
    rounded: torch.Tensor = (to_sortable(values) + (1 << (_PLACE_BITS - 1))) >> _PLACE_BITS << _PLACE_BITS
    rounded += _PLACES - position
    return rounded


def rank_of(keys: torch.Tensor) -> torch.Tensor:
    """The place of the rank that gave each of ``keys``; -1 where no rank had a number."""
    places: torch.Tensor = _PLACES - (keys & _PLACES)
    return torch.where(keys == NO_NUMBER, -1, places)
