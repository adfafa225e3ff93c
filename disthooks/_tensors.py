"""Pure facts about tensors: sizes in bytes, storage, layout, the local part of a distributed one.

What of a storage to keep for a tensor that lies over a part of it.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from typing import NamedTuple

import torch
from torch import nn

from disthooks._torch import StorageRef
from disthooks.errors import StoreError, UsageError

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS[_letter + "IB"] = 1024**_power
    _UNITS[_letter + "B"] = 1000**_power
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(size: int | str, what: str = "size") -> int:
    """Number of bytes in ``size``: an int, or text such as ``"4 KiB"``, ``"1.5GB"``, ``"20 GiB"``.

    Args:
        size: a non-negative int, or a number with a unit: B, KB, KiB, MB, MiB, GB, GiB, TB or TiB.
        what: the name of the argument, for the error message.

    Raises:
        UsageError: when the text is not a size, or negative.

    >>> parse_bytes("4 KiB"), parse_bytes("1.5 kB"), parse_bytes(17)
    (4096, 1500, 17)
    """
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise UsageError(
            f"{what}={size!r} is not a number of bytes: give an int that is not negative, or text such as "
            "'4 KiB', '1.5 GB', '512 B' (units B, KB, KiB, MB, MiB, GB, GiB, TB, TiB)"
        )
    return int(float(match[1]) * unit)


def format_bytes(count: float) -> str:
    """``count`` bytes in the largest binary unit that leaves at least one.

    >>> format_bytes(0), format_bytes(1536), format_bytes(3 * 2**30)
    ('0 B', '1.5 KiB', '3.0 GiB')
    """
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


class Layout(NamedTuple):
    """How a strided tensor lies over its storage; sizes, strides and offset count elements."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    conj: bool
    neg: bool

    @staticmethod
    def of(tensor: torch.Tensor) -> Layout:
        """The layout of ``tensor``."""
        fields = (
            tensor.dtype,
            tensor.size(),
            tensor.stride(),
            tensor.storage_offset(),
            tensor.is_conj(),
            tensor.is_neg(),
        )
        return tuple.__new__(Layout, fields)  # half the time: every saved tensor pays it

    def end(self) -> int:
        """Elements of the storage up to the last one that this layout reaches.

        >>> Layout.of(torch.zeros(4, 5)[1:3, 2]).end()
        13
        """
        if 0 in self.size:
            return 0
        last = self.offset
        for n, step in zip(self.size, self.stride, strict=True):
            last += (n - 1) * step
        return last + 1

    def over(self, storage: torch.UntypedStorage, shift: int = 0) -> torch.Tensor:
        """The tensor with this layout over ``storage``, whose first element stands at offset ``shift``.

        Raises:
            StoreError: when ``storage`` is too short; ``set_`` would lengthen it with bytes that nobody wrote.

        >>> x = torch.arange(6.0).view(2, 3).t()[1:]
        >>> torch.equal(Layout.of(x).over(x.untyped_storage()), x)
        True
        """
        if (self.end() - shift) * self.dtype.itemsize > storage.nbytes():
            raise StoreError(
                f"the memory of a saved tensor of shape {tuple(self.size)} was taken away: its storage has "
                f"{storage.nbytes()} bytes now. Something resized it between forward and backward"
            )
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, self.offset - shift, self.size, self.stride)
        if self.conj:
            tensor = tensor.conj()
        return torch._neg_view(tensor) if self.neg else tensor

    def of_whole(self, whole: torch.Tensor, shift: int = 0) -> torch.Tensor:
        """The tensor with this layout over the storage of ``whole``; changes of either are counted in both.

        >>> whole = torch.zeros(6)
        >>> part = Layout.of(torch.zeros(2, 3).t()).of_whole(whole)
        >>> _ = part.add_(1)
        >>> part.shape, whole.sum(), whole._version
        (torch.Size([3, 2]), tensor(6.), 1)
        """
        if self.dtype is whole.dtype and not (self.conj or self.neg):
            if self.offset == shift:
                return whole.as_strided(self.size, self.stride)  # a quarter of its time goes to the third argument
            return whole.as_strided(self.size, self.stride, self.offset - shift)
        tensor = whole.detach()
        tensor.data = self.over(whole.untyped_storage(), shift)
        return tensor


def resident(tensor: torch.Tensor) -> int:
    """Bytes of memory that ``tensor`` keeps alive: all of its storage, however little of it the tensor covers.

    >>> resident(torch.zeros(10, 4)[:, 1])
    160
    """
    return int(tensor.untyped_storage().nbytes())


def alone(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, or a copy of it where its storage has more bytes than it has: what keeps a tensor counts its bytes.

    >>> x = torch.zeros(10, 4)
    >>> alone(x) is x, resident(alone(x[:, 1]))
    (True, 40)
    """
    return tensor if resident(tensor) <= tensor.nbytes else tensor.clone(memory_format=torch.contiguous_format)


def exotic(tensor: torch.Tensor) -> str | None:
    """Why the bytes of ``tensor`` cannot be taken from a plain storage, or None when they can.

    >>> exotic(torch.ones(2)), exotic(torch.ones(2).to_sparse()), exotic(torch.ones(2, device="meta"))
    (None, 'sparse', 'meta')
    """
    if type(tensor) is not torch.Tensor:
        return "subclass"
    if tensor.layout is not torch.strided:
        return "sparse" if "sparse" in str(tensor.layout) else "layout"
    if tensor.is_quantized:
        return "quantized"
    if tensor.is_nested:
        return "nested"
    if tensor.is_meta:
        return "meta"
    if tensor._is_zerotensor():
        return "zerotensor"
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "functorch"
    return None


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part of ``tensor`` that lives on this rank: a DTensor's local tensor, any other tensor itself.

    It shares memory with ``tensor``, so an in-place change reaches it.
    """
    local = getattr(tensor, "_local_tensor", None)
    return local if isinstance(local, torch.Tensor) else tensor


def storages_of(module: nn.Module) -> dict[int, tuple[str, StorageRef]]:
    """Addresses of the storages of a module's parameters and buffers, and of a DataParallel replica's copies.

    The values are "parameter" or "buffer", and a weak reference: engines exchange the storages of weights in mid
    forward, and as long as the references are there no other tensor gets the address of one that is gone. Those that a
    lazy module has not made yet are left out; see :func:`is_waiting`.

    >>> [kind for kind, _ in storages_of(nn.Linear(2, 2)).values()]
    ['parameter', 'parameter']
    """
    copies = (copy for part in module.modules() for copy in getattr(part, "_former_parameters", {}).values())
    found: dict[int, tuple[str, StorageRef]] = {}
    for kind, tensors in (("buffer", module.buffers()), ("parameter", itertools.chain(module.parameters(), copies))):
        for tensor in tensors:
            if nn.parameter.is_lazy(tensor):
                continue
            with contextlib.suppress(NotImplementedError, RuntimeError):  # sparse ones have none
                ref = StorageRef(local_part(tensor).untyped_storage())
                found[ref.address] = kind, ref
    return found


def is_waiting(module: nn.Module) -> bool:
    """Whether a lazy module in ``module`` has not made its parameters and buffers yet.

    >>> is_waiting(nn.LazyLinear(2)), is_waiting(nn.Linear(2, 2))
    (True, False)
    """
    return any(nn.parameter.is_lazy(it) for it in itertools.chain(module.parameters(), module.buffers()))


class StorageRegion(NamedTuple):
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

    def raw(self) -> StorageRegion:
        """The same in a dtype that torch can copy, which it cannot every other (``torch.int4``): bits are bits."""
        return self._replace(dtype=_RAW[self.dtype.itemsize])


_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def is_most_of(layout: Layout, covered: int, nbytes: int) -> bool:
    """Whether a tensor of ``layout``, of ``covered`` bytes, is half of its storage of ``nbytes`` or more."""
    return covered * 2 >= nbytes and 0 not in layout.stride


def region_of(layout: Layout, nbytes: int) -> StorageRegion | None:
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
            return (
                None if length * itemsize * 2 >= nbytes else StorageRegion(layout.dtype, layout.offset, (length,), (1,))
            )
        if merged and step == merged[-1][0] * merged[-1][1]:
            merged[-1] = (merged[-1][0], merged[-1][1] * n)
        else:
            merged.append((step, n))
        covered += (n - 1) * step
    size = tuple(n for _, n in reversed(merged))
    if torch.Size(size).numel() * itemsize * 2 >= nbytes:
        return None
    return StorageRegion(layout.dtype, layout.offset, size, tuple(step for step, _ in reversed(merged)))
