"""The measure behind ``Histogram``: how many elements have which magnitude.

The bins are the same on every rank and in every step, so counts merge by adding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from disthooks.engines.base import Shard
from disthooks.grads.stats.base import Local, Measure, Merge, Per, onto, real

_LOWEST, _HIGHEST = -64, 32  # powers of two
_PARTS = 4  # bins in an octave
BINS = (_HIGHEST - _LOWEST) * _PARTS + 2
_BLOCK = {"cpu": 2**19, "cuda": 2**24}  # elements; CUDA's histc counts in float32, which ends at 2**24
# A float's bits without the sign are an integer; shifted by this, it is the exponent and two digits of the mantissa.
_BITS = {torch.float32: (torch.int32, 21, 127), torch.float64: (torch.int64, 50, 1023)}


@dataclass(frozen=True)
class MagnitudeCounts(Measure):
    """How many elements have a magnitude in each of 386 bins.

    The first bin is for zero and all below 2**-64, the last for 2**32 and more, infinity and NaN; between them an
    octave has four bins of the same width, so a bin is at most a quarter as wide as where it begins.

    Attributes:
        each: whether there are counts for each parameter, or for each scope.
    """

    each: bool = False
    merge: ClassVar[Merge] = "sum"

    @property
    def per(self) -> Per:  # type: ignore[override]
        """For each scope unless ``each``, since they are many."""
        return "parameter" if self.each else "scope"

    def width(self, shard: Shard | None) -> int:
        """The number of bins."""
        return BINS

    def local(self, local: Local) -> torch.Tensor:
        """The counts of each parameter or scope, one after the other."""
        if self.each:
            rows = [_counts([grad], local.device) for grad in local.grads]
            return torch.cat(rows) if rows else torch.zeros(0, dtype=torch.float64, device=local.device)
        alike: dict[frozenset[int], list[torch.Tensor | None]] = {}
        belongs: list[set[int]] = [set() for _ in local.grads]
        for scope, places in enumerate(local.scopes):
            for place in places:
                belongs[place].add(scope)
        for grad, scopes in zip(local.grads, belongs, strict=True):
            alike.setdefault(frozenset(scopes), []).append(grad)
        total = torch.zeros(len(local.scopes), BINS, dtype=torch.float64, device=local.device)
        for shared, grads in alike.items():
            found = _counts(grads, local.device)
            for scope in shared:
                total[scope] += found
        return total.flatten()


def edges() -> torch.Tensor:
    """Where the bins begin, and where the last one ends: 0, 2**-64, 1.25 * 2**-64, ... 2**32, infinity.

    >>> edges()[[0, 1, 2, 5, -2, -1]].tolist() == [0.0, 2.0**-64, 1.25 * 2.0**-64, 2.0**-63, 2.0**32, float("inf")]
    True
    """
    octaves = torch.arange(_LOWEST, _HIGHEST, dtype=torch.float64).exp2()
    parts = 1 + torch.arange(_PARTS, dtype=torch.float64) / _PARTS
    ends = torch.tensor([2.0**_HIGHEST, torch.inf], dtype=torch.float64)
    return torch.cat([torch.zeros(1, dtype=torch.float64), (octaves[:, None] * parts).flatten(), ends])


def quantile(counts: torch.Tensor, q: float) -> torch.Tensor:
    """The magnitude that a share ``q`` of the elements does not exceed, for each row of counts.

    Inside a bin elements are taken to lie evenly, so it is off by less than the bin's width, a quarter of it; 0 in
    the first bin, infinity in the last, NaN of nothing.

    >>> counts = torch.zeros(BINS, dtype=torch.float64)
    >>> counts[257] = 4  # in [1, 1.25)
    >>> float(quantile(counts, 0.5))
    1.125
    """
    upto, ends = counts.cumsum(-1), edges()
    rank = upto[..., -1:] * q
    # The first bin that reaches the rank and is not empty.
    at = ((upto < rank) | (upto == 0)).sum(-1, keepdim=True).clamp(max=BINS - 1)
    inside = counts.gather(-1, at)
    share = ((rank - (upto.gather(-1, at) - inside)) / inside).clamp(0, 1)
    low, high = ends[at], ends[at + 1]
    found = torch.where(high.isinf(), torch.inf, low + share * (high - low))
    found = torch.where(at == 0, 0.0, found)
    return torch.where(upto[..., -1:] > 0, found, torch.nan).squeeze(-1)


def _counts(grads: Sequence[torch.Tensor | None], device: torch.device) -> torch.Tensor:
    """How many elements of all of them are in each bin."""
    codes: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}
    for block in _blocks(grads):
        block = block if block.dtype == torch.float64 else block.float()
        key, found = (block.device, block.dtype), _coded(block)
        codes[key] = codes[key].add_(found) if key in codes else found
    total = torch.zeros(BINS, dtype=torch.float64, device=device)
    for (_, dtype), counts in codes.items():
        total += onto(_binned(counts, dtype), device)
    return total


def _blocks(grads: Sequence[torch.Tensor | None]) -> Iterator[torch.Tensor]:
    """The elements in pieces that stay in a cache: parts of large gradients, many small ones in one."""
    small: dict[tuple[torch.device, torch.dtype], tuple[list[torch.Tensor], int]] = {}
    for grad in grads:
        if grad is None or not grad.numel():
            continue
        flat, most = real(grad).reshape(-1), _BLOCK.get(grad.device.type, _BLOCK["cuda"])
        if 2 * flat.numel() > most:
            yield from torch.split(flat, most)
            continue
        key = (flat.device, flat.dtype)
        waiting, size = small.get(key, ([], 0))
        if size + flat.numel() > most:
            yield torch.cat(waiting)
            waiting, size = [], 0
        waiting.append(flat)
        small[key] = waiting, size + flat.numel()
    yield from (torch.cat(waiting) for waiting, _ in small.values())


def _coded(block: torch.Tensor) -> torch.Tensor:
    """How many elements have each exponent and first digits, without asking for the largest."""
    dtype, shift, bias = _BITS[block.dtype]
    codes, size = block.abs().view(dtype).bitwise_right_shift_(shift), (2 * bias + 2) * _PARTS
    if block.device.type == "cpu":
        return torch.bincount(codes.short(), minlength=size)  # twice as fast as of int32
    return torch.histc(codes.float(), bins=size, min=0, max=size).double()  # bincount would wait for the largest


def _binned(counts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bins' counts out of those of :func:`_coded`."""
    bias = _BITS[dtype][2]
    first, last = (bias + _LOWEST) * _PARTS, (bias + _HIGHEST) * _PARTS
    under, over = counts[:first].sum(), counts[last:].sum()
    return torch.cat([under[None], counts[first:last], over[None]]).double()
