"""The threads that make the system calls of a runtime, which may block."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable

from disthooks.errors import StoreError
from disthooks.saved.stores.tape import Group

_MOST = 2  # threads
_LOOK = 1.0  # seconds after which an idle thread looks whether the owner is alive

#: Moves a group. It may return what is to be done once the next group may begin. It must not raise an error.
Move = Callable[[Group], "Callable[[], None] | None"]


class _Worker:
    """A thread, and the group that it moves."""

    def __init__(self, move: Move, jobs: queue.SimpleQueue[Group | None], bell: queue.SimpleQueue[None]) -> None:
        self.job: Group | None = None
        self._owner = threading.current_thread()
        self.thread = threading.Thread(target=self._run, args=(move, jobs, bell), name="disthooks crew", daemon=True)

    def _run(self, move: Move, jobs: queue.SimpleQueue[Group | None], bell: queue.SimpleQueue[None]) -> None:
        while True:
            try:
                group = jobs.get(timeout=_LOOK)
            except queue.Empty:
                if self._owner.is_alive():
                    continue
                return  # it was killed, and so it did not end this thread
            if group is None:
                return
            self.job = group
            del group  # the thread must not hold the group, and so its tensors, while it waits for the next one
            afterwards = move(self.job)
            self.job = None
            bell.put(None)
            if afterwards is not None:
                afterwards()


class Crew:
    """Up to two threads. They start when there is work, and any of them may be killed. The owner alone uses them.

    Args:
        bell: gets None when a group was moved.
    """

    def __init__(self, bell: queue.SimpleQueue[None]) -> None:
        self._bell = bell
        self._workers: list[_Worker] = []
        self._jobs: queue.SimpleQueue[Group | None] = queue.SimpleQueue()

    def __len__(self) -> int:
        """How many groups wait or are moved."""
        return self._jobs.qsize() + sum(worker.job is not None for worker in self._workers)

    @property
    def is_full(self) -> bool:
        """Whether a group would have to wait."""
        return len(self) >= _MOST

    @property
    def threads(self) -> list[threading.Thread]:
        """The threads."""
        return [worker.thread for worker in self._workers]

    def give(self, group: Group, move: Move) -> None:
        """Let a thread ``move`` a ``group``. This thread does it if the system starts none."""
        if len(self._workers) < min(_MOST, len(self) + 1):
            worker = _Worker(move, self._jobs, self._bell)
            self._workers.append(worker)  # first: if the owner is killed now, the next one knows the thread
            try:
                worker.thread.start()
            except RuntimeError:
                self._workers.remove(worker)
        if self._workers:
            self._jobs.put(group)
        elif (afterwards := move(group)) is not None:
            afterwards()

    def has(self, group: Group) -> bool:
        """Whether a thread moves ``group`` now."""
        return any(worker.job is group for worker in self._workers)

    def bury(self) -> list[Group | None]:
        """Forget the threads that were killed. Returns for each the group that it moved, or None."""
        dead = [worker for worker in self._workers if not worker.thread.is_alive()]
        self._workers = [worker for worker in self._workers if worker not in dead]
        return [worker.job for worker in dead]

    def take_back(self) -> list[Group]:
        """The groups that nobody has begun to move. The crew forgets them."""
        found: list[Group] = []
        with contextlib.suppress(queue.Empty):
            while (group := self._jobs.get_nowait()) is not None:
                found.append(group)
        return found

    def end(self) -> None:
        """Let the threads end when they have moved what they have."""
        for _ in self._workers:
            self._jobs.put(None)
        # A thread of a later time has another queue, so it does not take what ends these threads.
        self._workers, self._jobs = [], queue.SimpleQueue()


def no_thread(error: RuntimeError) -> StoreError:
    """The error for a system that starts no thread."""
    return StoreError(
        f"no thread can be started to move saved tensors: {error}. The process, its user or its container has reached "
        "its limit of threads. Raise the limit (ulimit -u, pids.max, docker run --pids-limit), or use fewer threads "
        "(OMP_NUM_THREADS, workers of a DataLoader). The tensors that were saved before are still in memory, and their "
        "backward can run"
    )
