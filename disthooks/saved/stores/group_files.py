"""The scratch files to which the groups of tapes are written, and from which they are read."""

from __future__ import annotations

import contextlib
import itertools
import time
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from disthooks._streams import event_on, on
from disthooks.errors import StoreError
from disthooks.saved.stores.backend import check_process
from disthooks.saved.stores.base import IOStats
from disthooks.saved.stores.extents import Extent
from disthooks.saved.stores.gpu_direct import GpuDirect
from disthooks.saved.stores.pools import AlignedPool, tensor_over
from disthooks.saved.stores.scratch_file import ScratchFile, Waste
from disthooks.saved.stores.staging import Staging, pinned
from disthooks.saved.stores.tape import Entry, Group, padded

#: Returns GPUDirect Storage, or None if it does not work.
Directly = Callable[[], GpuDirect | None]

_MEASURE_FROM = 256 << 20  # bytes: a disk is measured when so many were written to it


class Written(NamedTuple):
    """Where the members of a group are: ``base`` is the offset of the first one in the memory of the group."""

    file: ScratchFile
    extent: Extent
    base: int


class GroupFiles:
    """Writes groups to files, in turn, and reads them back. Several threads may do so at once.

    Args:
        files: the files.
        checksum: whether to keep a CRC-32 of each tensor and to compare it when the tensor is read.
        directly: returns GPUDirect Storage if it works. It is first called when a tensor could use it.

    Attributes:
        buffers: memory of whole pages.
        staging: the copies from and to devices.
        stats: bytes that were moved. A count that is lost between threads only makes a figure inexact.
    """

    def __init__(self, files: Sequence[ScratchFile], checksum: bool, directly: Directly) -> None:
        self.files, self.buffers, self.stats = files, AlignedPool(), IOStats()
        self.staging, self.directly = Staging(), directly
        self._checksum, self._turns = checksum, itertools.cycle(files)
        self._measured: set[ScratchFile] = set()  # files that were measured, or whose measurement failed

    def write(self, group: Group) -> Written:
        """Write the members of ``group`` in one call.

        Raises:
            StoreError: if the system does not write them. Then nothing of them is in the file.
        """
        if group.members[0].filled is not None:
            return self._write_directly(group.members[0])
        for entry in group.members:
            if (outgoing := entry.outgoing) is not None:
                outgoing.wait()
                entry.outgoing = None
        file, members, memory = next(self._turns), group.members, memoryview(group.lease).cast("B")
        base, end = members[0].offset, members[-1].offset + members[-1].nbytes
        if self._checksum:
            for entry in members:
                entry.checksum = zlib.crc32(memory[entry.offset : entry.offset + entry.nbytes])
        extent = file.allocate(end - base)
        begin = time.perf_counter()
        try:
            with self.stats.writing.one():
                file.write(memory[base : padded(end) if file.direct else end], extent.offset)
        except BaseException:
            file.release(extent)
            raise
        self._count(members, time.perf_counter() - begin)
        self.stats.written += sum(entry.nbytes for entry in members)
        return Written(file, extent, base)

    def read(self, group: Group) -> None:
        """Read the members of ``group`` that are wanted and not in memory, into one block. The caller holds its lock.

        Raises:
            StoreError: if they cannot be read, or if other bytes were read than were written.
        """
        file = group.file
        check_process(file)
        wanted = [entry for entry in group.members if not entry.dropped and entry not in group.ahead]
        if not wanted or group.extent is None:
            return
        if wanted[0].filled is not None:
            group.ahead[wanted[0]] = self._read_directly(wanted[0], file, group.extent.offset)
            return
        first = wanted[0].offset
        nbytes = wanted[-1].offset + wanted[-1].nbytes - first
        try:
            lease = self.buffers.lease(nbytes) if group.device is None else pinned(nbytes, group.device)
        except OSError as error:
            raise file.error("there is no memory to read a saved tensor into", error, nbytes) from error
        memory = memoryview(lease).cast("B")
        begin = time.perf_counter()
        with self.stats.one_read(nbytes):
            into = memory[: padded(nbytes) if file.direct else nbytes]
            file.read(into, group.extent.offset + first - group.base, nbytes)
        self._count(wanted, time.perf_counter() - begin)
        for entry in wanted:
            start = entry.offset - first
            # The pages of an entry that was dropped meanwhile may be a hole by now.
            is_wrong = self._checksum and zlib.crc32(memory[start : start + entry.nbytes]) != entry.checksum
            if is_wrong and not entry.dropped:
                raise file.error("other bytes were read than were written (the checksum differs)", None, entry.nbytes)
        for entry in wanted:
            self.stats.read += entry.nbytes
            found = tensor_over(lease, entry.shape, entry.dtype, entry.offset - first)
            group.ahead[entry] = found if entry.at is None else self.staging.arrive(found, entry.at)
            if entry.dropped:  # its destructor may have looked before the line above
                group.ahead.pop(entry, None)

    def _write_directly(self, entry: Entry) -> Written:
        """Write ``entry`` from its device, by GPUDirect Storage."""
        file, direct, tensor, filled = next(self._turns), self.directly(), entry.tensor, entry.filled
        if tensor is None or direct is None or filled is None:
            raise StoreError("a stored tensor was dropped before it was written")
        filled.synchronize()
        extent = file.allocate(entry.nbytes)
        begin = time.perf_counter()
        try:
            with self.stats.writing.one():
                direct.write(file, tensor, extent.offset)
            if tensor.untyped_storage().nbytes() < tensor.nbytes:  # `resize_(0)` frees it, whoever else holds it
                raise file.error("the memory of a saved tensor was freed while it was written", None, entry.nbytes)
        except BaseException:
            file.release(extent)
            raise
        self._count([entry], time.perf_counter() - begin)
        self.stats.written += entry.nbytes
        return Written(file, extent, 0)

    def _read_directly(self, entry: Entry, file: ScratchFile, offset: int) -> torch.Tensor:
        """The tensor of ``entry`` on its device, read by GPUDirect Storage."""
        direct, stream = self.directly(), entry.at
        assert direct is not None
        assert stream is not None
        with on(stream):
            tensor = torch.empty(entry.shape, dtype=entry.dtype, device=stream.device)
        event_on(stream).synchronize()  # the stream may still use the memory for the tensor that had it before
        begin = time.perf_counter()
        with self.stats.one_read(entry.nbytes):
            direct.read(file, tensor, offset)
        self._count([entry], time.perf_counter() - begin)
        self.stats.read += entry.nbytes
        return tensor

    def look_after(self, file: ScratchFile) -> None:
        """Give unused space in ``file`` back, and measure the disk once, when enough was written."""
        with contextlib.suppress(StoreError, OSError):  # the disk is then not measured
            file.shrink(keep_peak=True)
            if self.stats.written > _MEASURE_FROM and file not in self._measured and file.may_be_measured:
                self._measured.add(file)
                file.measure(self.buffers)

    @staticmethod
    def release(written: Written) -> None:
        """Let other groups use the place of a group that all have dropped."""
        written.file.release(written.extent)

    @staticmethod
    def release_entry(group: Group, entry: Entry) -> None:
        """Let the pages of ``entry`` be a hole. The rest of ``group`` is still in use."""
        if group.extent is not None:
            group.file.release(Waste(group.extent, entry.offset - group.base, padded(entry.nbytes)))

    @staticmethod
    def _count(entries: Sequence[Entry], seconds: float) -> None:
        total = sum(entry.nbytes for entry in entries)
        for entry in entries:
            entry.seconds += seconds * entry.nbytes / total
