"""Locks, and the base classes of objects that threads share: safe at a fork, at Ctrl-C, and in destructors."""

from __future__ import annotations

import collections
import contextlib
import enum
import functools
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Generic, TypeVar

# [Note: the order of locks]
# Every lock of the library is made in this file and has a place in ``Order``. A thread that holds a lock takes only
# locks of later places. So threads cannot wait for each other in a circle: the thread that holds the lock of the latest
# place waits for no lock. A thread never holds two locks of the same place, with two exceptions:
#
# - A packed value that is computed again takes the locks of the values that it is computed from. Those are older in
#   the graph.
# - A tensor that moves down in a ``Tiered`` may push another tensor out of the tier below, never out of a tier above.
#
# Shared locks are reentrant, so a signal handler may call ``report()`` at any time. A test in ``tests/laws`` records
# each pair of a held lock and a lock that is taken under it, and another one forks under each pair.

# [Note: destructors]
# Python may collect garbage in any line: in a thread that holds some of the locks, or inside a method of the object to
# which the destructor belongs. So a destructor takes no lock and waits for nothing. It appends a release to a deque;
# ``deque.append`` is one C function, which is atomic. The next thread that takes the lock drains the queue
# (``_drain_releases``) before it reads or changes anything else.
#
# A destructor cannot *try* to take the lock either: Ctrl-C could come after the lock was taken and before the line that
# releases it. The end of a generator's body is such a destructor too, if a collection of garbage ends the generator.
# When Python exits, the names of a module may be gone before its objects are. So a destructor uses only its arguments
# and attributes.

# [Note: interrupts]
# Ctrl-C raises KeyboardInterrupt in the main thread. CPython checks for it when a Python function begins, when a loop
# jumps back, and after a call has returned, *before* the result is stored. So:
#
# - ``with lock:`` is safe, because the lock is taken and released in C. A context manager that is written in Python
#   could be interrupted between taking the lock and its own ``return``. So there is none: methods say
#   ``with self._lock:`` and then ``self._drain_releases()``.
# - ``x = queue.popleft()`` may lose an item: the call has removed and returned it, and x is not stored yet.
# - No interrupt comes between two lines if the first one has no call: ``total += queue[0]``, then ``queue.popleft()``.
#
# Applying a release takes more than such lines, so an interrupt may come in the middle. There are two ways to handle
# it, and the ``_may_repeat`` of each class says which one it uses. True: the release is removed after it was applied.
# After an interrupt it is applied once more, so ``_apply_release`` must do nothing the second time. False: the release
# is removed first, and an interrupt loses it. That is right if a repetition would do harm, such as giving a block of
# memory to two tensors, and if a lost release costs only a little memory.

# [Note: forks]
# A child process has only the thread that forked. If another thread held a lock at that moment, the lock would be held
# in the child for ever, and the data under it might be half changed. So the handlers of ``os.fork`` take all shared
# locks before the fork, in their order, and release them afterwards in both processes. They do not take the locks of
# single tensors, because there are too many of them. They cannot take a lock that another thread makes during the fork:
# the child resets such a lock.
#
# Python has a lock for each module that is being imported, and does not free it in a child. If another thread of the
# parent was importing the module of a public name, a child that uses this name would wait for ever. So disthooks holds
# a lock of its own while it imports a public name, and a fork waits until the import is over.
#
# Before the child releases the locks, it calls ``after_fork`` of every ``ForkSafe`` object, which forgets the threads
# and devices of the parent.


class Order(enum.IntEnum):
    """The places of locks: a thread that holds a lock takes only locks of later places.

    The comments name the data under each lock. See [Note: the order of locks].
    """

    EXPLAINING = 0  # a prediction: it changes switches of the process, and torch's functions
    IMPORT = 1  # modules of public names, which are imported when they are first used
    ATTACH = 2  # attaching: one thread at a time
    CLASSES = 3  # the classes of attached modules
    PACKED = 4  # one packed value
    PLACE = 5  # the verifications of Recompute
    PLACED = 6  # one tensor of a Tiered
    OPENING = 7  # what works in this process for stores
    OWNER = 8  # the work of the owner of a runtime
    TAPE = 9  # the open group of a tape
    GROUP = 10  # what is read of one group of a tape
    IN_FLIGHT = 11  # the bytes in flight of a runtime (OnDisk), the queues of a courier (OnCpu)
    STAGING = 13  # copies between devices and the memory that files are written from
    LINK = 14  # the copies between one device and the host
    TURNS = 15  # the order in which the tensors of a Tiered are read
    QUEUE = 16  # the tensors of one tier
    POOL = 17  # memory that is used again
    SCRATCH_FILE = 18  # the used parts of a file
    BUDGET = 19  # bytes under a limit
    IO_STATS = 20  # the time during which threads move bytes
    WATCH = 21  # the records of a watcher
    COUNTERS = 22  # the counts of an attachment, and the index of its packed values
    PREDICTION = 23  # torch's operators and functions that stand in for others during a prediction


def _make(order: Order, again: bool) -> Any:
    return threading.RLock() if again else threading.Lock()


#: Makes every lock. Tests put another function here, which records when locks are taken.
make: Callable[[Order, bool], Any] = _make

# Each read, write and removal of a dict is atomic, so registering a lock needs no lock.
_shared: dict[int, tuple[Order, weakref.ref[Any]]] = {}
_numbers = itertools.count()


def shared_lock(order: Order) -> Any:
    """A reentrant lock for data that several threads use. The handlers of ``os.fork`` take it.

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
    """A lock for one tensor; reentrant if ``again``. The handlers of ``os.fork`` do not take it."""
    return make(order, again)


def shared_locks() -> list[tuple[Order, Any]]:
    """All shared locks that are alive, in their order."""
    found = [(order, number, reference()) for number, (order, reference) in list(_shared.items())]
    return [(order, lock) for order, _, lock in sorted(found, key=lambda each: each[:2]) if lock is not None]


#: Held while a public name is imported. See [Note: forks].
importing = shared_lock(Order.IMPORT)

Released = TypeVar("Released")


class ForkSafe(Generic[Released]):
    """The base of objects that several threads share: a lock, and a queue of releases.

    Destructors append to the queue without the lock.

    A method takes the lock and drains the queue before it does anything else::

        with self._lock:
            self._drain_releases()

    Args:
        order: the place of the lock.

    A subclass sets all attributes that its ``after_fork`` uses before it calls this ``__init__``, because another
    thread may fork right after that.

    Attributes:
        release: a function for destructors. It appends its argument to the queue, and the next thread that takes the
            lock calls ``_apply_release`` with it. It is a C function; see [Note: destructors].

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
        """Forget threads and devices of the parent. It is called in the child of a fork, under all shared locks."""

    def _apply_release(self, release: Released) -> None:
        """Make the change that a destructor has asked for. It is called under the lock, with one release at a time."""
        raise NotImplementedError

    def _drain_releases(self) -> None:
        """Apply the releases, the oldest first. The caller holds the lock."""
        # A signal handler may call report() while this thread drains, and so this method again. The inner call then
        # leaves the rest of the releases to the outer one.
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
    """A number that destructors change. A reader of the number holds a lock of its own.

    Attributes:
        change: a function for destructors, which adds its argument. It is a C function; see [Note: destructors].
        change_by: the same for all numbers of its argument, an iterable.

    >>> held = DeferredSum()
    >>> held.change(5); held.change(-2)
    >>> held.total()
    3
    """

    __slots__ = ("_changes", "_total", "change", "change_by")

    def __init__(self) -> None:
        self._total = 0
        self._changes: collections.deque[int] = collections.deque()
        self.change: Callable[[int], None] = self._changes.append
        self.change_by: Callable[[Iterable[int]], None] = self._changes.extend

    def __len__(self) -> int:
        """The number of changes that are not added up yet."""
        return len(self._changes)

    def total(self) -> int:
        """The sum of all changes so far."""
        try:
            while self._changes:
                # No interrupt comes between these lines, so each change is added once. See [Note: interrupts].
                self._total += self._changes[0]
                self._changes.popleft()
        except IndexError:  # after the loop's check, a signal handler called this method and emptied the deque
            return self.total()
        return self._total


class _TakenForFork(threading.local):
    """The locks that this thread has taken for a fork."""

    def __init__(self) -> None:
        self.locks: list[Any] = []


_fork_safe: weakref.WeakSet[ForkSafe[Any]] = weakref.WeakSet()
_taken = _TakenForFork()


def _before() -> None:
    # Two threads may fork at once, and both take the locks in their order. See [Note: forks].
    for _, lock in shared_locks():
        # Ctrl-C may come between these lines. The lock is in the list before it is taken, so `_after` releases it.
        _taken.locks.append(lock)
        lock.acquire()


def _after() -> None:
    while _taken.locks:
        # `release` raises an error if an interrupt came before the lock was taken, or after it was released.
        with contextlib.suppress(RuntimeError):
            _taken.locks[-1].release()
        _taken.locks.pop()


def _after_in_child() -> None:
    taken = set(map(id, _taken.locks))
    for _, lock in shared_locks():
        if id(lock) not in taken:  # another thread made this lock during the fork, and may have held it
            lock._at_fork_reinit()
    for shared in list(_fork_safe):
        shared.after_fork()
    _after()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_after_in_child)
    # If Ctrl-C comes during the fork, it ends the first handler that runs after the fork, and locks would stay taken.
    # This second handler releases them.
    os.register_at_fork(after_in_parent=_after, after_in_child=_after)
