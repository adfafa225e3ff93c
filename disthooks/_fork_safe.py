"""Every lock of the library is made here, and they all have one order.

What a process has to do at a fork: in the child the threads that held locks are not there to release them.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import itertools
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

# [Note: the order of locks]
# A thread that holds a lock asks only for locks that come later in ``Order``. So threads cannot wait for each other in
# a circle: whoever holds the last of the locks that are held waits for none. There are three more rules.
#
# - ``os.fork`` takes all shared locks, in this order, so that what they guard is whole in the child.
#   The locks of single tensors (``own``) are not taken: there are too many.
# - Two locks of the same place are never held together, with two exceptions. A packed value that is computed again asks
#   for those it is computed from, which are older in the graph. A tensor that moves down in a ``Tiered`` may push one
#   out of the tier below, never one of a tier above.
# - A destructor takes no lock at all. A collection may begin anywhere, so in a thread that holds any lock. Destructors
#   append to a deque, which whoever takes the lock next works off. The frame of a generator that a collection ends is a
#   destructor in this sense.
#
# Shared locks can be taken again by the thread that has them, so a signal handler may call ``report()`` at any time.
# ``tests/laws/test_locks.py`` records what is asked for under what, and forks under each pair.


class Order(enum.IntEnum):
    """The places of locks: a thread that holds one asks only for later ones. See [Note: the order of locks]."""

    ATTACH = 1  # save_activations: one thread at a time
    CLASSES = 2  # the classes of attached modules
    PACKED = 3  # one packed value
    PLACE = 4  # what Recompute has proven
    PLACED = 5  # one tensor of a Tiered
    OPENING = 6  # the movers and scratch files of OnDisk that exist
    MOVER = 7  # the queues of a mover (OnDisk) or of a courier (OnCpu)
    WAY = 8  # whether there is a way from the GPU to the disk past the host
    TRANSFER = 9  # what a mover has under way between devices and host
    LINK = 10  # the copies between one device and the host
    TURNS = 11  # in which order the tensors of a Tiered are read
    QUEUE = 12  # what lies in one tier
    POOL = 13  # memory that is used again
    SCRATCH_FILE = 14  # which part of a file is used by whom
    BUDGET = 15  # bytes under a limit
    IO_STATS = 16  # time in which a thread moves bytes
    WATCH = 17  # what a watcher has seen
    COUNTERS = 18  # the counts of an attachment, and what is packed


def _make(order: Order, again: bool) -> Any:
    return threading.RLock() if again else threading.Lock()


#: Makes every lock; tests put one here that records.
make: Callable[[Order, bool], Any] = _make

# Reads, writes and removals of a dict are atomic: to register a lock takes none.
_shared: dict[int, tuple[Order, weakref.ref[Any]]] = {}
_numbers = itertools.count()


def shared(order: Order) -> Any:
    """A lock for what several threads use. Its thread may take it again, and ``os.fork`` takes it.

    >>> lock = shared(Order.COUNTERS)
    >>> with lock, lock:
    ...     (Order.COUNTERS, lock) in shared_locks()
    True
    """
    lock, number = make(order, True), next(_numbers)
    # When the lock dies, Python calls ``_shared.pop(number, reference)``: a C function, so no interrupt comes between.
    _shared[number] = order, weakref.ref(lock, functools.partial(_shared.pop, number))
    return lock


def own(order: Order, again: bool = True) -> Any:
    """A lock for one tensor; its thread may take it ``again``. ``os.fork`` does not take it."""
    return make(order, again)


def shared_locks() -> list[tuple[Order, Any]]:
    """All shared locks that are alive, in their order."""
    found = [(order, number, reference()) for number, (order, reference) in list(_shared.items())]
    return [(order, lock) for order, _, lock in sorted(found, key=lambda each: each[:2]) if lock is not None]


class Forked(Protocol):
    """Has something to do in the child of a fork."""

    def after_fork(self) -> None:
        """Called in the child, before any of its other code runs; this thread holds all shared locks."""


class _Held(threading.local):
    """The locks that this thread took for a fork."""

    def __init__(self) -> None:
        self.locks: list[Any] = []


_all: weakref.WeakSet[Forked] = weakref.WeakSet()
_held = _Held()


def care_for(one: Forked) -> None:
    """Call ``one.after_fork()`` in the child of every fork, as long as ``one`` lives."""
    _all.add(one)


def _before() -> None:
    # See [Note: the order of locks]. Two threads may fork at once: both take the locks in that order.
    for _, lock in shared_locks():
        _held.locks.append(lock)  # first: Ctrl-C may come between these lines, and a lock must not stay taken
        lock.acquire()


def _after() -> None:
    while _held.locks:
        with contextlib.suppress(RuntimeError):  # an interrupt came before it was taken, or after it was released
            _held.locks[-1].release()
        _held.locks.pop()


def _after_in_child() -> None:
    taken = set(map(id, _held.locks))
    for _, lock in shared_locks():
        if id(lock) not in taken:  # another thread made it meanwhile, and may have had it
            lock._at_fork_reinit()
    for one in list(_all):
        one.after_fork()
    _after()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_after_in_child)
    # Ctrl-C that comes during the fork ends what runs first after it, and every lock would stay taken: once more.
    os.register_at_fork(after_in_parent=_after, after_in_child=_after)
