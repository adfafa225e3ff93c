"""A tensor on its way to an arena and back, and the bytes of it that are moved."""

from __future__ import annotations

import ctypes
import os
import threading
import zlib
from typing import TYPE_CHECKING

import torch

from disthooks.errors import StoreError
from disthooks.saved.stores.arena import CHUNK, Arena, Extent
from disthooks.saved.stores.buffers import PAGE, Buffers, memory_of, tensor_over
from disthooks.saved.stores.traffic import Traffic

if TYPE_CHECKING:
    from disthooks.saved.stores.prefetch import Stream

QUEUED, WRITING, WRITTEN, FAILED, GONE = "queued", "writing", "written", "failed", "gone"


class Ticket:
    """One stored tensor: in memory until it is written, then in the arena, and for a while in memory again."""

    __slots__ = (
        "ahead",
        "arena",
        "checksum",
        "device",
        "dropped",
        "dtype",
        "extent",
        "nbytes",
        "position",
        "reading",
        "shape",
        "state",
        "stream",
        "tensor",
    )

    def __init__(self, tensor: torch.Tensor, device: torch.device, arena: Arena, stream: Stream) -> None:
        self.tensor: torch.Tensor | None = tensor  # until it is written
        self.nbytes, self.shape, self.dtype, self.device = tensor.nbytes, tensor.shape, tensor.dtype, device
        self.arena, self.stream = arena, stream
        self.state = QUEUED
        self.extent: Extent | None = None
        self.checksum = 0
        self.dropped = False
        self.reading = False  # or waiting to be read, by a thread, ahead of need
        self.ahead: torch.Tensor | None = None  # what was read ahead of need
        self.position = 0


class Transfer:
    """Moves the bytes of a ticket.

    Args:
        checksum: keep a CRC-32 of what is written, and compare it with that of what is read.
        keep: most bytes of idle memory that is kept for the next reads.
    """

    def __init__(self, checksum: bool, keep: int) -> None:
        self._checksum = checksum
        self.buffers = Buffers(keep)
        self.traffic = Traffic()  # written by several threads: a lost update spoils a statistic
        self._own = threading.local()

    def write(self, ticket: Ticket) -> None:
        """Write the tensor of ``ticket`` to a new extent, the ticket's from then on; after an error there is none.

        Raises:
            StoreError: when the system does not take it, or its memory was taken away meanwhile.
        """
        tensor = ticket.tensor
        if tensor is None or not tensor.nbytes:  # it was dropped in this moment, or there is nothing to write
            return
        arena, extent = ticket.arena, ticket.arena.allocate(tensor.nbytes)
        try:
            _check_memory(ticket, tensor)
            if self._checksum:
                ticket.checksum = zlib.crc32(memory_of(tensor))
            if arena.direct:
                self._write_aligned(arena, extent.offset, tensor)
            else:
                arena.write(memory_of(tensor), extent.offset)
            _check_memory(ticket, tensor)
        except BaseException:
            arena.free(extent)
            raise
        ticket.extent = extent
        self.traffic.written += tensor.nbytes

    def _write_aligned(self, arena: Arena, offset: int, tensor: torch.Tensor) -> None:
        """Through memory of this thread's own: torch's tensors do not begin at a page."""
        staging = getattr(self._own, "staging", None)
        if staging is None:
            staging = self._own.staging = self.buffers.lease(CHUNK)
        memory = memoryview(staging).cast("B")
        for start in range(0, tensor.nbytes, CHUNK):
            count = min(CHUNK, tensor.nbytes - start)
            ctypes.memmove(staging, tensor.data_ptr() + start, count)
            arena.write(memory[: _pages(count)], offset + start)

    def read(self, ticket: Ticket) -> torch.Tensor:
        """The tensor of a written ticket, in memory that is used again when nobody uses it any more.

        Raises:
            StoreError: when it cannot be read, or is not what was written.
        """
        if not ticket.nbytes:
            return torch.empty(ticket.shape, dtype=ticket.dtype, device="cpu")
        arena, extent = ticket.arena, ticket.extent
        assert extent is not None
        if arena.process != os.getpid():
            raise StoreError(
                f"OnDisk({arena.directory!r}): process {arena.process} stored this tensor, and {os.getpid()} is a fork "
                "of it: its file may be written meanwhile. Run the backward in the process that ran the forward",
                path=arena.directory,
            )
        try:
            lease = self.buffers.lease(ticket.nbytes)
        except OSError as error:
            raise arena.error("no memory to read into", error, ticket.nbytes) from error
        memory = memoryview(lease).cast("B")
        arena.read(
            memory[: _pages(ticket.nbytes)] if arena.direct else memory[: ticket.nbytes], extent.offset, ticket.nbytes
        )
        if self._checksum and zlib.crc32(memory[: ticket.nbytes]) != ticket.checksum:
            raise arena.error("what was read is not what was written (its checksum differs)", None, ticket.nbytes)
        self.traffic.read += ticket.nbytes
        return tensor_over(lease, ticket.shape, ticket.dtype)


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def _check_memory(ticket: Ticket, tensor: torch.Tensor) -> None:
    last = int(tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    if tensor.untyped_storage().nbytes() < last:
        raise ticket.arena.error(
            f"the memory of a saved tensor of shape {tuple(tensor.shape)} was taken away before it was written",
            None,
            last,
        )
