"""Locks, and the base class of objects that threads share and that destructors change."""

from __future__ import annotations

import _thread
import collections
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

# [Note: locks]
# A thread that holds a lock takes only locks that come later in this list, so threads never wait in a circle:
#
# 1. one attachment at a time (``saved/attach.py``), then the classes of modules; the round of a ``fit``;
# 2. one saved tensor (``saved/packed.py``): it is offloaded, restored or computed again by one thread at a time. A
#    tensor that is computed again takes the locks of the older tensors that it is computed from;
# 3. the stores: first ``Tiered``, then the stores behind it, and then memory, files and limits.
#
# The locks of counters and of what watches come last: code that holds one of them calls no other object. All locks are
# reentrant, because a signal handler may call ``report()`` at any time.

# [Note: destructors]
# Python may collect garbage in any line: in a thread that holds a lock, or inside a method of the object to which the
# destructor belongs. So a destructor takes no lock and waits for nothing. It appends a release to a deque;
# ``deque.append`` is atomic. The next thread that takes the lock applies the releases before it does anything else.
# When Python exits, the names of a module may be gone before its objects are. So a destructor uses only its arguments
# and attributes.

# [Note: interrupts and forks]
# Ctrl-C may raise KeyboardInterrupt in the main thread after any bytecode. After it, no hook stays open, no thread
# waits for ever, no gradient is wrong, and when the graphs are gone all bytes are given back: tickets give their bytes
# back in destructors. A count may be wrong if Ctrl-C came between two bytecodes that change it.
#
# A forked child has only the thread that forked. Its locks are free. What the parent stored elsewhere than in memory
# cannot be read there, and the error says so. ``open()`` of a store makes a new runtime.
#
# Python has a lock for each module that is being imported, and does not free it in a child. If another thread of the
# parent was importing the module of a public name, a child that uses this name would wait for ever. So a fork waits
# until such an import is over. It waits for nothing else.

_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def new_lock() -> Any:
    """A reentrant lock. It is free in a forked child.

    >>> lock = new_lock()
    >>> with lock, lock:
    ...     pass
    """
    lock = threading.RLock()
    _locks.add(lock)
    return lock


#: The class of a reentrant lock. An object that is its own lock has it as its base; checkers of types call it final.
ReentrantLock: Any = _thread.RLock


#: Held while a public name is imported. See [Note: interrupts and forks].
importing = new_lock()


def _free_locks() -> None:
    for lock in list(_locks):
        lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=importing.acquire, after_in_parent=importing.release, after_in_child=_free_locks)

Released = TypeVar("Released")


class Shared(Generic[Released]):
    """The base of objects that several threads share: a lock, and a queue of releases for destructors.

    A method takes the lock and applies the releases before it does anything else::

        with self._lock:
            self._apply_releases()

    Attributes:
        release: a function for destructors. It appends its argument to the queue, and the next thread that takes the
            lock calls ``_apply_release`` with it. See [Note: destructors].

    >>> class Pool(Shared[str]):
    ...     def _apply_release(self, release):
    ...         print("idle again:", release)
    >>> pool = Pool()
    >>> pool.release("a block")
    >>> with pool._lock:
    ...     pool._apply_releases()
    idle again: a block
    """

    def __init__(self) -> None:
        self._lock = new_lock()
        self._releases: collections.deque[Released] = collections.deque()
        self.release: Callable[[Released], None] = self._releases.append
        self._is_applying = False

    def _apply_release(self, release: Released) -> None:
        """Make the change that a destructor has asked for. It is called under the lock, with one release at a time.

        After Ctrl-C it is called once more for the same release.
        """
        raise NotImplementedError

    def _apply_releases(self) -> None:
        """Apply the releases, the oldest first. The caller holds the lock."""
        if self._is_applying:  # a signal handler came in the middle
            return
        self._is_applying = True
        try:
            while self._releases:
                self._apply_release(self._releases[0])
                self._releases.popleft()
        finally:
            self._is_applying = False


class DeferredSum:
    """A number that destructors change. A reader of the number holds a lock of its own.

    Attributes:
        change: a function for destructors, which adds its argument. See [Note: destructors].

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
        while self._changes:
            self._total += self._changes.popleft()
        return self._total
