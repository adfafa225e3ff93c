"""The packed value: one content, shared by all the views of it that autograd saved."""

from __future__ import annotations

import functools
import threading
import time
from abc import ABC, abstractmethod

import torch
from torch.utils.weak import WeakIdRef

from disthooks._tensors import Layout
from disthooks._torch import StorageRef, uncompiled
from disthooks.errors import MutationError
from disthooks.saved.kept import changed_message
from disthooks.saved.ledger import Key, Ledger
from disthooks.saved.region import Region


@functools.cache
def _empty(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=device)


class Packed(ABC):
    """The contents of one storage at one version: in memory first, then elsewhere, until nobody needs them.

    ``alias`` shares the saved tensor's version counter. Once the contents are taken its memory is exchanged
    for none, and what stays is a witness: a few bytes that still see every in-place change.

    Where "elsewhere" is, a subclass says, by taking the contents and bringing them back.
    """

    __slots__ = (
        "__weakref__",
        "_generation",
        "_handed",
        "_held",
        "_loaded",
        "_lock",
        "_stream",
        "_waiting",
        "alias",
        "changed",
        "constant",
        "key",
        "ledger",
        "live",
        "nbytes",
        "owner",
        "region",
        "source",
        "taken",
        "undecided",
        "version",
        "where",
    )

    def __init__(
        self, alias: torch.Tensor, storage: torch.UntypedStorage, region: Region | None, ledger: Ledger, where: str
    ) -> None:
        self.alias, self.version, self.region = alias, alias._version, region
        self.ledger, self.where = ledger, where
        # Held so that the address in the ledger's key is not given to another storage.
        self.source = StorageRef(storage)
        self.key: Key | None = None
        self.owner: WeakIdRef | None = None
        self.nbytes = storage.nbytes()
        # The stream that fills it; another one may be current by the time it is copied.
        self._stream = torch.cuda.current_stream(alias.device) if alias.is_cuda else None
        self._loaded: torch.cuda.Event | None = None
        self.taken = self.changed = self.undecided = False
        self.live = 0  # handles that exist
        self._lock = threading.RLock()  # a destructor may run while its own thread is inside
        self._held: torch.UntypedStorage | StorageRef | None = None  # the storage brought back
        self._generation = self._waiting = 0
        self._handed: torch.Tensor | None = None  # its version counts what is written into what was handed out
        self.constant = False  # whether no gradient flows to what was saved

    @abstractmethod
    def _take(self, storage: torch.UntypedStorage) -> bool:
        """Put the contents of ``storage`` elsewhere.

        False when they have to stay, or, if ``undecided``, when it may be asked for again. An error leaves
        everything as it was.
        """

    @abstractmethod
    def _bring(self) -> torch.UntypedStorage:
        """The contents, over a storage whose first element stands at the region's offset."""

    # -- from memory to elsewhere

    def take(self) -> None:
        """Have the contents put elsewhere and let go of the memory; after an error everything is as it was."""
        with self._lock:
            # Memory that was freed already (FSDP frees what it gathered when its forward ends) may come back: it
            # stays an alias, as without hooks.
            storage = self.alias.untyped_storage()
            gone = storage.nbytes() != self.nbytes
            if self.taken or gone or self._is_changed():
                self.undecided = False
                return
            begin = time.perf_counter()
            if self._stream is None:
                self.taken = self._take(storage)
            else:
                with torch.cuda.stream(self._stream):
                    self.taken = self._take(storage)
            if self.taken:
                self._is_changed()  # another thread may have written while it was copied
                self.alias.data = _empty(self.alias.dtype, self.alias.device)
            self.ledger.count_seconds("pack", time.perf_counter() - begin)

    def content(self, storage: torch.UntypedStorage, typed: bool = False) -> torch.Tensor:
        """What of ``storage`` to keep, as a tensor without conj or neg bits: those belong to the views.

        Without a region it is all of it, as ``uint8``, or when ``typed`` in the dtype of the tensor that was saved,
        where that divides it.
        """
        if self.region is not None:
            dtype, offset, size, stride = self.region
        else:
            typed = typed and self.nbytes % self.alias.dtype.itemsize == 0
            dtype, offset, stride = self.alias.dtype if typed else torch.uint8, 0, (1,)
            size = (self.nbytes // dtype.itemsize,)
        return torch.empty(0, dtype=dtype, device=self.alias.device).set_(storage, offset, size, stride)

    # -- from elsewhere to memory

    def tensor(self, handle: Handle) -> torch.Tensor:
        """What ``handle`` stands for, over a storage that is brought back once for all handles that want it next."""
        with self._lock:
            if not self.taken:
                storage = self.alias.untyped_storage()
                # What a backward returns may become a gradient, and be added to where it lies.
                if self.constant:
                    storage = storage.clone()  # type: ignore[no-untyped-call]
                return handle.layout.over(storage)
            storage, counter = self._storage(handle), self._handed
        tensor = handle.layout.over(storage, self.region.offset if self.region else 0)
        if counter is not None:
            counting = counter.detach()
            counting.data = tensor
            tensor = counting
        return self._hand_over(tensor)

    def _storage(self, handle: Handle) -> torch.UntypedStorage:
        storage = self._held.get() if isinstance(self._held, StorageRef) else self._held
        if storage is None or (self._handed is not None and self._handed._version):
            storage = self._timed_bring()
            self._generation += 1
            self._waiting = self.live
            # Inference mode counts nothing.
            self._handed = None if torch.is_inference_mode_enabled() else torch.empty(0, device=storage.device)
        if handle.seen != self._generation:
            handle.seen = self._generation
            self._waiting -= 1
        # The others will want it in a moment; after the last of them only its users keep it.
        self._held = storage if self._waiting > 0 else StorageRef(storage)
        return storage

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

    def _timed_bring(self) -> torch.UntypedStorage:
        begin = time.perf_counter()
        storage = self._bring()
        if self._stream is not None:
            self._loaded = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._loaded.record()
        self.ledger.count_seconds("unpack", time.perf_counter() - begin)
        return storage

    def _hand_over(self, tensor: torch.Tensor) -> torch.Tensor:
        """Order ``tensor``, brought back on another stream perhaps, before what follows on the current one."""
        if self._loaded is not None and tensor.is_cuda:
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

    @uncompiled()
    def __del__(self) -> None:
        self.packed.forget(self)

    @property
    def where(self) -> str:
        """The name of the module that saved it."""
        return self.packed.where

    def unpack(self) -> torch.Tensor:
        """The saved tensor; any number of times, in any thread."""
        self.packed.check()
        return self.packed.tensor(self)
