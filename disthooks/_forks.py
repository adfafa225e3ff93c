"""What a process has to do at a fork: in the child the threads that held locks are not there to release them."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from typing import Protocol


class Forked(Protocol):
    """Has a lock that no other thread may hold during a fork, and perhaps more to do in the child.

    One that is taken while another's is held has a ``fork_depth``, larger than the other's, which is 0 where there is
    none: who forks takes them in that order, or it and a thread would wait for each other.
    """

    @property
    def fork_lock(self) -> contextlib.AbstractContextManager[bool]:
        """Held during a fork by who forks, so that what it guards is whole in the child."""

    def after_fork(self) -> None:
        """Called in the child, under the lock."""


_all: weakref.WeakSet[Forked] = weakref.WeakSet()
_lock = threading.Lock()
_held: list[Forked] = []


def care_for(one: Forked) -> None:
    """Take care of ``one`` at every fork, as long as it lives."""
    with _lock:
        _all.add(one)


def _before() -> None:
    _lock.acquire()
    for one in sorted(_all, key=lambda one: getattr(one, "fork_depth", 0)):
        one.fork_lock.__enter__()
        _held.append(one)


def _after() -> None:
    while _held:
        with contextlib.suppress(RuntimeError):  # an interrupt came when it was released already
            _held[-1].fork_lock.__exit__(None, None, None)
        _held.pop()
    with contextlib.suppress(RuntimeError):
        _lock.release()


def _after_in_child() -> None:
    for one in _held:
        one.after_fork()
    _after()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after, after_in_child=_after_in_child)
    # Ctrl-C that comes during the fork ends what runs first after it, and every lock would stay taken: once more.
    os.register_at_fork(after_in_parent=_after, after_in_child=_after)
