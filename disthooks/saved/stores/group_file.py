"""The scratch file to which the groups of tapes are written, and from which they are read."""

from __future__ import annotations

import time
from collections.abc import Sequence

from disthooks.saved.stores.base import IOStats
from disthooks.saved.stores.extents import Extent
from disthooks.saved.stores.host import AlignedPool, pool_of, tensor_over
from disthooks.saved.stores.scratch_file import ScratchFile
from disthooks.saved.stores.staging import Staging
from disthooks.saved.stores.tape import Entry, Group, padded


class GroupFile:
    """Writes groups to a file, and reads them back. Several threads may do so at once.

    Attributes:
        buffers: memory of whole pages.
        staging: the copies from and to devices.
        stats: bytes that were moved. A count that is lost between threads only makes a figure inexact.
    """

    def __init__(self, file: ScratchFile) -> None:
        self.file, self.buffers, self.stats, self.staging = file, AlignedPool(), IOStats(), Staging()

    def write(self, group: Group) -> tuple[Extent, int]:
        """Write the members of ``group`` in one call. Returns its ``extent`` and ``base``.

        Raises:
            StoreError: if the system does not write them. Then nothing of them is in the file.
        """
        for entry in group.members:
            if (outgoing := entry.outgoing) is not None:
                outgoing.wait()
                entry.outgoing = None
        file, members, memory = self.file, group.members, memoryview(group.lease).cast("B")
        base, end = members[0].offset, members[-1].offset + members[-1].nbytes
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
        return extent, base

    def read(self, group: Group) -> None:
        """Read the members of ``group`` that are wanted and not in memory, into one block. The caller holds its lock.

        Raises:
            StoreError: if they cannot be read.
        """
        file = self.file
        file.check_process()
        wanted = [entry for entry in group.members if not entry.dropped and entry not in group.ahead]
        if not wanted or group.extent is None:
            return
        first = wanted[0].offset
        nbytes = wanted[-1].offset + wanted[-1].nbytes - first
        try:
            lease = self.buffers.lease(nbytes) if group.device is None else pool_of(group.device, True).lease(nbytes)
        except OSError as error:
            raise file.error("there is no memory to read a saved tensor into", error, nbytes) from error
        memory = memoryview(lease).cast("B")
        begin = time.perf_counter()
        with self.stats.one_read(nbytes):
            into = memory[: padded(nbytes) if file.direct else nbytes]
            file.read(into, group.extent.offset + first - group.base, nbytes)
        self._count(wanted, time.perf_counter() - begin)
        for entry in wanted:
            self.stats.read += entry.nbytes
            found = tensor_over(lease, entry.shape, entry.dtype, entry.offset - first)
            group.ahead[entry] = found if entry.at is None else self.staging.arrive(found, entry.at)
            if entry.dropped:  # its destructor may have looked before the line above
                group.ahead.pop(entry, None)

    @staticmethod
    def _count(entries: Sequence[Entry], seconds: float) -> None:
        total = sum(entry.nbytes for entry in entries)
        for entry in entries:
            entry.seconds += seconds * entry.nbytes / total
