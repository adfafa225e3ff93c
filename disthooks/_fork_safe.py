"""Locks, and what threads share under them: safe at a fork, at Ctrl-C, and in destructors."""

from __future__ import annotations

import atexit
import collections
import contextlib
import enum
import functools
import itertools
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from disthooks.errors import StoreError

# [Note: the order of locks]
# Every lock of the library is made in this file and has a place in ``Order``. A thread that holds a lock asks only
# for locks that come later. So threads cannot wait for each other in a circle: whichever thread holds the last of all
# the locks that are held waits for nobody. Two locks of the same place are never held together, with two exceptions:
#
# - A packed value that is computed again takes the locks of the values that it is computed from. Those are older in
#   the graph.
# - A tensor that moves down in a ``Tiered`` may push another one out of the tier below, never one out of a tier
#   above.
#
# Shared locks are reentrant, so a signal handler may call ``report()`` at any time. ``tests/laws`` records which
# locks are asked for under which, and forks under each pair.

# [Note: destructors]
# A collection of garbage may begin in any line, so also in a thread that holds any of the locks, or in the middle of
# a method of the very object that the destructor belongs to. So a destructor takes no lock and waits for nothing. It
# appends to a deque what it releases; ``deque.append`` is one C function, which is atomic. The next thread that takes
# the lock drains the queue (``_drain_releases``) before it reads or changes anything else.
#
# There is no way to *try* for the lock in a destructor: Ctrl-C could come after the lock was taken and before the
# line that releases it. The body of a generator that a collection ends is a destructor in this sense, too. When
# Python ends, the names of a module may be gone before its objects are: a destructor uses only its arguments and
# attributes.

# [Note: interrupts]
# Ctrl-C raises KeyboardInterrupt in the main thread. CPython looks for it when a Python function begins, when a loop
# goes round, and after a call has returned, *before* the result is stored. So:
#
# - ``with lock:`` is safe, because the lock is taken and released in C. A context manager that is written in Python
#   could be interrupted between the lock and its own ``return``, so there is none: methods say ``with self._lock:``
#   and then ``self._drain_releases()``.
# - ``x = queue.popleft()`` may lose what it removes: the call has returned, and x is not stored yet.
# - Lines without calls between them are done together: ``total += queue[0]`` and then ``queue.popleft()``.
#
# A release that takes more than such lines can be interrupted half way. There are two ways out, and each class says
# by ``_may_repeat`` which one is right for it. Either the release is removed after it was applied. Then an interrupt
# makes it be applied once more, and the second time ``_apply_release`` has to do nothing. Or it is removed before,
# and an interrupt loses it. That is right where twice would be wrong, because a block of memory would be given to two
# tensors, and where a lost release costs only a little memory.

# [Note: forks]
# A child has only the thread that forked. A lock that another thread holds at that moment would be held in the child
# for ever, and what it guards might be half changed. So ``os.fork`` takes all shared locks first, in their order, and
# releases them afterwards in both processes. The locks of single tensors are not taken: there are too many of them. A
# lock that another thread makes during the fork is not among those that were taken, and is made anew in the child.
#
# Python has a lock for each module that is being imported, and does not free it in a child. Whoever uses a public
# name there whose module another thread of the parent was just importing would wait for ever. So the import of a
# public name holds one of our locks, and a fork waits until it is over.
#
# Last, the child calls ``after_fork`` of every ``ForkSafe`` object, which forgets threads and devices of the parent.


class Order(enum.IntEnum):
    """The places of locks: a thread that holds one asks only for later ones. See [Note: the order of locks]."""

    IMPORT = 0  # modules of public names, which are imported when they are first asked for
    ATTACH = 1  # attaching: one thread at a time
    CLASSES = 2  # the classes of attached modules
    PACKED = 3  # one packed value
    PLACE = 4  # what Recompute has proven
    PLACED = 5  # one tensor of a Tiered
    OPENING = 6  # the movers and scratch files of OnDisk that exist
    MOVER = 7  # the queues of a mover (OnDisk) or of a courier (OnCpu)
    WAY = 8  # whether GPUDirect Storage can be used
    TRANSFER = 9  # copies that a mover has under way between devices and the host
    LINK = 10  # the copies between one device and the host
    TURNS = 11  # the order in which the tensors of a Tiered are read
    QUEUE = 12  # the tensors of one tier
    POOL = 13  # memory that is used again
    SCRATCH_FILE = 14  # which parts of a file are used
    BUDGET = 15  # bytes under a limit
    IO_STATS = 16  # the time during which threads move bytes
    WATCH = 17  # what a watcher has seen
    COUNTERS = 18  # the counts of an attachment, and what is packed


def _make(order: Order, again: bool) -> Any:
    return threading.RLock() if again else threading.Lock()


#: Makes every lock; tests put one here that records.
make: Callable[[Order, bool], Any] = _make

# Reads, writes and removals of a dict are atomic: to register a lock takes none.
_shared: dict[int, tuple[Order, weakref.ref[Any]]] = {}
_numbers = itertools.count()


def shared_lock(order: Order) -> Any:
    """A lock for what several threads use. Its thread may take it again, and ``os.fork`` takes it.

    >>> lock = shared_lock(Order.COUNTERS)
    >>> with lock, lock:
    ...     (Order.COUNTERS, lock) in shared_locks()
    True
    """
    lock, number = make(order, True), next(_numbers)
    # When the lock dies, Python calls ``_shared.pop(number, reference)``: a C function, so no interrupt comes between.
    _shared[number] = order, weakref.ref(lock, functools.partial(_shared.pop, number))
    return lock


def tensor_lock(order: Order, again: bool = True) -> Any:
    """A lock for one tensor; its thread may take it ``again``. ``os.fork`` does not take it."""
    return make(order, again)


def shared_locks() -> list[tuple[Order, Any]]:
    """All shared locks that are alive, in their order."""
    found = [(order, number, reference()) for number, (order, reference) in list(_shared.items())]
    return [(order, lock) for order, _, lock in sorted(found, key=lambda each: each[:2]) if lock is not None]


#: Held while a public name is imported. See [Note: forks].
importing = shared_lock(Order.IMPORT)

Released = TypeVar("Released")


class ForkSafe(Generic[Released]):
    """What several threads share: a lock, and a queue of releases that destructors fill without the lock.

    A method takes the lock and drains the queue before it does anything else::

        with self._lock:
            self._drain_releases()

    Args:
        order: the place of the lock.

    A subclass calls this ``__init__`` when it has all attributes that its ``after_fork`` uses: another thread may fork
    from then on.

    Attributes:
        release: has ``_apply_release`` called with its argument by the next thread that takes the lock. It is a C
            function, for destructors. See [Note: destructors].

    >>> class Pool(ForkSafe[str]):
    ...     def _apply_release(self, release):
    ...         print("idle again:", release)
    >>> pool = Pool(Order.POOL)
    >>> pool.release("a block")
    >>> with pool._lock:
    ...     pool._drain_releases()
    idle again: a block
    """

    #: Whether ``_apply_release`` may be called twice for one release. See [Note: interrupts].
    _may_repeat: ClassVar[bool] = True

    def __init__(self, order: Order) -> None:
        self._lock = shared_lock(order)
        self._releases: collections.deque[Released] = collections.deque()
        self.release: Callable[[Released], None] = self._releases.append
        self._is_draining = False
        _fork_safe.add(self)

    def after_fork(self) -> None:
        """Called in the child of a fork, before any of its other code runs; this thread holds all shared locks."""

    def _apply_release(self, release: Released) -> None:
        """Make the change that a destructor could not make; called under the lock, for one release at a time."""
        raise NotImplementedError

    def _drain_releases(self) -> None:
        """Apply the releases, the oldest first; called under the lock."""
        # A signal handler may call report() in the middle of this: it leaves the rest of the releases to this call.
        if not self._releases or self._is_draining:
            return
        self._is_draining = True
        try:
            while self._releases:
                if self._may_repeat:
                    self._apply_release(self._releases[0])
                    self._releases.popleft()
                else:
                    self._apply_release(self._releases.popleft())
        finally:
            self._is_draining = False


class DeferredSum:
    """A number that destructors change; whoever asks for it does so under a lock.

    Attributes:
        change: adds its argument. It is a C function, for destructors. See [Note: destructors].

    >>> held = DeferredSum()
    >>> held.change(5); held.change(-2)
    >>> held.total()
    3
    """

    __slots__ = ("_changes", "_total", "change")

    def __init__(self) -> None:
        self._total = 0
        self._changes: collections.deque[int] = collections.deque()
        self.change: Callable[[int], None] = self._changes.append

    def total(self) -> int:
        """The sum of all changes so far."""
        try:
            while self._changes:
                # Each change is added once: no interrupt comes between these lines. See [Note: interrupts].
                self._total += self._changes[0]
                self._changes.popleft()
        except IndexError:  # a signal handler asked, too, after the loop had looked whether there are any
            return self.total()
        return self._total


class _TakenForFork(threading.local):
    """The locks that this thread took for a fork."""

    def __init__(self) -> None:
        self.locks: list[Any] = []


_fork_safe: weakref.WeakSet[ForkSafe[Any]] = weakref.WeakSet()
_taken = _TakenForFork()


def _before() -> None:
    # Two threads may fork at once: both take the locks in their order. See [Note: forks].
    for _, lock in shared_locks():
        _taken.locks.append(lock)  # first: Ctrl-C may come between these lines, and a lock must not stay taken
        lock.acquire()


def _after() -> None:
    while _taken.locks:
        with contextlib.suppress(RuntimeError):  # an interrupt came before it was taken, or after it was released
            _taken.locks[-1].release()
        _taken.locks.pop()


def _after_in_child() -> None:
    taken = set(map(id, _taken.locks))
    for _, lock in shared_locks():
        if id(lock) not in taken:  # another thread made it meanwhile, and may have had it
            lock._at_fork_reinit()
    for one in list(_fork_safe):
        one.after_fork()
    _after()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_after_in_child)
    # Ctrl-C that comes during the fork ends what runs first after it, and every lock would stay taken: once more.
    os.register_at_fork(after_in_parent=_after, after_in_child=_after)


Job = TypeVar("Job")


_IDLE = 1.0  # seconds after which a thread without work ends

_LOOK = 0.1  # seconds after which a waiter looks whether the threads are alive

_REMEDY = (
    "The process, its user or its container has as many threads as it may have: raise the limit (ulimit -u, pids.max, "
    "docker run --pids-limit), or use fewer (OMP_NUM_THREADS, workers of a DataLoader). What was saved so far is still "
    "in memory, and its backward can run"
)


class Workers(ForkSafe[Released], ABC, Generic[Job, Released]):
    """Up to ``most`` threads, started when there is work, ended when there is none for a second.

    A waiter calls :meth:`_wait`, which notices when a thread has died and hands its job to :meth:`_lost`. So nobody
    waits for a thread that is gone.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._jobs: dict[threading.Thread, Job | None] = {}  # what each thread is at
        self._closed = False
        super().__init__(Order.MOVER)
        self._work, self._done = threading.Condition(self._lock), threading.Condition(self._lock)
        _workers.add(self)

    # -- what there is to do, asked and told under the lock

    @abstractmethod
    def _next(self) -> Job | None:
        """The next thing to do."""

    def _pause(self) -> float | None:
        """Seconds until there is something to do, if there is nothing now; None if that is not known."""
        return None

    @abstractmethod
    def _do(self, job: Job) -> None:
        """Do ``job``, in one of the threads and without the lock. This must not raise."""

    @abstractmethod
    def _lost(self, job: Job) -> None:
        """The thread that did ``job`` has died."""

    # -- for all

    def after_fork(self) -> None:
        """Forget the threads: a child has none of them."""
        self._work, self._done = threading.Condition(self._lock), threading.Condition(self._lock)
        self._jobs.clear()

    def end_idle(self) -> None:
        """End the threads if none of them has a job, and wait until they have ended."""
        with self._lock:
            self._drain_releases()
            busy = any(job is not None for job in self._jobs.values())
            ending = [] if busy else list(self._jobs)
            for thread in ending:
                del self._jobs[thread]
            self._work.notify_all()
        _join(ending)

    def close(self) -> None:
        """The process ends: threads finish their jobs and begin no others."""
        with self._lock:
            self._closed = True
            threads = list(self._jobs)
            self._work.notify_all()
        _join(threads)

    # -- under the lock

    def _call_for_work(self) -> None:
        """Have a thread do the next job: wake one, or start one.

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
        """``job`` is done, even if its thread has not come back for the next one."""
        for thread, at in self._jobs.items():
            if at is job:
                self._jobs[thread] = None

    def _wait(self) -> None:
        """Wait until a job is done, or for a while."""
        self._call_for_work()
        try:
            self._done.wait(_LOOK)
        except BaseException:
            # An interrupt came while the lock was not held: the "with" around this call will release it.
            if not self._lock._is_owned():
                self._lock.acquire()
            raise
        self._drain_releases()

    # -- in the threads

    def _serve(self) -> None:
        me = threading.current_thread()
        while True:
            with self._lock:
                self._drain_releases()
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


_workers: weakref.WeakSet[Workers[Any, Any]] = weakref.WeakSet()


def _join(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        if thread.ident is not None and thread is not threading.current_thread():  # Ctrl-C may come before it starts
            thread.join(_IDLE)


@atexit.register
def _close_all() -> None:
    for workers in list(_workers):
        workers.close()
