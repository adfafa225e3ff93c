"""Who forks takes the locks in the order in which they are nested."""

from __future__ import annotations

import os
import threading

from disthooks import _forks


class Recorded:
    """A lock that remembers in which order such locks were taken."""

    def __init__(self, depth: int, taken: list[int]) -> None:
        self.fork_depth, self._taken, self._lock = depth, taken, threading.Lock()
        self.fork_lock = self

    def __enter__(self) -> bool:
        self._taken.append(self.fork_depth)
        return self._lock.__enter__()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def after_fork(self) -> None:
        pass


def test_outer_locks_are_taken_first() -> None:
    taken: list[int] = []
    every = [Recorded(depth, taken) for depth in (2, 0, 1, 2, 0)]
    for one in every:
        _forks.care_for(one)
    child = os.fork()
    if child == 0:
        os._exit(0 if taken == [0, 0, 1, 2, 2] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert taken == [0, 0, 1, 2, 2]
    assert not any(one._lock.locked() for one in every)
