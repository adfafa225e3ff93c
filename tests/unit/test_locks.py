"""What threads share: releases are applied once, by whoever takes the lock, and a child's locks are free."""

from __future__ import annotations

import gc
import os
import threading
from typing import Any

import pytest

from disthooks._locks import DeferredSum, Shared, new_lock
from tests.support.threads import together


class Names(Shared[str]):
    """Notes what it applies."""

    def __init__(self) -> None:
        self.applied: list[str] = []
        super().__init__()

    def _apply_release(self, release: str) -> None:
        self.applied.append(release)

    def all(self) -> list[str]:
        with self._lock:
            self._apply_releases()
            return list(self.applied)


def test_releases_are_applied_in_their_order_by_whoever_takes_the_lock() -> None:
    names = Names()
    threads = [threading.Thread(target=names.release, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
        thread.join()
    assert names.applied == []
    assert names.all() == ["a", "b", "c"] == names.all()


def test_a_destructor_releases_while_another_thread_has_the_lock() -> None:
    names = Names()

    class Leased:
        def __del__(self) -> None:
            names.release("leased")

    has_lock, may_go = threading.Event(), threading.Event()

    def hold() -> None:
        with names._lock:
            has_lock.set()
            may_go.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert has_lock.wait(60)
    leased: Any = Leased()
    leased.itself = leased  # a cycle: a collection ends it
    del leased
    gc.collect()
    may_go.set()
    thread.join(60)
    assert names.all() == ["leased"]


def test_a_deferred_sum_counts_what_many_threads_change() -> None:
    held = DeferredSum()
    together([lambda: [held.change(i) for i in range(100)]] * 4)
    assert held.total() == 4 * 4950 == held.total()


@pytest.mark.forks
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_lock_that_another_thread_holds_is_free_in_a_child() -> None:
    lock, holds, may_go = new_lock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            holds.set()
            may_go.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert holds.wait(60)
    child = os.fork()
    if child == 0:
        os._exit(0 if lock.acquire(timeout=60) else 1)
    may_go.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
