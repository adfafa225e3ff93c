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
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from disthooks._locks import new_lock
from disthooks._streams import handed_over
from disthooks._tensors import COPIED, Layout, StorageRegion, alone, is_most_of, region_of
from disthooks._torch import StorageRef, free_weak_ref, uncompiled
from disthooks.errors import StoreError
from disthooks.saved.codecs.base import Codec, relative_error
from disthooks.saved.counters import ModuleCounts
from disthooks.saved.packed import Decision, Handle, Packed, Place, SavedTensor
from disthooks.saved.stores.base import MovingTicket, Store
from disthooks.saved.stores.host import memory_of
from disthooks.saved.when_to_hook import refuse_capture


class MakesContents(Protocol):
    def make(self, saved: SavedTensor, decision: Decision) -> Packed:
        """The packed value of ``saved``, whose content is not known yet."""


class ContentIndex:
    """Decides which content a saved tensor is, so that one content of an attachment is packed once.

    A look-up needs no lock, because it is one operation of a dict. To add a content takes one: of two threads that pack
    the same content at the same time, only one adds it. References to values that are gone are sorted out from time to
    time, because a callback for each of them would cost more (decision 29).

    All views of one content have the same key: the address of the storage object, the version, the region (or the
    dtype, for a codec), the identity of the owner. See [Note: storage and version] in packed.py. A key is the hash of
    these, so they are compared with those of the content that is found.

    Args:
        at_least: a view of fewer bytes is found by a full look alone, which may leave it in memory.
        is_typed: whether there are codecs, which need to know the dtype of a content.

    Attributes:
        by_owner: the contents that are all of their storage, by the identity of the tensor that counts the changes.
        alive: every object that holds bytes of the store. A sum that destructors change would stay wrong after the
            handler of a signal has raised an error in one of them.
        recent: the contents that were offloaded last, whose copies are in memory for operators that save them again.
        undecided: the contents that may be dropped once a device has said so.
        has_bytes: whether the bytes of tensors of the CPU are copied at once, and compared.
    """

    def __init__(self, at_least: int = 0, is_typed: bool = False) -> None:
        self._at_least, self._is_typed, self._until_sorted = at_least, is_typed, 1024
        self._by_key: dict[int, weakref.ref[Packed]] = {}
        self.by_owner: dict[int, weakref.ref[Packed]] = {}
        self.alive: dict[weakref.ref[Any], weakref.ref[Any]] = {}  # a set that `_sort_out` takes
        self.has_bytes = True
        self._parts: dict[int, _Parts] = {}  # by the key of the whole storage
        self._lock = new_lock()
        self.recent: collections.deque[weakref.ref[Packed]] = collections.deque()
        self.undecided: collections.deque[weakref.ref[Packed]] = collections.deque()

    def find(
        self, tensor: torch.Tensor, owner: torch.Tensor, owner_id: int, saved_at: int
    ) -> tuple[Packed, Layout] | None:
        """The content of ``tensor``, and its layout. It is the short way if it or a view of it was saved before.

        None if a full look is necessary.
        """
        reference = self.by_owner.get(owner_id)
        packed = None if reference is None else reference()
        if packed is None or packed.place == "withdrawn" or packed.owner() is not owner:
            return None
        if tensor._version != packed.version or (owner.ndim < 2 and not owner.requires_grad):
            return None  # a constant vector may be written uncounted (decision 12)
        if tensor is not owner and (type(tensor) is not torch.Tensor or tensor.is_nested):
            return None  # a view of plain memory that is no plain tensor
        if tensor.untyped_storage()._cdata != packed.storage_ref.address:
            return None
        layout, first = Layout.of(tensor), packed.first_layout
        if layout is not first and layout != first:
            nbytes = tensor.nbytes
            if nbytes < self._at_least or not is_most_of(layout, nbytes, packed.nbytes):
                return None
            if self._is_typed and layout.dtype is not first.dtype:
                return None
        return (packed, layout) if self._is_same(packed, tensor, layout, saved_at) else None

    def find_or_add(self, saved: SavedTensor, decision: Decision, maker: MakesContents) -> tuple[Packed, Handle, bool]:
        """The content of ``saved``, a handle on it, and whether it is new: ``maker`` makes it, if it is not known."""
        part, owner, owner_id, version, storage, _, layout, region, saved_at, _, is_small, _ = saved
        dtype = layout.dtype if self._is_typed and not is_small else None
        address = storage._cdata
        key = whole_key = hash((address, version, region or dtype, owner_id))
        found = known = self._known(key, saved, region) if key in self._by_key else None
        # Batch norm writes into its running statistics without counting it, so constant vectors are not shared
        # (decision 12).
        is_vector = owner.ndim < 2 and not owner.requires_grad
        if region is not None:
            whole_key = hash((address, version, dtype, owner_id))
            if not (known is not None or is_small or is_vector):
                known = self._whole(whole_key, saved, region)
        if known is not None and not is_vector:
            if self._is_same(known, part, layout, saved_at):
                return known, known.handle(layout), False
            if decision.fate == "recompute":
                # It was written without a count since it was saved first, so its node does not tell what it is now.
                decision = decision._replace(fate="store")
        packed = maker.make(saved, decision)
        packed.counts.all.saved_bytes += part.nbytes  # the handle takes the sum
        handle = Handle(packed, layout)
        packed.first_handle = weakref.ref(handle)
        if not self._is_added(key, packed, saved, found, is_vector):
            # Another thread was faster, and mostly with the same contents.
            packed.counts.all.saved_bytes -= part.nbytes
            return self.find_or_add(saved, decision, maker)
        if region is not None and not is_small:
            self._parts[whole_key] = _Parts.plus(self._parts.get(whole_key), packed, region)
        return packed, handle, True

    def _is_added(self, key: int, packed: Packed, saved: SavedTensor, found: Packed | None, is_vector: bool) -> bool:
        """Add ``packed`` in place of ``found``, unless another thread has added a content meanwhile."""
        part, region = saved.part, saved.region
        if part.is_cpu and self.has_bytes and not (saved.is_fresh or is_vector):
            packed.copy_now()  # first: another thread that finds it compares with the copy
        with self._lock:
            if key in self._by_key and self._known(key, saved, region) not in (None, found):
                return False
            reference = self._by_key[key] = self.hold(packed)
            if packed.has_short_way and region is None and not is_vector and type(saved.owner) is type(part):
                self.by_owner[saved.owner_id] = reference
        return True

    def _known(self, key: int, saved: SavedTensor, region: StorageRegion | None) -> Packed | None:
        """The content under ``key``, if it is of this owner and region, and other saved tensors may share it."""
        reference = self._by_key.get(key)
        packed = None if reference is None else reference()
        if packed is None or packed.place == "withdrawn" or packed.owner() is not saved.owner:
            return None
        if packed.storage_ref.address != saved.storage._cdata or packed.saved_version != saved.version:
            return None
        is_other = self._is_typed and not saved.is_small and packed.first_layout.dtype is not saved.layout.dtype
        return None if is_other or packed.region != region else packed

    def _whole(self, key: int, saved: SavedTensor, region: StorageRegion) -> Packed | None:
        """The content of all of the storage that ``region`` belongs to, under ``key``.

        Queries, keys and values are thirds of one storage, mostly. If each were packed alone, it would be copied out of
        the storage, and spread again in backward to strides that reach over nearly all of it. So if the regions that
        this operator saves are half of the storage, the first of them becomes that content (decision 42).
        """
        whole = self._known(key, saved, None)
        parts = self._parts.get(key)
        if whole is not None or parts is None or parts.saved_at != saved.saved_at:
            return whole
        first = parts.first()
        if first is None or first.region is None or first.place == "offloaded" or first.owner() is not saved.owner:
            return None
        if (parts.nbytes + region.nbytes) * 2 < saved.nbytes:
            return None
        with first:
            with self._lock:
                whole = self._known(key, saved, None)
                if whole is not None:
                    return whole  # another thread was faster
                self._by_key[key], first.region = weakref.ref(first), None
            first.copy_again()
        return first

    def _is_same(self, packed: Packed, part: torch.Tensor, layout: Layout, saved_at: int) -> bool:
        """Whether ``part`` still is what was ``packed``. See [Note: leaves within one call]."""
        if packed.saved_at == saved_at:
            return True
        is_comparable = part.is_cpu and self.has_bytes
        is_same = packed.has_contents_of(part, layout) if is_comparable else packed.nature == "result"
        is_same = is_same and packed.is_intact  # or what computes it again is gone, as a weight that FSDP has freed
        if is_same:
            packed.saved_at = saved_at
        return is_same

    def hold(self, packed: Any) -> weakref.ref[Any]:
        """Let ``held_bytes`` of ``packed`` count, as long as it lives. Returns a reference to it."""
        self._until_sorted -= 1
        if self._until_sorted < 0:
            for table in (self._by_key, self.by_owner, self.alive):
                _sort_out(table)
            self._parts.clear()
            self._until_sorted = len(self.alive) + 1024
        reference = weakref.ref(packed)
        self.alive[reference] = reference
        return reference

    def held_bytes(self) -> int:
        """The bytes that the store has of all that is alive."""
        return sum(each.held_bytes for ref in list(self.alive) if (each := ref()) is not None)


class _Parts(NamedTuple):
    """The regions of one storage that one operator saves: there may be thousands of them.

    Attributes:
        saved_at: the operator.
        first: the content of the first region.
        nbytes: the sum of all regions.
    """

    saved_at: int
    first: weakref.ref[Packed]
    nbytes: int

    @staticmethod
    def plus(before: _Parts | None, packed: Packed, region: StorageRegion) -> _Parts:
        if before is None or before.saved_at != packed.saved_at or before.first() is None:
            return _Parts(packed.saved_at, weakref.ref(packed), region.nbytes)
        return before._replace(nbytes=before.nbytes + region.nbytes)


def _sort_out(table: dict[Any, weakref.ref[Any]]) -> None:
    """Remove the references to values that are gone. A destructor may add some meanwhile."""
    for name in list(table):  # it makes no object that could start a collection of garbage
        reference = table.get(name)
        if reference is not None and reference() is None:
            table.pop(name, None)


_NO_TICKET: Any = object()


class StoredTickets(StorageRef):
    """The tickets that the store gave for one content, and where the tensors lay. They are dropped with it.

    This object has the destructor, so that the packed value needs none. While a destructor runs, Python lets other
    threads find the dying object again, and they would share bytes that are being dropped (decision 13).

    Attributes:
        first: the ticket of the first tensor; there is one tensor without codecs.
        lies_at: where that tensor lay.
        more: the ticket of each of the others, and where it lay.
        nbytes: of all tensors that the store has.
    """

    __slots__ = ("_store", "first", "lies_at", "more", "nbytes")

    def __init__(self, storage: torch.UntypedStorage, store: Store) -> None:
        self.address, self._ref = storage._cdata, storage._weak_ref()
        self._store, self.first, self.lies_at, self.nbytes = store, _NO_TICKET, 0, 0
        self.more: tuple[tuple[Any, int], ...] = ()

    def give_back(self) -> None:
        """Drop the tickets now, after an error: a traceback may keep this object."""
        tickets = [] if self.first is _NO_TICKET else [self.first, *(ticket for ticket, _ in self.more)]
        self.first, self.more, self.nbytes = _NO_TICKET, (), 0
        for ticket in tickets:
            self._store.drop(ticket)

    @uncompiled()
    def __del__(self, _free: Callable[[Any], None] = free_weak_ref, _none: Any = _NO_TICKET) -> None:
        # A store's `drop` takes no lock: see [Note: locks]. Globals may be gone when the interpreter ends.
        if self.first is not _none:
            self._store.drop(self.first)
            for ticket, _ in self.more:
                self._store.drop(ticket)
        _free(self._ref)


class StoredContent(Packed):
    """Contents that go through codecs into a store."""

    __slots__ = (
        "_checksum",
        "_codecs",
        "_copy",
        "_shape",
        "_spec",
        "_store",
        "_weak_copy",
    )

    storage_ref: StoredTickets
    has_short_way = True

    #: Whether the contents may stay where they are, if no codec changes them and the store would put them there.
    may_stay = True

    def __init__(self, saved: SavedTensor, codecs: Sequence[Codec], store: Store, counts: ModuleCounts) -> None:
        Packed.__init__(self, saved, StoredTickets(saved.storage, store), counts)
        self._codecs, self._store = codecs, store
        # Whether the tensor is all of its storage, in its order, in a dtype that torch can copy.
        self.is_in_order = saved.layout.is_copied and saved.part.nbytes == saved.nbytes
        # The contents as they were saved: held until the store has them, and a little longer for operators that save
        # the same again. See [Note: contents are of one moment].
        self._copy: torch.Tensor | None = None
        self._weak_copy: weakref.ref[torch.Tensor] | None = None
        self._checksum: int | None = None
        self._shape: tuple[torch.dtype, torch.Size] | None = None  # of what is stored, if the tensor has another one

    @property
    def held_bytes(self) -> int:
        return self.storage_ref.nbytes

    @property
    def is_lossless(self) -> bool:
        return not any(codec.lossy for codec in self._codecs)

    # -- the copy, and comparisons with it

    def copy_now(self) -> None:
        self._copy = self._store.own(self.alias) if self.is_in_order else self._copied()
        self._weak_copy = weakref.ref(self._copy)

    def copy_again(self) -> None:
        with self:
            if self._copy is not None:
                self.copy_now()

    def release_copy(self) -> None:
        copy, self._copy = self._copy, None
        # Without the lock: `copy` lives, and is compared with, until there is the checksum. It tells later whether a
        # tensor that is saved again is the same, and for Recompute whether memory that others still hold is.
        is_there = self.owner() is not None or (not self.may_stay and self.storage_ref.get() is not None)
        if copy is not None and self._weak_copy is not None and is_there:
            self._checksum = _checksum(copy)
        self._weak_copy = None

    def stay_in_memory(self) -> None:
        self._copy = self._weak_copy = None

    def has_contents_of(self, part: torch.Tensor, layout: Layout) -> bool:
        copy, storage = None if self._weak_copy is None else self._weak_copy(), part.untyped_storage()
        if copy is not None and layout is self.first_layout and self.region is None:
            nbytes = storage.nbytes()
            return nbytes == copy.nbytes and _memcmp(storage.data_ptr(), copy.data_ptr(), nbytes) == 0
        with self:
            copy = None if self._weak_copy is None else self._weak_copy()
            if copy is None and self._checksum is None:
                # Nobody has copied it yet, and a second thread must not share it; or nobody will.
                return self.place == "in place"
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

    def _copied(self) -> torch.Tensor:
        if self.is_in_order:
            return self._store.own(self.alias)
        storage, dtype = self.alias.untyped_storage(), self.alias.dtype
        return self._store.own(self.content(storage, typed=bool(self._codecs) or dtype in COPIED))

    # -- to the store

    def _offload(self, storage: torch.UntypedStorage) -> Place:
        content = self._copy
        if content is None:
            content = self._copy = self._copied()
            # A fresh tensor, which `pack` did not copy. The next operator may save it again, so the copy is compared.
            if content.is_cpu and self._checksum is None:
                self._weak_copy = weakref.ref(content)
        if not content.is_cpu:
            self._copy = None
        parts: tuple[torch.Tensor, ...] = (content,)
        if self._codecs:
            parts = self._encode(content)
            is_unchanged = len(parts) == 1 and parts[0] is content
            if is_unchanged and self.may_stay and not self._store.leaves_memory(content):
                self.counts.count_kept("in place", self.nbytes)
                self._copy = self._weak_copy = None
                return "in place"
        if self._codecs or not self.is_in_order:
            self._shape = content.dtype, content.shape
        begin, moved = time.perf_counter(), 0
        try:
            for part in parts:
                # A store counts the bytes of a part. A part that lies over a piece of a larger storage would keep all
                # of that storage in memory.
                moved += self._put(part if part is content else alone(part))
        except BaseException:
            self.storage_ref.give_back()  # the graph keeps this content, in memory
            raise
        self.counts.count_put(self.storage_ref.nbytes, moved, time.perf_counter() - begin, content.nbytes)
        return "offloaded"

    def _put(self, part: torch.Tensor) -> int:
        """Give ``part`` to the store. Returns how many of its bytes have left the memory that they were in.

        If they leave it later, they are counted then.
        """
        store, stored = self._store, self.storage_ref
        try:
            if stored.first is _NO_TICKET:
                ticket = stored.first = store.put(part)
                stored.lies_at = part.data_ptr()
            else:
                ticket = store.put(part)
                stored.more = (*stored.more, (ticket, part.data_ptr()))
        except StoreError as error:
            raise _with_module(error, "to store what", self.module_name) from error
        nbytes = part.nbytes
        stored.nbytes += nbytes
        if part.device != self.alias.device:
            return nbytes
        # If nothing changes a tensor on its way, `decide` has asked this already.
        if (self._codecs or not self.may_stay) and not store.leaves_memory(part):
            return 0
        if isinstance(ticket, MovingTicket) and not ticket.has_left(functools.partial(self.counts.count_moved, nbytes)):
            return 0
        return nbytes

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
        self.counts.codec_seconds += time.perf_counter() - begin
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
        if changed and self.counts.all.codec_errors.is_due(position):
            with torch.no_grad():
                for tensor, parts, spec in changed:
                    error = relative_error(codec.decode(parts, spec), tensor)
                    self.counts.all.codec_errors.add(repr(codec), error)

    # -- and back

    def _restore(self, is_as_packed: bool = False) -> torch.Tensor:
        if self.alias.is_cuda:
            refuse_capture(self.module_name)  # the backward may be captured
        begin, copied, store, stored = time.perf_counter(), 0.0, self._store, self.storage_ref
        try:
            content = store.get(stored.first)
            rest = [store.get(ticket) for ticket, _ in stored.more] if stored.more else []
        except StoreError as error:
            raise _with_module(error, "to bring back what", self.module_name) from error
        for ticket in (stored.first, *(ticket for ticket, _ in stored.more)):
            if isinstance(ticket, MovingTicket):
                copied += ticket.pop_transfer_seconds()
        self.counts.count_got(stored.nbytes, time.perf_counter() - begin, copied)
        if self._codecs:
            begin, tensors = time.perf_counter(), [content, *rest]
            for codec, specs in zip(reversed(self._codecs), reversed(self._spec), strict=True):
                parts = iter(tensors)
                tensors = [codec.decode(tuple(next(parts) for _ in range(n)), spec) for n, spec in specs]
            self.counts.codec_seconds += time.perf_counter() - begin
            content = tensors[0]
        # torch itself accepts a wrong dtype or a shape that broadcasts, silently.
        dtype, shape = self._shape or (self.first_layout.dtype, self.first_layout.size)
        if content.dtype is not dtype or content.shape != shape or content.device != self.alias.device:
            raise StoreError(
                f"{self._store!r} gave back {content.dtype} {tuple(content.shape)} on {content.device} for what "
                f"{self.module_name!r} saved as {dtype} {tuple(shape)} on {self.alias.device}: "
                "get() must return what was put, and decode() what was encoded"
            )
        return content if is_as_packed else _spread(content, self.region)

    def _in_memory(self, layout: Layout) -> torch.Tensor:
        copy = self._copy
        if copy is None:
            return super()._in_memory(layout)
        whole = _spread(copy, self.region)
        return layout.of_whole(whole.detach(), self.region.offset if self.region else 0)

    def is_own_memory(self, tensor: torch.Tensor) -> bool:
        # A store may give back the very tensor that was put, while it is in memory (decision 35).
        address, stored = tensor.data_ptr(), self.storage_ref
        return address != stored.lies_at and all(address != other for _, other in stored.more)


class SmallCopy(Packed):
    """A copy of a small part of a large storage, which stays in memory so that the rest need not."""

    __slots__ = ("_copy",)

    def copy_now(self) -> None:
        self._copy = self.content(self.alias.untyped_storage()).clone(memory_format=torch.contiguous_format)

    def has_contents_of(self, part: torch.Tensor, layout: Layout) -> bool:
        with self:
            now = self.content(part.untyped_storage()).contiguous()
            return now.is_cpu and hasattr(self, "_copy") and _are_equal(now, self._copy)

    def _offload(self, storage: torch.UntypedStorage) -> Place:
        if not hasattr(self, "_copy"):
            self._copy = self.content(storage).clone(memory_format=torch.contiguous_format)
        return "offloaded"

    def _restore(self, is_as_packed: bool = False) -> torch.Tensor:
        return _spread(self._copy if self.stream is None else handed_over(self._copy, self.stream), self.region)


def _with_module(error: StoreError, doing: str, module_name: str) -> StoreError:
    """``error`` with the name of the module whose tensor it was, which a store does not know."""
    message = f"{doing} {repr(module_name) if module_name else 'a block of code'} saved: {error}"
    return StoreError(message, path=error.path, wanted=error.wanted, free=error.free)


def _spread(content: torch.Tensor, region: StorageRegion | None) -> torch.Tensor:
    """``content`` at the strides of its region. Without a region: without gaps, from the front of a storage."""
    if (content.dtype.is_complex and content.is_conj()) or content.is_neg():
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
