"""Threads that write tensors to arenas and read them back before they are wanted."""

from __future__ import annotations

import atexit
import collections
import itertools
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import cast

import torch

from disthooks._forks import care_for
from disthooks.errors import StoreError
from disthooks.saved.stores.arena import Arena
from disthooks.saved.stores.prefetch import Stream
from disthooks.saved.stores.ticket import FAILED, GONE, QUEUED, WRITING, WRITTEN, Ticket, Transfer

_IDLE = 1.0  # seconds after which a thread without work ends
_LOOK = 0.1  # seconds after which who waits looks whether those it waits for are there
_WINDOW = 32  # tickets: backward leaves the expected order by a few, so more would only cost time
_MEASURE_FROM = 256 << 20  # bytes: a disk that so much goes to is worth measuring


class Mover:
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
        self.arenas, self.budget, self._most = arenas, budget, threads
        self._transfer = Transfer(checksum, keep=budget)
        self.traffic = self._transfer.traffic
        self.process = os.getpid()
        self._own = threading.local()  # the stream of each thread that puts
        self._turns = itertools.cycle(arenas)
        self._writes: collections.deque[Ticket] = collections.deque()
        self._reads: collections.deque[Ticket] = collections.deque()
        self._ahead: dict[Ticket, None] = {}  # read ahead of need or to be, the oldest first
        self._dropped: collections.deque[Ticket] = collections.deque()
        self._jobs: dict[threading.Thread, Ticket | None] = {}  # what each thread is at
        self._flying = 0  # bytes put and not written
        self._failed: tuple[Ticket, BaseException] | None = None  # not said yet
        self._closed = False
        # A collection may begin under the lock, and its destructors may come here in the same thread.
        self.fork_lock = self._lock = threading.RLock()
        self._work, self._done = threading.Condition(self._lock), threading.Condition(self._lock)
        care_for(self)
        _movers.add(self)

    def after_fork(self) -> None:
        """A child has none of the threads: what was not written stays in memory there, for who wants it."""
        self._work, self._done = threading.Condition(self._lock), threading.Condition(self._lock)
        for ticket in self._ahead:
            ticket.reading = False
        for queue in (self._reads, self._writes, self._jobs):
            queue.clear()

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
        return held if held is not None else self._transfer.read(ticket)

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
        with self._lock:
            self._settle()
            ending = [] if self._flying or self._reads or any(self._jobs.values()) else list(self._jobs)
            for thread in ending:
                del self._jobs[thread]
            self._work.notify_all()
        _join(ending)
        self._transfer.buffers.clear()
        for arena in self.arenas:
            arena.shrink(keep_peak=False)

    def close(self) -> None:
        """The process ends: threads do no more than what they are at."""
        with self._lock:
            self._closed = True
            threads = list(self._jobs)
            self._work.notify_all()
        _join(threads)

    @property
    def in_flight(self) -> int:
        """Bytes that are put and not yet written."""
        with self._lock:
            self._settle()
            return self._flying

    # -- under the lock

    def _stream(self) -> Stream:
        if not hasattr(self._own, "stream"):
            self._own.stream = Stream()
        return cast(Stream, self._own.stream)

    def _say_failure(self) -> None:
        failed, self._failed = self._failed, None
        if failed is not None and not failed[0].dropped:
            raise failed[1]

    def _wait(self) -> None:
        """Wait until something is done, or a while, and see to it that somebody does it."""
        self._call_for_work()
        self._done.wait(_LOOK)
        self._settle()

    def _call_for_work(self) -> None:
        for thread, ticket in list(self._jobs.items()):
            if not thread.is_alive():
                del self._jobs[thread]
                if ticket is not None:
                    self._finish(ticket, StoreError("a thread that moved a saved tensor has died"))
        if len(self._jobs) < self._most and all(self._jobs.values()) and not self._closed:
            thread = threading.Thread(target=self._serve, name="disthooks mover", daemon=True)
            self._jobs[thread] = None
            thread.start()
        self._work.notify()

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

    # -- in the threads that move

    def _serve(self) -> None:
        me = threading.current_thread()
        while True:
            with self._lock:
                self._settle()
                ticket = self._next() if me in self._jobs and not self._closed else None
                if ticket is None:
                    if me in self._jobs and not self._closed and self._work.wait(_IDLE):
                        continue
                    if me not in self._jobs or self._closed or not (self._reads or self._writes):
                        self._jobs.pop(me, None)
                        return
                    continue
                self._jobs[me] = ticket
            self._move(ticket)
            with self._lock:
                if me in self._jobs:
                    self._jobs[me] = None
            ticket = None  # nothing is held while there is nothing to do
            self._settle_late()

    def _move(self, ticket: Ticket) -> None:
        error: BaseException | None = None
        read = None
        try:
            if ticket.state != WRITING:
                read = self._transfer.read(ticket)
            else:
                self._transfer.write(ticket)
        except BaseException as found:
            error = found
        with self._lock:
            self._finish(ticket, error, read)
        ticket.arena.shrink(keep_peak=True)
        if self.traffic.written > _MEASURE_FROM and ticket.arena.measured is None:
            ticket.arena.measure(self._transfer.buffers)


_movers: weakref.WeakSet[Mover] = weakref.WeakSet()


def _join(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(_IDLE)


@atexit.register
def _close_all() -> None:
    for mover in list(_movers):
        mover.close()
