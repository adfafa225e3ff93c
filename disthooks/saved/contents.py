"""Where contents go: a store, or a compact copy beside them."""

from __future__ import annotations

import time
import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from disthooks._device import handed_over
from disthooks._tensors import Layout, alone
from disthooks._torch import uncompiled
from disthooks.errors import StoreError
from disthooks.saved.codecs.base import Codec, relative_error
from disthooks.saved.entry import refuse_capture
from disthooks.saved.ledger import Ledger
from disthooks.saved.packed import Packed
from disthooks.saved.region import Region
from disthooks.saved.stores.base import Store


def _named(error: StoreError, doing: str, where: str) -> StoreError:
    """``error`` of a store, which knows no modules, with the name of the one whose tensor it was."""
    message = f"{doing} {repr(where) if where else 'a block of code'} saved: {error}"
    return StoreError(message, path=error.path, wanted=error.wanted, free=error.free)


class _Tickets:
    """What the store holds for a packed value.

    An object of its own, so that the packed value needs no destructor: while one runs, Python lets other threads
    find the dying object again, and they would share bytes that are being dropped.
    """

    __slots__ = ("_ledger", "_store", "nbytes", "tickets")

    def __init__(self, store: Store, ledger: Ledger) -> None:
        self._store, self._ledger = store, ledger
        self.tickets: list[Any] = []
        self.nbytes = 0

    @uncompiled()
    def __del__(self) -> None:
        self._ledger.change_held(-self.nbytes)
        for ticket in self.tickets:
            self._store.drop(ticket)


class InStore(Packed):
    """Contents that go through codecs into a store."""

    __slots__ = ("_addresses", "_codecs", "_encoded", "_own", "_spec", "_store", "_tickets", "_wanted")

    def __init__(
        self,
        alias: torch.Tensor,
        storage: torch.UntypedStorage,
        region: Region | None,
        first: Layout,
        codecs: Sequence[Codec],
        store: Store,
        ledger: Ledger,
        where: str,
    ) -> None:
        super().__init__(alias, storage, region, first, ledger, where)
        self._codecs, self._store = codecs, store
        self.any_dtype = not codecs
        self.in_order = region is None and _is_all_in_order(alias, first, self.nbytes)
        self._own = False

    @property
    def lossless(self) -> bool:
        """Whether no codec loses anything."""
        return not any(codec.lossy for codec in self._codecs)

    def _take(self, storage: torch.UntypedStorage) -> bool:
        content = self.content(storage, typed=bool(self._codecs) or self.alias.dtype in _COPIED)
        # A store may take its time, and others may be computed from what it has: whatever is written meanwhile.
        if self.volatile or (self.ledger.recomputes and content.is_cpu and self._store.moves(content)):
            content = content.clone()
        parts = self._encode(content) if self._codecs else (content,)
        self._encoded = not (len(parts) == 1 and parts[0] is content)
        stays = self._codecs and not self._encoded and not self._store.moves(content)
        if stays and not self.ledger.recomputes:  # others are computed from what a store holds
            self.ledger.count_kept("in place", self.nbytes, self.where)
            return False
        self._wanted = (content.dtype, content.shape)
        # A store counts the bytes of a part. A part that lies over a piece of a larger storage, as a region does, would
        # keep all of that storage in memory.
        parts = tuple(alone(part) for part in parts)
        self._addresses = [part.data_ptr() for part in parts]
        self._tickets = self._put(parts, content.nbytes)
        self._own = not any(_lies_in(part, storage) for part in parts)
        return True

    @property
    def is_own(self) -> bool:
        """Whether what was put is not the memory of the saved tensor."""
        return self._own

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
        self.ledger.count_codecs(time.perf_counter() - begin, self.where)
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
        if changed and self.ledger.is_sampled(place):
            with torch.no_grad():
                for tensor, parts, spec in changed:
                    self.ledger.count_error(repr(codec), relative_error(codec.decode(parts, spec), tensor))

    def _put(self, tensors: Sequence[torch.Tensor], saved: int) -> _Tickets:
        begin = time.perf_counter()
        held = _Tickets(self._store, self.ledger)  # first: whatever interrupts, it drops what is in it
        total = moved = 0
        for tensor in tensors:
            try:
                held.tickets.append(self._store.put(tensor))
            except StoreError as error:
                raise _named(error, "to store what", self.where) from error
            total += tensor.nbytes
            moved += tensor.nbytes if self._store.moves(tensor) or tensor.device != self.alias.device else 0
        held.nbytes = total
        self.ledger.change_held(total)
        self.ledger.count_put(total, moved, time.perf_counter() - begin, self.where, saved)
        return held

    def _bring(self) -> torch.Tensor:
        if self.alias.is_cuda:
            refuse_capture(self.where)  # of a backward
        begin = time.perf_counter()
        try:
            tensors = [self._store.get(ticket) for ticket in self._tickets.tickets]
        except StoreError as error:
            raise _named(error, "to bring back what", self.where) from error
        seconds, copied = time.perf_counter() - begin, 0.0
        for ticket in self._tickets.tickets:
            copied += self._store.took(ticket)
        self.ledger.count_got(self._tickets.nbytes, seconds, self.where, copied)
        content = self._decode(tensors) if self._codecs else tensors[0]
        # torch itself accepts a wrong dtype or a shape that broadcasts, silently.
        if (content.dtype, content.shape) != self._wanted or content.device != self.alias.device:
            raise StoreError(
                f"{self._store!r} gave back {content.dtype} {tuple(content.shape)} on {content.device} for what "
                f"{self.where!r} saved as {self._wanted[0]} {tuple(self._wanted[1])} on {self.alias.device}: get() "
                "must return what was put, and decode() what was encoded"
            )
        # A store gives back what was put while it is in memory. What a backward returns may become a gradient, and be
        # added to where it lies: a constant may be anybody's, and what a codec made belongs to the store.
        if (self.constant or self._encoded) and content.data_ptr() in self._addresses:
            content = content.clone()
        return _spread(content, self.region)

    def _decode(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        begin = time.perf_counter()
        for codec, specs in zip(reversed(self._codecs), reversed(self._spec), strict=True):
            parts = iter(tensors)
            tensors = [codec.decode(tuple(next(parts) for _ in range(n)), spec) for n, spec in specs]
        self.ledger.count_codecs(time.perf_counter() - begin, self.where)
        return tensors[0]


class Parts:
    """The parts of storages that are saved one after the other, added up: half of a storage or more is packed whole.

    A sum for each storage, and no look at what was saved before: an operator may save thousands of views of one tensor.
    """

    def __init__(self) -> None:
        self._sums: dict[Hashable, tuple[weakref.ref[InStore], int]] = {}

    def add(self, key: Hashable, packed: Packed) -> None:
        """``packed`` is a region of the storage that ``key`` stands for."""
        if type(packed) is not InStore or packed.region is None:
            return
        first, covered = self._sums.get(key, (weakref.ref(packed), 0))
        if first() is None:
            first, covered = weakref.ref(packed), 0
        self._sums[key] = first, covered + packed.region.nbytes

    def to_widen(self, key: Hashable, owner: torch.Tensor, region: Region, nbytes: int) -> InStore | None:
        """What may as well hold all ``nbytes`` of the storage of ``owner``, of which ``region`` is saved now.

        That is the first part, if all parts and ``region`` together are half of it or more.
        """
        reference, covered = self._sums.get(key, (None, 0))
        packed = None if reference is None else reference()
        if packed is None or packed.region is None or packed.taken or packed.owner() is not owner:
            return None
        return packed if (covered + region.nbytes) * 2 >= nbytes else None

    def clear(self) -> None:
        """What was saved is put elsewhere now."""
        self._sums.clear()


class SmallCopy(Packed):
    """A small part of a large storage: a copy of it stays in memory, so that the rest need not."""

    __slots__ = ("_copy",)

    def _take(self, storage: torch.UntypedStorage) -> bool:
        self._copy = self.content(storage).clone(memory_format=torch.contiguous_format)
        return True

    @property
    def is_own(self) -> bool:
        """It is a copy."""
        return True

    def _bring(self) -> torch.Tensor:
        made_on = self._stream
        return _spread(self._copy if made_on is None else handed_over(self._copy, made_on), self.region)


def _lies_in(part: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    """Whether ``part`` begins in the memory of ``storage``."""
    begin = storage.data_ptr()
    return part.device == storage.device and begin <= part.data_ptr() < begin + storage.nbytes()


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


def _spread(content: torch.Tensor, region: Region | None) -> torch.Tensor:
    """``content`` at the strides of its region, or as it is, at the front of a storage."""
    if content.is_conj() or content.is_neg():
        content = content.resolve_conj().resolve_neg()
    if region is None:
        at_front = content.storage_offset() == 0 and content.is_contiguous()
        return content if at_front else content.clone(memory_format=torch.contiguous_format)
    base = torch.empty(region.extent, dtype=content.dtype, device=content.device)
    base.as_strided(region.size, region.stride).copy_(content)
    return base
