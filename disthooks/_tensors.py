"""Facts about tensors: sizes in bytes, layouts, storages and their regions, the local part of a distributed tensor."""

# [Note: whole or compact]
# A saved tensor may cover only a part of its storage. If it covers half of the storage or more, disthooks keeps all of
# the storage: other views are likely to need the rest of it, and the strides stay as they are. If the tensor covers
# less than half, disthooks keeps only the elements that the tensor covers, as a `StorageRegion` (decision 3). These are
# in the order of the storage, not of the view. So a transposed or reshaped view of the same elements has the same
# region, and its elements are kept only once.

# [Note: tensors without bits]
# A fake tensor has a shape, a storage with a size, and a version, but no bits. To hooks it is a subclass of unknown
# memory, which they leave alone. Code that runs hooks on fake tensors puts their class into `bitless.kinds` of its
# thread. Then they count as plain memory here, and all of them have the same checksum.

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
import threading
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from disthooks._torch import StorageRef
from disthooks.errors import StoreError, UsageError

# Bytes of each unit, with its name in capitals.
_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS[_letter + "IB"] = 1024**_power
    _UNITS[_letter + "B"] = 1000**_power
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(size: int | str, what: str = "size") -> int:
    """The number of bytes of ``size``: an int, or text such as ``"4 KiB"``, ``"1.5GB"``, ``"20 GiB"``.

    Args:
        size: an int that is not negative, or a number with a unit: B, KB, KiB, MB, MiB, GB, GiB, TB or TiB, in any
            case of letters.
        what: the name of the argument, for the error text.

    Raises:
        UsageError: if ``size`` is negative, or is not a size.

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
    """``count`` bytes as text, in the largest binary unit that is not larger than ``count``.

    >>> format_bytes(0), format_bytes(1536), format_bytes(3 * 2**30)
    ('0 B', '1.5 KiB', '3.0 GiB')
    """
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


# Every saved tensor pays for the look-ups of these names.
_Tensor, _STRIDED = torch.Tensor, torch.strided
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


class _Bitless(threading.local):
    """The classes of tensors that count as plain memory in this thread, although they have no bits."""

    kinds: frozenset[type] = frozenset()


#: See [Note: tensors without bits].
bitless = _Bitless()


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is of torch's own class, or of one in ``bitless.kinds``.

    >>> is_plain(torch.ones(2)), is_plain(nn.Parameter(torch.ones(2)))
    (True, False)
    """
    return type(tensor) is _Tensor or type(tensor) in bitless.kinds


# Some of the other dtypes have no kernel for a copy (torch.int4, torch.bits8), so their contents are taken as bits.
COPIED = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128}
COPIED |= {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool}


class Layout(NamedTuple):
    """Where the elements of a strided tensor are in its storage.

    ``size``, ``stride`` and ``offset`` count elements of ``dtype``. ``conj`` and ``neg`` are the bits with which torch
    marks a lazy conjugate and a lazy negative. ``is_copied`` says whether a contiguous copy has the same layout.
    """

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    conj: bool
    neg: bool
    is_copied: bool

    @staticmethod
    def of(tensor: torch.Tensor) -> Layout:
        """The layout of ``tensor``. Equal layouts are mostly one object."""
        dtype = tensor.dtype
        conj = dtype.is_complex and tensor.is_conj()
        return _layouts[dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), conj, tensor.is_neg()]

    def end(self) -> int:
        """The number of elements from the start of the storage to the last one of this layout, both included.

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
        """The tensor with this layout over ``storage``.

        Raises:
            StoreError: if ``storage`` is too short.

        >>> x = torch.arange(6.0).view(2, 3).t()[1:]
        >>> torch.equal(Layout.of(x).over(x.untyped_storage()), x)
        True
        """
        # `set_` would lengthen a storage that is too short, and its new bytes would have any value.
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
        """The tensor with this layout over the storage of ``whole``. Both share one version counter.

        >>> whole = torch.zeros(6)
        >>> part = Layout.of(torch.zeros(2, 3).t()).of_whole(whole)
        >>> _ = part.add_(1)
        >>> part.shape, whole.sum(), whole._version
        (torch.Size([3, 2]), tensor(6.), 1)
        """
        if self.dtype is whole.dtype and not (self.conj or self.neg):
            if self.offset == shift:  # without its third argument `as_strided` takes a quarter less time
                return whole.as_strided(self.size, self.stride)
            return whole.as_strided(self.size, self.stride, self.offset - shift)
        # `detach` shares the version counter, and setting `data` keeps it.
        tensor = whole.detach()
        tensor.data = self.over(whole.untyped_storage(), shift)
        return tensor


class _Layouts(dict[Any, Layout]):
    """The layouts that were asked for, by their fields."""

    def __missing__(self, fields: Any) -> Layout:
        dtype, size, stride, offset, conj, neg = fields
        dense, expected = [], 1
        for n in reversed(size):
            dense.append(expected)
            expected *= n
        # A dimension of one element may have any stride, and a copy would have another.
        is_plain = offset == 0 and dtype in COPIED and not (conj or neg) and 1 not in size
        if len(self) >= 4096:
            self.clear()
        is_copied = is_plain and stride == tuple(reversed(dense))
        return self.setdefault(fields, Layout._make((*fields, is_copied)))


_layouts = _Layouts()


def resident(tensor: torch.Tensor) -> int:
    """Bytes of memory that ``tensor`` keeps alive: all of its storage, even if it covers a small part of it.

    >>> resident(torch.zeros(10, 4)[:, 1])
    160
    """
    return int(tensor.untyped_storage().nbytes())


def alone(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, or a copy of it if its storage has more bytes than ``tensor``.

    A store counts the bytes of the tensors that it holds. It would hold the rest of a larger storage without counting
    it.

    >>> x = torch.zeros(10, 4)
    >>> alone(x) is x, resident(alone(x[:, 1]))
    (True, 40)
    """
    return tensor if resident(tensor) <= tensor.nbytes else tensor.clone(memory_format=torch.contiguous_format)


def exotic(tensor: torch.Tensor) -> str | None:
    """One word that says why ``tensor`` is not plain bytes in a storage; None if it is plain bytes.

    >>> exotic(torch.ones(2)), exotic(torch.ones(2).to_sparse()), exotic(torch.ones(2, device="meta"))
    (None, 'sparse', 'meta')
    """
    if type(tensor) is not _Tensor and type(tensor) not in bitless.kinds:
        return "subclass"
    if tensor.layout is not _STRIDED:
        return "sparse" if "sparse" in str(tensor.layout) else "layout"
    if tensor.is_quantized:
        return "quantized"
    if tensor.is_nested:
        return "nested"
    if tensor.is_meta:
        return "meta"
    if tensor._is_zerotensor():
        return "zerotensor"
    if _is_wrapped(tensor):
        return "functorch"
    return None


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The part of ``tensor`` that is on this rank: the local tensor of a DTensor; any other tensor itself.

    The result shares memory with ``tensor``, so an in-place change of one is a change of both.
    """
    # The attribute tells a DTensor from other tensors, so that torch.distributed.tensor need not be imported.
    local = getattr(tensor, "_local_tensor", None)
    return local if isinstance(local, torch.Tensor) else tensor


@torch.no_grad()  # reading the values of a sparse tensor that has a history would make a node
def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The strided tensors that ``tensor`` consists of, its elements first: itself, or values and indices, or offsets.

    The list is empty if torch gives no access to them, as in the layout of mkldnn.

    >>> [tuple(part.shape) for part in parts_of(torch.eye(3).to_sparse())]
    [(3,), (2, 3)]
    """
    if hasattr(tensor, "__tensor_flatten__"):  # jagged tensors, DTensor
        inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])  # a DTensor names its mesh, too
        return [part for each in inner if isinstance(each, torch.Tensor) for part in parts_of(each)]
    layout = tensor.layout
    if layout is torch.sparse_coo:
        return [tensor._values(), tensor._indices()]  # the public methods refuse tensors that are not coalesced
    if layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.values(), tensor.crow_indices(), tensor.col_indices()]
    if layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.values(), tensor.ccol_indices(), tensor.row_indices()]
    if tensor.is_nested:
        return [tensor.values()]
    return [tensor] if layout is _STRIDED else []


def bytes_of(tensor: torch.Tensor) -> int:
    """The bytes of the elements that ``tensor`` has in memory on this rank, and of their indices.

    >>> bytes_of(torch.ones(5)), bytes_of(torch.eye(1000).to_sparse())
    (20, 20000)
    """
    is_one = type(tensor) is _Tensor and tensor.layout is _STRIDED
    parts = [tensor] if is_one else parts_of(tensor) or [tensor]
    return sum(part.numel() * part.element_size() for part in parts)


def elements_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements that ``tensor`` has in memory, as a strided tensor: of a sparse or nested one its values.

    Raises:
        TypeError: if torch does not give them without waiting for the device.
    """
    if tensor.layout is _STRIDED and not tensor.is_nested:
        return tensor
    parts = parts_of(tensor)
    # Where sequences do not fill the memory, the bytes between them have no known value.
    if not parts or (tensor.is_nested and not tensor.is_contiguous()):
        raise TypeError(f"torch has no way to read all elements of {tensor.layout}, or there are gaps between them")
    return parts[0]


def storages_of(module: nn.Module) -> dict[int, tuple[str, StorageRef]]:
    """The storages of a module's parameters and buffers, and of the copies that a DataParallel replica has.

    The dict lacks the parameters that a lazy module has not made yet; see :func:`is_waiting`.

    Returns:
        For the address of each storage: "parameter" or "buffer", and a weak reference. The caller keeps the references
        as long as it compares addresses. Engines exchange the storages of weights during forward, and without a
        reference a new tensor could get the address of a storage that is gone (decision 26).

    >>> [kind for kind, _ in storages_of(nn.Linear(2, 2)).values()]
    ['parameter', 'parameter']
    """
    copies = (copy for part in module.modules() for copy in getattr(part, "_former_parameters", {}).values())
    found: dict[int, tuple[str, StorageRef]] = {}
    for kind, tensors in (("buffer", module.buffers()), ("parameter", itertools.chain(module.parameters(), copies))):
        for tensor in tensors:
            if nn.parameter.is_lazy(tensor):
                continue
            with contextlib.suppress(NotImplementedError, RuntimeError):  # sparse tensors have no storage
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
    """The elements of a large storage that a small tensor covers, the same for all views of these elements.

    ``offset``, ``size`` and ``stride`` count elements of ``dtype``. See [Note: whole or compact].
    """

    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def extent(self) -> int:
        """The number of elements of the storage from the first to the last of the region, both included."""
        return 1 + sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))

    @property
    def nbytes(self) -> int:
        return torch.Size(self.size).numel() * self.dtype.itemsize

    def raw(self) -> StorageRegion:
        """The same region in a dtype of the same size that torch can copy. It cannot copy ``torch.int4``, for one."""
        return self._replace(dtype=_RAW[self.dtype.itemsize])

    def over(self, storage: torch.UntypedStorage) -> torch.Tensor:
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        return tensor.set_(storage, self.offset, self.size, self.stride)


# A dtype that torch can copy, by the bytes of an element.
_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def is_most_of(layout: Layout, covered: int, nbytes: int) -> bool:
    """Whether a tensor with ``layout`` and ``covered`` bytes covers at least half of its storage of ``nbytes``.

    With a stride of 0 ``covered`` counts one element several times, so the answer is False then.
    """
    return covered * 2 >= nbytes and 0 not in layout.stride


def region_of(layout: Layout, nbytes: int) -> StorageRegion | None:
    """The region of a storage of ``nbytes`` to keep for a tensor with ``layout``; None to keep all of the storage.

    See [Note: whole or compact].

    >>> x = torch.zeros(4, 12)
    >>> region_of(Layout.of(x.t()), 192)
    >>> region_of(Layout.of(x[:, :4]), 192) == region_of(Layout.of(x[:, :4].t()), 192)
    True
    """
    itemsize = layout.dtype.itemsize
    if is_most_of(layout, layout.size.numel() * itemsize, nbytes):
        return None
    # A dimension of one element, or with stride 0, adds no element. The others are sorted from the smallest stride.
    dims = sorted((step, n) for n, step in zip(layout.size, layout.stride, strict=True) if n > 1 and step)
    merged: list[tuple[int, int]] = []
    covered = 1  # elements of the storage from the first to the last of the dimensions so far
    for step, n in dims:
        if step < covered:
            # The dimensions overlap, as the windows of `unfold` do. Keep all elements from the first to the last.
            length = 1 + sum((n - 1) * step for step, n in dims)
            if length * itemsize * 2 >= nbytes:
                return None
            return StorageRegion(layout.dtype, layout.offset, (length,), (1,))
        # Two dimensions without a gap between them become one, so that reshaped views have the same region.
        if merged and step == merged[-1][0] * merged[-1][1]:
            merged[-1] = (merged[-1][0], merged[-1][1] * n)
        else:
            merged.append((step, n))
        covered += (n - 1) * step
    size = tuple(n for _, n in reversed(merged))
    if torch.Size(size).numel() * itemsize * 2 >= nbytes:
        return None
    return StorageRegion(layout.dtype, layout.offset, size, tuple(step for step, _ in reversed(merged)))


def has_gaps(layout: Layout, nbytes: int) -> bool:
    """Whether a tensor in a storage of ``nbytes`` covers less than half of what is between its first and last element.

    >>> x = torch.zeros(100, 100)
    >>> has_gaps(Layout.of(x[0]), x.nbytes), has_gaps(Layout.of(x[:, 0]), x.nbytes)
    (False, True)
    """
    region = region_of(layout, nbytes)
    return region is not None and region.nbytes * 2 < region.extent * region.dtype.itemsize


def memory_under(tensor: torch.Tensor) -> torch.Tensor:
    """The memory from the first element of ``tensor`` to its last, as one row of bytes."""
    layout, itemsize = Layout.of(tensor), tensor.element_size()
    nbytes = (layout.end() - layout.offset) * itemsize if tensor.numel() else 0
    row = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return row.set_(tensor.untyped_storage(), layout.offset * itemsize, (nbytes,), (1,))


def words_of(storage: torch.UntypedStorage, nbytes: int) -> torch.Tensor:
    """The first ``nbytes`` of ``storage`` as one row of int64; of uint8 if they are no whole number of words."""
    dtype = torch.uint8 if nbytes % 8 else torch.int64
    row = torch.empty(0, dtype=dtype, device=storage.device)
    return row.set_(storage, 0, (nbytes // dtype.itemsize,), (1,))


def floats_of(value: object, around: tuple[int, ...] = ()) -> list[torch.Tensor]:
    """The tensors with floating-point elements in a module's input or output, the local part of a DTensor.

    They are found in tuples, lists, dicts, dataclasses and in every container that torch's pytree knows. ``around`` has
    the identities of the containers around ``value``: a dataclass may have a field that leads back to itself.
    """
    if isinstance(value, torch.Tensor):
        part = local_part(value)
        return [part] if part.is_floating_point() or part.is_complex() else []
    # The usual containers need no pytree, which takes longer than looking at a small tensor.
    inside: Iterable[object]
    if isinstance(value, (tuple, list)):
        inside = value
    elif isinstance(value, dict):
        inside = value.values()
    elif value is None or isinstance(value, (int, float, str)) or id(value) in around:
        inside = ()
    else:
        leaves = pytree.tree_leaves(value)
        if len(leaves) != 1 or leaves[0] is not value:  # pytree knows this container
            inside = leaves
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            inside = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
        else:
            inside = ()
    found: list[torch.Tensor] = []
    for inner in inside:
        found += floats_of(inner, (*around, id(value)))
    return found


@contextlib.contextmanager
def needing_gradients(parameter: torch.Tensor) -> Iterator[bool]:
    """Inside, ``parameter`` needs gradients, if it can: torch accepts no hook for a parameter that does not.

    The hook stays when the parameter is frozen again, and is called if the parameter gets a gradient later. The value
    of the context is whether a hook can be put on. See [Note: hooks on leaves] in engines/base.py.

    >>> weight = torch.nn.Parameter(torch.ones(1), requires_grad=False)
    >>> with needing_gradients(weight) as able:
    ...     handle = weight.register_hook(lambda grad: 2 * grad)
    >>> weight.requires_grad, able
    (False, True)
    >>> weight.requires_grad_(True).sum().backward()
    >>> weight.grad
    tensor([2.])
    """
    able = parameter.is_leaf and (parameter.is_floating_point() or parameter.is_complex())
    if parameter.requires_grad or not able or parameter.is_inference():
        yield parameter.requires_grad
        return
    parameter.requires_grad_(True)
    try:
        yield True
    finally:
        parameter.requires_grad_(False)
