"""Where contents go: a store, or a compact copy beside them."""

# [Note: contents are of one moment]
# Much code writes to a tensor without counting the change: `y.data.fill_(0)`, a numpy array over the same memory,
# `dist.all_reduce(y)`, kernels of an extension. So the contents of a saved tensor are those that it has when the
# operator that saves it is done, whenever a thread of a store comes to move them: they are copied, and the store gets
# the copy. It is made in `pack`, where the inputs of an operator are what they were given as and its outputs are
# computed. Only what an operator allocates by itself may be filled after it was saved (the noise of `rrelu`,
# pytorch#193671). No code of the user's can have such a tensor before the operator returns: it is told by its
# reference counts, and copied when the next operator begins.
#
# The same tensor, saved again by a later operator, may have been written meanwhile. Its version does not say so, and
# its bytes are compared: with the copy while that is in memory, otherwise by a CRC-32. Where they differ, what is
# saved now is another content. The checksum is computed only of contents whose tensor still lives when the next
# operator but one saves something: of most it does not.
#
# An accelerator's bytes cannot be compared without waiting for it. There the copy is made on the device when the next
# operator begins; leaves and constants are shared by what one operator saves and no further, and tensors with a
# history by their version.

from __future__ import annotations

import binascii
import ctypes
import time
import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from disthooks._streams import handed_over
from disthooks._tensors import Layout, StorageRegion, alone, is_most_of, region_of
from disthooks._torch import uncompiled
from disthooks.errors import StoreError
from disthooks.saved.codecs.base import Codec, relative_error
from disthooks.saved.counters import Counters
from disthooks.saved.eligibility import refuse_capture
from disthooks.saved.packed import Packed
from disthooks.saved.stores.base import Store
from disthooks.saved.stores.pools import memory_of


def _named(error: StoreError, doing: str, module_name: str) -> StoreError:
    """``error`` of a store, which knows no modules, with the name of the one whose tensor it was."""
    message = f"{doing} {repr(module_name) if module_name else 'a block of code'} saved: {error}"
    return StoreError(message, path=error.path, wanted=error.wanted, free=error.free)


class StoredTickets:
    """What the store holds for a packed value.

    An object of its own, so that the packed value needs no destructor: while one runs, Python lets other threads
    find the dying object again, and they would share bytes that are being dropped.
    """

    __slots__ = ("_counters", "_store", "nbytes", "tickets")

    def __init__(self, store: Store, counters: Counters) -> None:
        self._store, self._counters = store, counters
        self.tickets: list[Any] = []
        self.nbytes = 0

    @uncompiled()
    def __del__(self) -> None:
        self._counters.change_held(-self.nbytes)
        for ticket in self.tickets:
            self._store.drop(ticket)


class StoredContent(Packed):
    """Contents that go through codecs into a store."""

    __slots__ = (
        "_addresses",
        "_checksum",
        "_codecs",
        "_copy",
        "_encoded",
        "_own",
        "_spec",
        "_store",
        "_tickets",
        "_wanted",
        "_weak_copy",
    )

    def __init__(
        self,
        alias: torch.Tensor,
        storage: torch.UntypedStorage,
        region: StorageRegion | None,
        first: Layout,
        codecs: Sequence[Codec],
        store: Store,
        counters: Counters,
        module_name: str,
    ) -> None:
        super().__init__(alias, storage, region, first, counters, module_name)
        self._codecs, self._store = codecs, store
        self.is_untyped = not codecs
        self.is_in_order = region is None and _is_all_in_order(alias, first, self.nbytes)
        self._own = False
        self._addresses: list[int] = []
        # The contents, see [Note: contents are of one moment]: held until the store has them and a while longer.
        self._copy: torch.Tensor | None = None
        self._weak_copy: weakref.ref[torch.Tensor] | None = None
        self._checksum: int | None = None

    @property
    def is_lossless(self) -> bool:
        """Whether no codec loses anything."""
        return not any(codec.lossy for codec in self._codecs)

    def copy_now(self) -> None:
        """Copy the contents, which are there."""
        with self._lock:
            self._copy = self._copied(self.alias.untyped_storage())
            self._weak_copy = weakref.ref(self._copy)

    def _copied(self, storage: torch.UntypedStorage) -> torch.Tensor:
        return self._store.own(self.content(storage, typed=bool(self._codecs) or self.alias.dtype in _COPIED))

    def copy_again(self) -> None:
        """The region is another one since the contents were copied, if they were."""
        with self._lock:
            if self._copy is not None:
                self.copy_now()

    def release_copy(self) -> None:
        """Let go of the copy; what may be saved again is told by a checksum from now on."""
        with self._lock:
            copy, self._copy = self._copy, None
            if copy is not None and self._weak_copy is not None and self.owner() is not None:
                self._checksum = _checksum(copy)

    @property
    def can_compare(self) -> bool:
        """Whether the copy is in memory, or a checksum of it is known."""
        return self._checksum is not None or (self._weak_copy is not None and self._weak_copy() is not None)

    def has_contents_of(self, part: torch.Tensor, layout: Layout) -> bool:
        """Whether what ``part`` has now, at ``layout``, are the bytes that were saved."""
        with self._lock:
            copy = None if self._weak_copy is None else self._weak_copy()
            storage = part.untyped_storage()
            if copy is None and self._checksum is None:
                return self.is_in_place  # where the user has it
            if storage.nbytes() != self.nbytes:
                return False
            region = self.region
            if region is None and not is_most_of(layout, part.nbytes, self.nbytes):
                region = region_of(layout, self.nbytes)  # a small part of much is looked at alone
                if region is not None:
                    region = region.raw()
                    return copy is not None and torch.equal(_at(region, storage), _at(region, copy.untyped_storage()))
            now = _all_of(storage) if region is None else _at(region, storage).contiguous()
            return _checksum(now) == self._checksum if copy is None else _are_equal(now, copy)

    def _offload(self, storage: torch.UntypedStorage) -> bool:
        if self._copy is None:
            self._copy = self._copied(storage)
            if self._copy.is_cpu and self._checksum is None:
                self._weak_copy = weakref.ref(self._copy)
        content = self._copy
        if not content.is_cpu:
            self._copy = None
        parts = self._encode(content) if self._codecs else (content,)
        self._encoded = not (len(parts) == 1 and parts[0] is content)
        stays = self._codecs and not self._encoded and not self._store.leaves_memory(content)
        if stays and not self.counters.recomputes:  # others are computed from what a store holds
            self.counters.count_kept("in place", self.nbytes, self.module_name)
            self._copy = self._weak_copy = None
            self.is_in_place = True
            return False
        self._wanted = (content.dtype, content.shape)
        # A store counts the bytes of a part. A part that lies over a piece of a larger storage, as a region does, would
        # keep all of that storage in memory.
        parts = tuple(alone(part) for part in parts)
        self._addresses = [part.data_ptr() for part in parts]
        self._tickets = self._put(parts, content.nbytes)
        self._own = True  # the content is a copy
        return True

    @property
    def is_private(self) -> bool:
        """Whether what was put is not the memory of the saved tensor."""
        return self._own

    def stay_in_memory(self) -> None:
        """It stays in memory."""
        self._copy = self._weak_copy = None

    def _still_here(self, layout: Layout, alone: bool) -> torch.Tensor:
        copy = self._copy
        if copy is None:
            return super()._still_here(layout, alone)
        whole = _spread(copy.clone() if alone else copy, self.region)
        return layout.of_whole(whole.detach(), self.region.offset if self.region else 0)

    def _encode(self, content: torch.Tensor) -> tuple[torch.Tensor, ...]:
        begin = time.perf_counter()
        tensors: tuple[torch.Tensor, ...] = (content,)
        self._spec: list[Any] = []
        for place, codec in enumerate(self._codecs):
            encoded = [codec.encode(tensor) for tensor in tensors]
            if codec.lossy:
                self._measure(place, codec, tensors, encoded)
            self._spec.append([(len(parts), spec) for parts, spec in encoded])
            tensors = tuple(part for parts, _ in encoded for part in parts)
        self.counters.count_codecs(time.perf_counter() - begin, self.module_name)
        return tensors

    def _measure(
        self,
        place: int,
        codec: Codec,
        tensors: Sequence[torch.Tensor],
        encoded: Sequence[tuple[tuple[torch.Tensor, ...], Any]],
    ) -> None:
        """Note the error of ``codec``, at ``place``, for what it did not leave alone, once in a while."""
        changed = [
            (tensor, parts, spec)
            for tensor, (parts, spec) in zip(tensors, encoded, strict=True)
            if not (len(parts) == 1 and parts[0] is tensor) and (tensor.is_floating_point() or tensor.is_complex())
        ]
        if changed and self.counters.is_sampled(place):
            with torch.no_grad():
                for tensor, parts, spec in changed:
                    self.counters.count_error(repr(codec), relative_error(codec.decode(parts, spec), tensor))

    def _put(self, tensors: Sequence[torch.Tensor], saved: int) -> StoredTickets:
        begin = time.perf_counter()
        held = StoredTickets(self._store, self.counters)  # first: whatever interrupts, it drops what is in it
        total = moved = 0
        for tensor in tensors:
            try:
                held.tickets.append(self._store.put(tensor))
            except StoreError as error:
                raise _named(error, "to store what", self.module_name) from error
            total += tensor.nbytes
            moved += tensor.nbytes if self._store.leaves_memory(tensor) or tensor.device != self.alias.device else 0
        held.nbytes = total
        self.counters.change_held(total)
        self.counters.count_put(total, moved, time.perf_counter() - begin, self.module_name, saved)
        return held

    def _restore(self) -> torch.Tensor:
        if self.alias.is_cuda:
            refuse_capture(self.module_name)  # of a backward
        begin = time.perf_counter()
        try:
            tensors = [self._store.get(ticket) for ticket in self._tickets.tickets]
        except StoreError as error:
            raise _named(error, "to bring back what", self.module_name) from error
        seconds, copied = time.perf_counter() - begin, 0.0
        for ticket in self._tickets.tickets:
            copied += self._store.pop_transfer_seconds(ticket)
        self.counters.count_got(self._tickets.nbytes, seconds, self.module_name, copied)
        content = self._decode(tensors) if self._codecs else tensors[0]
        # torch itself accepts a wrong dtype or a shape that broadcasts, silently.
        if (content.dtype, content.shape) != self._wanted or content.device != self.alias.device:
            raise StoreError(
                f"{self._store!r} gave back {content.dtype} {tuple(content.shape)} on {content.device} for what "
                f"{self.module_name!r} saved as {self._wanted[0]} {tuple(self._wanted[1])} on {self.alias.device}: "
                "get() must return what was put, and decode() what was encoded"
            )
        return _spread(content, self.region)

    def is_memory_of_store(self, tensor: torch.Tensor) -> bool:
        """Whether it is what was put, which a store gives back while it is in memory."""
        return tensor.data_ptr() in self._addresses

    def _decode(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        begin = time.perf_counter()
        for codec, specs in zip(reversed(self._codecs), reversed(self._spec), strict=True):
            parts = iter(tensors)
            tensors = [codec.decode(tuple(next(parts) for _ in range(n)), spec) for n, spec in specs]
        self.counters.count_codecs(time.perf_counter() - begin, self.module_name)
        return tensors[0]


class StorageParts:
    """The parts of storages that are saved one after the other, added up: half of a storage or more is packed whole.

    A sum for each storage, and no look at what was saved before: an operator may save thousands of views of one tensor.
    """

    def __init__(self) -> None:
        self._sums: dict[Hashable, tuple[weakref.ref[StoredContent], int]] = {}

    def add(self, key: Hashable, packed: Packed) -> None:
        """``packed`` is a region of the storage that ``key`` stands for."""
        if type(packed) is not StoredContent or packed.region is None:
            return
        first, covered = self._sums.get(key, (weakref.ref(packed), 0))
        if first() is None:
            first, covered = weakref.ref(packed), 0
        self._sums[key] = first, covered + packed.region.nbytes

    def to_widen(self, key: Hashable, owner: torch.Tensor, region: StorageRegion, nbytes: int) -> StoredContent | None:
        """What may as well hold all ``nbytes`` of the storage of ``owner``, of which ``region`` is saved now.

        That is the first part, if all parts and ``region`` together are half of it or more.
        """
        reference, covered = self._sums.get(key, (None, 0))
        packed = None if reference is None else reference()
        if packed is None or packed.region is None or packed.is_offloaded or packed.owner() is not owner:
            return None
        return packed if (covered + region.nbytes) * 2 >= nbytes else None

    def clear(self) -> None:
        """What was saved is put elsewhere now."""
        self._sums.clear()


class SmallCopy(Packed):
    """A small part of a large storage: a copy of it stays in memory, so that the rest need not."""

    __slots__ = ("_copy",)

    def copy_now(self) -> None:
        """Copy the contents, which are there."""
        with self._lock:
            self._copy = self.content(self.alias.untyped_storage()).clone(memory_format=torch.contiguous_format)

    def has_contents_of(self, part: torch.Tensor, layout: Layout) -> bool:
        """Whether what ``part`` has now are the bytes that were saved."""
        with self._lock:
            now = self.content(part.untyped_storage()).contiguous()
            return now.is_cpu and hasattr(self, "_copy") and _are_equal(now, self._copy)

    def _offload(self, storage: torch.UntypedStorage) -> bool:
        if not hasattr(self, "_copy"):
            self._copy = self.content(storage).clone(memory_format=torch.contiguous_format)
        return True

    @property
    def is_private(self) -> bool:
        """It is a copy."""
        return True

    def _restore(self) -> torch.Tensor:
        made_on = self._stream
        return _spread(self._copy if made_on is None else handed_over(self._copy, made_on), self.region)


def _is_all_in_order(alias: torch.Tensor, layout: Layout, nbytes: int) -> bool:
    """Whether ``alias`` is all of its storage of ``nbytes``, in the order of it, in a dtype that torch can copy."""
    return (
        layout.offset == 0
        and not (layout.conj or layout.neg)
        and alias.is_contiguous()
        and 1 not in layout.size  # whose stride may be any, and a copy would not have it
        and alias.nbytes == nbytes
        and layout.dtype in _COPIED
    )


# Of the others some have no kernel for a copy (torch.int4, torch.bits8): bits are bits.
_COPIED = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128}
_COPIED |= {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool}


def _spread(content: torch.Tensor, region: StorageRegion | None) -> torch.Tensor:
    """``content`` at the strides of its region, or as it is, at the front of a storage."""
    if content.is_conj() or content.is_neg():
        content = content.resolve_conj().resolve_neg()
    if region is None:
        at_front = content.storage_offset() == 0 and content.is_contiguous()
        return content if at_front else content.clone(memory_format=torch.contiguous_format)
    base = torch.empty(region.extent, dtype=content.dtype, device=content.device)
    base.as_strided(region.size, region.stride).copy_(content)
    return base


def _at(region: StorageRegion, storage: torch.UntypedStorage) -> torch.Tensor:
    """The elements of ``region`` in ``storage``."""
    tensor = torch.empty(0, dtype=region.dtype, device=storage.device)
    return tensor.set_(storage, region.offset, region.size, region.stride)


def _all_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


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
