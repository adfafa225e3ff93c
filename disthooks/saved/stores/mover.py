"""Threads that write tensors to files and read them back before they are wanted."""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import threading
import time
from collections.abc import Sequence

import torch

from disthooks._streams import work_for
from disthooks.errors import StoreError
from disthooks.saved.stores.carrier import (
    FAILED,
    GONE,
    QUEUED,
    WRITTEN,
    Ahead,
    Slab,
    Ticket,
    Transfer,
    padded,
    taken_together,
)
from disthooks.saved.stores.order import AccessOrder, PerThread
from disthooks.saved.stores.scratch_file import Incoming, ScratchFile, Waste, let_go
from disthooks.saved.stores.transfer import Crew

_SMALL = 256 << 10  # bytes: smaller ones are joined
_JOINED = 1 << 20  # bytes of small ones that are worth a write
_MUCH = 0.1  # of a backward, spent waiting for reads


class Mover(Crew[Slab | list[Ticket]]):
    """Moves tensors between memory and files, beside the computation.

    A tensor that is put is held until it is written; when more than ``limit`` bytes are, ``put`` waits. Who wants
    one has those read that will be wanted next, at most ``limit`` bytes of them.

    Everything that waits looks after those it waits for: what a thread had to do when it died is failed.

    Args:
        files: tensors go to each in turn.
        limit: bytes in flight, each way.
        transfer: moves the bytes.
        threads: at most so many.
    """

    def __init__(self, files: Sequence[ScratchFile], limit: int, transfer: Transfer, threads: int = 2) -> None:
        self.files, self.limit, self.process = files, limit, os.getpid()
        self.transfer = transfer
        self.stats = self.transfer.stats
        self._orders = PerThread(AccessOrder)  # that of each thread that puts
        self._turns = itertools.cycle(files)
        self._writes: collections.deque[Ticket] = collections.deque()
        self._reads: collections.deque[Slab] = collections.deque()
        self._ahead = Ahead(limit, self.stats)
        self._dropped = collections.deque[Ticket]()
        self._flying = 0  # bytes put and not written
        self._uncalled = 0  # of those, bytes for which no thread was called yet
        self._failed: tuple[Ticket, BaseException] | None = None  # not said yet
        self._said = 0  # how often one was; what else was in flight then fails for the same reason, and is not said
        self._claims: dict[int, Slab] = {}  # what the threads of the computation read themselves, by thread
        super().__init__(threads)

    def after_fork(self) -> None:
        """What was not written stays in memory in a child, for who wants it."""
        super().after_fork()
        self.transfer.after_fork()
        for ticket in self._ahead:
            ticket.reading = False
        self._reads.clear()
        self._writes.clear()

    # -- for the threads of the computation

    def ticket(self, tensor: torch.Tensor, device: torch.device) -> Ticket:
        """A ticket to put, for ``tensor``, contiguous and in CPU memory or on an accelerator, which belongs on
        ``device``."""
        return Ticket(tensor, device, self._orders())

    def put(self, ticket: Ticket) -> None:
        """Have the tensor of ``ticket`` written.

        Raises:
            StoreError: when an earlier one could not be written. It stays in memory, and this is said once.
        """
        with self._lock:
            self._settle()
            # Closed: the process ends, and nobody writes any more.
            while 0 < self._flying > self.limit - ticket.nbytes and not (self._failed or self._closed):
                self._wait()
            self._say_failure()
            self.transfer.make_room(ticket.nbytes, self.limit)
            self.transfer.for_writes(self.limit)
            self.transfer.begin(ticket)
            ticket.order.put(ticket)
            self._flying += ticket.nbytes
            ticket.state, ticket.said = QUEUED, self._said
            self._writes.append(ticket)
            self._uncalled += ticket.nbytes
            if self._uncalled >= min(_JOINED, self.limit):
                self._call_for_work()

    def get(self, ticket: Ticket) -> torch.Tensor:
        """The tensor of ``ticket``: the one that was put, as long as it is in memory, or a copy.

        Raises:
            StoreError: when one could not be written, which is said once: it stays in memory. Or when it cannot be
                read, or is not what was written.
        """
        with self._lock:
            self._settle()
            if ticket.dropped or ticket.state == GONE:
                raise StoreError("a stored tensor is asked for after it was dropped")
            self._say_failure()
            ticket.order.read(ticket)
            if ticket.ahead is not None or (ticket.reading and ticket.slab not in self._reads):  # or nearly
                self.stats.ahead += ticket.nbytes
            found = self._in_memory(ticket)
            self._have_read(self._ahead.after(ticket))
        # Reads into memory that is there already are faster; who does not wait would have it for nothing.
        self.transfer.for_reads(keep=2 * self.limit if ticket.order.waiting > _MUCH else 0)
        return self.transfer.give(ticket, self._late(ticket) if found is None else found)

    def _late(self, ticket: Ticket) -> torch.Tensor | Incoming:
        """Wait for it, or read it here."""
        begin = time.perf_counter()
        while (found := self._read_for(ticket)) is None:
            pass
        ticket.order.waited(time.perf_counter() - begin)
        return found

    def prefetch(self, ticket: Ticket) -> None:
        """``ticket`` will be wanted soon."""
        with self._lock:
            self._settle()
            self._have_read([slab] if (slab := self._ahead.one(ticket, {ticket})) is not None else [])

    def drop(self, ticket: Ticket) -> None:
        """``ticket`` is not wanted any more; called from destructors, so it waits for nothing.

        Its memory goes at once, its place in the file when next somebody has the lock: there is no way to try for
        it that Ctrl-C could not leave it taken.
        """
        if not ticket.dropped:
            ticket.dropped = True
            if ticket.outgoing is not None:  # as Python ends, the names of this module may be gone before
                let_go(ticket.outgoing)
            ticket.tensor = ticket.ahead = ticket.outgoing = None
            self._dropped.append(ticket)

    def wait(self) -> None:
        """Wait until everything is written; StoreError when something could not be."""
        with self._lock:
            self._settle()
            while self._flying and not self._closed:
                self._wait()
            self._say_failure()

    def release_idle(self) -> None:
        """Let go of threads and memory that have nothing to do, and of space in the file; all come back when needed."""
        self.end_idle()
        self.transfer.buffers.clear()
        for file in self.files:
            file.shrink(keep_peak=False)

    @property
    def in_flight(self) -> int:
        """Bytes that are put and not yet written."""
        with self._lock:
            self._settle()
            return self._flying

    def _read_for(self, ticket: Ticket) -> torch.Tensor | Incoming | None:
        """Its tensor after its slab was read in this thread; or, when another one is at it, after a while."""
        me = threading.get_ident()
        tensors: list[tuple[Ticket, torch.Tensor | Incoming]] = []
        try:
            with self._lock:
                slab = self._claim(ticket, me)
                if slab is None:
                    self._wait()
            if slab is not None:
                tensors = self.transfer.read(slab)
        finally:
            with self._lock:
                slab = self._claims.get(me)
                if slab is not None:
                    self._was_read(slab, tensors)
                    self._claims.pop(me, None)  # now: after an interrupt, all of it is done again
        with self._lock:
            return self._in_memory(ticket)

    # -- under the lock

    def _say_failure(self) -> None:
        failed, self._failed = self._failed, None
        if failed is not None and not failed[0].dropped:
            self._said += 1
            try:
                raise failed[1]
            finally:
                del failed  # its traceback holds this frame: no cycle may stay

    def _lost(self, job: Slab | list[Ticket]) -> None:
        if isinstance(job, Slab):
            self._was_read(job, [])
        else:
            self._was_written(job, StoreError("a thread that moved a saved tensor has died"))

    def _in_memory(self, ticket: Ticket) -> torch.Tensor | Incoming | None:
        """The tensor of ``ticket``, if it is in memory, for one who wants it now."""
        if ticket.ahead is not None:
            ahead = ticket.ahead
            self._ahead.remove(ticket)
            return ahead
        if ticket.tensor is not None:
            self.stats.from_memory += ticket.nbytes
        return ticket.tensor

    def _claim(self, ticket: Ticket, reader: int) -> Slab | None:
        """The slab of ``ticket`` for the thread ``reader`` to read, or None when another thread is at it."""
        slab = ticket.slab
        if slab is None or ticket.ahead is not None:
            return None
        if slab in self._reads:
            self._reads.remove(slab)
        elif self._is_read(slab):
            return None
        self._claims[reader] = slab
        for member in slab.members:
            member.reading = not member.dropped
        return slab

    def _settle(self) -> None:
        interrupted = self._claims.get(threading.get_ident())
        if interrupted is not None:
            self._was_read(interrupted, [])  # an interrupt kept this thread from saying that it reads no more
            self._claims.pop(threading.get_ident(), None)
        while self._dropped:
            ticket = self._dropped[0]
            ticket.order.drop(ticket)
            self._ahead.remove(ticket)
            if ticket.state == QUEUED:
                ticket.state = GONE  # it stays in the queue, and is passed over there
                self._flying -= ticket.nbytes
                self.stats.never_written += ticket.nbytes
                self._done.notify_all()
            self._let_go(ticket)
            self._dropped.popleft()  # now: after an interrupt, all of it is done again
        self.transfer.settle()
        if not self._writes and not any(self._jobs.values()):
            self._flying = 0  # whatever an interrupt left it at

    def _is_read(self, slab: Slab) -> bool:
        """Whether a thread is at it, or will be; the tickets' own marks may be left from before an interrupt."""
        return slab in self._reads or slab in self._jobs.values() or slab in self._claims.values()

    def _let_go(self, ticket: Ticket, read: Slab | None = None) -> None:
        """Have the place of a dropped ticket used again, unless its slab is being read; ``read`` is no more."""
        slab = ticket.slab
        if slab is not None and read is None and slab in self._reads and all(m.dropped for m in slab.members):
            for member in slab.members:
                self._let_go(member, slab)
            self._reads.remove(slab)
        elif ticket.dropped and slab is not None and (slab is read or not self._is_read(slab)):
            slab.live.discard(ticket)
            if not slab.live and not slab.freed:
                free, extent = slab.file.free, slab.extent
                slab.freed = True
                free(extent)  # a C function: no interrupt comes between
            elif slab.live:
                slab.file.waste(Waste(slab.extent.offset, ticket.offset, padded(ticket.nbytes)))
            ticket.slab = None

    def _have_read(self, slabs: Sequence[Slab]) -> None:
        self._reads.extend(slabs)
        with contextlib.suppress(StoreError):  # no thread can be started: whoever wants one of them reads it
            for _ in slabs:
                self._call_for_work()

    def _next(self) -> Slab | list[Ticket] | None:
        if self._pause() == 0:
            slab = min(self._reads, key=lambda slab: slab.start)
            self._reads.remove(slab)
            return slab
        found = taken_together(self._writes, _SMALL, _JOINED)
        self._uncalled = 0
        return found or None

    def _pause(self) -> float | None:
        start = min((slab.start for slab in self._reads), default=None)
        return None if start is None else max(0.0, start - time.perf_counter())

    def _was_written(self, tickets: list[Ticket], error: BaseException | None) -> None:
        self._is_over(tickets)
        for ticket in tickets:
            self._flying -= ticket.nbytes
            ticket.state = WRITTEN if error is None else FAILED
            if error is None and ticket.slab is not None:
                ticket.tensor = ticket.outgoing = None
            elif error is not None and not ticket.dropped and ticket.said == self._said:
                self._failed = self._failed or (ticket, error)
            self._let_go(ticket)
        self._done.notify_all()

    def _was_read(self, slab: Slab, tensors: Sequence[tuple[Ticket, torch.Tensor | Incoming]]) -> None:
        """An error of reading ahead is found again by who wants it."""
        self._is_over(slab)  # in this moment, so that what is dropped in the next one is let go of
        for ticket in slab.members:
            ticket.reading = False
        for ticket, tensor in tensors:
            if not ticket.dropped and ticket.tensor is None:
                ticket.ahead = tensor
                self._ahead.add(ticket)
        for ticket in slab.members:
            if ticket.ahead is None:
                self._ahead.remove(ticket)
            self._let_go(ticket, slab)
        self._done.notify_all()

    # -- in the threads

    def _do(self, job: Slab | list[Ticket]) -> None:
        tickets = job.members if isinstance(job, Slab) else job
        if (device := next((ticket.device for ticket in tuple(tickets) if ticket.at is not None), None)) is not None:
            work_for(device)
        if isinstance(job, Slab):
            self._read_ahead(job)
        else:
            self._write(job)

    def _read_ahead(self, slab: Slab) -> None:
        tensors: list[tuple[Ticket, torch.Tensor | Incoming]] = []
        with contextlib.suppress(BaseException):
            tensors = self.transfer.read(slab)
        with self._lock:
            self._was_read(slab, tensors)

    def _write(self, job: list[Ticket]) -> None:
        file = next(self._turns)
        try:
            self.transfer.write(job, file)
        except BaseException as error:
            with self._lock:
                self._was_written(job, error)
        else:
            with self._lock:
                self._was_written(job, None)
        self.transfer.look_after(file)
