"""Locks that write down what is asked for while they are held."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from disthooks import _fork_safe
from disthooks._fork_safe import Order


class Orders:
    """Pairs of places, ``(held, asked for)``, and how they were seen."""

    def __init__(self) -> None:
        self.pairs: set[tuple[Order, Order]] = set()
        self.wrong: list[str] = []
        self.mine = threading.local()

    def asked(self, lock: Watched) -> None:
        held: list[Watched] = self.mine.__dict__.setdefault("held", [])
        if lock in held:
            return  # again
        for other in held:
            self.pairs.add((other.order, lock.order))
            same = other.order == lock.order and lock.order in (Order.PACKED, Order.PLACED)
            if other.order > lock.order or (other.order == lock.order and not same):
                self.wrong.append(f"{lock.order.name} under {other.order.name}")


class Watched:
    """A lock of the library that tells ``orders`` what happens to it, and ``when_asked``, a test's own function."""

    def __init__(self, orders: Orders, order: Order, again: bool) -> None:
        self.orders, self.order = orders, order
        self._lock: Any = threading.RLock() if again else threading.Lock()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if blocking:
            self.orders.asked(self)
        taken: bool = self._lock.acquire(blocking, timeout)
        if taken:
            self.orders.mine.__dict__.setdefault("held", []).append(self)
        return taken

    def release(self) -> None:
        self._lock.release()
        held = self.orders.mine.held
        del held[len(held) - 1 - held[::-1].index(self)]

    def locked(self) -> bool:
        return bool(self._lock.locked())

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()

    def _is_owned(self) -> bool:
        return bool(self._lock._is_owned())

    def _release_save(self) -> Any:
        held, self.orders.mine.held = self.orders.mine.held, [o for o in self.orders.mine.held if o is not self]
        return self._lock._release_save(), held.count(self)

    def _acquire_restore(self, state: Any) -> None:
        self.orders.asked(self)
        self._lock._acquire_restore(state[0])
        self.orders.mine.held.extend([self] * state[1])

    def _at_fork_reinit(self) -> None:
        self._lock._at_fork_reinit()


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch) -> Iterator[Orders]:
    """What is asked for under what, by everything that is made in this test."""
    from disthooks.saved import attach, module_class
    from disthooks.saved.stores import base, device_copy, disk, pools

    found = Orders()
    monkeypatch.setattr(_fork_safe, "make", lambda order, again: Watched(found, order, again))
    monkeypatch.setattr(module_class, "_lock", _fork_safe.shared_lock(Order.CLASSES))
    monkeypatch.setattr(attach, "_attaching", _fork_safe.shared_lock(Order.ATTACH))
    opening = _fork_safe.shared_lock(Order.OPENING)
    for module in (base, disk):
        monkeypatch.setattr(module, "opening", opening)
    pools.pool_of.cache_clear()
    device_copy.link_of.cache_clear()
    yield found
    pools.pool_of.cache_clear()
    device_copy.link_of.cache_clear()
