"""What of a storage to keep for a tensor that lies over a part of it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from disthooks._tensors import Layout


class Region(NamedTuple):
    """The elements of a large storage that a small tensor covers, whichever of its views shows them."""

    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def extent(self) -> int:
        """Elements from the first to the last, both included."""
        return 1 + sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return torch.Size(self.size).numel() * self.dtype.itemsize

    def raw(self) -> Region:
        """The same in a dtype that torch can copy, which it cannot every other (``torch.int4``): bits are bits."""
        return self._replace(dtype=_RAW[self.dtype.itemsize])


_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def is_most_of(layout: Layout, covered: int, nbytes: int) -> bool:
    """Whether a tensor of ``layout``, of ``covered`` bytes, is half of its storage of ``nbytes`` or more."""
    return covered * 2 >= nbytes and 0 not in layout.stride


def region_of(layout: Layout, nbytes: int) -> Region | None:
    """What of a storage of ``nbytes`` to keep for a tensor of ``layout``: None for all of it.

    Half of the storage or more is kept whole: other views of it will ask for the rest, and its strides come
    back without a thought. Less than half is compacted to the elements the tensor covers, in the order of the
    storage, so that a transposed or reshaped view of the same elements finds them.

    >>> x = torch.zeros(4, 12)
    >>> region_of(Layout.of(x.t()), 192)
    >>> region_of(Layout.of(x[:, :4]), 192) == region_of(Layout.of(x[:, :4].t()), 192)
    True
    """
    itemsize = layout.dtype.itemsize
    if is_most_of(layout, layout.size.numel() * itemsize, nbytes):
        return None
    dims = sorted(
        ((step, n) for n, step in zip(layout.size, layout.stride, strict=True) if n > 1 and step),
        reverse=True,
    )
    merged: list[tuple[int, int]] = []
    covered = 1  # elements from the first to the last of the dimensions looked at so far
    for step, n in reversed(dims):
        if step < covered:  # overlapping windows: keep the run of elements they lie in
            length = 1 + sum((n - 1) * step for step, n in dims)
            return None if length * itemsize * 2 >= nbytes else Region(layout.dtype, layout.offset, (length,), (1,))
        if merged and step == merged[-1][0] * merged[-1][1]:
            merged[-1] = (merged[-1][0], merged[-1][1] * n)
        else:
            merged.append((step, n))
        covered += (n - 1) * step
    size = tuple(n for _, n in reversed(merged))
    if torch.Size(size).numel() * itemsize * 2 >= nbytes:
        return None
    return Region(layout.dtype, layout.offset, size, tuple(step for step, _ in reversed(merged)))
