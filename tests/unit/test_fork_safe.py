"""The base of what threads share: releases are applied once, by whoever takes the lock, whatever comes between."""

from __future__ import annotations

import gc
import os
import signal
import threading
from typing import Any

import pytest

from disthooks._fork_safe import DeferredSum, ForkSafe, Order


class Names(ForkSafe[str]):
    """Notes what it applies, and does ``then`` once, in the middle of the first release."""

    def __init__(self, then: Any = None, may_repeat: bool = True) -> None:
        self.applied: list[str] = []
        self.then, self.forks = then, 0
        self._may_repeat = may_repeat  # type: ignore[misc]
        super().__init__(Order.POOL)

    def after_fork(self) -> None:
        self.forks += 1

    def _apply_release(self, release: str) -> None:
        then, self.then = self.then, None
        if then is not None:
            then(self)
        self.applied.append(release)

    def drained(self) -> list[str]:
        with self._lock:
            self._drain_releases()
            return list(self.applied)


def test_releases_are_applied_in_their_order_by_whoever_takes_the_lock() -> None:
    names = Names()
    threads = [threading.Thread(target=names.release, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
        thread.join()
    assert names.applied == []
    assert names.drained() == ["a", "b", "c"] == names.drained()


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
    assert names.drained() == ["leased"]


@pytest.mark.parametrize("may_repeat", [True, False])
def test_an_interrupt_repeats_a_release_or_loses_it_and_never_the_next_one(may_repeat: bool) -> None:
    names = Names(lambda names: signal.raise_signal(signal.SIGINT), may_repeat)
    names.release("first")
    names.release("second")
    with pytest.raises(KeyboardInterrupt):
        names.drained()
    assert names.drained() == (["first", "second"] if may_repeat else ["second"])


@pytest.mark.parametrize("may_repeat", [True, False])
def test_a_signal_handler_that_drains_in_the_middle_loses_and_repeats_nothing(may_repeat: bool) -> None:
    names = Names(Names.drained, may_repeat)
    for name in "abc":
        names.release(name)
    assert names.drained() == ["a", "b", "c"]


def test_a_deferred_sum_counts_what_many_threads_change() -> None:
    held = DeferredSum()
    threads = [threading.Thread(target=lambda: [held.change(i) for i in range(100)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert held.total() == 4 * 4950 == held.total()


@pytest.mark.forks
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_child_is_told_of_the_fork_and_its_parent_is_not() -> None:
    names = Names()
    child = os.fork()
    if child == 0:
        os._exit(names.forks if names._lock.acquire(timeout=5) else 9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert names.forks == 0
