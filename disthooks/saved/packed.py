"""What autograd holds for a tensor that the user's own functions pack.

The packed value: one content, shared by all the views of it that autograd saved.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from abc import ABC, abstractmethod
from typing import Any, NamedTuple, cast

import torch

from disthooks._fork_safe import Order, own
from disthooks._streams import current_stream, handed_over, on, on_accelerator, used_on
from disthooks._tensors import Layout, StorageRegion
from disthooks._torch import StorageRef, at_end_of_backward, backward_id, current_node, is_python_node, uncompiled
from disthooks.errors import MutationError
from disthooks.saved.counters import Counters
from disthooks.saved.in_place import changed_message


class FunctionsHandle:
    """What autograd holds for a tensor that the user's own ``pack`` took."""

    __slots__ = ("counters", "module_name", "nbytes", "packed", "store")

    def __init__(self, packed: Any, store: Any, counters: Counters, nbytes: int, module_name: str) -> None:
        self.packed, self.store, self.counters, self.nbytes, self.module_name = (
            packed,
            store,
            counters,
            nbytes,
            module_name,
        )
        counters.change_held(nbytes)

    @uncompiled()
    def __del__(self) -> None:
        self.counters.change_held(-self.nbytes)

    def unpack(self) -> torch.Tensor:
        """What the user's ``unpack`` makes of it."""
        begin = time.perf_counter()
        tensor: torch.Tensor = self.store.get(self.packed)
        self.counters.count_got(self.nbytes, time.perf_counter() - begin, self.module_name)
        return tensor


# [Note: what a function of the user's own is given]
# The backward of an `autograd.Function` may write into what it saved, and may return it as a gradient. torch then
# knows that the tensor is somebody's, and does not make it a `.grad` that the next backward adds to and an optimizer
# scales. It cannot know that of what an unpack hook returns: a tensor of its own over whatever memory. So Python code
# is given memory that nobody else has: not the user's, not a store's, not that of another reader. The operators of
# torch only read.


@functools.cache
def _empty(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=device)


class Restored:
    """Contents that are in memory again, or will be when a handle asks.

    Every handle that has yet to read them holds it, and nobody else: they go with the last reader.
    """

    __slots__ = ("__weakref__", "given", "stream", "tensor", "version")

    def __init__(self, tensor: torch.Tensor | None = None, stream: torch.Stream | None = None) -> None:
        self.tensor, self.version = tensor, 0 if tensor is None else tensor._version
        self.stream = stream  # of an accelerator, which fills it
        self.given = tensor is not None  # to Python code, which may do with it what it likes


class _LastRestored(NamedTuple):
    """What a node of the user's own was given: it may ask again while it runs."""

    reader: tuple[int, int]
    storage: StorageRef
    layout: Layout
    version: int
    counter: torch.Tensor  # an empty alias, which counts what is written
    stream: torch.Stream | None

    @staticmethod
    def of(tensor: torch.Tensor, stream: torch.Stream | None, reader: tuple[int, int]) -> _LastRestored:
        counter = tensor.detach()
        counter.data = _empty(tensor.dtype, tensor.device)
        storage = StorageRef(tensor.untyped_storage())
        return _LastRestored(reader, storage, Layout.of(tensor), tensor._version, counter, stream)

    def get(self, reader: tuple[int, int]) -> Restored | None:
        """The same memory, if it is in use still and was not written."""
        storage = self.storage.get() if self.reader == reader else None
        if storage is None or self.counter._version != self.version:
            return None
        tensor = self.counter.detach()
        tensor.data = self.layout.over(storage)
        return Restored(tensor, self.stream)


class _ReadByNode(threading.local):
    """What the user's own node that runs in this thread has asked for; it holds no packed value."""

    def __init__(self) -> None:
        self._node = 0
        self.once: weakref.WeakSet[Packed] = weakref.WeakSet()
        self.kept: weakref.WeakKeyDictionary[Packed, torch.Tensor] = weakref.WeakKeyDictionary()  # asked for twice

    def by(self, node: Any) -> _ReadByNode:
        """For ``node``: what another one has asked for is forgotten."""
        if self._node != id(node):
            self._node = id(node)
            self.once.clear()
            self.kept.clear()
        return self


_read_by_node = _ReadByNode()


class Packed(ABC):
    """The contents of one storage at one version: in memory first, then elsewhere, until nobody needs them.

    ``alias`` shares the saved tensor's version counter. Once the contents are taken its memory is exchanged
    for none, and what stays is a witness: a few bytes that still see every in-place change.

    Where "elsewhere" is, a subclass says, by taking the contents and bringing them back.
    """

    __slots__ = (
        "__weakref__",
        "_last_restored",
        "_lock",
        "_most",
        "_restore_count",
        "_restored",
        "_stream",
        "alias",
        "cost",
        "counters",
        "first_layout",
        "handles",
        "is_changed",
        "is_constant",
        "is_in_order",
        "is_in_place",
        "is_never_shared",
        "is_offloaded",
        "is_sealed",
        "is_undecided",
        "is_untyped",
        "is_volatile",
        "is_withdrawn",
        "module_name",
        "nbytes",
        "owner",
        "region",
        "saved_at",
        "storage_ref",
        "version",
    )

    def __init__(
        self,
        alias: torch.Tensor,
        storage: torch.UntypedStorage,
        region: StorageRegion | None,
        first: Layout,
        counters: Counters,
        module_name: str,
    ) -> None:
        self.alias, self.version, self.region = alias, alias._version, region
        self.first_layout = first  # the layout of what was saved first
        self.counters, self.module_name = counters, module_name
        # Held so that the address in the key is not given to another storage.
        self.storage_ref = StorageRef(storage)
        self.owner: weakref.ref[torch.Tensor]  # the tensor that counts the changes; set by who made it
        self.nbytes = storage.nbytes()
        # The stream that fills it; another one may be current by the time it is copied.
        self._stream = current_stream(alias.device) if on_accelerator(alias) else None
        self.is_offloaded = self.is_changed = self.is_undecided = False
        self.is_sealed = False  # whether the contents are as they were saved, whoever writes to the tensor from now on
        self.is_withdrawn = False  # whether nothing is to share it any more
        self.is_untyped = True  # whether the contents are bits, whatever they mean
        self.is_never_shared = False  # operators may write to it uncounted, as batch norm to its statistics
        self.is_volatile = False  # whether it may be changed uncounted while it is in memory
        self.cost = 0  # operators that are run to bring the contents
        self.is_constant = False  # whether no gradient flows to what was saved
        self._lock = own(Order.PACKED)
        self.handles: list[weakref.ref[Handle]] = []  # those that are gone are sorted out from time to time
        self._most = 64
        self.is_in_place = False  # whether it was decided that the contents stay where they are
        self.saved_at = (0, 0)  # thread and number of the operator that saved it last
        self.is_in_order = False  # whether the contents are laid out as what was saved first
        self._restore_count = 0  # how often the contents were brought
        self._restored: weakref.ref[Restored] | None = None
        self._last_restored: _LastRestored | None = None

    @abstractmethod
    def _offload(self, storage: torch.UntypedStorage) -> bool:
        """Put the contents of ``storage`` elsewhere.

        False when they have to stay, or, if ``undecided``, when it may be asked for again. An error leaves
        everything as it was.
        """

    def copy_now(self) -> None:  # noqa: B027
        """Copy the contents now, if they are to be put elsewhere later."""

    def copy_again(self) -> None:  # noqa: B027
        """Copy them again, if they were: it is all of the storage from now on."""

    def release_copy(self) -> None:  # noqa: B027
        """Let go of what was held for those that save the same again at once."""

    @property
    def can_compare(self) -> bool:
        """Whether what was saved, or a checksum of it, is in memory to compare with."""
        return False

    def has_contents_of(self, part: torch.Tensor, layout: Layout) -> bool:
        """Whether what ``part`` has now, at ``layout``, is what was saved; by default its version tells."""
        return True

    def is_memory_of_store(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor``, which was brought, is memory of a store."""
        return False

    @abstractmethod
    def _restore(self) -> torch.Tensor:
        """The contents, in fresh memory, whose first element stands at the region's offset."""

    @property
    def is_source(self) -> bool:
        """Whether others may be computed from it: its contents are elsewhere, and come back when they are asked for."""
        return self.is_offloaded and not self.is_undecided

    @property
    def is_intact(self) -> bool:
        """Whether the contents that were saved can still be had, which a change of the tensor need not prevent."""
        return self.is_sealed or not self._is_changed()

    @property
    def is_private(self) -> bool:
        """Whether the contents, which were taken, lie in memory or a file that nobody else writes to."""
        return False

    @property
    def is_lossless(self) -> bool:
        """Whether the contents come back bit for bit."""
        return True

    def peek(self, layout: Layout) -> torch.Tensor | None:
        """What a handle of ``layout`` would get, without a trace: nobody who asks later finds it. None if not taken."""
        with self._lock:
            if not self.is_offloaded:
                return None
            return layout.of_whole(self._restore(), self.region.offset if self.region else 0)

    def handle(self, layout: Layout) -> Handle:
        """A handle for a saved tensor of ``layout``."""
        with self._lock:
            brought = None if self._restored is None else self._restored()
            if brought is None:
                brought = self._new_generation()
            handle = Handle(self, layout, brought)
            if len(self.handles) > self._most:
                self.handles = [other for other in self.handles if other() is not None]
                self._most = 2 * len(self.handles) + 64
            self.handles.append(weakref.ref(handle))
            return handle

    def prepare(self) -> None:  # noqa: B027
        """Called once after it was made, without the lock of the counters: prepare what is known now."""

    def stay_in_memory(self) -> None:  # noqa: B027
        """It stays in memory: let go of what was needed to take it. By default nothing."""

    # -- from memory to elsewhere

    def offload(self) -> None:
        """Have the contents put elsewhere and let go of the memory; after an error everything is as it was."""
        with self._lock:
            # Memory that was freed already (FSDP frees what it gathered when its forward ends) may come back: it
            # stays an alias, as without hooks.
            storage = self.alias.untyped_storage()
            gone = storage.nbytes() != self.nbytes
            if self.is_offloaded or gone or self._is_changed():
                self.is_undecided = False
                if not self.is_offloaded:
                    self.stay_in_memory()
                return
            if self._stream is None:
                self.is_offloaded = self._offload(storage)
            else:
                with on(self._stream):
                    self.is_offloaded = self._offload(storage)
            if self.is_offloaded:
                # Another thread may have written while it was copied.
                self.is_sealed = not self._is_changed() and self.is_private
                if self._stream is not None:
                    # A graph would hold it until its backward. Now it goes sooner, and memory that belongs to another
                    # stream must not be used again before this one is done with what it was given: by us, or by others.
                    used_on(self.alias, self._stream)
                self.alias.data = _empty(self.alias.dtype, self.alias.device)

    def content(self, storage: torch.UntypedStorage, typed: bool = False) -> torch.Tensor:
        """What of ``storage`` to keep, as a tensor without conj or neg bits: those belong to the views.

        Without a region it is all of it: as the tensor that was saved where that is the same, in order; otherwise 1-D
        and as ``uint8``, or when ``typed`` in the dtype of that tensor, where that divides it.
        """
        if self.is_in_order:
            return self.alias.detach()
        if self.region is not None:
            dtype, offset, size, stride = self.region
        else:
            typed = typed and self.nbytes % self.alias.dtype.itemsize == 0
            dtype, offset, stride = self.alias.dtype if typed else torch.uint8, 0, (1,)
            size = (self.nbytes // dtype.itemsize,)
        return torch.empty(0, dtype=dtype, device=self.alias.device).set_(storage, offset, size, stride)

    # -- from elsewhere to memory

    def tensor(self, handle: Handle) -> torch.Tensor:
        """What ``handle`` stands for, over memory that is filled once for all handles that want it next."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # inside of it no changes are counted
                return self.tensor(handle)
        node = current_node()
        by_python = is_python_node(node)
        with self._lock:
            if not self.is_offloaded:
                return self._still_here(handle.layout, by_python)
            alone, reader = len(self.handles) == 1, (id(node), backward_id())
            brought = self._restored_for(handle, reader)
            tensor, stream = cast(torch.Tensor, brought.tensor), brought.stream
            if by_python:  # see [Note: what a function of the user's own is given]
                if self.is_memory_of_store(tensor):
                    tensor = brought.tensor = tensor.clone()
                    brought.version = 0
                if (node is not None or self.is_constant) and (brought.given or not alone):
                    tensor = tensor.clone()
                if node is not None:
                    self._last_restored = _LastRestored.of(tensor, stream, reader)
        if self.is_in_order and handle.layout is self.first_layout:
            tensor = tensor if alone else tensor.detach()
        else:
            tensor = handle.layout.of_whole(tensor, self.region.offset if self.region else 0)
        return tensor if stream is None else handed_over(tensor, stream)

    def _still_here(self, layout: Layout, alone: bool) -> torch.Tensor:
        """What lies at ``layout``, as long as the contents are where they were; ``alone``: in memory of its own."""
        storage = self.alias.untyped_storage()
        return layout.over(storage.clone() if alone else storage)  # type: ignore[no-untyped-call]

    def _restored_for(self, handle: Handle, reader: tuple[int, int]) -> Restored:
        brought, handle.restored = handle.restored or self._restored_again(handle, reader), None
        tensor = brought.tensor
        if tensor is None or tensor._version != brought.version:  # never hand out what an earlier reader wrote to
            tensor = brought.tensor = self._restore_for(current_node())
            brought.version = tensor._version
            brought.stream = None if self._stream is None else current_stream(tensor.device)
            brought.given = False
            self.drop_far_readers(handle, brought)
        return brought

    def _restore_for(self, node: Any) -> torch.Tensor:
        """The contents for ``node``, in fresh memory.

        A user's own backward may say ``ctx.saved_tensors`` many times, and each time all that it saved is asked for. It
        may do with each of them what it likes. So a copy is held from the second time on, until that node is done.
        """
        if node is None or not is_python_node(node):
            return self._restore()
        asked = _read_by_node.by(node)
        kept = asked.kept.get(self)
        if kept is not None:
            return kept.clone()
        content = self._restore()
        if self in asked.once:
            asked.kept[self] = content.clone()
            at_end_of_backward(asked.kept.clear)
        asked.once.add(self)
        return content

    def drop_far_readers(self, handle: Handle, brought: Restored) -> None:
        """Have those that will not read for a while bring it again, rather than hold it.

        "A while" is until as many bytes have gone by as it has itself; twice as many after each time that it was
        brought. So contents that thousands of steps share, a mask or a weight that is no Parameter, are brought a few
        times (the logarithm of the number of steps), and a tensor that two far places share is not held between them.
        """
        far, reach = Restored(), self.nbytes << min(self._restore_count, 64)
        self._restore_count += 1
        for other in self.handles:
            waiting = other()
            if (
                waiting is not None
                and waiting.restored is brought
                and handle.saved_bytes_before - waiting.saved_bytes_before > reach
            ):
                waiting.restored = far

    def _restored_again(self, handle: Handle, reader: tuple[int, int]) -> Restored:
        """For a handle that has read already: in a second backward, or twice in one."""
        brought = None if self._restored is None else self._restored()
        if brought is not None:
            return brought
        left = None if self._last_restored is None else self._last_restored.get(reader)
        if left is not None:
            return left
        brought = self._new_generation()
        for other in self.handles:
            waiting = other()
            if waiting is not None and waiting is not handle:
                waiting.restored = brought  # it will want it in a moment
        return brought

    def _new_generation(self) -> Restored:
        brought = Restored()
        self._restored = weakref.ref(brought)
        return brought

    # -- versions

    def _is_changed(self) -> bool:
        self.is_changed = self.is_changed or self.alias._version != self.version
        return self.is_changed

    def check(self) -> None:
        """MutationError when the saved tensor was changed in place since; what torch does without hooks."""
        if self._is_changed():
            raise MutationError(changed_message(self.module_name, self.alias._version, self.version))


class Handle:
    """What autograd holds for one saved tensor: the packed value and how this view lies over it."""

    __slots__ = ("__weakref__", "layout", "packed", "restored", "saved_bytes_before")

    def __init__(self, packed: Packed, layout: Layout, brought: Restored) -> None:
        self.packed, self.layout = packed, layout
        self.saved_bytes_before = packed.counters.saved_bytes  # backward comes from the highest to the lowest
        self.restored: Restored | None = brought  # until it is read

    @property
    def module_name(self) -> str:
        """The name of the module that saved it."""
        return self.packed.module_name

    def unpack(self) -> torch.Tensor:
        """The saved tensor; any number of times, in any thread."""
        packed = self.packed
        if packed.is_changed or packed.alias._version != packed.version:
            packed.check()
        return packed.tensor(self)
