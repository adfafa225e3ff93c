"""Numbers as int64 that have the same order, so that a MAX over ranks keeps NaN and can say who had it.

A MAX of floating-point numbers may drop a NaN, and cannot tell which rank's number it took. The bits of a float64
compare like integers once those of negative numbers are turned around.
"""

from __future__ import annotations

import torch

_NAN = 0x7FF8 << 48
_FLIP = 0x7FFF_FFFF_FFFF_FFFF
_LOW = 24  # bits for the rank's place
_PLACES = 2**_LOW - 1

#: Below every number: what a rank that has none gives.
NO_NUMBER = -(2**63)


def to_sortable(values: torch.Tensor) -> torch.Tensor:
    """int64 of the same order as the float64 ``values``, with NaN above all.

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
    """Like :func:`to_sortable`, and by whom: values rounded to 28 binary digits, then this rank's place.

    Of two ranks with the same value the first wins.

    >>> pairs = [(0.5, 3), (1.5, 7), (1.5, 9)]
    >>> keys = torch.stack([with_rank(torch.tensor(value), rank) for value, rank in pairs])
    >>> rank_of(keys.amax()).item()
    7
    """
    rounded: torch.Tensor = (to_sortable(values) + (1 << (_LOW - 1))) >> _LOW << _LOW
    rounded += _PLACES - position
    return rounded


def rank_of(keys: torch.Tensor) -> torch.Tensor:
    """The place of the rank that gave each of ``keys``; -1 where no rank did."""
    places: torch.Tensor = _PLACES - (keys & _PLACES)
    return torch.where(keys == NO_NUMBER, -1, places)
