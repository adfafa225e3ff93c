"""Contents that go to a store or stay as a small copy, and the index that finds contents that are packed already."""

# [Note: contents are of one moment]
# Much code writes to a tensor without counting the change: `y.data.fill_(0)`, a numpy array over the same memory,
# `dist.all_reduce(y)`, kernels of an extension. So the contents of a saved tensor are those that it has when the
# operator that saves it is done, no matter when a thread of a store moves them: the contents are copied, and the store
# gets the copy (decision 108). `pack` makes the copy: at that time nobody has written to the inputs of the operator
# yet, and its outputs are computed.

# [Note: contents are taken late]
# Tensors that an operator allocates by itself are the exception. It may save such a tensor first and fill it later, as
# `rrelu` does with its noise (pytorch#193671). No code of the user's can have such a tensor before the operator
# returns, so its reference counts tell it apart. It is copied when the next operator of the call begins.

# [Note: leaves within one call]
# A later operator may save the same tensor again, and it may have been written meanwhile. Its version does not say so,
# so its bytes are compared: with the copy while that is in memory, otherwise by a CRC-32 (decision 109). If they
# differ, the tensor is packed as another content. The checksum is computed only if the saved tensor is still alive when
# the next operator but one saves something; most are not. An accelerator's bytes cannot be compared without waiting for
# it. There the copy is made on the device when the next operator begins. Leaves and constants, which optimizers,
# line searches and `gradcheck` write through `.data`, are shared among the tensors that one operator saves and no
# further (decision 21); tensors with a history are shared as long as their version is the same.

from __future__ import annotations

import binascii
import collections
import ctypes
import functools
import time
import weakref
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from disthooks._locks import new_lock
from disthooks._streams import handed_over
from disthooks._tensors import Layout, StorageRegion, alone, is_most_of, region_of
from disthooks._torch import uncompiled
from disthooks.errors import StoreError
from disthooks.saved.codecs.base import Codec, relative_error
from disthooks.saved.counters import Counters
from disthooks.saved.packed import Packed
from disthooks.saved.stores.base import Store
from disthooks.saved.stores.host import memory_of
from disthooks.saved.when_to_hook import refuse_capture

# All views of one packed value have the same key: the address of the storage object, the version, the region (or the
# dtype, for a codec), the identity of the owner. See [Note: storage and version] in packed.py. Equal keys do not say
# that the contents are equal.
Key = tuple[int, int, object, int]


class ContentIndex:
    """Finds the packed values of one attachment that are alive, so that one content is packed once.

    A look-up needs no lock, because it is one operation of a dict. ``add`` has one: of two threads that pack the same
    content at the same time, only one adds it. References to values that are gone are sorted out from time to time,
    because a callback for each of them would cost more (decision 29).

    Attributes:
        by_owner: the values that are all of their storage, by the identity of the tensor that counts the changes.
        recent: the values that were offloaded last, whose copies are in memory for operators that save the same again.
        undecided: the values whose contents may be dropped once a device has said so.
    """

    def __init__(self, is_typed: bool = False) -> None:
        self._by_key: dict[Key, weakref.ref[Packed]] = {}
        self.by_owner: dict[int, weakref.ref[Packed]] = {}
        self._is_typed, self._limit = is_typed, 1024
        self._lock = new_lock()
        self.recent: collections.deque[weakref.ref[Packed]] = collections.deque()
        self.undecided: collections.deque[weakref.ref[Packed]] = collections.deque()

    def __len__(self) -> int:
        return len(self._by_key) + len(self.by_owner)

    def find(self, key: Key) -> Packed | None:
        """The packed value under ``key``; None if it is gone, or if no other saved tensor may share it."""
        reference = self._by_key.get(key)
        packed = None if reference is None else reference()
        return None if packed is None or packed.is_withdrawn else packed

    def add(self, key: Key, packed: Packed, known: Packed | None = None, owner: int | None = None) -> bool:
        """Let ``find`` find ``packed`` under ``key`` as long as it lives.

        Args:
            key: of the content.
            packed: the content.
            known: what ``find`` found under ``key``, with other contents; ``packed`` takes its place.
            owner: ``lookup_view`` finds ``packed``, which must be all of its storage, for the tensor of this identity
                and for its views.

        Returns:
            False, and ``packed`` is not added, if another thread has added a value since ``known`` was found.
        """
        with self._lock:
            if key in self._by_key and self.find(key) not in (None, known):
                return False
            if len(self._by_key) + len(self.by_owner) > self._limit:
                _sort_out(self._by_key)
                _sort_out(self.by_owner)
                self._limit = 2 * len(self) + 1024
            reference = self._by_key[key] = weakref.ref(packed)
            if owner is not None:
                self.by_owner[owner] = reference
            return True

    def lookup_view(self, tensor: torch.Tensor, owner: torch.Tensor, at_least: int) -> tuple[Packed, Layout] | None:
        """The packed value of ``tensor``, and its layout. It is the short way if it or a view of it was saved before.

        None if a full look is necessary.
        """
        reference = self.by_owner.get(id(owner))
        packed = None if reference is None else reference()
        if packed is None or packed.is_withdrawn or packed.owner() is not owner or tensor._version != packed.version:
            return None
        if owner.dim() < 2 and not owner.requires_grad:
            return None  # a constant vector may be written uncounted (decision 12)
        if tensor is not owner and (type(tensor) is not torch.Tensor or tensor.is_nested):
            return None  # a view of plain memory that is no plain tensor
        if tensor.untyped_storage()._cdata != packed.storage_ref.address:
            return None
        layout = Layout.of(tensor)
        if layout == packed.first_layout:
            return packed, packed.first_layout
        nbytes = tensor.nbytes
        is_whole = nbytes >= at_least and is_most_of(layout, nbytes, packed.nbytes)
        has_dtype = not self._is_typed or layout.dtype is packed.first_layout.dtype
        return (packed, layout) if is_whole and has_dtype else None


_Name = TypeVar("_Name")


def _sort_out(table: dict[_Name, weakref.ref[Packed]]) -> None:
    """Remove the references to values that are gone. A destructor may add some meanwhile."""
    for name in list(table):  # it makes no object that could start a collection of garbage
        reference = table.get(name)
        if reference is not None and reference() is None:
            table.pop(name, None)


class StoredTickets:
    """The tickets that the store gave for one packed value, and where the tensors lay. They are dropped with it.

    This object has the destructor, so that the packed value needs none. While a destructor runs, Python lets other
    threads find the dying object again, and they would share bytes that are being dropped (decision 13).
    """

    __slots__ = ("__weakref__", "_store", "addresses", "nbytes", "tickets")

    def __init__(self, store: Store) -> None:
        self._store = store
        self.tickets: list[Any] = []
        self.addresses: list[int] = []
        self.nbytes = 0

    @uncompiled()
    def __del__(self) -> None:
        # A store's `drop` takes no lock: see [Note: locks].
        for ticket in self.tickets:
            self._store.drop(ticket)


class StoredContent(Packed):
    """Contents that go through codecs into a store."""

    __slots__ = (
        "_checksum",
        "_codecs",
        "_copy",
        "_shape",
        "_spec",
        "_store",
        "_tickets",
        "_weak_copy",
        "is_in_place",
    )

    #: Whether the contents may stay where they are, if no codec changes them and the store would put them there.
    may_stay = True

    def __init__(
        self,
        alias: torch.Tensor,
        storage: torch.UntypedStorage,
        region: StorageRegion | None,
        first_layout: Layout,
        codecs: Sequence[Codec],
        store: Store,
        counters: Counters,
        module_name: str,
    ) -> None:
        Packed.__init__(self, alias, storage, region, first_layout, counters, module_name)
        self._codecs, self._store = codecs, store
        # Whether the tensor is all of its storage, in its order, in a dtype that torch can copy.
        self.is_in_order = (
            region is None
            and first_layout.offset == 0
            and not (first_layout.conj or first_layout.neg)
            and alias.is_contiguous()
            and 1 not in first_layout.size  # such a dimension may have any stride, and a copy would have another
            and alias.nbytes == self.nbytes
            and first_layout.dtype in _COPIED
        )
        # The contents as they were saved: held until the store has them, and a little longer for operators that save
        # the same again. See [Note: contents are of one moment].
        self._copy: torch.Tensor | None = None
        self._weak_copy: weakref.ref[torch.Tensor] | None = None
        self._checksum: int | None = None
        # Whether the contents stayed where the user has them, because no codec changed them. Otherwise a value without
        # a copy is one that nobody has copied yet, and a second thread must not share it.
        self.is_in_place = False

    @property
    def is_lossless(self) -> bool:
        return not any(codec.lossy for codec in self._codecs)

    # -- the copy, and comparisons with it

    def copy_now(self) -> None:
        self._copy = self._copied(self.alias.untyped_storage())
        self._weak_copy = weakref.ref(self._copy)

    def copy_again(self) -> None:
        with self.lock:
            if self._copy is not None:
                self.copy_now()

    def release_copy(self) -> None:
        copy, self._copy = self._copy, None
        # Without the lock: `copy` lives, and is compared with, until there is the checksum.
        if copy is not None and self._weak_copy is not None and self.owner() is not None:
            self._checksum = _checksum(copy)  # it tells later whether a tensor that is saved again is the same

    def stay_in_memory(self) -> None:
        self._copy = self._weak_copy = None

    @property
    def can_compare(self) -> bool:
        return self._checksum is not None or (self._weak_copy is not None and self._weak_copy() is not None)

    def has_contents_of(self, part: torch.Tensor, layout: Layout) -> bool:
        copy, storage = None if self._weak_copy is None else self._weak_copy(), part.untyped_storage()
        if copy is not None and layout is self.first_layout and self.region is None:
            nbytes = storage.nbytes()
            return nbytes == copy.nbytes and _memcmp(storage.data_ptr(), copy.data_ptr(), nbytes) == 0
        with self.lock:
            copy = None if self._weak_copy is None else self._weak_copy()
            if copy is None and self._checksum is None:
                return self.is_in_place  # the contents are where the user has them
            if storage.nbytes() != self.nbytes:
                return False
            region = self.region
            if region is None and not is_most_of(layout, part.nbytes, self.nbytes):
                region = region_of(layout, self.nbytes)  # if `part` is small, no more than its elements are compared
                if region is not None:
                    region = region.raw()
                    return copy is not None and torch.equal(region.over(storage), region.over(copy.untyped_storage()))
            if region is None:
                now = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # all of its bytes
            else:
                now = region.over(storage).contiguous()
            return _checksum(now) == self._checksum if copy is None else _are_equal(now, copy)

    def _copied(self, storage: torch.UntypedStorage) -> torch.Tensor:
        if self.is_in_order:
            return self._store.own(self.alias)
        return self._store.own(self.content(storage, typed=bool(self._codecs) or self.alias.dtype in _COPIED))

    # -- to the store

    def _offload(self, storage: torch.UntypedStorage) -> bool:
        if self._copy is None:
            self._copy = self._copied(storage)
            # A fresh tensor, which `pack` did not copy. The next operator may save it again, so the copy is compared.
            if self._copy.is_cpu and self._checksum is None:
                self._weak_copy = weakref.ref(self._copy)
        content = self._copy
        if not content.is_cpu:
            self._copy = None
        parts = self._encode(content) if self._codecs else (content,)
        is_unchanged = len(parts) == 1 and parts[0] is content
        if self._codecs and is_unchanged and self.may_stay and not self._store.leaves_memory(content):
            self.counters.count_kept("in place", self.nbytes, self.module_name)
            self._copy = self._weak_copy = None
            self.is_in_place = True
            return False
        self._shape = (content.dtype, content.shape)
        begin, total, moved = time.perf_counter(), 0, 0
        stored = StoredTickets(self._store)  # if an interrupt comes, this drops the tickets that it has
        for part in parts:
            if part is not content:
                # A store counts the bytes of a part. A part that lies over a piece of a larger storage would keep all
                # of that storage in memory.
                part = alone(part)
            try:
                stored.tickets.append(self._store.put(part))
            except StoreError as error:
                raise _with_module(error, "to store what", self.module_name) from error
            nbytes = part.nbytes
            total += nbytes
            later = functools.partial(self.counters.count_moved, nbytes, self.module_name)
            if part.device != self.alias.device or (
                self._store.leaves_memory(part) and self._store.has_left(stored.tickets[-1], later)
            ):
                moved += nbytes
            stored.addresses.append(part.data_ptr())
        stored.nbytes = total
        self.counters.hold(stored)
        self.counters.count_put(total, moved, time.perf_counter() - begin, self.module_name, content.nbytes)
        self._tickets = stored
        return True

    def _encode(self, content: torch.Tensor) -> tuple[torch.Tensor, ...]:
        begin = time.perf_counter()
        tensors: tuple[torch.Tensor, ...] = (content,)
        self._spec: list[Any] = []
        for position, codec in enumerate(self._codecs):
            encoded = [codec.encode(tensor) for tensor in tensors]
            if codec.lossy:
                self._measure(position, codec, tensors, encoded)
            self._spec.append([(len(parts), spec) for parts, spec in encoded])
            tensors = tuple(part for parts, _ in encoded for part in parts)
        self.counters.count_codecs(time.perf_counter() - begin, self.module_name)
        return tensors

    def _measure(
        self,
        position: int,
        codec: Codec,
        tensors: Sequence[torch.Tensor],
        encoded: Sequence[tuple[tuple[torch.Tensor, ...], Any]],
    ) -> None:
        """Measure the error of ``codec`` for the tensors that it changed, if a measurement is due."""
        changed = [
            (tensor, parts, spec)
            for tensor, (parts, spec) in zip(tensors, encoded, strict=True)
            if not (len(parts) == 1 and parts[0] is tensor) and (tensor.is_floating_point() or tensor.is_complex())
        ]
        if changed and self.counters.codec_errors.is_due(position):
            with torch.no_grad():
                for tensor, parts, spec in changed:
                    error = relative_error(codec.decode(parts, spec), tensor)
                    self.counters.codec_errors.add(repr(codec), error)

    # -- and back

    def _restore(self) -> torch.Tensor:
        if self.alias.is_cuda:
            refuse_capture(self.module_name)  # the backward may be captured
        begin, copied = time.perf_counter(), 0.0
        tensors: list[torch.Tensor] = []
        try:
            for ticket in self._tickets.tickets:
                tensors.append(self._store.get(ticket))
                copied += self._store.pop_transfer_seconds(ticket)
        except StoreError as error:
            raise _with_module(error, "to bring back what", self.module_name) from error
        self.counters.count_got(self._tickets.nbytes, time.perf_counter() - begin, self.module_name, copied)
        if self._codecs:
            begin = time.perf_counter()
            for codec, specs in zip(reversed(self._codecs), reversed(self._spec), strict=True):
                parts = iter(tensors)
                tensors = [codec.decode(tuple(next(parts) for _ in range(n)), spec) for n, spec in specs]
            self.counters.count_codecs(time.perf_counter() - begin, self.module_name)
        content = tensors[0]
        # torch itself accepts a wrong dtype or a shape that broadcasts, silently.
        if (content.dtype, content.shape) != self._shape or content.device != self.alias.device:
            raise StoreError(
                f"{self._store!r} gave back {content.dtype} {tuple(content.shape)} on {content.device} for what "
                f"{self.module_name!r} saved as {self._shape[0]} {tuple(self._shape[1])} on {self.alias.device}: "
                "get() must return what was put, and decode() what was encoded"
            )
        return _spread(content, self.region)

    def _in_memory(self, layout: Layout) -> torch.Tensor:
        copy = self._copy
        if copy is None:
            return super()._in_memory(layout)
        whole = _spread(copy, self.region)
        return layout.of_whole(whole.detach(), self.region.offset if self.region else 0)

    def is_own_memory(self, tensor: torch.Tensor) -> bool:
        # A store may give back the very tensor that was put, while it is in memory (decision 35).
        return tensor.data_ptr() not in self._tickets.addresses


class StorageParts(dict[Key, tuple["weakref.ref[StoredContent]", int]]):
    """The regions of storages that one operator saves, to tell when a storage is better packed whole.

    Queries, keys and values are thirds of one storage, mostly. If each were packed alone, it would be copied out of the
    storage, and spread again in backward to strides that reach over nearly all of it. So if the parts are half of the
    storage or more, the first of them is widened to all of it (decision 42). For the key of each whole storage there
    are only the first part and the sum of the bytes, because an operator may save thousands of views of one tensor.
    """

    def add(self, key: Key, packed: StoredContent, region: StorageRegion) -> None:
        first, covered = self.get(key, (weakref.ref(packed), 0))
        if first() is None:
            first, covered = weakref.ref(packed), 0
        self[key] = first, covered + region.nbytes

    def to_widen(self, key: Key, owner: torch.Tensor, region: StorageRegion, nbytes: int) -> StoredContent | None:
        """The first part, if all parts and ``region`` together are half of the ``nbytes`` of the storage or more."""
        reference, covered = self.get(key, (None, 0))
        packed = None if reference is None else reference()
        if packed is None or packed.region is None or packed.is_offloaded or packed.owner() is not owner:
            return None
        return packed if (covered + region.nbytes) * 2 >= nbytes else None


class SmallCopy(Packed):
    """A copy of a small part of a large storage, which stays in memory so that the rest need not."""

    __slots__ = ("_copy",)

    def copy_now(self) -> None:
        self._copy = self.content(self.alias.untyped_storage()).clone(memory_format=torch.contiguous_format)

    def has_contents_of(self, part: torch.Tensor, layout: Layout) -> bool:
        with self.lock:
            now = self.content(part.untyped_storage()).contiguous()
            return now.is_cpu and hasattr(self, "_copy") and _are_equal(now, self._copy)

    def _offload(self, storage: torch.UntypedStorage) -> bool:
        if not hasattr(self, "_copy"):
            self._copy = self.content(storage).clone(memory_format=torch.contiguous_format)
        return True

    def _restore(self) -> torch.Tensor:
        return _spread(self._copy if self.stream is None else handed_over(self._copy, self.stream), self.region)


def _with_module(error: StoreError, doing: str, module_name: str) -> StoreError:
    """``error`` with the name of the module whose tensor it was, which a store does not know."""
    message = f"{doing} {repr(module_name) if module_name else 'a block of code'} saved: {error}"
    return StoreError(message, path=error.path, wanted=error.wanted, free=error.free)


# Some of the other dtypes have no kernel for a copy (torch.int4, torch.bits8), so their contents are taken as bits.
_COPIED = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128}
_COPIED |= {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool}


def _spread(content: torch.Tensor, region: StorageRegion | None) -> torch.Tensor:
    """``content`` at the strides of its region. Without a region: without gaps, from the front of a storage."""
    if content.is_conj() or content.is_neg():
        content = content.resolve_conj().resolve_neg()
    if region is None:
        at_front = content.storage_offset() == 0 and content.is_contiguous()
        return content if at_front else content.clone(memory_format=torch.contiguous_format)
    base = torch.empty(region.extent, dtype=content.dtype, device=content.device)
    base.as_strided(region.size, region.stride).copy_(content)
    return base


def _checksum(content: torch.Tensor) -> int:
    return binascii.crc32(memory_of(content))


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two contiguous tensors in CPU memory have the same bytes."""
    if one.nbytes != other.nbytes:
        return False
    differs: int = _memcmp(one.data_ptr(), other.data_ptr(), one.nbytes)
    return differs == 0


_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
