"""How the bytes of stored tensors get from memory to a scratch file and back."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import itertools
import math
import sys
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch

from disthooks._fork_safe import Order, shared_lock
from disthooks._streams import current_stream, event_on, handed_over, on
from disthooks.errors import StoreError
from disthooks.saved.stores.backend import check_process
from disthooks.saved.stores.base import IOStats
from disthooks.saved.stores.device_copy import (
    Incoming,
    Link,
    Outgoing,
    arriving,
    brought,
    link_of,
    pinned,
    sent,
    source_of,
    taken,
)
from disthooks.saved.stores.extents import Extent
from disthooks.saved.stores.gpu_direct import GpuDirect
from disthooks.saved.stores.order import AccessOrder
from disthooks.saved.stores.pools import PAGE, AlignedPool, memory_at, memory_of, shaped, tensor_over
from disthooks.saved.stores.scratch_file import CHUNK, ScratchFile

QUEUED, WRITING, WRITTEN, FAILED, GONE = "queued", "writing", "written", "failed", "gone"


class Ticket:
    """One stored tensor: in memory until it is written, then in a slab of a file, and for a while in memory again."""

    __slots__ = (
        "ahead",
        "at",
        "checksum",
        "device",
        "dropped",
        "dtype",
        "filled",
        "nbytes",
        "offset",
        "order",
        "outgoing",
        "owed",
        "position",
        "reading",
        "said",
        "seconds",
        "shape",
        "slab",
        "state",
        "tensor",
    )

    def __init__(self, tensor: torch.Tensor, device: torch.device, order: AccessOrder) -> None:
        self.tensor: torch.Tensor | None = tensor  # until it is written
        self.outgoing: Outgoing | None = None  # the copy from its device to the memory that it is written from
        self.at: torch.Stream | None = None  # the stream of its device on which it was filled, and will be read
        self.nbytes, self.shape, self.dtype, self.device = tensor.nbytes, tensor.shape, tensor.dtype, device
        self.order = order
        self.filled: torch.Event | None = None  # for GPUDirect Storage: the event after which the tensor is filled
        self.state = GONE  # until it is put
        self.said = 0  # how many failed writes had been raised when it was put
        self.seconds = 0.0  # seconds of its write and reads since these were last asked for
        self.owed = 0  # bytes of it that a budget counts
        self.slab: Slab | None = None
        self.offset = 0  # the byte of the slab at which it begins
        self.checksum = 0
        self.dropped = False
        self.reading = False  # whether a thread reads it, or will
        self.ahead: torch.Tensor | Incoming | None = None  # the tensor that was read ahead
        self.position = 0


class Slab:
    """One or more tensors that are written together and read together: one large tensor, or many small ones."""

    __slots__ = ("extent", "file", "freed", "live", "members", "start")

    def __init__(self, file: ScratchFile, extent: Extent, members: Sequence[Ticket]) -> None:
        self.file, self.extent, self.members = file, extent, members
        self.live = set(members)
        self.freed = False
        self.start = 0.0  # when its read should begin, by ``time.perf_counter``


def taken_together(writes: collections.deque[Ticket], small: int, joined: int) -> list[Ticket]:
    """Remove from the front of ``writes`` the tickets of the next slab.

    That is one tensor, or several tensors of up to ``small`` bytes each, together about ``joined`` bytes.
    """
    found: list[Ticket] = []
    total = 0
    while writes and total < joined:
        if found and writes[0].nbytes > small:
            break
        ticket = writes.popleft()
        if ticket.state == QUEUED:
            ticket.state = WRITING
            found.append(ticket)
            total += padded(ticket.nbytes)  # its bytes in the slab, and in the memory in which tensors are joined
            if ticket.nbytes > small:
                break
    return found


def padded(nbytes: int) -> int:
    """``nbytes`` rounded up to whole pages: each of several joined tensors has its own pages."""
    return -(-nbytes // PAGE) * PAGE


_STAGING = 2 * CHUNK  # bytes of memory for writes that are always kept, because each write needs some
_MEASURE_FROM = 256 << 20  # bytes: a disk is measured when so many were written to it


Directly = Callable[[], "GpuDirect | None"]


class Transfer:
    """Writes the tensors of tickets to files and reads them back; see [Note: direct I/O].

    Args:
        checksum: whether to keep a CRC-32 of each tensor that is written, and to compare it when the tensor is read.
        directly: returns GPUDirect Storage if it works. It is first called when a tensor could use it.
    """

    def __init__(self, checksum: bool, directly: Directly = lambda: None) -> None:
        self._checksum, self.directly = checksum, directly
        self.buffers = AlignedPool()
        self.stats = IOStats()  # several threads change it without a lock: a lost update only makes a figure inexact
        self._measured: set[ScratchFile] = set()  # files that were measured, or whose measurement failed
        self._links: dict[torch.device, Link] = {}  # the links that were used
        self._sent: collections.deque[Outgoing] = collections.deque()  # copies that hold their sources, oldest first
        self._coming: weakref.WeakSet[Incoming] = weakref.WeakSet()
        self._lock = shared_lock(Order.TRANSFER)  # guards the two above
        self._allowed = sys.maxsize  # most bytes on devices

    def for_reads(self, keep: int) -> None:
        """Note that reads come next: free the memory that writes used, except ``keep`` bytes."""
        self.buffers.trim(keep)

    def for_writes(self, in_flight: int) -> None:
        """Note that writes come next, with up to ``in_flight`` bytes at a time."""
        self.buffers.keep = _STAGING + in_flight

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy of ``tensor`` in CPU memory, in whole pages, which can be written without another copy.

        Raises:
            OSError: if the system has no more memory.
        """
        lease = self.buffers.lease(tensor.nbytes)
        block = tensor_over(lease, torch.Size([len(lease)]), torch.uint8)
        copy: torch.Tensor = shaped(block, tensor.shape, tensor.dtype).data
        return copy.copy_(tensor)

    def after_fork(self) -> None:
        """Forget the copies, because a child cannot use the devices."""
        self._links.clear()
        self._sent.clear()

    def poll(self) -> None:
        """Release the sources of copies that are done."""
        if not self._links:
            return
        for link in tuple(self._links.values()):
            link.poll()
        with self._lock:
            while self._sent and self._sent[0].source is None:
                self._sent.popleft()

    @property
    def device_bytes(self) -> int:
        """Bytes on devices of tensors that are being copied out, or that came back and were not read yet."""
        self.poll()
        with self._lock:
            coming = sum(incoming.device_bytes for incoming in tuple(self._coming))
            return coming + sum(outgoing.host.nbytes for outgoing in self._sent if outgoing.source is not None)

    def set_device_limit(self, nbytes: int) -> None:
        """Hold at most ``nbytes`` on devices. The current streams wait for copies; the host does not."""
        self._allowed = nbytes
        with self._lock:
            while self._sent and self.device_bytes > nbytes and self._sent:
                outgoing = self._sent.popleft()
                link_of(outgoing.device).let_go(outgoing)

    def make_room(self, nbytes: int, most: int) -> None:
        """Make the host wait until at most ``most - nbytes`` bytes are being copied from devices.

        Copies of dropped tensors count, too: they still use memory on the device and on the host, and nothing else
        waits for them.
        """
        while True:
            with self._lock:
                under_way = sum(outgoing.host.nbytes for outgoing in self._sent if outgoing.source is not None)
                if not self._sent or under_way + nbytes <= most:
                    return
                oldest = self._sent[0]
            oldest.wait()
            self.poll()

    def begin(self, ticket: Ticket) -> None:
        """Begin to copy the tensor of ``ticket`` from its device, if it is on one. The host does not wait."""
        tensor = ticket.tensor
        if tensor is None or tensor.is_cpu or not tensor.nbytes:
            return
        ticket.at = current_stream(ticket.device)
        direct = self.directly()
        if direct is not None and direct.takes(tensor):
            ticket.filled = event_on(ticket.at)
            return
        self._links[ticket.device] = link_of(ticket.device)
        ticket.outgoing = outgoing = sent(tensor)
        with self._lock:
            self._sent.append(outgoing)
        ticket.tensor = outgoing.host

    def give(self, ticket: Ticket, found: torch.Tensor | Incoming) -> torch.Tensor:
        """The tensor of ``ticket`` on its device, for the current stream.

        Args:
            ticket: the ticket.
            found: the tensor that was put, while it is still on its device; otherwise the tensor that was read, or its
                copy in host memory.
        """
        if isinstance(found, Incoming):
            return taken(found, ticket.device)
        if ticket.at is None:
            return found.to(ticket.device)
        if found.device == ticket.device:
            return handed_over(found, ticket.at)
        outgoing = ticket.outgoing  # None once the tensor is written, and then ``found`` is filled
        source = source_of(outgoing, ticket.at)
        return source if source is not None else brought(found, ticket.device, outgoing)

    def write(self, tickets: Sequence[Ticket], file: ScratchFile) -> None:
        """Write the tensors of ``tickets`` to a new slab. After an error there is no slab.

        Raises:
            StoreError: if the system does not write them, or if the memory of one of them was freed meanwhile.
        """
        # Tickets that were dropped meanwhile have no tensor.
        held = [(ticket, tensor) for ticket in tickets if (tensor := ticket.tensor) is not None and tensor.nbytes]
        if not held:
            return
        end = 0
        for ticket, tensor in held:
            # Wait until the tensor is in the memory that it is written from.
            if (outgoing := ticket.outgoing) is not None:
                outgoing.wait()
            if ticket.filled is not None:
                ticket.filled.synchronize()
            ticket.offset = padded(end)
            end = ticket.offset + ticket.nbytes
            _check_memory(tensor, file)
            if self._checksum:
                ticket.checksum = zlib.crc32(memory_of(tensor))
        extent = file.allocate(end)
        try:
            begin = time.perf_counter()
            with self.stats.writing.one():
                self._write_at(file, extent.offset, held, end)
            seconds = time.perf_counter() - begin
            for _, tensor in held:
                _check_memory(tensor, file)  # once more, because it may have been freed during the write
        except BaseException:
            file.release(extent)
            raise
        slab = Slab(file, extent, [ticket for ticket, _ in held])
        for ticket in slab.members:
            ticket.slab = slab
            ticket.seconds += seconds * ticket.nbytes / end
            self.stats.written += ticket.nbytes

    def look_after(self, file: ScratchFile) -> None:
        """Give unused space in ``file`` back, and measure the disk once, when enough was written."""
        file.shrink(keep_peak=True)
        if self.stats.written > _MEASURE_FROM and file not in self._measured and file.may_be_measured:
            self._measured.add(file)
            with contextlib.suppress(StoreError, OSError):  # the disk is then not measured
                file.measure(self.buffers)

    def _write_at(
        self, file: ScratchFile, offset: int, held: Sequence[tuple[Ticket, torch.Tensor]], nbytes: int
    ) -> None:
        """Write the tensors of ``held``, ``nbytes`` together, at ``offset``, with as few copies as possible."""
        tensor, direct = held[0][1], self.directly() if held[0][0].filled is not None else None
        if direct is not None:  # such a tensor is large, and therefore alone
            direct.write(file, tensor, offset)
            return
        if len(held) > 1:  # join them in one buffer
            staging = self.buffers.lease(nbytes)
            address = ctypes.addressof(staging)
            for ticket, small in held:
                ctypes.memmove(address + ticket.offset, small.data_ptr(), ticket.nbytes)
            file.write(memoryview(staging).cast("B")[: padded(nbytes)], offset)
            return
        if not file.direct:
            file.write(memory_of(tensor), offset)
            return
        # Direct I/O takes a tensor as it is only if it begins at a page, and if its storage has all of its last page.
        # Other tensors go through an aligned buffer. See [Note: direct I/O].
        end = int(tensor.storage_offset()) * tensor.element_size() + padded(nbytes)
        if tensor.data_ptr() % PAGE == 0 and end <= tensor.untyped_storage().nbytes():
            file.write(memory_at(tensor.data_ptr(), padded(nbytes)), offset)
            return
        staging = self.buffers.lease(min(nbytes, CHUNK))
        memory = memoryview(staging).cast("B")
        for start in range(0, nbytes, CHUNK):
            count = min(CHUNK, nbytes - start)
            ctypes.memmove(staging, tensor.data_ptr() + start, count)
            file.write(memory[: padded(count)], offset + start)

    def read(self, slab: Slab) -> list[tuple[Ticket, torch.Tensor | Incoming]]:
        """Read the tensors of a slab that were not dropped, into one block of memory.

        The copies of tensors to their device are under way when this returns.

        Raises:
            StoreError: if they cannot be read, or if other bytes were read than were written.
        """
        file = slab.file
        check_process(file)
        wanted = [ticket for ticket in slab.members if not ticket.dropped]
        if not wanted:
            return []
        if wanted[0].filled is not None:
            return [(wanted[0], self._read_directly(wanted[0], file, slab.extent.offset))]
        begin = wanted[0].offset // PAGE * PAGE
        nbytes = wanted[-1].offset + wanted[-1].nbytes - begin
        device = next((ticket.device for ticket in wanted if ticket.at is not None), None)
        lease, memory = self._memory(file, nbytes, device)
        started = time.perf_counter()
        with self.stats.one_read(nbytes):
            file.read(memory[: padded(nbytes)] if file.direct else memory[:nbytes], slab.extent.offset + begin, nbytes)
        seconds = time.perf_counter() - started
        for ticket in wanted:
            ticket.seconds += seconds * ticket.nbytes / nbytes
            start = ticket.offset - begin
            if self._checksum and zlib.crc32(memory[start : start + ticket.nbytes]) != ticket.checksum:
                why = "other bytes were read than were written (the checksum differs)"
                raise file.error(why, None, ticket.nbytes)
            self.stats.read += ticket.nbytes
        return [(ticket, self._arrived(ticket, lease, ticket.offset - begin)) for ticket in wanted]

    def _read_directly(self, ticket: Ticket, file: ScratchFile, offset: int) -> torch.Tensor:
        """The tensor of ``ticket``, read by GPUDirect Storage."""
        direct, stream = self.directly(), ticket.at
        assert direct is not None
        assert stream is not None
        with on(stream):
            tensor = torch.empty(ticket.shape, dtype=ticket.dtype, device=ticket.device)
        event_on(stream).synchronize()  # the stream may still use the memory for the tensor that had it before
        begin = time.perf_counter()
        with self.stats.one_read(ticket.nbytes):
            direct.read(file, tensor, offset)
        ticket.seconds += time.perf_counter() - begin
        self.stats.read += ticket.nbytes
        return tensor

    def _memory(self, file: ScratchFile, nbytes: int, device: torch.device | None) -> tuple[Any, memoryview]:
        """Memory to read into: pinned if the tensors go on to a ``device``."""
        try:
            if device is not None:
                block = pinned(nbytes, device)
                return block, memory_at(block.data_ptr(), block.nbytes, write=True)
            lease = self.buffers.lease(nbytes)
        except OSError as error:
            raise file.error("there is no memory to read a saved tensor into", error, nbytes) from error
        return lease, memoryview(lease).cast("B")

    def _arrived(self, ticket: Ticket, lease: Any, offset: int) -> torch.Tensor | Incoming:
        """The tensor of ``ticket``, which was read to ``offset`` of ``lease``.

        If it belongs on a device that has room for it, the copy to this device begins.
        """
        if not isinstance(lease, torch.Tensor):
            return tensor_over(lease, ticket.shape, ticket.dtype, offset)
        host = shaped(lease, ticket.shape, ticket.dtype, offset)
        if ticket.at is None:
            return host
        with self._lock:  # so that two threads do not both take the last room
            if self.device_bytes + ticket.nbytes > self._allowed:
                return host
            incoming = arriving(host, ticket.at)
            self._coming.add(incoming)
        return incoming


def _check_memory(tensor: torch.Tensor, file: ScratchFile) -> None:
    """Raise StoreError if the memory of ``tensor`` was freed, as ``untyped_storage().resize_(0)`` does."""
    last = int(tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    if tensor.untyped_storage().nbytes() < last:
        what = f"the memory of a saved tensor of shape {tuple(tensor.shape)} was freed before the tensor was written"
        raise file.error(what, None, last)


_MOST = 64  # tickets to look ahead: backward departs from the expected order by a few
_MARGIN = 1.5  # a read is expected to take up to so many times as long as the last reads took


class Ahead:
    """The tickets that are read before backward asks for them, done or not; used under the lock of the mover.

    Args:
        budget: most bytes of them. A tensor that is larger is read alone.
        stats: counts the bytes that were read in vain, and knows how fast reads are.
    """

    def __init__(self, budget: int, stats: IOStats) -> None:
        self._budget, self._stats = budget, stats
        self._tickets: dict[Ticket, None] = {}  # the oldest first
        self._bytes = 0
        self._enough = 0  # for so many reads of backward, enough is read ahead already

    def __iter__(self) -> Iterator[Ticket]:
        return iter(self._tickets)

    def __len__(self) -> int:
        return len(self._tickets)

    def add(self, ticket: Ticket) -> None:
        """Note that ``ticket`` was read, or will be."""
        if ticket not in self._tickets:
            self._tickets[ticket] = None
            self._bytes += ticket.nbytes

    def remove(self, ticket: Ticket) -> None:
        """Note that ``ticket`` was asked for or dropped, and forget the tensor that was read for it."""
        ticket.ahead = None
        if ticket in self._tickets:
            del self._tickets[ticket]
            self._bytes -= ticket.nbytes

    def after(self, ticket: Ticket) -> list[Slab]:
        """The slabs to read because backward asks for ``ticket`` now; other tensors make room for them.

        The ``start`` of each slab is set so that it is read just in time. A tensor that is read too early takes memory,
        maybe while a long operation works with large tensors.
        """
        following = itertools.islice(cast("Iterator[tuple[Ticket, float]]", ticket.order.after(ticket)), _MOST)
        first = next(following, None)
        if first is None:
            return []
        if self._enough and (first[0] in self._tickets or first[0].tensor is not None):
            self._enough -= 1
            return []
        due: dict[Ticket, float] = {}  # the tickets that fit, in the order of reads
        room = self._budget
        for other, seconds in itertools.chain([first], following):
            room -= other.nbytes
            if due and room < 0:
                break
            due[other] = seconds
        self._enough = len(due) // 4
        found = [self.one(other, {ticket, *due}) for other in due]
        # Each read starts at the last moment at which it, and all reads behind it, are in time.
        now, latest = time.perf_counter(), math.inf
        for other, seconds in reversed(due.items()):
            if other.reading and other.slab is not None:
                latest = min(latest, seconds) - _MARGIN * other.nbytes * self._stats.pace
                other.slab.start = now + latest
        return [slab for slab in found if slab is not None]

    def one(self, ticket: Ticket, wanted: set[Ticket]) -> Slab | None:
        """The slab to read for ``ticket``; None if ``ticket`` is in memory or being read, or does not fit.

        Tensors that were read ahead and are not in ``wanted`` make room for it.
        """
        slab = ticket.slab
        if ticket.state != WRITTEN or ticket.reading or ticket.dropped or ticket in self._tickets or slab is None:
            return None
        for other in [other for other in self._tickets if other.ahead is not None and other not in wanted]:
            if self._bytes + ticket.nbytes <= self._budget:
                break
            self._stats.in_vain += other.nbytes
            self.remove(other)
        if self._tickets and self._bytes + ticket.nbytes > self._budget:
            return None
        for member in slab.members:
            if not member.dropped and member.ahead is None:
                member.reading = True
                self.add(member)
        slab.start = 0.0  # at once, unless the caller sets a later time
        return slab
