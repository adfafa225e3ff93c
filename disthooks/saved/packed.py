"""The packed value: one stored content, shared by all the views of it that autograd saved."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdRef

from disthooks._tensors import Layout
from disthooks._torch import StorageRef
from disthooks.errors import MutationError, StoreError
from disthooks.saved.codecs import Codec
from disthooks.saved.kept import changed_message
from disthooks.saved.ledger import Key, Ledger
from disthooks.saved.region import Region
from disthooks.saved.stores.base import Store


@functools.cache
def _empty(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=device)


class _Stored:
    """What the store holds for a packed value.

    An object of its own, so that the packed value needs no destructor: while one runs, Python lets other threads
    find the dying object again, and they would share bytes that are being dropped.
    """

    __slots__ = ("_ledger", "_nbytes", "_store", "tickets")

    def __init__(self, store: Store, tickets: Sequence[Any], ledger: Ledger, nbytes: int) -> None:
        self._store, self.tickets, self._ledger, self._nbytes = store, tickets, ledger, nbytes

    def __del__(self) -> None:
        for ticket in self.tickets:
            self._store.drop(ticket)
        self._ledger.release(self._nbytes)


class Packed:
    """The contents of one storage at one version: in memory first, then in the store, until nobody needs them.

    ``alias`` shares the saved tensor's version counter. Once the contents are stored its memory is exchanged
    for none, and what stays is a witness: a few bytes that still see every in-place change.
    """

    __slots__ = (
        "__weakref__",
        "_codecs",
        "_generation",
        "_held",
        "_loaded",
        "_lock",
        "_store",
        "_stored",
        "_stream",
        "_waiting",
        "_wanted",
        "alias",
        "changed",
        "key",
        "ledger",
        "live",
        "nbytes",
        "owner",
        "region",
        "source",
        "spec",
        "version",
        "where",
    )

    def __init__(
        self,
        alias: torch.Tensor,
        region: Region | None,
        codecs: Sequence[Codec],
        store: Store,
        ledger: Ledger,
        where: str,
    ) -> None:
        self.alias, self.version, self.region = alias, alias._version, region
        self._codecs, self._store, self.ledger, self.where = codecs, store, ledger, where
        # Held so that the address in the ledger's key is not given to another storage.
        self.source = StorageRef(alias.untyped_storage())
        self.key: Key | None = None
        self.owner: WeakIdRef | None = None
        self.nbytes = alias.untyped_storage().nbytes()
        # The stream that fills it; another one may be current by the time it is copied.
        self._stream = torch.cuda.current_stream(alias.device) if alias.is_cuda else None
        self.changed = False
        self._stored: _Stored | None = None
        self._loaded: torch.cuda.Event | None = None
        self.spec: list[Any] = []
        self.live = 0  # handles that exist
        self._lock = threading.RLock()  # a destructor may run while its own thread is inside
        self._held: torch.UntypedStorage | StorageRef | None = None  # the storage brought back
        self._generation = self._waiting = 0

    # -- from memory to the store

    def store(self) -> None:
        """Hand the contents to the store and let go of the memory; StoreError leaves everything as it was."""
        with self._lock:
            # Memory that was freed already (FSDP frees what it gathered when its forward ends) may come back: it
            # stays an alias, as without hooks.
            gone = self.alias.untyped_storage().nbytes() != self.nbytes
            if self._stored is not None or gone or self._is_changed():
                return
            begin = time.perf_counter()
            with torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext():
                self._stored = self._put(self._encode())
            self._is_changed()  # another thread may have written while it was copied
            self.alias.data = _empty(self.alias.dtype, self.alias.device)
            self.ledger.count_seconds("pack", time.perf_counter() - begin)

    def _put(self, tensors: Sequence[torch.Tensor]) -> _Stored:
        tickets: list[Any] = []
        try:
            for tensor in tensors:
                tickets.append(self._store.put(tensor))
        except BaseException:
            for ticket in tickets:
                self._store.drop(ticket)
            raise
        total = 0
        for tensor in tensors:
            nbytes = tensor.numel() * tensor.element_size()
            total += nbytes
            if self._store.moves(tensor):
                self.ledger.count("moved", nbytes)
        self.ledger.count("stored", total)
        return _Stored(self._store, tickets, self.ledger, total)

    def _content(self) -> torch.Tensor:
        """The bytes to keep, as a tensor without conj or neg bits: those belong to the views."""
        storage = self.alias.untyped_storage()
        if self.region is not None:
            dtype, offset, size, stride = self.region
        else:
            # Bytes are bytes unless a codec wants to know what they mean.
            typed = self._codecs and storage.nbytes() % self.alias.dtype.itemsize == 0
            dtype, offset, stride = self.alias.dtype if typed else torch.uint8, 0, (1,)
            size = (storage.nbytes() // dtype.itemsize,)
        return torch.empty(0, dtype=dtype, device=self.alias.device).set_(storage, offset, size, stride)

    def _encode(self) -> tuple[torch.Tensor, ...]:
        content = self._content()
        self._wanted = (content.dtype, content.shape)
        tensors: tuple[torch.Tensor, ...] = (content,)
        self.spec = []
        for codec in self._codecs:
            encoded = [codec.encode(tensor) for tensor in tensors]
            self.spec.append([(len(parts), spec) for parts, spec in encoded])
            tensors = tuple(part for parts, _ in encoded for part in parts)
        return tensors

    # -- from the store to memory

    def storage(self, handle: Handle) -> tuple[torch.UntypedStorage, int]:
        """The storage that ``handle`` lies over, and the offset at which that storage begins.

        It is brought back once for all handles that want it next.
        """
        with self._lock:
            if self._stored is None:
                return self.alias.untyped_storage(), 0
            storage = self._held.get() if isinstance(self._held, StorageRef) else self._held
            if storage is None:
                storage = self._load()
                self._generation += 1
                self._waiting = self.live
            if handle.seen != self._generation:
                handle.seen = self._generation
                self._waiting -= 1
            # The others will want it in a moment; after the last of them only its users keep it.
            self._held = storage if self._waiting > 0 else StorageRef(storage)
            return storage, self.region.offset if self.region else 0

    def forget(self, handle: Handle) -> None:
        """``handle`` is gone: it does not wait for the storage any more."""
        self.live -= 1
        # Called from a destructor, which must not wait: its thread may hold another lock. Missing the moment
        # only means that the storage is held until the last handle is gone.
        if self._lock.acquire(blocking=False):
            try:
                if handle.seen != self._generation:
                    self._waiting -= 1
                    if self._waiting <= 0:
                        self._held = None
            finally:
                self._lock.release()

    def _load(self) -> torch.UntypedStorage:
        begin = time.perf_counter()
        assert self._stored is not None
        tensors = tuple(self._store.get(ticket) for ticket in self._stored.tickets)
        self.ledger.count("loaded", sum(t.numel() * t.element_size() for t in tensors))
        for codec, specs in zip(reversed(self._codecs), reversed(self.spec), strict=True):
            parts = iter(tensors)
            tensors = tuple(codec.decode(tuple(next(parts) for _ in range(n)), spec) for n, spec in specs)
        storage = self._place(tensors[0])
        if storage.device.type == "cuda":
            self._loaded = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._loaded.record()
        self.ledger.count_seconds("unpack", time.perf_counter() - begin)
        return storage

    def _place(self, content: torch.Tensor) -> torch.UntypedStorage:
        # torch itself accepts a wrong dtype or a shape that broadcasts, silently.
        if (content.dtype, content.shape) != self._wanted or content.device != self.alias.device:
            raise StoreError(
                f"{self._store!r} gave back {content.dtype} {tuple(content.shape)} on {content.device} for what "
                f"{self.where!r} saved as {self._wanted[0]} {tuple(self._wanted[1])} on {self.alias.device}: get() "
                "must return what was put, and decode() what was encoded"
            )
        if self.region is None:
            return (content if content.storage_offset() == 0 else content.clone()).untyped_storage()
        base = torch.empty(self.region.extent, dtype=content.dtype, device=content.device)
        base.as_strided(self.region.size, self.region.stride).copy_(content)
        return base.untyped_storage()

    def hand_over(self, tensor: torch.Tensor) -> torch.Tensor:
        """Order ``tensor``, brought back on another stream perhaps, before what follows on the current one."""
        if tensor.is_cuda and self._loaded is not None:
            stream = torch.cuda.current_stream(tensor.device)
            stream.wait_event(self._loaded)
            tensor.record_stream(stream)
        return tensor

    # -- versions

    def _is_changed(self) -> bool:
        self.changed = self.changed or self.alias._version != self.version
        return self.changed

    def check(self) -> None:
        """MutationError when the saved tensor was changed in place since; what torch does without hooks."""
        if self._is_changed():
            raise MutationError(changed_message(self.where, self.alias._version, self.version))


class Handle:
    """What autograd holds for one saved tensor: the packed value and how this view lies over it."""

    __slots__ = ("layout", "packed", "seen")

    def __init__(self, packed: Packed, layout: Layout) -> None:
        self.packed, self.layout, self.seen = packed, layout, 0
        packed.live += 1

    def __del__(self) -> None:
        self.packed.forget(self)

    def unpack(self) -> torch.Tensor:
        """The saved tensor; any number of times, in any thread."""
        self.packed.check()
        storage, shift = self.packed.storage(self)
        return self.packed.hand_over(self.layout.over(storage, shift))
