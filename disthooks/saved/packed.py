"""The objects that autograd holds for saved tensors, and the packed value that several of these objects share.

A ``Packed`` is one content, in memory or offloaded. A ``Handle`` is one saved tensor over it. Autograd holds an
``InPlace``, a ``DTensorHandle`` or a ``FunctionsHandle`` for other saved tensors.
"""

# [Note: the witness]
# A tensor that was changed in place after it was saved has to raise in backward, also when its contents were offloaded
# meanwhile. `alias = tensor.detach()` shares the version counter of the saved tensor. Once the contents are offloaded,
# `alias.data = empty` takes the memory from the alias, which keeps the counter. So a tensor of zero bytes still sees
# every change that is made through any other alias, even if the saved tensor itself is gone (decision 1).

# [Note: storage and version]
# Two saved tensors have the same content if they lie over the same storage object, at the same version. The key has the
# address of the storage object, never a data pointer or an `id`. `StorageRef` holds the storage weakly, which keeps its
# address from being given to another storage, and does not keep its memory. Versions can be compared only where one
# counter counts: among views of one base tensor. `unsafe_chunk`, `.data` and `from_numpy` make aliases with counters of
# their own, so the base tensor (`owner`) is part of the key (decision 2).

# [Note: one restore a generation]
# Contents that several saved tensors share are restored once for all of them. Each handle that has yet to read holds
# the same `Restored`, and drops it when it has read. So the restored memory goes with the last reader, by Python's own
# reference counts: no destructor, no lock (decisions 5 and 28). A handle that reads a second time, with `retain_graph`,
# begins a new generation, which all other handles join. A reader that comes much later in backward leaves the
# generation and restores for itself, because holding the memory until then costs more (decisions 45 and 107).

# [Note: few objects]
# A model saves many tensors, and each object that Python's garbage collector tracks brings its next run nearer, which
# looks at every object of the process: a quarter of the time of a stored tensor was that. So a content is its own lock,
# equal layouts are one object (`Layout.of`), the operator that saved it is a number, the keys of the index are numbers,
# and one weak reference to a content serves everybody. benchmarks/overhead.py counts the objects and the calls.

from __future__ import annotations

import functools
import time
import weakref
from abc import ABC, abstractmethod
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from disthooks._locks import ReentrantLock
from disthooks._streams import current_stream, handed_over, on, stream_of, used_on
from disthooks._tensors import Layout, StorageRegion, has_gaps
from disthooks._torch import PYTHON_NODE, StorageRef, at_end_of_backward, backward_id, current_node, uncompiled
from disthooks.errors import MutationError
from disthooks.saved.counters import ModuleCounts
from disthooks.saved.python_nodes import copy_for_python, read_by_node

#: What a saved tensor is to autograd. An operator made a "result", and its version tells whether it was changed. A
#: "leaf" and its views, and a "constant", to which no gradient flows, may be written without a count: see
#: [Note: leaves within one call]. The user may also write into a constant that he reads outside of a backward.
Nature = Literal["result", "leaf", "constant"]


def changed_message(module_name: str, now: int, then: int) -> str:
    """What to tell the user about a tensor saved in ``module_name`` that is at version ``now`` instead of ``then``."""
    place = f"the forward of {module_name!r}" if module_name else "a saving(...) block"
    return (
        "one of the variables needed for gradient computation has been modified by an inplace operation: a "
        f"tensor saved in {place} is at version {now}; expected version {then} "
        "instead. Use the out-of-place operation there, or give it a clone()"
    )


class FunctionsHandle:
    """The object that autograd holds for a tensor that the user's own ``pack`` took."""

    __slots__ = ("__weakref__", "counts", "held_bytes", "store", "ticket")

    def __init__(self, ticket: Any, store: Any, counts: ModuleCounts, nbytes: int) -> None:
        self.ticket, self.store, self.counts, self.held_bytes = ticket, store, counts, nbytes

    def unpack(self) -> torch.Tensor:
        begin = time.perf_counter()
        tensor: torch.Tensor = self.store.get(self.ticket)
        self.counts.count_got(self.held_bytes, time.perf_counter() - begin)
        return tensor


class InPlace:
    """The object that autograd holds for a tensor that stays in memory, with the reason why it stays.

    Attributes:
        checksum: of the tensor's bytes, if Recompute computes other tensors from it.
    """

    __slots__ = ("__weakref__", "checksum", "is_alias", "module_name", "reason", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, module_name: str, reason: str = "", is_alias: bool = False) -> None:
        self.tensor, self.version, self.module_name, self.reason = tensor, tensor._version, module_name, reason
        self.is_alias = is_alias  # of an activation's memory, so Python code gets a copy
        self.checksum: torch.Tensor | None = None

    def unpack(self) -> torch.Tensor:
        """The tensor itself, or a copy for Python code. MutationError when it was changed in place since."""
        if self.tensor._version != self.version:
            raise MutationError(changed_message(self.module_name, self.tensor._version, self.version))
        if not self.is_alias:
            return self.tensor
        node = current_node()
        if node is not None and not isinstance(node, PYTHON_NODE):
            return self.tensor
        storage = self.tensor.untyped_storage()
        return copy_for_python(self.tensor, Layout.of(self.tensor), (storage._cdata, storage.nbytes()), node)


@functools.cache
def _empty(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=device)


class Restored:
    """Contents that are in memory again, or will be once a handle asks. See [Note: one restore a generation].

    Attributes:
        tensor: the contents; None until the first handle asks.
        version: of ``tensor`` when it was restored. A later version means that a reader wrote into it.
        stream: of an accelerator, which fills ``tensor``.
    """

    __slots__ = ("__weakref__", "stream", "tensor", "version")

    def __init__(self, tensor: torch.Tensor | None = None, stream: torch.Stream | None = None) -> None:
        self.tensor, self.version = tensor, 0 if tensor is None else tensor._version
        self.stream = stream


#: For a handle that is the only one of its packed value and has yet to read: it shares with nobody.
_ALONE = Restored()


class _LastRestored(NamedTuple):
    """The tensor that a node of the user's own was given. If it asks again while it runs, it gets the same memory.

    The memory is held weakly, by torch's own count (decision 13), so it lives only as long as the node uses it.
    """

    reader: tuple[int, int]  # the node and its backward
    storage: StorageRef
    layout: Layout
    version: int
    witness: torch.Tensor  # without memory; it counts the changes
    stream: torch.Stream | None

    @staticmethod
    def of(tensor: torch.Tensor, stream: torch.Stream | None, reader: tuple[int, int]) -> _LastRestored:
        witness = tensor.detach()
        witness.data = witness.new_empty(0)
        storage = StorageRef(tensor.untyped_storage())
        return _LastRestored(reader, storage, Layout.of(tensor), tensor._version, witness, stream)

    def get(self, reader: tuple[int, int]) -> Restored | None:
        """The same memory for the same reader, if it is still in use and was not written."""
        storage = self.storage.get() if self.reader == reader else None
        if storage is None or self.witness._version != self.version:
            return None
        # The alias of the witness has its counter, so what the node writes is counted for its next question.
        tensor = self.witness.detach()
        tensor.data = self.layout.over(storage)
        return Restored(tensor, self.stream)


class Readers:
    """The handles of a packed value that has several, and in which generation they read.

    The lock of the packed value guards them. See [Note: one restore a generation].
    """

    __slots__ = ("_current", "_limit", "_restore_count", "handles")

    def __init__(self, first: weakref.ref[Handle]) -> None:
        self.handles = [first]  # dead references are sorted out from time to time
        self._limit = 64
        self._restore_count = 0
        self._current: weakref.ref[Restored] | None = None
        handle = first()
        if handle is not None and handle.restored is _ALONE:
            handle.restored = self._generation()

    def _generation(self) -> Restored:
        restored = None if self._current is None else self._current()
        if restored is None:
            restored = Restored()
            self._current = weakref.ref(restored)
        return restored

    def add(self, packed: Packed, layout: Layout) -> Handle:
        """A new handle, which reads with the current generation."""
        restored = None if self._current is None else self._current()
        handle = Handle(packed, layout, self._generation() if restored is None else restored)
        if len(self.handles) > self._limit:
            self.handles = [other for other in self.handles if other() is not None]
            self._limit = 2 * len(self.handles) + 64
        self.handles.append(weakref.ref(handle))
        return handle

    def join_again(self, handle: Handle, last: Restored | None) -> Restored:
        """The generation for a ``handle`` that has read already: in a second backward, or twice in one."""
        restored = None if self._current is None else self._current()
        if restored is None and last is not None:
            return last
        if restored is None:
            restored = self._generation()
            for reference in self.handles:
                other = reference()
                if other is not None and other is not handle:
                    other.restored = restored  # in a second backward it will read soon
        return restored

    def drop_far_readers(self, handle: Handle, restored: Restored, nbytes: int) -> None:
        """Let handles that will not read for a while leave the generation, so that its memory goes earlier.

        A while is until backward has passed as many saved bytes as the content has. It doubles with each restore, so
        contents that thousands of steps share, such as a mask, are restored a logarithmic number of times.
        """
        far, reach = None, nbytes << min(self._restore_count, 64)
        self._restore_count += 1
        for reference in self.handles:
            other = reference()
            if other is None or other.restored is not restored:
                continue
            if handle.saved_bytes_before - other.saved_bytes_before > reach:
                far = far or Restored()  # one for all of them; most contents have no such handle
                other.restored = far


#: Where the contents of a packed value are. "in memory": in the user's memory, and they may be offloaded later.
#: "undecided": there, until a device says whether they may be dropped. "in place": they stay there, because the store
#: would put them there. "offloaded": elsewhere; they stay as they were saved, even if somebody writes to the tensor
#: later. "withdrawn": in memory for their own graph, and no other saved tensor may share them.
Place = Literal["in memory", "undecided", "in place", "offloaded", "withdrawn"]


class Decision(NamedTuple):
    """The fate of one saved tensor, and the reason. ``pack`` counts the tensor by it at its end.

    Attributes:
        fate: "keep" it in memory; "recast" a weight's copy; "recompute" it if Recompute knows how; "store" it.
        reason: why it is kept, or why only a small copy of it is.
        weight: the weight of which the tensor is autocast's copy.
        is_activation: whether a tensor that is kept is plain memory that a function may return as a gradient.
    """

    fate: Literal["keep", "recast", "recompute", "store"]
    reason: str = ""
    weight: nn.Parameter | None = None
    is_activation: bool = False


class SavedTensor(NamedTuple):
    """A tensor that autograd saves and that is to be packed.

    Attributes:
        part: the tensor, or the local part of a DTensor.
        owner: the tensor that counts the changes: the base of a view. See [Note: storage and version].
        owner_id: its identity.
        version: of the tensor. A DTensor counts its changes itself, beside those of its local part.
        storage: of ``part``.
        nbytes: of the storage.
        layout: of ``part`` in the storage.
        region: the part of the storage that is packed; None for all of it.
        saved_at: the thread and the number of the operator that saves it, as one number.
        nature: what the tensor, or the tensor that it is a view of, is to autograd.
        is_small: whether it becomes a small copy of a part of a large storage, which stays in memory.
        is_fresh: whether no code of the user's can have the tensor yet. See [Note: contents are taken late].
    """

    part: torch.Tensor
    owner: torch.Tensor
    owner_id: int
    version: int
    storage: torch.UntypedStorage
    nbytes: int
    layout: Layout
    region: StorageRegion | None
    saved_at: int
    nature: Nature
    is_small: bool
    is_fresh: bool


class Packed(ReentrantLock, ABC):  # type: ignore[misc]  # a base of type Any
    """The contents of one storage at one version, for all the saved tensors that lie over it.

    They are in memory at first. A subclass says what ``_offload`` does with them and how ``_restore`` gets them back:
    by a store, by casting a weight again, by computing them again.

    ``with packed:`` guards the contents and the handles: it is its own lock. See [Note: few objects].

    Attributes:
        alias: shares the version counter of the saved tensor, and at first its memory. See [Note: the witness].
        version: of the alias, when the tensor was saved.
        saved_version: of the saved tensor.
        place: where the contents are.
        storage_ref: holds the storage weakly. See [Note: storage and version].
        nbytes: of the storage.
        region: the part of the storage that is packed; None for all of it.
        first_layout: how the tensor that was saved first lies over the storage.
        is_in_order: whether that tensor is all of the storage, in its order, and is packed as it is (decision 30).
        owner: the tensor that counts the changes.
        saved_at: the operator that saved it last.
        stream: that fills the saved tensor, on an accelerator. Another one may be current by the time it is copied.
        counts: of the module that saved it.
        first_handle: the handle of the tensor that was saved first.
        nature: what the saved tensor, or the tensor that it is a view of, is to autograd.
    """

    __slots__ = (
        "_last",
        "_readers",
        "alias",
        "counts",
        "first_handle",
        "first_layout",
        "is_in_order",
        "nature",
        "nbytes",
        "owner",
        "place",
        "region",
        "saved_at",
        "saved_version",
        "storage_ref",
        "stream",
        "version",
    )

    cost = 0  # how many operators run to restore the contents
    products = 0  # how many of them are matrix products
    has_short_way = False  # whether :meth:`ContentIndex.find` may find it

    def __init__(self, saved: SavedTensor, storage_ref: StorageRef, counts: ModuleCounts) -> None:
        (
            part,
            owner,
            _,
            self.saved_version,
            _,
            self.nbytes,
            self.first_layout,
            self.region,
            self.saved_at,
            self.nature,
            _,
            _,
        ) = saved
        self.alias = alias = part.detach()
        self.version, self.owner, self.storage_ref = alias._version, weakref.ref(owner), storage_ref
        self.counts, self.stream = counts, None if alias.is_cpu else stream_of(alias)
        self.is_in_order = False
        self.place: Place = "in memory"
        self.first_handle: weakref.ref[Handle]
        self._readers: Readers | None = None  # None as long as there is one handle
        self._last: _LastRestored | None = None

    @property
    def module_name(self) -> str:
        return self.counts.name

    @property
    def held_bytes(self) -> int:
        """The bytes that a store has of it."""
        return 0

    def is_changed(self) -> bool:
        """Whether the saved tensor was changed in place since."""
        return self.alias._version != self.version

    # -- the methods that a subclass overrides

    @abstractmethod
    def _offload(self, storage: torch.UntypedStorage) -> Place:
        """Put the contents of ``storage`` elsewhere, and say where they are now.

        If they are "undecided", this may be called again later. After an error everything is as it was.
        """

    @abstractmethod
    def _restore(self, is_as_packed: bool = False) -> torch.Tensor:
        """The contents, in fresh memory whose first element stands at the region's offset.

        With ``is_as_packed`` they may have other strides: nobody looks at the memory.
        """

    def prepare(self) -> None:
        """Plan how Recompute computes the contents. Called once, when they are packed."""

    def copy_now(self) -> None:
        """Copy the contents, if they are to be offloaded.

        See [Note: contents are of one moment] in contents.py.
        """

    def copy_again(self) -> None:
        """Copy the contents again, if they were copied: they are all of the storage from now on."""

    def release_copy(self) -> None:
        """Drop the copy, which is held for operators that save the same again at once."""

    def stay_in_memory(self) -> None:
        """Drop everything that was needed to offload the contents: they stay where they are."""

    def has_contents_of(self, part: torch.Tensor, layout: Layout) -> bool:
        """Whether the bytes of ``part``, at ``layout``, are those that were saved. By default the version tells."""
        return True

    def is_own_memory(self, tensor: torch.Tensor) -> bool:
        """Whether nobody else, such as a store, has the memory of ``tensor``, which was just restored."""
        return True

    @property
    def is_source(self) -> bool:
        """Whether Recompute may compute other tensors from it."""
        return self.place == "offloaded"

    @property
    def is_intact(self) -> bool:
        """Whether the contents that were saved can still be had, even if the tensor was changed since."""
        return self.place == "offloaded" or not self.is_changed()

    @property
    def is_lossless(self) -> bool:
        return True

    # -- from memory to elsewhere

    def handle(self, layout: Layout) -> Handle:
        """One more handle on it, beside the first one."""
        with self:
            readers = self._readers
            if readers is None:
                readers = self._readers = Readers(self.first_handle)
            return readers.add(self, layout)

    def offload(self) -> None:
        """Put the contents elsewhere and drop the memory. After an error everything is as it was."""
        with self:
            if self.place in ("offloaded", "withdrawn"):
                return
            place: Place = "in memory"
            alias, stream = self.alias, self.stream
            storage = alias.untyped_storage()
            # Memory that was freed already may come back: FSDP frees what it gathered when its forward ends. Then the
            # packed value stays an alias, as autograd has it without hooks. A changed tensor is not offloaded either:
            # its contents are not those that were saved, and `unpack` raises.
            if storage.nbytes() == self.nbytes and alias._version == self.version:
                if stream is None:
                    place = self._offload(storage)
                else:
                    with on(stream):
                        place = self._offload(storage)
            if alias._version != self.version:  # or another thread has written while the contents were copied
                place = "in memory"
            self.place = place
            if place == "in memory":
                self.stay_in_memory()
            elif place == "offloaded":
                if stream is not None:
                    # Without hooks the graph would hold this memory until backward. Now it is freed sooner, and the
                    # allocator must not give it away before this stream is done with it.
                    used_on(alias, stream)
                # A fake tensor belongs to one dispatch mode, so nothing of it is remembered.
                is_tensor = type(alias) is torch.Tensor
                alias.data = _empty(alias.dtype, alias.device) if is_tensor else alias.new_empty(0)

    def withdraw(self) -> None:
        """Leave the contents in memory, for their own graph alone."""
        self.stay_in_memory()
        self.place = "withdrawn"  # without the lock: the end of a generator may call this from a destructor

    def content(self, storage: torch.UntypedStorage, typed: bool = False) -> torch.Tensor:
        """The packed part of ``storage``, as a tensor without conj or neg bits: those belong to the views.

        Without a region all of the storage is packed: as the tensor that was saved, if that is in order; otherwise as
        a 1-D tensor of ``uint8``. With ``typed`` the 1-D tensor has the dtype of the saved tensor, if the dtype
        divides the storage (decision 4).
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

    def peek(self, layout: Layout) -> torch.Tensor | None:
        """The tensor that a handle of ``layout`` would get; no later reader notices. None if it is still in memory."""
        with self:
            if self.place != "offloaded":
                return None
            return layout.of_whole(self._restore(), self.region.offset if self.region else 0)

    def tensor(self, handle: Handle) -> torch.Tensor:
        """The saved tensor of ``handle``, over memory that is filled once for all handles of its generation."""
        node = current_node()
        is_python = node is None or isinstance(node, PYTHON_NODE)
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # inference tensors count no changes
                return self.tensor(handle)
        with self:
            if self.place != "offloaded":
                tensor, stream, is_own = self._in_memory(handle.layout), None, not is_python
            else:
                # By reading, the handle leaves its generation: see [Note: one restore a generation].
                restored, handle.restored = handle.restored, None
                is_own = is_alone = self._readers is None
                is_as_packed = self.is_in_order and handle.layout is self.first_layout
                if is_alone and not is_python:
                    tensor = self._restore(is_as_packed)
                    stream = None if self.stream is None else current_stream(tensor.device)
                else:
                    tensor, stream, is_own = self._restored(handle, restored, node, is_python, is_alone)
                if is_as_packed:
                    tensor = tensor if is_alone else tensor.detach()
                else:
                    tensor = handle.layout.of_whole(tensor, self.region.offset if self.region else 0)
            tensor = tensor if stream is None else handed_over(tensor, stream)
            if not is_own:
                tensor = copy_for_python(tensor, handle.layout, (self.storage_ref.address, self.nbytes), node)
        return tensor

    def _restored(
        self, handle: Handle, restored: Restored | None, node: Any, is_python: bool, is_alone: bool
    ) -> tuple[torch.Tensor, torch.Stream | None, bool]:
        """The contents that ``handle`` shares with the other readers of its generation, and the stream that fills them.

        The last value tells whether the reader may have them. Python code shares with nobody: see
        [Note: what a function of the user's own is given] in python_nodes.py.
        """
        readers, reader = self._readers, (id(node), backward_id())
        if restored is None:
            last = None if self._last is None else self._last.get(reader)
            restored = (last or _ALONE) if readers is None else readers.join_again(handle, last)
        if restored is _ALONE:
            restored = Restored()
        tensor = restored.tensor
        # No reader is given memory that an earlier reader wrote to (decision 23).
        is_new = tensor is None or tensor._version != restored.version
        if tensor is None or is_new:
            tensor = self._restore_for(node) if is_python and node is not None else self._restore()
            restored.tensor, restored.version = tensor, tensor._version
            restored.stream = None if self.stream is None else current_stream(tensor.device)
            if readers is not None:
                readers.drop_far_readers(handle, restored, self.nbytes)
        if not is_python:
            return tensor, restored.stream, True
        # Outside of a backward the saved tensors of a user's graph share their memory, as they do without hooks.
        is_for_itself = node is not None or self.nature == "constant"
        if is_for_itself and (readers is not None or (node is not None and has_gaps(handle.layout, self.nbytes))):
            return tensor, restored.stream, False
        if is_for_itself and not is_new:
            tensor = tensor.clone()
        elif not self.is_own_memory(tensor):
            tensor = restored.tensor = tensor.clone()
            restored.version = 0
        if node is not None:
            self._last = _LastRestored.of(tensor, restored.stream, reader)
        return tensor, restored.stream, True

    def _in_memory(self, layout: Layout) -> torch.Tensor:
        """The elements at ``layout``, as long as the contents are in memory."""
        return layout.over(self.alias.untyped_storage())

    def _restore_for(self, python_node: Any) -> torch.Tensor:
        """The contents for a node of the user's own, in fresh memory.

        Its backward may say ``ctx.saved_tensors`` many times. Each time torch asks for all that it saved, and the node
        may write into each answer. So from the second time on a copy is held until that node is done.
        """
        read = read_by_node.of(python_node)
        copy = read.copies.get(self)
        if copy is not None:
            return copy.clone()
        content = self._restore()
        if self in read.once:
            read.copies[self] = content.clone()
            at_end_of_backward(read.clear)
        read.once.add(self)
        return content


class Handle:
    """The object that autograd holds for one saved tensor: the packed value, and how the tensor lies over it.

    Attributes:
        restored: the generation in which it reads; None once it has read.
        saved_bytes_before: the bytes that its attachment had packed before. Backward reads from the highest number to
            the lowest.
    """

    __slots__ = ("__weakref__", "layout", "packed", "restored", "saved_bytes_before")

    def __init__(self, packed: Packed, layout: Layout, restored: Restored = _ALONE) -> None:
        self.packed, self.layout = packed, layout
        self.saved_bytes_before = packed.counts.all.saved_bytes
        self.restored: Restored | None = restored

    @property
    def module_name(self) -> str:
        return self.packed.module_name


class DTensorHandle:
    """The object that autograd holds for a DTensor: the handle of its local part, and a description of the whole.

    The DTensor counts the changes, not its local part. So the witness here is a DTensor without memory (decision 22).
    """

    __slots__ = ("_context", "_inner", "_version", "_witness", "handle")

    def __init__(self, handle: Handle, tensor: torch.Tensor) -> None:
        self.handle, self._version = handle, tensor._version
        witness: Any = tensor.detach()
        # The description of the whole is made of the other tensors inside, so all but the local part are kept.
        names, self._context = witness.__tensor_flatten__()
        self._inner = {name: getattr(witness, name) for name in names if name != "_local_tensor"}
        witness._local_tensor = torch.empty(0, device="cpu")
        self._witness = witness

    def unpack(self) -> torch.Tensor:
        if self._witness._version != self._version:
            raise MutationError(changed_message(self.handle.module_name, self._witness._version, self._version))
        inner = {**self._inner, "_local_tensor": unpack(self.handle)}
        kind, size, stride = type(self._witness), self._witness.size(), self._witness.stride()
        whole: torch.Tensor = kind.__tensor_unflatten__(inner, self._context, size, stride)
        return whole


@uncompiled(
    "compiled autograd unpacks a tensor that disthooks packed, and its graph breaks at each of them: leave compiled "
    "autograd off for this backward"
)
def unpack(held: Handle | DTensorHandle | InPlace | FunctionsHandle) -> torch.Tensor:
    """The saved tensor; any number of times, in any thread. MutationError if it was changed in place since."""
    # A function of the module, so that a graph does not keep the hooks of its call alive.
    if type(held) is not Handle:
        return held.unpack()  # type: ignore[union-attr]
    packed = held.packed
    if packed.alias._version != packed.version:
        raise MutationError(changed_message(packed.module_name, packed.alias._version, packed.version))
    return packed.tensor(held)
