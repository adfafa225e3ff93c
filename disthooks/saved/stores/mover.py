"""Threads that write tensors to arenas and read them back before they are wanted."""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import threading
from collections.abc import Iterator, Sequence
from typing import cast

import torch

from disthooks.errors import StoreError
from disthooks.saved.stores.arena import Arena
from disthooks.saved.stores.base import Account
from disthooks.saved.stores.crew import Crew
from disthooks.saved.stores.prefetch import Stream
from disthooks.saved.stores.ticket import FAILED, GONE, QUEUED, WRITING, WRITTEN, Ticket, Transfer
from disthooks.saved.stores.traffic import StoreReport

_WINDOW = 32  # tickets: backward leaves the expected order by a few, so more would only cost time
_MEASURE_FROM = 256 << 20  # bytes: a disk that so much goes to is worth measuring


class Mover(Crew[Ticket]):
    """Moves tensors between memory and arenas, beside the computation.

    A tensor that is put is held until it is written; when more than ``budget`` bytes are, ``put`` waits. Who wants
    one has those read that will be wanted next, at most ``budget`` bytes of them.

    Everything that waits looks after those it waits for: what a thread had to do when it died is failed.

    Args:
        arenas: tensors go to each in turn.
        budget: bytes in flight, each way.
        checksum: check what is read.
        threads: at most so many.
    """

    def __init__(self, arenas: Sequence[Arena], budget: int, checksum: bool, threads: int = 2) -> None:
        self.arenas, self.budget = arenas, budget
        self._transfer = Transfer(checksum, keep=budget)
        self.traffic = self._transfer.traffic
        self.process = os.getpid()
        self._own = threading.local()  # the stream of each thread that puts
        self._turns = itertools.cycle(arenas)
        self._writes: collections.deque[Ticket] = collections.deque()
        self._reads: collections.deque[Ticket] = collections.deque()
        self._ahead: dict[Ticket, None] = {}  # read ahead of need or to be, the oldest first
        self._dropped: collections.deque[Ticket] = collections.deque()
        self._flying = 0  # bytes put and not written
        self._failed: tuple[Ticket, BaseException] | None = None  # not said yet
        super().__init__(threads)

    def after_fork(self) -> None:
        """What was not written stays in memory in a child, for who wants it."""
        super().after_fork()
        for ticket in self._ahead:
            ticket.reading = False
        self._reads.clear()
        self._writes.clear()

    # -- for the threads of the computation

    def put(self, tensor: torch.Tensor, device: torch.device) -> Ticket:
        """Have ``tensor``, contiguous and in CPU memory, written; it belongs on ``device``.

        Raises:
            StoreError: when an earlier one could not be written. It stays in memory, and this is said once.
        """
        with self._lock:
            self._settle()
            while self._flying and self._flying + tensor.nbytes > self.budget and self._failed is None:
                self._wait()
            self._say_failure()
            ticket = Ticket(tensor, device, next(self._turns), self._stream())
            ticket.stream.put(ticket)
            try:
                self._flying += ticket.nbytes
                self._writes.append(ticket)
                self.traffic.put += ticket.nbytes
                self._call_for_work()
            except BaseException:
                self.drop(ticket)  # nobody will
                raise
        self._settle_late()
        return ticket

    def get(self, ticket: Ticket) -> torch.Tensor:
        """The tensor of ``ticket`` in CPU memory: the one that was put, as long as it is in memory, or a copy.

        Raises:
            StoreError: when one could not be written, which is said once: it stays in memory. Or when it cannot be
                read, or is not what was written.
        """
        with self._lock:
            self._settle()
            self._say_failure()
            ticket.stream.read(ticket)
            if ticket in self._reads:  # no thread has begun yet: this one can
                self._reads.remove(ticket)
                self._not_ahead(ticket)
            self._read_on_from(ticket)
            while ticket.reading:
                self._wait()
            ahead, held = ticket.ahead, ticket.tensor
            if ahead is not None:
                self._not_ahead(ticket)
                self.traffic.ahead += ticket.nbytes
            elif held is not None:
                self.traffic.from_memory += ticket.nbytes
        self._settle_late()
        if ahead is not None:
            return ahead
        return held if held is not None else self._read(ticket)

    def prefetch(self, ticket: Ticket) -> None:
        """``ticket`` will be wanted soon."""
        with self._lock:
            self._settle()
            self._read_ahead(ticket, {ticket})
        self._settle_late()

    def drop(self, ticket: Ticket) -> None:
        """``ticket`` is not wanted any more; called from destructors, so it waits for nothing."""
        ticket.dropped = True
        ticket.tensor = ticket.ahead = None
        self._dropped.append(ticket)
        self._settle_late()

    def wait(self) -> None:
        """Wait until everything is written; StoreError when something could not be."""
        with self._lock:
            self._settle()
            while self._flying:
                self._wait()
            self._say_failure()

    def rest(self) -> None:
        """Let go of threads and memory that have nothing to do, and of space in the file; all come back when needed."""
        self.end_idle()
        self._transfer.buffers.clear()
        for arena in self.arenas:
            arena.shrink(keep_peak=False)

    @property
    def in_flight(self) -> int:
        """Bytes that are put and not yet written."""
        with self._lock:
            self._settle()
            return self._flying

    def report(self, name: str, account: Account) -> StoreReport:
        """What went through, for the store of this ``name`` and ``account``."""
        traffic, measured = self.traffic, [arena.measured for arena in self.arenas if arena.measured is not None]
        return StoreReport(
            name,
            held=account.held,
            limit=account.limit,
            in_flight=self.in_flight,
            written=traffic.written,
            never_written=traffic.never_written,
            from_memory=traffic.from_memory,
            ahead=traffic.ahead,
            in_vain=traffic.in_vain,
            read=traffic.read,
            write_seconds=traffic.writing.seconds,
            read_seconds=traffic.reading.seconds,
            measured_write=sum(each.write for each in measured) or None,
            measured_read=sum(each.read for each in measured) or None,
            why_buffered="; ".join(sorted({arena.why_buffered for arena in self.arenas} - {""})),
        )

    def _read(self, ticket: Ticket) -> torch.Tensor:
        with self.traffic.reading.one():
            return self._transfer.read(ticket)

    # -- under the lock

    def _stream(self) -> Stream:
        if not hasattr(self._own, "stream"):
            self._own.stream = Stream()
        return cast(Stream, self._own.stream)

    def _say_failure(self) -> None:
        failed, self._failed = self._failed, None
        if failed is not None and not failed[0].dropped:
            try:
                raise failed[1]
            finally:
                del failed  # its traceback holds this frame: no cycle may stay

    def _lost(self, ticket: Ticket) -> None:
        self._finish(ticket, StoreError("a thread that moved a saved tensor has died"))

    def _settle(self) -> None:
        while self._dropped:
            ticket = self._dropped.popleft()
            ticket.stream.drop()
            if not ticket.reading:
                self._not_ahead(ticket)
            if ticket.state == QUEUED:
                ticket.state = GONE  # it stays in the queue, and is passed over there
                self._flying -= ticket.nbytes
                self.traffic.never_written += ticket.nbytes
                self._done.notify_all()
            self._let_go(ticket)
        if not self._writes and not any(self._jobs.values()):
            self._flying = 0  # whatever an interrupt left it at

    def _let_go(self, ticket: Ticket) -> None:
        if ticket.dropped and not ticket.reading and ticket.extent is not None:
            ticket.arena.free(ticket.extent)
            ticket.extent = None

    def _settle_late(self) -> None:
        """Settle what was dropped while another held the lock, so that it could not be settled then."""
        while self._dropped and not self._lock._is_owned() and self._lock.acquire(blocking=False):  # type: ignore[attr-defined]
            try:
                self._settle()
            finally:
                self._lock.release()

    def _read_on_from(self, ticket: Ticket) -> None:
        """Have those read that come after ``ticket``, as many as fit; others that were read make room for them."""
        wanted: dict[Ticket, None] = {}  # in order
        room = self.budget
        for other in itertools.islice(cast("Iterator[Ticket]", ticket.stream.after(ticket)), _WINDOW):
            room -= other.nbytes
            if room < 0 and wanted:
                break
            wanted[other] = None
        for other in wanted:
            self._read_ahead(other, {ticket, *wanted})

    def _read_ahead(self, ticket: Ticket, wanted: set[Ticket]) -> None:
        if ticket.state != WRITTEN or ticket.dropped or ticket in self._ahead:
            return
        used = sum(other.nbytes for other in self._ahead)
        for other in [other for other in self._ahead if other.ahead is not None and other not in wanted]:
            if used + ticket.nbytes <= self.budget:
                break
            self._not_ahead(other)
            used -= other.nbytes
            self.traffic.in_vain += other.nbytes
        if used and used + ticket.nbytes > self.budget:
            return
        ticket.reading = True
        self._ahead[ticket] = None
        self._reads.append(ticket)
        self._call_for_work()

    def _not_ahead(self, ticket: Ticket) -> None:
        ticket.reading, ticket.ahead = False, None
        self._ahead.pop(ticket, None)

    def _next(self) -> Ticket | None:
        if self._reads:
            return self._reads.popleft()
        while self._writes:
            ticket = self._writes.popleft()
            if ticket.state == QUEUED:
                ticket.state = WRITING
                return ticket
        return None

    def _finish(self, ticket: Ticket, error: BaseException | None, read: torch.Tensor | None = None) -> None:
        """``ticket`` was moved, or not; an error in reading ahead is found again by who wants it."""
        if ticket.state == WRITING:
            self._flying -= ticket.nbytes
            ticket.state = WRITTEN if error is None else FAILED
            if error is None:
                ticket.tensor = None
            elif not ticket.dropped:
                self._failed = self._failed or (ticket, error)
        else:
            ticket.reading = False
            ticket.ahead = None if ticket.dropped else read
            if ticket.ahead is None:
                self._ahead.pop(ticket, None)
        self._let_go(ticket)
        self._done.notify_all()

    # -- in the threads

    def _do(self, ticket: Ticket) -> None:
        read = None
        try:
            if ticket.state != WRITING:
                read = self._read(ticket)
            else:
                with self.traffic.writing.one():
                    self._transfer.write(ticket)
        except BaseException as error:
            with self._lock:
                self._finish(ticket, error)
        else:
            with self._lock:
                self._finish(ticket, None, read)
        ticket.arena.shrink(keep_peak=True)
        if self.traffic.written > _MEASURE_FROM and ticket.arena.measured is None:
            with contextlib.suppress(StoreError):
                ticket.arena.measure(self._transfer.buffers)
