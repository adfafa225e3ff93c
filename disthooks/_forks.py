"""What a process has to do at a fork: in the child the threads that held locks are not there to release them."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from typing import Any, Protocol

from disthooks._locks import shared_locks


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
