"""What one thread saves to disk, in order: entries, and the groups in which they move."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from disthooks.saved.stores.copies import Coming, Outgoing
from disthooks.saved.stores.extents import Extent
from disthooks.saved.stores.host import PAGE, tensor_over
from disthooks.saved.stores.order import AccessOrder
from disthooks.saved.stores.scratch_file import ScratchFile
from disthooks.saved.stores.staging import Staging

SMALL = 256 << 10  # bytes: smaller tensors move together, because waking a thread costs more (decision 41)
JOINED = 1 << 20  # bytes of a group of small tensors

#: The states of a group. An entry of a WRITTEN group may be in memory, too: in ``ahead`` of the group. A FAILED one
#: could not be written, and stays in memory. All entries of a GONE one are dropped.
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
        reserved: bytes of it that a budget counts.
        seconds: of its write and reads since these were last asked for.
    """

    __slots__ = (
        "at",
        "device",
        "dropped",
        "dtype",
        "group",
        "is_copy",
        "nbytes",
        "offset",
        "outgoing",
        "reserved",
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
        self.offset = self.reserved = 0
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
        lease: the memory in which the entries lie, each from a page on. None once it is not in flight any more.
        end: bytes of the lease that are used.
        live: the entries that are not dropped, as far as the worker knows, and ``nbytes`` their bytes.
        dead: bytes of the entries that were dropped before the group was written.
        copies: by address, the offsets of copies that were made here and not put yet.
        members: the entries that are written, in the order of their offsets.
        extent, base: where it was written; ``base`` is the offset of the first entry that was written.
        lock: held by the thread that reads it. ``is_reading`` tells others.
        ahead: the entries that were read from the file and that no ``get`` has taken yet, with their tensors.
        is_planned: whether it is to be read ahead, and nobody has begun.
        is_read: whether an entry was read since it was put.
        raised: how many failed writes had been raised when it was queued.
        position, dropped: for :class:`AccessOrder`.
        start: when its read should begin, by ``time.perf_counter``.
    """

    __slots__ = (
        "_tape",
        "ahead",
        "base",
        "copies",
        "dead",
        "device",
        "dropped",
        "end",
        "extent",
        "is_planned",
        "is_read",
        "is_reading",
        "lease",
        "live",
        "lock",
        "members",
        "nbytes",
        "position",
        "raised",
        "size",
        "start",
        "state",
    )

    file: ScratchFile

    def __init__(self, tape: Reads, device: torch.device | None, lease: Any, size: int) -> None:
        self._tape = weakref.ref(tape)  # weak: the order of a tape holds its groups
        self.device, self.lease, self.size = device, lease, size
        self.end = self.base = self.position = self.raised = self.nbytes = self.dead = 0
        self.start = 0.0
        self.live: dict[Entry, None] = {}
        self.members: list[Entry] = []
        self.copies: dict[int, int] = {}
        self.ahead: dict[Entry, torch.Tensor | Coming] = {}
        self.state = OPEN
        self.is_read = self.is_planned = self.is_reading = self.dropped = False
        self.extent: Extent | None = None
        self.lock = threading.RLock()

    @property
    def tape(self) -> Reads:
        """The order of reads that it is a part of, which lives as long as the worker."""
        tape = self._tape()
        assert tape is not None
        return tape

    @property
    def has_entries(self) -> bool:
        return bool(self.live or self.dead)

    def add(self, entry: Entry) -> None:
        entry.group = self
        self.live[entry] = None
        self.nbytes += entry.nbytes


class Reads:
    """In which order backward reads the groups of one tape.

    Attributes:
        order: learns the order.
        last: the group of which an entry was read last.
        asked: that group, and when it was asked for, until the reads after it are planned.
    """

    def __init__(self) -> None:
        self.order = AccessOrder()
        self.last: Group | None = None
        self.asked: tuple[Group, float] | None = None


class Tape:
    """What one thread saves for one device, in order. The thread that puts fills the open group.

    Only ``own`` and ``alone`` are called without the lock of the worker.

    Attributes:
        sealed: groups that are full, until the worker takes them.
        own: by address, the memory of a large copy that is put next, or never.
    """

    def __init__(
        self, device: torch.device | None, memory: Callable[[int], Any], staging: Staging, joined: int
    ) -> None:
        self.device, self.reads = device, Reads()
        self.small = min(SMALL, joined // 4)
        self.sealed: list[Group] = []
        self._memory, self._staging, self._joined = memory, staging, joined
        self._open: Group | None = None
        self.own: dict[int, Any] = {}

    def own_alone(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy of ``tensor``, which is large, in the memory from which it will be written.

        Raises:
            OSError: if the system has no more memory.
        """
        lease = self._memory(int(tensor.nbytes))
        copy = _copied(tensor, lease, 0)
        self.own = {copy.data_ptr(): lease}  # of the last copy only: it is put next, or never
        return copy

    def own_joined(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy of ``tensor``, which is small, in the open group; OSError if there is no memory."""
        group, offset = self._take(int(tensor.nbytes))
        copy = _copied(tensor, group.lease, offset)
        group.copies[copy.data_ptr()] = offset
        return copy

    def alone(self, entry: Entry) -> Group:
        """A group of ``entry`` alone, whose tensor is contiguous; OSError if there is no memory."""
        tensor = entry.tensor
        assert tensor is not None
        lease = self.own.pop(tensor.data_ptr(), None)
        if lease is None:
            lease = self._memory(entry.nbytes)
            self._fill(entry, lease, 0)
        group = Group(self.reads, self.device, lease, entry.nbytes)
        group.end = padded(entry.nbytes)
        group.add(entry)
        return group

    def join_copy(self, entry: Entry) -> bool:
        """Add ``entry`` to the open group if that has entries already, and the copy that ``entry`` is about."""
        tensor, group = entry.tensor, self._open
        assert tensor is not None
        offset = group.copies.pop(tensor.data_ptr(), None) if group is not None and group.live else None
        if group is None or offset is None:
            return False
        entry.offset = offset
        group.add(entry)
        return True

    def begins_group(self, entry: Entry) -> bool:
        group = self._open
        return group is None or not group.has_entries or self._is_full(group, entry.nbytes)

    def groups(self) -> list[Group]:
        """The groups that the worker has not taken yet."""
        return [*self.sealed, *([self._open] if self._open is not None and self._open.has_entries else [])]

    def join(self, entry: Entry) -> Group:
        """Add ``entry``, which is small and contiguous, to the open group; OSError if there is no memory."""
        tensor, group = entry.tensor, self._open
        assert tensor is not None
        offset = None if group is None else group.copies.pop(tensor.data_ptr(), None)
        if group is None or offset is None:
            group, offset = self._take(entry.nbytes)
            self._fill(entry, group.lease, offset)
        entry.offset = offset
        group.add(entry)
        return group

    def seal(self) -> None:
        """Let the open group be full, if it has entries."""
        group = self._open
        if group is not None and group.has_entries:
            self._open = None
            self.sealed.append(group)

    def _take(self, nbytes: int) -> tuple[Group, int]:
        """The open group, or a new one, and the offset of its next ``nbytes`` bytes."""
        if self._open is not None and self._is_full(self._open, nbytes):
            self.seal()
            self._open = None  # copies that were never put end with it
        if self._open is None:
            self._open = Group(self.reads, self.device, self._memory(self._joined), self._joined)
        offset = self._open.end
        self._open.end += padded(nbytes)
        return self._open, offset

    def _is_full(self, group: Group, nbytes: int) -> bool:
        # When a backward has read the group and dropped all of it, a new tape begins.
        return group.end + nbytes > self._joined or (group.is_read and not group.live)

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
