"""The bytes of stored tensors on their way from memory to a scratch file and back."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import itertools
import math
import os
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
from disthooks.saved.stores.order import AccessOrder
from disthooks.saved.stores.pools import PAGE, AlignedPool, memory_at, memory_of, shaped, tensor_over
from disthooks.saved.stores.scratch_file import CHUNK, Extent, GpuDirect, ScratchFile

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
        self.outgoing: Outgoing | None = None  # how it got from its device to where it is written from
        self.at: torch.Stream | None = None  # of the device: on which it was filled, and will be wanted
        self.nbytes, self.shape, self.dtype, self.device = tensor.nbytes, tensor.shape, tensor.dtype, device
        self.order = order
        self.filled: torch.Event | None = None  # there: of what goes to disk from the device itself
        self.state = GONE  # until it is put
        self.said = 0  # how many failures had been said when it was put
        self.seconds = 0.0  # during which it was written and read, not yet asked for
        self.owed = 0  # bytes of it that a budget counts
        self.slab: Slab | None = None
        self.offset = 0  # in the slab
        self.checksum = 0
        self.dropped = False
        self.reading = False  # somebody is to read it
        self.ahead: torch.Tensor | Incoming | None = None  # what was read
        self.position = 0


class Slab:
    """What is written and read at once: one large tensor, or many small ones."""

    __slots__ = ("extent", "file", "freed", "live", "members", "start")

    def __init__(self, file: ScratchFile, extent: Extent, members: Sequence[Ticket]) -> None:
        self.file, self.extent, self.members = file, extent, members
        self.live = set(members)
        self.freed = False
        self.start = 0.0  # when to begin to read it, by ``time.perf_counter``


def taken_together(writes: collections.deque[Ticket], small: int, joined: int) -> list[Ticket]:
    """Remove from the front of ``writes`` what is written at once.

    That is one tensor, or several of up to ``small`` bytes each until they are ``joined`` bytes.
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
            total += padded(ticket.nbytes)  # what it takes in the slab, and in the memory it is joined in
            if ticket.nbytes > small:
                break
    return found


def padded(nbytes: int) -> int:
    """``nbytes`` rounded up to whole pages: each of several joined tensors has its own."""
    return -(-nbytes // PAGE) * PAGE


_STAGING = 2 * CHUNK  # bytes of memory to write from that is kept: it is used all the time
_MEASURE_FROM = 256 << 20  # bytes: a disk that so much goes to is worth measuring


Directly = Callable[[], "GpuDirect | None"]


class Transfer:
    """Writes the tensors of tickets to files and reads them back; see [Note: direct I/O].

    Args:
        checksum: keep a CRC-32 of what is written, and compare it with that of what is read.
        directly: gives GPUDirect Storage where it works; first called when a tensor could use it.
    """

    def __init__(self, checksum: bool, directly: Directly = lambda: None) -> None:
        self._checksum, self.directly = checksum, directly
        self.buffers = AlignedPool()
        self.stats = IOStats()  # written by several threads: a lost update spoils a statistic
        self._measured: set[ScratchFile] = set()  # or tried to
        self._links: dict[torch.device, Link] = {}  # that were used
        self._sent: collections.deque[Outgoing] = collections.deque()  # whose sources are held, the oldest first
        self._coming: weakref.WeakSet[Incoming] = weakref.WeakSet()
        self._lock = shared_lock(Order.TRANSFER)  # of both
        self._allowed = sys.maxsize  # bytes on devices

    def for_reads(self, keep: int) -> None:
        """Reads come next: free the memory that writes used, except ``keep`` bytes."""
        self.buffers.trim(keep)

    def for_writes(self, in_flight: int) -> None:
        """Writes come next, of up to ``in_flight`` bytes at a time."""
        self.buffers.keep = _STAGING + in_flight

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy of ``tensor`` in CPU memory, in whole pages that can be written as they are.

        Raises:
            OSError: when the system has no more memory.
        """
        lease = self.buffers.lease(tensor.nbytes)
        block = tensor_over(lease, torch.Size([len(lease)]), torch.uint8)
        copy: torch.Tensor = shaped(block, tensor.shape, tensor.dtype).data
        return copy.copy_(tensor)

    def after_fork(self) -> None:
        """Forget the copies: a child cannot use the devices."""
        self._links.clear()
        self._sent.clear()

    def poll(self) -> None:
        """Let go of the sources of copies that are done."""
        if not self._links:
            return
        for link in tuple(self._links.values()):
            link.poll()
        with self._lock:
            while self._sent and self._sent[0].source is None:
                self._sent.popleft()

    @property
    def device_bytes(self) -> int:
        """Bytes on devices that are on their way out, or came back and were not taken."""
        self.poll()
        with self._lock:
            coming = sum(incoming.device_bytes for incoming in tuple(self._coming))
            return coming + sum(outgoing.host.nbytes for outgoing in self._sent if outgoing.source is not None)

    def set_device_limit(self, nbytes: int) -> None:
        """Hold at most ``nbytes`` on devices: the current streams wait for copies, the host does not."""
        self._allowed = nbytes
        with self._lock:
            while self._sent and self.device_bytes > nbytes and self._sent:
                outgoing = self._sent.popleft()
                link_of(outgoing.device).let_go(outgoing)

    def make_room(self, nbytes: int, most: int) -> None:
        """Wait until at most ``most - nbytes`` bytes are being copied from devices.

        Copies of dropped tensors count, too: nobody else waits for them, and they still use both memories.
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
        """Begin to copy the tensor of ``ticket`` from its device, if it is on one, without waiting."""
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
        """The tensor that was ``found`` for ``ticket``, on its device and for the current stream.

        That is the tensor that was put, as long as it is on its device.
        """
        if isinstance(found, Incoming):
            return taken(found, ticket.device)
        if ticket.at is None:
            return found.to(ticket.device)
        if found.device == ticket.device:
            return handed_over(found, ticket.at)
        outgoing = ticket.outgoing  # it goes when all is written: what was found is filled then
        source = source_of(outgoing, ticket.at)
        return source if source is not None else brought(found, ticket.device, outgoing)

    def write(self, tickets: Sequence[Ticket], file: ScratchFile) -> None:
        """Write the tensors of ``tickets`` to a new slab; after an error there is no slab.

        Raises:
            StoreError: when the system does not take it, or the memory of one was taken away meanwhile.
        """
        # Tickets that were dropped meanwhile have no tensor.
        held = [(ticket, tensor) for ticket in tickets if (tensor := ticket.tensor) is not None and tensor.nbytes]
        if not held:
            return
        end = 0
        for ticket, tensor in held:
            _wait_until_filled(ticket)
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
                _check_memory(tensor, file)
        except BaseException:
            file.release(extent)
            raise
        slab = Slab(file, extent, [ticket for ticket, _ in held])
        for ticket in slab.members:
            ticket.slab = slab
            ticket.seconds += seconds * ticket.nbytes / end
            self.stats.written += ticket.nbytes

    def look_after(self, file: ScratchFile) -> None:
        """Give space in ``file`` back that is not needed; measure the disk once, when enough was written."""
        file.shrink(keep_peak=True)
        if self.stats.written > _MEASURE_FROM and file not in self._measured and file.may_be_measured:
            self._measured.add(file)
            with contextlib.suppress(StoreError, OSError):  # then it stays unmeasured
                file.measure(self.buffers)

    def _write_at(
        self, file: ScratchFile, offset: int, held: Sequence[tuple[Ticket, torch.Tensor]], nbytes: int
    ) -> None:
        tensor, direct = held[0][1], self.directly() if held[0][0].filled is not None else None
        if direct is not None:
            direct.write(file, tensor, offset)  # never with others: it is large
        elif len(held) > 1:
            self._write_joined(file, offset, held, nbytes)
        elif not file.direct:
            file.write(memory_of(tensor), offset)
        elif _is_in_pages(tensor):
            file.write(memory_at(tensor.data_ptr(), padded(nbytes)), offset)
        else:
            self._write_aligned(file, offset, tensor)

    def _write_joined(
        self, file: ScratchFile, offset: int, held: Sequence[tuple[Ticket, torch.Tensor]], nbytes: int
    ) -> None:
        staging = self.buffers.lease(nbytes)
        address = ctypes.addressof(staging)
        for ticket, tensor in held:
            ctypes.memmove(address + ticket.offset, tensor.data_ptr(), ticket.nbytes)
        file.write(memoryview(staging).cast("B")[: padded(nbytes)], offset)

    def _write_aligned(self, file: ScratchFile, offset: int, tensor: torch.Tensor) -> None:
        """Write ``tensor`` through an aligned buffer. See [Note: direct I/O]."""
        staging = self.buffers.lease(min(tensor.nbytes, CHUNK))
        memory = memoryview(staging).cast("B")
        for start in range(0, tensor.nbytes, CHUNK):
            count = min(CHUNK, tensor.nbytes - start)
            ctypes.memmove(staging, tensor.data_ptr() + start, count)
            file.write(memory[: padded(count)], offset + start)

    def read(self, slab: Slab) -> list[tuple[Ticket, torch.Tensor | Incoming]]:
        """The tensors of a slab that were not dropped, in one block of memory.

        Tensors of a device are on their way there when this returns.

        Raises:
            StoreError: when it cannot be read, or is not what was written.
        """
        file = slab.file
        if file.process != os.getpid():
            raise StoreError(
                f"OnDisk({file.directory!r}): process {file.process} stored this tensor, and {os.getpid()} is a fork "
                "of it: its file may be written meanwhile. Run the backward in the process that ran the forward",
                path=file.directory,
            )
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
                raise file.error("what was read is not what was written (its checksum differs)", None, ticket.nbytes)
            self.stats.read += ticket.nbytes
        return [(ticket, self._arrived(ticket, lease, ticket.offset - begin)) for ticket in wanted]

    def _read_directly(self, ticket: Ticket, file: ScratchFile, offset: int) -> torch.Tensor:
        """The tensor of ``ticket``, read by GPUDirect Storage."""
        direct, stream = self.directly(), ticket.at
        assert direct is not None
        assert stream is not None
        with on(stream):
            tensor = torch.empty(ticket.shape, dtype=ticket.dtype, device=ticket.device)
        event_on(stream).synchronize()  # the memory may have been another tensor's until now
        begin = time.perf_counter()
        with self.stats.one_read(ticket.nbytes):
            direct.read(file, tensor, offset)
        ticket.seconds += time.perf_counter() - begin
        self.stats.read += ticket.nbytes
        return tensor

    def _memory(self, file: ScratchFile, nbytes: int, device: torch.device | None) -> tuple[Any, memoryview]:
        """Memory to read into: pinned if its contents go on to a ``device``."""
        try:
            if device is not None:
                block = pinned(nbytes, device)
                return block, memory_at(block.data_ptr(), block.nbytes, write=True)
            lease = self.buffers.lease(nbytes)
        except OSError as error:
            raise file.error("no memory to read into", error, nbytes) from error
        return lease, memoryview(lease).cast("B")

    def _arrived(self, ticket: Ticket, lease: Any, offset: int) -> torch.Tensor | Incoming:
        """The tensor of ``ticket`` that was read; if it belongs on a device, it is sent there if there is room."""
        if not isinstance(lease, torch.Tensor):
            return tensor_over(lease, ticket.shape, ticket.dtype, offset)
        host = shaped(lease, ticket.shape, ticket.dtype, offset)
        if ticket.at is None:
            return host
        with self._lock:  # two threads must not both find the last room
            if self.device_bytes + ticket.nbytes > self._allowed:
                return host
            incoming = arriving(host, ticket.at)
            self._coming.add(incoming)
        return incoming


def _wait_until_filled(ticket: Ticket) -> None:
    """Wait until the tensor of ``ticket`` is in the memory that it is written from."""
    if (outgoing := ticket.outgoing) is not None:
        outgoing.wait()
    if ticket.filled is not None:
        ticket.filled.synchronize()


def _is_in_pages(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` begins at a page, and has its last page for itself."""
    end = int(tensor.storage_offset()) * tensor.element_size() + padded(tensor.nbytes)
    return tensor.data_ptr() % PAGE == 0 and end <= tensor.untyped_storage().nbytes()


def _check_memory(tensor: torch.Tensor, file: ScratchFile) -> None:
    last = int(tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    if tensor.untyped_storage().nbytes() < last:
        what = f"the memory of a saved tensor of shape {tuple(tensor.shape)} was taken away before it was written"
        raise file.error(what, None, last)


_MOST = 64  # tickets that are looked at: backward differs from the expected order by a few
_MARGIN = 1.5  # a read may take so many times what the last ones took


class Ahead:
    """The tickets that were read, or will be, before they are asked for; used under the lock of the mover.

    Args:
        budget: most bytes of them; a larger one is read alone.
        stats: counts what was read in vain, and knows how fast reads are.
    """

    def __init__(self, budget: int, stats: IOStats) -> None:
        self._budget, self._stats = budget, stats
        self._tickets: dict[Ticket, None] = {}  # the oldest first
        self._bytes = 0
        self._enough = 0  # for so many reads nothing more has to be read ahead

    def __iter__(self) -> Iterator[Ticket]:
        return iter(self._tickets)

    def __len__(self) -> int:
        return len(self._tickets)

    def add(self, ticket: Ticket) -> None:
        """``ticket`` was read, or will be."""
        if ticket not in self._tickets:
            self._tickets[ticket] = None
            self._bytes += ticket.nbytes

    def remove(self, ticket: Ticket) -> None:
        """``ticket`` was asked for or dropped: forget what was read for it."""
        ticket.ahead = None
        if ticket in self._tickets:
            del self._tickets[ticket]
            self._bytes -= ticket.nbytes

    def after(self, ticket: Ticket) -> list[Slab]:
        """The slabs to read because ``ticket`` is asked for now, each with the time to ``start``; make room for them.

        Each should be there just in time. A tensor that is read early takes memory, and it would do so just while a
        long operation works with large tensors.
        """
        following = itertools.islice(cast("Iterator[tuple[Ticket, float]]", ticket.order.after(ticket)), _MOST)
        first = next(following, None)
        if first is None:
            return []
        if self._enough and (first[0] in self._tickets or first[0].tensor is not None):
            self._enough -= 1
            return []
        due: dict[Ticket, float] = {}  # in order
        room = self._budget
        for other, seconds in itertools.chain([first], following):
            room -= other.nbytes
            if due and room < 0:
                break
            due[other] = seconds
        self._enough = len(due) // 4
        found = [self.one(other, {ticket, *due}) for other in due]
        self._set_starts(due)
        return [slab for slab in found if slab is not None]

    def _set_starts(self, due: dict[Ticket, float]) -> None:
        """Set for each read the last moment to start, so that it and all reads behind it are in time."""
        now, latest = time.perf_counter(), math.inf
        for ticket, seconds in reversed(due.items()):
            if ticket.reading and ticket.slab is not None:
                latest = min(latest, seconds) - _MARGIN * ticket.nbytes * self._stats.pace
                ticket.slab.start = now + latest

    def one(self, ticket: Ticket, wanted: set[Ticket]) -> Slab | None:
        """The slab to read for ``ticket``, if it is not in memory and fits; others than ``wanted`` make room."""
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
        slab.start = 0.0  # at once, unless a better time is set
        return slab
