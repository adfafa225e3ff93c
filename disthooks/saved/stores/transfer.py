"""A device's tensors on their way to host memory and back, beside the computation.

Everything is ordered by events; nothing here waits for the device but :meth:`Outgoing.wait`.

Who frees memory that another stream reads or writes gives wrong numbers, so a link holds both ends of each copy until
its event has happened. That is looked at whenever the link is used.

What one thread puts into a store from a device: which of it comes back soon, and when each is wanted, there.

A few threads that work as long as there is something to do.
"""

from __future__ import annotations

import atexit
import collections
import functools
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar, cast

import torch

from disthooks._fork_safe import Order, care_for, shared
from disthooks._streams import capturing, current_stream, event_on, new_stream, on, used_on
from disthooks.errors import StoreError
from disthooks.saved.stores.order import _ORDERS, AccessOrder, Ordered

_LARGE = 1 << 20  # bytes: smaller copies say little about the speed of a link


class Throughput:
    """Bytes that were copied, and the time the device took for it.

    >>> rate = Throughput()
    >>> rate.add(2_000_000, 0.001); rate.add(1000, 0.001)
    >>> rate.nbytes, rate.seconds, rate.best
    (2001000, 0.002, 2000000000.0)

    Attributes:
        best: bytes a second of the fastest large copy; None before there was one.
        pace: seconds for a byte, of the last copies above all; None before there was one.
    """

    def __init__(self) -> None:
        self.nbytes, self.seconds = 0, 0.0
        self.best: float | None = None
        self.pace: float | None = None

    def add(self, nbytes: int, seconds: float) -> None:
        """A copy has ended."""
        self.nbytes += nbytes
        self.seconds += seconds
        if nbytes >= _LARGE and seconds > 0:
            self.best = max(self.best or 0.0, nbytes / seconds)
            pace = seconds / nbytes
            self.pace = pace if self.pace is None else 0.9 * self.pace + 0.1 * pace


class _Copy:
    """One copy in a side stream: when it began and when it is done, on the device, and who counts it."""

    __slots__ = ("begin", "device", "done", "host", "rate")

    begin: torch.Event
    done: torch.Event

    def __init__(self, device: torch.device, host: torch.Tensor, rate: Throughput | None) -> None:
        self.device, self.host, self.rate = device, host, rate

    def is_done(self, _capturing: Callable[[], bool] = capturing) -> bool:  # held: Python may be ending
        """Whether it has happened; asked of a copy that an interrupt stopped on its way out, never.

        While this thread captures a CUDA graph, which a question would end, nobody knows: a destructor may ask.
        """
        return hasattr(self, "done") and not _capturing() and self.done.query()


class Outgoing(_Copy):
    """A copy of a device's tensor in host memory, under way or there.

    Attributes:
        host: contiguous, of the shape and dtype of the tensor; filled once ``done`` has happened.
        source: the tensor, held until it is copied; None after that.
        done: the copy's end, on the device.
    """

    __slots__ = ("source",)

    def __init__(self, source: torch.Tensor, host: torch.Tensor, rate: Throughput | None = None) -> None:
        super().__init__(source.device, host, rate)
        self.source: torch.Tensor | None = source

    def wait(self) -> torch.Tensor:
        """``host``, once it is filled. The host waits: for threads that write it to disk."""
        self.done.synchronize()
        self.source = None
        return self.host


class Coming(_Copy):
    """A tensor on its way back to the device.

    Attributes:
        tensor: on the device, filled once ``done`` has happened; None when somebody has it.
        stream: the one its memory belongs to.
        done: the copy's end, on the device.
    """

    __slots__ = ("stream", "tensor")

    def __init__(self, tensor: torch.Tensor, host: torch.Tensor, stream: torch.Stream, rate: Throughput | None) -> None:
        super().__init__(tensor.device, host, rate)
        self.tensor: torch.Tensor | None = tensor
        self.stream = stream


class Link:
    """What goes between one device and the host, in this process.

    There is one stream for each way. What a caller's ``Throughput`` is given counts its copies alone.

    Args:
        device: an accelerator, with its index.

    Attributes:
        out: what was sent.
        back: what was fetched.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._out, self._back = new_stream(device), new_stream(device)
        self._sent: collections.deque[Outgoing] = collections.deque()
        self._coming: collections.deque[Coming] = collections.deque()
        self.out, self.back = Throughput(), Throughput()
        self._lock = shared(Order.LINK)

    # -- to the host

    def send(self, tensor: torch.Tensor, host: torch.Tensor, rate: Throughput | None = None) -> Outgoing:
        """Begin to copy ``tensor`` into ``host``, after what the current stream was given so far.

        Both are held until that is done. ``tensor`` may be let go of before, by :meth:`let_go`.
        """
        source = tensor.detach().contiguous()
        with self._lock:
            self.poll()
            self._out.wait_event(event_on(current_stream(self.device)))
            outgoing = Outgoing(source, host, rate)
            self._sent.append(outgoing)  # before the copy begins: an interrupt may come at any time
            with on(self._out):
                outgoing.begin = event_on(self._out, timed=True)
                host.copy_(source, non_blocking=True)
                outgoing.done = event_on(self._out, timed=True)
            return outgoing

    def let_go(self, outgoing: Outgoing) -> None:
        """Let go of the source of ``outgoing`` now, without waiting on the host.

        The current stream waits for the copy. So it is as good as an operator of that stream, and so is the source:
        memory that belongs to the stream is used again by what comes later in it, and of memory that belongs to
        another one (a batch that a loader brought on a stream of its own) the allocator is told, as it has to be of
        every operator of this stream that uses it.
        """
        source = outgoing.source
        if source is not None and not outgoing.is_done():
            stream = current_stream(self.device)
            stream.wait_event(outgoing.done)
            used_on(source, stream)
        outgoing.source = None

    # -- to the device

    def fetch(self, outgoing: Outgoing, rate: Throughput | None = None) -> torch.Tensor:
        """The tensor on the device again: itself while it is held, or a copy that the current stream may use."""
        source = outgoing.source
        return source if source is not None else self.take(self.bring(outgoing, rate))

    def bring(self, outgoing: Outgoing, rate: Throughput | None = None) -> Coming:
        """Begin to copy it back, into memory of the current stream; :meth:`take` is for who wants it."""
        with self._lock:
            self.poll()
            stream, host = current_stream(self.device), outgoing.host
            coming = Coming(torch.empty(host.shape, dtype=host.dtype, device=self.device), host, stream, rate)
            self._back.wait_event(event_on(stream))  # the memory may have been another tensor's until now
            self._back.wait_event(outgoing.done)
            self._coming.append(coming)
            tensor = coming.tensor
            assert tensor is not None
            with on(self._back):
                coming.begin = event_on(self._back, timed=True)
                tensor.copy_(host, non_blocking=True)
                coming.done = event_on(self._back, timed=True)
            return coming

    def take(self, coming: Coming) -> torch.Tensor:
        """The tensor of ``coming``, which the current stream may use; once."""
        tensor = coming.tensor
        assert tensor is not None
        stream = current_stream(self.device)
        stream.wait_event(coming.done)
        if stream != coming.stream:
            used_on(tensor, stream)
        coming.tensor = None
        return tensor

    # -- both

    def poll(self) -> None:
        """Let go of what is copied by now."""
        with self._lock:
            self._mend()
            while self._sent and self._sent[0].is_done():
                outgoing = self._sent[0]
                outgoing.source = None
                _count(outgoing, self.out)
                self._sent.popleft()
            while self._coming and self._coming[0].is_done():
                _count(self._coming[0], self.back)
                self._coming.popleft()

    def wait(self) -> None:
        """Wait on the host until all that was sent has arrived."""
        with self._lock:
            self._mend()
            last = self._sent[-1] if self._sent else None
        if last is not None:
            last.done.synchronize()
        self.poll()

    def _mend(self) -> None:
        """An interrupt may have come in the middle of a copy, of which nobody knows: it is done when the rest is."""
        for copies, stream in ((self._sent, self._out), (self._coming, self._back)):
            if copies and not hasattr(copies[-1], "done"):
                copies[-1].begin = copies[-1].done = event_on(stream, timed=True)


def _count(copy: _Copy, total: Throughput) -> None:
    seconds = copy.begin.elapsed_time(copy.done) / 1000
    for rate in filter(None, (total, copy.rate)):
        rate.add(copy.host.nbytes, seconds)


@functools.cache
def link_of(device: torch.device) -> Link:
    """The link of ``device`` in this process."""
    return Link(device)


class Sized(Ordered, Protocol):
    """What a :class:`Lane` remembers besides: its bytes."""

    nbytes: int


class Lane(AccessOrder):
    """A :class:`AccessOrder` that learns two things more, from one backward for the next.

    How many bytes are put between the put of a tensor and its first read: few for the last modules of a forward, or
    for the last stage of a pipeline. And when each read comes, in the time of the device: the host runs ahead of it,
    so its clock says nothing. Both only make things faster; nothing is wrong when they are.

    >>> class Ticket:
    ...     position, dropped, nbytes = 0, False, 8
    >>> lane = Lane()
    >>> for _ in range(2):
    ...     tickets = [Ticket(), Ticket(), Ticket()]
    ...     for ticket in tickets: lane.put(ticket)
    ...     stays = [lane.is_back_soon(ticket, 16) for ticket in tickets]
    ...     for ticket in reversed(tickets): lane.read(ticket); ticket.dropped = True; lane.drop(ticket)
    >>> stays
    [False, True, True]
    """

    def __init__(self) -> None:
        super().__init__()
        self._before: list[int] = []  # bytes put before each position
        self._total = 0
        self._turns: dict[int, int] = {}  # by position: bytes put between put and first read
        self._expected: Mapping[int, int] = {}  # the same of the last time
        self._marks: dict[int, tuple[torch.Event, torch.Event]] = {}  # before a read, and when it could go on
        self._rounds: dict[int, int] = {}  # by how many were put: how often
        self._unread: dict[int, dict[int, tuple[torch.Event, torch.Event]]] = {}  # marks, not asked yet
        self._times: dict[int, dict[int, float]] = {}

    def put(self, ticket: Ordered) -> None:
        """``ticket`` is the next one."""
        super().put(ticket)
        place = ticket.position
        if place != len(self._before):  # all of it is new, or was numbered anew: what is not known is long ago
            self._before = [0] * place
            self._total = 0 if place == 0 else self._total
        self._before.append(self._total)
        self._total += cast(Sized, ticket).nbytes

    def is_back_soon(self, ticket: Sized, room: int) -> bool:
        """Whether ``ticket``, just put, was read last time before it and what was put after it had ``room`` bytes."""
        turn = self._expected.get(ticket.position)
        return turn is not None and turn + ticket.nbytes <= room

    def read(self, ticket: Ordered) -> None:
        """``ticket`` is wanted."""
        place = ticket.position
        if place not in self._turns and place < len(self._before):
            self._turns[place] = self._total - self._before[place] - cast(Sized, ticket).nbytes
        super().read(ticket)

    def drop(self, ticket: Ordered) -> None:
        """``ticket`` is dropped; after the last of them what was learned is what the next time expects."""
        count = len(self._tickets)
        super().drop(ticket)
        if not count or self._tickets:
            return
        if self._turns:
            self._expected = self._turns
            self._rounds[count] = self._rounds.get(count, 0) + 1
        if self._marks:
            self._unread[count] = self._marks
        for known in (self._rounds, self._unread, self._times):
            while len(known) > _ORDERS:
                known.pop(next(iter(known)))
        self._turns, self._marks, self._before, self._total = {}, {}, [], 0

    # -- the time of the device

    def is_timed(self, ticket: Ordered) -> bool:
        """Whether to note when this read is: the first of a ticket, the 1st, 2nd, 3rd, 5th, 9th, ... time around."""
        rounds = self._rounds.get(len(self._tickets), 0)
        return rounds.bit_count() <= 1 and ticket.position not in self._marks

    def mark(self, ticket: Ordered, came: torch.Event, went: torch.Event) -> None:
        """The computation ``came`` to this read, and ``went`` on from it."""
        self._marks[ticket.position] = came, went

    def times(self) -> Mapping[int, float]:
        """By position: seconds of computation before its read, from the last time that it was measured; or nothing.

        The device is not waited for: what it has not said yet is not known yet.
        """
        count = len(self._tickets)
        marks = self._unread.get(count)
        # The last of them first, but another stream or thread may be behind it.
        if marks is not None and all(event.query() for _, event in reversed(marks.values())):
            self._times[count] = _seconds(marks)
            del self._unread[count]
        return self._times.get(count, {})


def _seconds(marks: Mapping[int, tuple[torch.Event, torch.Event]]) -> dict[int, float]:
    found: dict[int, float] = {}
    at, last = 0.0, None
    for position, (came, went) in marks.items():
        at += 0.0 if last is None else max(0.0, last.elapsed_time(came)) / 1000
        found[position], last = at, went
    return found


Job = TypeVar("Job")

_IDLE = 1.0  # seconds after which a thread without work ends
_LOOK = 0.1  # seconds after which who waits looks whether those it waits for are there

_REMEDY = (
    "The process, its user or its container has as many threads as it may have: raise the limit (ulimit -u, pids.max, "
    "docker run --pids-limit), or use fewer (OMP_NUM_THREADS, workers of a DataLoader). What was saved so far is still "
    "in memory, and its backward can run"
)


class Crew(ABC, Generic[Job]):
    """Up to ``most`` threads, started when there is work, ended when there is none for a second.

    Who waits for something to be done waits by :meth:`_wait`, which finds out when a thread has died, and has its job
    counted as :meth:`_lost`: no wait is without an owner.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._jobs: dict[threading.Thread, Job | None] = {}  # what each thread is at
        self._closed = False
        self._lock = shared(Order.MOVER)
        self._work, self._done = threading.Condition(self._lock), threading.Condition(self._lock)
        care_for(self)
        _crews.add(self)

    # -- what there is to do, asked and told under the lock

    @abstractmethod
    def _next(self) -> Job | None:
        """The next thing to do."""

    def _pause(self) -> float | None:
        """Seconds after which there is something to do, when there is nothing now; None when nobody knows of any."""
        return None

    @abstractmethod
    def _do(self, job: Job) -> None:
        """Do it; without the lock, in one of the threads. It must not raise."""

    @abstractmethod
    def _lost(self, job: Job) -> None:
        """The thread that was at it has died."""

    def _settle(self) -> None:
        """Do what had to be put off; called whenever the lock was taken."""

    # -- for all

    def after_fork(self) -> None:
        """A child has none of the threads."""
        self._work, self._done = threading.Condition(self._lock), threading.Condition(self._lock)
        self._jobs.clear()

    def end_idle(self) -> None:
        """End the threads, if none of them has anything to do, and wait until they have ended."""
        with self._lock:
            self._settle()
            busy = any(job is not None for job in self._jobs.values())
            ending = [] if busy else list(self._jobs)
            for thread in ending:
                del self._jobs[thread]
            self._work.notify_all()
        _join(ending)

    def close(self) -> None:
        """The process ends: threads do no more than what they are at."""
        with self._lock:
            self._closed = True
            threads = list(self._jobs)
            self._work.notify_all()
        _join(threads)

    # -- under the lock

    def _call_for_work(self) -> None:
        """There is something to do: see to it that somebody does it.

        Raises:
            StoreError: when there is no thread, and the system lets none start.
        """
        for thread, job in list(self._jobs.items()):
            if not thread.is_alive():
                del self._jobs[thread]
                if job is not None:
                    self._lost(job)
        if len(self._jobs) < self._most and None not in self._jobs.values() and not self._closed:
            thread = threading.Thread(target=self._serve, name=f"disthooks {type(self).__name__}", daemon=True)
            self._jobs[thread] = None
            try:
                thread.start()
            except RuntimeError as error:
                del self._jobs[thread]
                if not self._jobs:
                    raise StoreError(f"no thread can be started to move saved tensors: {error}. {_REMEDY}") from error
        self._work.notify()

    def _is_over(self, job: Job) -> None:
        """``job`` is done, whatever the thread that was at it does besides."""
        for thread, at in self._jobs.items():
            if at is job:
                self._jobs[thread] = None

    def _wait(self) -> None:
        """Wait until something is done, or a while."""
        self._call_for_work()
        try:
            self._done.wait(_LOOK)
        except BaseException:
            # An interrupt in a moment in which the lock is not held: who leaves its "with" has to have it.
            if not self._lock._is_owned():
                self._lock.acquire()
            raise
        self._settle()

    # -- in the threads

    def _serve(self) -> None:
        me = threading.current_thread()
        while True:
            with self._lock:
                self._settle()
                job = self._next() if me in self._jobs and not self._closed else None
                if job is None and me in self._jobs and not self._closed:
                    pause = self._pause()
                    if self._work.wait(_IDLE if pause is None else pause) or pause is not None:
                        continue
                if job is None:
                    job = self._next() if me in self._jobs and not self._closed else None  # in the last moment
                if job is None:
                    self._jobs.pop(me, None)
                    return
                self._jobs[me] = job
            self._do(job)
            with self._lock:
                if me in self._jobs:
                    self._jobs[me] = None
            job = None  # nothing is held while there is nothing to do


_crews: weakref.WeakSet[Crew[Any]] = weakref.WeakSet()


def _join(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        if thread.ident is not None and thread is not threading.current_thread():  # Ctrl-C may come before it starts
            thread.join(_IDLE)


@atexit.register
def _close_all() -> None:
    for crew in list(_crews):
        crew.close()
