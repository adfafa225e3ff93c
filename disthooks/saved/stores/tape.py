"""What one thread saves, in order: entries, and the groups in which they move."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from disthooks._fork_safe import Order, tensor_lock
from disthooks.saved.stores.device_copy import Outgoing
from disthooks.saved.stores.extents import Extent
from disthooks.saved.stores.order import AccessOrder
from disthooks.saved.stores.pools import PAGE, tensor_over
from disthooks.saved.stores.scratch_file import ScratchFile
from disthooks.saved.stores.staging import Incoming, Staging

SMALL = 256 << 10  # bytes: smaller tensors move together, because waking a thread costs more (decision 41)
JOINED = 1 << 20  # bytes of a group of small tensors

#: The states of a group. An entry of a WRITTEN group may be in memory, too: in ``ahead`` of the group.
OPEN, QUEUED, WRITING, WRITTEN, FAILED, GONE = "open", "queued", "writing", "written", "failed", "gone"


class Entry:
    """One tensor of a tape.

    Attributes:
        group: its group, once it is on the tape.
        tensor: the tensor that was put, until it is written. Any thread may ask for it.
        offset: its first byte in the memory, and later in the extent, of its group.
        is_copy: whether ``tensor`` is a copy of what the caller has. Then each reader gets a copy of its own.
        device: where ``get`` returns it.
        at: the stream of ``device`` on which it was filled, and will be read; None if the device has no streams.
        outgoing: the copy from its device that fills ``tensor``; None when that is done.
        owed: bytes of it that a budget counts.
        seconds: of its write and reads since these were last asked for.
    """

    __slots__ = (
        "at",
        "checksum",
        "device",
        "dropped",
        "dtype",
        "group",
        "is_copy",
        "nbytes",
        "offset",
        "outgoing",
        "owed",
        "seconds",
        "shape",
        "tensor",
    )

    def __init__(self, tensor: torch.Tensor, device: torch.device, at: torch.Stream | None, is_copy: bool) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.device, self.at = device, at
        self.outgoing: Outgoing | None = None
        self.group: Group | None = None
        self.nbytes, self.shape, self.dtype = int(tensor.nbytes), tensor.shape, tensor.dtype
        self.offset = self.owed = self.checksum = 0
        self.seconds = 0.0
        self.dropped, self.is_copy = False, is_copy

    @property
    def is_ahead(self) -> bool:
        """Whether it was read from the file, and no ``get`` has taken it yet."""
        return self.group is not None and self in self.group.ahead


class Group:
    """Entries that are written together, and read together: one large tensor, or many small ones.

    Attributes:
        size: bytes that it counts in flight.
        device: the accelerator to which ``get`` returns the entries; None for CPU memory.
        lease: the memory in which the entries lie, each from a page on. None once it is not in flight any more, and if
            the one entry goes past the host.
        end: bytes of the lease that are used.
        entries: all of them, in the order of their puts.
        copies: by address, the offsets of copies that were made here and not put yet.
        is_sealed: whether it is full. Nothing is added any more.
        members: the entries that were not dropped when it was written.
        live: those entries that the owner does not know as dropped, and ``nbytes`` their bytes.
        file, extent, base: where it was written; ``base`` is the offset of the first entry that was written.
        lock: held by the thread that reads it. ``is_reading`` tells others, who need not be sure.
        ahead: the entries that were read from the file and that no ``get`` has taken yet, with their tensors.
        is_planned: whether it is to be read ahead, and nobody has begun.
        is_read: whether an entry was read since it was put.
        said: how many failed writes had been raised when it was handed over.
        position, dropped: for :class:`AccessOrder`.
        start: when its read should begin, by ``time.perf_counter``.
    """

    __slots__ = (
        "_tape",
        "ahead",
        "base",
        "copies",
        "device",
        "dropped",
        "end",
        "entries",
        "extent",
        "file",
        "is_planned",
        "is_read",
        "is_reading",
        "is_sealed",
        "lease",
        "live",
        "lock",
        "members",
        "nbytes",
        "position",
        "said",
        "size",
        "start",
        "state",
    )

    file: ScratchFile

    def __init__(self, tape: Tape, lease: Any, size: int) -> None:
        self._tape = weakref.ref(tape)  # weak: the order of a tape holds its groups
        self.device, self.lease, self.size = tape.device, lease, size
        self.end = self.base = self.position = self.said = self.nbytes = 0
        self.start = 0.0
        self.entries: list[Entry] = []
        self.members: list[Entry] = []
        self.live: set[Entry] = set()
        self.copies: dict[int, int] = {}
        self.ahead: dict[Entry, torch.Tensor | Incoming] = {}
        self.state = OPEN
        self.is_sealed = self.is_read = self.is_planned = self.is_reading = self.dropped = False
        self.extent: Extent | None = None
        self.lock = tensor_lock(Order.GROUP)

    @property
    def tape(self) -> Tape:
        """The tape that the group is on, which lives as long as the runtime."""
        tape = self._tape()
        assert tape is not None
        return tape

    def stays(self) -> list[Entry]:
        """The entries that are not dropped; they become the ``live`` ones."""
        found = [entry for entry in self.entries if not entry.dropped]
        self.live, self.nbytes = set(found), sum(entry.nbytes for entry in found)
        return found


class Tape:
    """What one thread saves for one device, in order. The thread that puts fills the open group.

    Args:
        device: the accelerator to which ``get`` returns the tensors; None for CPU memory.
        memory: gives memory of whole pages; OSError if there is none.
        staging: copies tensors from devices.
        joined: bytes of a group of small tensors. Tensors with more than a quarter of it are alone.
        hand_over: gives a group that is full to the owner.

    Attributes:
        order: learns in which order backward reads the groups. The owner alone uses it.
        last_read: the group of which an entry was read last.
    """

    def __init__(
        self,
        device: torch.device | None,
        memory: Callable[[int], Any],
        staging: Staging,
        joined: int,
        hand_over: Callable[[Group], None],
    ) -> None:
        self.device, self.order = device, AccessOrder()
        self.last_read: Group | None = None
        self.small = min(SMALL, joined // 4)
        self._memory, self._staging, self._joined, self._hand_over = memory, staging, joined, hand_over
        self._open: Group | None = None
        self._leases: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # of large copies
        self._lock = tensor_lock(Order.TAPE)

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy of ``tensor`` in the memory from which it will be written. Both are in CPU memory.

        Raises:
            OSError: if the system has no more memory.
        """
        nbytes = int(tensor.nbytes)
        if not nbytes:
            return tensor.clone(memory_format=torch.contiguous_format)
        if nbytes > self.small:
            lease = self._memory(nbytes)
            copy = _copied(tensor, lease, 0)
            self._leases[copy.data_ptr()] = lease
            return copy
        with self._lock:
            group, offset = self._take(nbytes)
            copy = _copied(tensor, group.lease, offset)
            group.copies[copy.data_ptr()] = offset
        return copy

    def add(self, entry: Entry) -> Group:
        """Add ``entry``, whose tensor is contiguous, to the tape. Returns its group, which may have to be handed over.

        Raises:
            OSError: if the system has no more memory.
        """
        tensor = entry.tensor
        assert tensor is not None
        if entry.nbytes > self.small:
            lease = self._leases.pop(tensor.data_ptr(), None)
            if lease is None:
                lease = self._memory(entry.nbytes)
                self._fill(entry, lease, 0)
            entry.group = alone = Group(self, lease, entry.nbytes)
            alone.entries.append(entry)
            alone.end, alone.is_sealed = padded(entry.nbytes), True
            return alone
        with self._lock:
            group = self._open
            offset = None if group is None or group.is_sealed else group.copies.pop(tensor.data_ptr(), None)
            if group is None or offset is None:
                group, offset = self._take(entry.nbytes)
                self._fill(entry, group.lease, offset)
            entry.group, entry.offset = group, offset
            group.entries.append(entry)
            return group

    def _fill(self, entry: Entry, lease: Any, offset: int) -> None:
        """Let the tensor of ``entry`` be a copy at ``offset`` of ``lease``, from which it can be written."""
        tensor = entry.tensor
        assert tensor is not None
        if tensor.is_cpu:
            host = _copied(tensor, lease, offset)
            entry.is_copy = True  # readers get other copies, because ``put`` got no copy
        else:
            host = tensor_over(lease, tensor.shape, tensor.dtype, offset)
            entry.outgoing = self._staging.send(tensor, host)
        entry.tensor = host

    def _take(self, nbytes: int) -> tuple[Group, int]:
        """The open group and the offset of its next ``nbytes`` bytes; under the lock."""
        group = self._group_for(nbytes)
        offset = group.end
        group.end += padded(nbytes)
        return group, offset

    def _group_for(self, nbytes: int) -> Group:
        """The open group if it has room for ``nbytes``, or a new one; under the lock."""
        group = self._open
        if group is not None and (group.is_sealed or group.end + nbytes > self._joined):
            self._seal(group)
            group = None
        elif group is not None and group.is_read and all(entry.dropped for entry in group.entries):
            self._seal(group)  # a backward is over: a new tape begins, and nothing of this group will be written
            group = None
        if group is None:
            group = self._open = Group(self, self._memory(self._joined), self._joined)
        return group

    def _seal(self, group: Group) -> None:
        # An interrupt may come between any of these lines. Then the next call does all of them again, and the owner
        # ignores a group that it was given before.
        group.is_sealed = True
        if group.entries:
            self._hand_over(group)
        self._open = None

    def flush(self) -> None:
        """Hand over the open group. Any thread may call this."""
        with self._lock:
            if self._open is not None and self._open.entries:
                self._seal(self._open)


def padded(nbytes: int) -> int:
    """``nbytes`` rounded up to whole pages: each of several joined tensors has its own pages."""
    return -(-nbytes // PAGE) * PAGE


def _copied(tensor: torch.Tensor, lease: Any, offset: int) -> torch.Tensor:
    """A contiguous copy of ``tensor``, which is in CPU memory, at ``offset`` of ``lease``."""
    copy = tensor_over(lease, tensor.shape, tensor.dtype, offset)
    try:
        copy.copy_(tensor)
    except NotImplementedError:  # torch copies no tensors of int1 to int7 and uint1 to uint7
        copy.view(torch.uint8).copy_(tensor.view(torch.uint8))
    return copy


def cloned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a contiguous ``tensor``, of any dtype."""
    try:
        return tensor.clone()
    except NotImplementedError:
        return tensor.view(torch.uint8).clone().view(tensor.dtype)
