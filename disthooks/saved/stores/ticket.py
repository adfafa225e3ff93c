"""A tensor on its way to an arena and back, and the bytes of it that are moved."""

from __future__ import annotations

import contextlib
import ctypes
import os
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from disthooks.errors import StoreError
from disthooks.saved.stores.arena import CHUNK, Arena, Extent
from disthooks.saved.stores.buffers import PAGE, Buffers, memory_of, tensor_over
from disthooks.saved.stores.traffic import Traffic

if TYPE_CHECKING:
    from disthooks.saved.stores.prefetch import Stream

_STAGING = 2 * CHUNK  # bytes of memory to write from that is kept: it is used all the time
_MEASURE_FROM = 256 << 20  # bytes: a disk that so much goes to is worth measuring
_ALIGN = 64  # bytes between the beginnings of joined tensors, as torch aligns them
QUEUED, WRITING, WRITTEN, FAILED, GONE = "queued", "writing", "written", "failed", "gone"


class Ticket:
    """One stored tensor: in memory until it is written, then in a slab, and for a while in memory again."""

    __slots__ = (
        "ahead",
        "checksum",
        "device",
        "dropped",
        "dtype",
        "nbytes",
        "offset",
        "owed",
        "position",
        "reading",
        "said",
        "shape",
        "slab",
        "state",
        "stream",
        "tensor",
    )

    def __init__(self, tensor: torch.Tensor, device: torch.device, stream: Stream) -> None:
        self.tensor: torch.Tensor | None = tensor  # until it is written
        self.nbytes, self.shape, self.dtype, self.device = tensor.nbytes, tensor.shape, tensor.dtype, device
        self.stream = stream
        self.state = GONE  # until it is put
        self.said = 0  # how many failures had been said when it was put
        self.owed = 0  # bytes of it that an account counts
        self.slab: Slab | None = None
        self.offset = 0  # in the slab
        self.checksum = 0
        self.dropped = False
        self.reading = False  # somebody is to read it
        self.ahead: torch.Tensor | None = None  # what was read
        self.position = 0


class Slab:
    """What is written and read in one go: a large tensor, or many small ones, which alone would not be worth it."""

    __slots__ = ("arena", "extent", "freed", "live", "members", "start")

    def __init__(self, arena: Arena, extent: Extent, members: Sequence[Ticket]) -> None:
        self.arena, self.extent, self.members = arena, extent, members
        self.live = set(members)
        self.freed = False
        self.start = 0.0  # when to begin to read it, by ``time.perf_counter``


class Transfer:
    """Moves the bytes of tickets.

    Args:
        checksum: keep a CRC-32 of what is written, and compare it with that of what is read.
    """

    def __init__(self, checksum: bool) -> None:
        self._checksum = checksum
        self.buffers = Buffers()
        self.traffic = Traffic()  # written by several threads: a lost update spoils a statistic
        self._measured: set[Arena] = set()  # or tried to

    def for_reads(self, keep: int) -> None:
        """Reads come: what was kept to write from goes, but for ``keep`` bytes."""
        self.buffers.trim(keep)

    def for_writes(self) -> None:
        """Writes come."""
        self.buffers.keep = _STAGING

    def write(self, tickets: Sequence[Ticket], arena: Arena) -> None:
        """Write the tensors of ``tickets`` to a new slab; after an error there is none.

        Raises:
            StoreError: when the system does not take it, or the memory of one was taken away meanwhile.
        """
        # Those that were dropped in this moment have none.
        held = [(ticket, tensor) for ticket in tickets if (tensor := ticket.tensor) is not None and tensor.nbytes]
        if not held:
            return
        end = 0
        for ticket, tensor in held:
            ticket.offset = padded(end)
            end = ticket.offset + ticket.nbytes
            _check_memory(tensor, arena)
            if self._checksum:
                ticket.checksum = zlib.crc32(memory_of(tensor))
        extent = arena.allocate(end)
        try:
            with self.traffic.writing.one():
                self._write_at(arena, extent.offset, held, end)
            for _, tensor in held:
                _check_memory(tensor, arena)
        except BaseException:
            arena.free(extent)
            raise
        slab = Slab(arena, extent, [ticket for ticket, _ in held])
        for ticket in slab.members:
            ticket.slab = slab
            self.traffic.written += ticket.nbytes

    def look_after(self, arena: Arena) -> None:
        """Give space in the file back that is not needed; measure the disk, once, when enough went to it."""
        arena.shrink(keep_peak=True)
        if self.traffic.written > _MEASURE_FROM and arena not in self._measured:
            self._measured.add(arena)
            with contextlib.suppress(StoreError, OSError):  # as good as never asked
                arena.measure(self.buffers)

    def _write_at(self, arena: Arena, offset: int, held: Sequence[tuple[Ticket, torch.Tensor]], nbytes: int) -> None:
        if len(held) > 1:
            self._write_joined(arena, offset, held, nbytes)
        elif arena.direct:
            self._write_aligned(arena, offset, held[0][1])
        else:
            arena.write(memory_of(held[0][1]), offset)

    def _write_joined(
        self, arena: Arena, offset: int, held: Sequence[tuple[Ticket, torch.Tensor]], nbytes: int
    ) -> None:
        staging = self.buffers.lease(nbytes)
        address = ctypes.addressof(staging)
        for ticket, tensor in held:
            ctypes.memmove(address + ticket.offset, tensor.data_ptr(), ticket.nbytes)
        arena.write(memoryview(staging).cast("B")[: _pages(nbytes)], offset)

    def _write_aligned(self, arena: Arena, offset: int, tensor: torch.Tensor) -> None:
        """Through memory that is aligned: torch's tensors do not begin at a page."""
        staging = self.buffers.lease(min(tensor.nbytes, CHUNK))
        memory = memoryview(staging).cast("B")
        for start in range(0, tensor.nbytes, CHUNK):
            count = min(CHUNK, tensor.nbytes - start)
            ctypes.memmove(staging, tensor.data_ptr() + start, count)
            arena.write(memory[: _pages(count)], offset + start)

    def read(self, slab: Slab) -> list[tuple[Ticket, torch.Tensor]]:
        """The tensors of a slab that are still wanted, in memory that is used again when nobody uses any of them.

        Raises:
            StoreError: when it cannot be read, or is not what was written.
        """
        arena = slab.arena
        if arena.process != os.getpid():
            raise StoreError(
                f"OnDisk({arena.directory!r}): process {arena.process} stored this tensor, and {os.getpid()} is a fork "
                "of it: its file may be written meanwhile. Run the backward in the process that ran the forward",
                path=arena.directory,
            )
        wanted = [ticket for ticket in slab.members if not ticket.dropped]
        if not wanted:
            return []
        begin = wanted[0].offset // PAGE * PAGE
        nbytes = wanted[-1].offset + wanted[-1].nbytes - begin
        try:
            lease = self.buffers.lease(nbytes)
        except OSError as error:
            raise arena.error("no memory to read into", error, nbytes) from error
        memory = memoryview(lease).cast("B")
        with self.traffic.one_read(nbytes):
            arena.read(
                memory[: _pages(nbytes)] if arena.direct else memory[:nbytes], slab.extent.offset + begin, nbytes
            )
        for ticket in wanted:
            start = ticket.offset - begin
            if self._checksum and zlib.crc32(memory[start : start + ticket.nbytes]) != ticket.checksum:
                raise arena.error("what was read is not what was written (its checksum differs)", None, ticket.nbytes)
            self.traffic.read += ticket.nbytes
        return [(ticket, tensor_over(lease, ticket.shape, ticket.dtype, ticket.offset - begin)) for ticket in wanted]


def padded(nbytes: int) -> int:
    """``nbytes`` up to where the next one of joined tensors begins."""
    return -(-nbytes // _ALIGN) * _ALIGN


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def _check_memory(tensor: torch.Tensor, arena: Arena) -> None:
    last = int(tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    if tensor.untyped_storage().nbytes() < last:
        what = f"the memory of a saved tensor of shape {tuple(tensor.shape)} was taken away before it was written"
        raise arena.error(what, None, last)
