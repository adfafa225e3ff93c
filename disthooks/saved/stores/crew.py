"""A few threads that work as long as there is something to do."""

from __future__ import annotations

import atexit
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from disthooks._forks import care_for
from disthooks._locks import Order, shared
from disthooks.errors import StoreError

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
