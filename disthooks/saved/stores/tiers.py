"""Several stores, the fastest first: what does not fit into one goes to the next."""

from __future__ import annotations

import collections
import contextlib
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from disthooks.errors import StoreError, UsageError
from disthooks.saved.stores.base import Account, Functions, Store
from disthooks.saved.stores.traffic import StoreReport


@dataclass(frozen=True)
class OnDevice(Store):
    """Keep saved tensors where they are, up to a limit: the first tier of a :class:`Tiered`.

    Args:
        limit: most bytes at any time in this process, an int or text such as ``"8 GiB"``, or ``"64 GiB per node"``.

    Raises:
        UsageError: when ``limit`` is not a size.
        StoreError: in forward, at the limit.

    >>> store = OnDevice("1 MiB")
    >>> x = torch.ones(3)
    >>> store.get(store.put(x)).data_ptr() == x.data_ptr()
    True
    """

    limit: int | str
    account: Account = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "account", Account(self.limit, "OnDevice"))

    def __reduce__(self) -> tuple[Any, ...]:
        return OnDevice, (self.limit,)

    def moves(self, tensor: torch.Tensor) -> bool:
        """Never."""
        return False

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """Hold ``tensor``."""
        self.account.reserve(tensor.nbytes)
        return tensor

    def get(self, ticket: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return ticket

    def held(self, ticket: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return ticket

    def drop(self, ticket: torch.Tensor) -> None:
        """Let go of it."""
        self.account.release(ticket.nbytes)

    def report(self) -> tuple[StoreReport, ...]:
        """Bytes held."""
        return (StoreReport("OnDevice()", held=self.account.held, limit=self.account.limit),)


class _Placed:
    """A tensor in one of the tiers; it moves down when those that will be wanted sooner need its place."""

    __slots__ = ("__weakref__", "dropped", "lock", "ticket", "tier")

    def __init__(self) -> None:
        self.lock = threading.Lock()  # held while it is moved or read
        self.tier = -1  # nowhere
        self.ticket: Any = None
        self.dropped = False


@dataclass(frozen=True)
class Tiered(Store):
    """Several stores, the fastest first; when one is full, the tensors in it that will be wanted last go to the next.

    A backward wants last what was saved first, so the oldest make room for a new one. Where reading them back would
    take as long as writing the new one (a disk that is full), it is the new one that goes further down. A store that
    fails counts as full. What is in memory still when a write fails is not lost.

    Args:
        stores: two or more, such as ``OnDevice("8 GiB"), OnCpu("64 GiB per node"), OnDisk("/scratch")``.

    Raises:
        UsageError: when there are fewer than two, or one of them is no store that can be a tier.
        StoreError: in forward, when the last one is full too.

    >>> tiers = Tiered(OnDevice(8), OnDevice(100))
    >>> tickets = [tiers.put(torch.ones(1)) for _ in range(5)]
    >>> [report.held for report in tiers.report()]
    [8, 12]
    >>> tiers.tier_of(tickets[0]), tiers.tier_of(tickets[4])
    (1, 0)
    """

    stores: tuple[Store, ...]
    # The tensors of each tier, the oldest first.
    _queues: tuple[collections.deque[weakref.ref[_Placed]], ...] = field(init=False, repr=False, compare=False)
    _most: list[int] = field(init=False, repr=False, compare=False)  # their lengths from which they are sorted out
    _broken: set[int] = field(init=False, repr=False, compare=False)  # tiers that failed, until they are empty

    def __init__(self, *stores: Store) -> None:
        if len(stores) < 2 or not all(isinstance(s, Store) and not isinstance(s, (Functions, Tiered)) for s in stores):
            raise UsageError(f"Tiered takes two or more stores, not Functions and no other Tiered, got {stores!r}")
        object.__setattr__(self, "stores", stores)
        object.__setattr__(self, "worth", max(store.worth for store in stores))
        object.__setattr__(self, "_queues", tuple(collections.deque() for _ in stores))
        object.__setattr__(self, "_broken", set())
        object.__setattr__(self, "_most", [1024] * len(stores))

    def __reduce__(self) -> tuple[Any, ...]:
        return Tiered, self.stores

    def __repr__(self) -> str:
        return f"Tiered({', '.join(map(repr, self.stores))})"

    def moves(self, tensor: torch.Tensor) -> bool:
        """Whether any of the tiers takes it out of the memory it is in."""
        return any(store.moves(tensor) for store in self.stores)

    def put(self, tensor: torch.Tensor) -> _Placed:
        """Put ``tensor`` into the first tier, or the next one that takes it."""
        placed = _Placed()
        self._place(placed, tensor, 0)
        return placed

    def get(self, ticket: _Placed) -> torch.Tensor:
        """The tensor, from wherever it is."""
        with self._at(ticket):
            store = self.stores[ticket.tier]
            try:
                return store.get(ticket.ticket)
            except StoreError:
                # It may be the failure of another tensor, which is said once.
                held = store.held(ticket.ticket)
                return store.get(ticket.ticket) if held is None else held

    def prefetch(self, ticket: _Placed) -> None:
        """Have its tier read it ahead."""
        with self._at(ticket):
            self.stores[ticket.tier].prefetch(ticket.ticket)

    def drop(self, ticket: _Placed) -> None:
        """Let go of it."""
        ticket.dropped = True
        self._let_go(ticket)

    def wait(self) -> None:
        """Wait until all tiers have what was put into them."""
        for store in self.stores:
            store.wait()

    def rest(self) -> None:
        """Let go of what is idle in all tiers."""
        for store in self.stores:
            store.rest()

    def report(self) -> tuple[StoreReport, ...]:
        """One entry for each tier."""
        return tuple(report for store in self.stores for report in store.report())

    def tier_of(self, ticket: _Placed) -> int:
        """The number of the tier that a tensor is in now; the first is 0."""
        return ticket.tier

    def _place(self, placed: _Placed, tensor: torch.Tensor, first: int) -> None:
        """Put ``tensor`` into tier ``first``, or the next one that takes it."""
        why = ""  # not the error: its traceback would hold what this frame holds, in a cycle
        for tier in range(first, len(self.stores)):
            try:
                placed.ticket = self._put_at(tier, tensor)
            except StoreError as error:
                why = str(error)
                continue
            placed.tier = tier
            self._line_up(tier, placed)
            return
        raise StoreError(f"{self!r}: the last tier is full, or failed: {why}", wanted=tensor.nbytes)

    def _put_at(self, tier: int, tensor: torch.Tensor) -> Any:
        """A ticket of one tier; StoreError when there is no way to make room there."""
        store = self.stores[tier]
        self._mend(tier)
        while True:
            try:
                return store.put(tensor)
            except StoreError:
                account = getattr(store, "account", None)
                if not isinstance(account, Account) or account.has_room(tensor.nbytes):
                    self._broken.add(tier)  # it is not its limit
                    raise
                if not account.could_have_room(tensor.nbytes) or not self._make_room(tier):
                    raise

    def _mend(self, tier: int) -> None:
        """Try a tier that failed again once it is empty."""
        if tier in self._broken:
            account = getattr(self.stores[tier], "account", None)
            if isinstance(account, Account) and account.held:
                raise StoreError(f"{self.stores[tier]!r} failed, and is not empty yet")
            self._broken.discard(tier)

    def _make_room(self, tier: int) -> bool:
        """Move the oldest tensor of ``tier`` further down; False when that cannot be done."""
        queue = self._queues[tier]
        if tier + 1 == len(self.stores):
            return False
        while (first := _first(queue)) is not None:
            oldest = first()
            if oldest is None or oldest.dropped or oldest.tier != tier:
                _remove(queue, first)
                continue
            with self._at(oldest):
                if oldest.tier != tier:
                    continue  # another thread was faster
                held = self.stores[tier].held(oldest.ticket)
                if held is None:
                    return False  # it would have to be read
                before = oldest.ticket
                self._place(oldest, held, tier + 1)
                self.stores[tier].drop(before)
            return True
        return False

    def _line_up(self, tier: int, placed: _Placed) -> None:
        """``placed`` is the newest of ``tier``; those that are gone are sorted out from time to time."""
        queue = self._queues[tier]
        if len(queue) > self._most[tier]:
            for _ in range(len(queue)):
                first = _first(queue)
                other = None if first is None else first()
                if first is not None and _remove(queue, first) and other is not None and other.tier == tier:
                    queue.append(first)
            self._most[tier] = 2 * len(queue) + 1024
        queue.append(weakref.ref(placed))

    @contextlib.contextmanager
    def _at(self, placed: _Placed) -> Iterator[None]:
        """Nobody else is at it; who drops it meanwhile leaves that to this one."""
        try:
            with placed.lock:
                yield
        finally:
            self._let_go(placed)

    def _let_go(self, placed: _Placed) -> None:
        """Drop it if it is to be dropped, unless somebody is at it, who will then."""
        while placed.dropped and placed.tier >= 0 and placed.lock.acquire(blocking=False):
            try:
                tier, placed.tier = placed.tier, -1
                if tier >= 0:
                    self.stores[tier].drop(placed.ticket)
            finally:
                placed.lock.release()


_Queue = collections.deque["weakref.ref[_Placed]"]


def _first(queue: _Queue) -> weakref.ref[_Placed] | None:
    """The oldest; other threads may take it away."""
    try:
        return queue[0]
    except IndexError:
        return None


def _remove(queue: _Queue, first: weakref.ref[_Placed]) -> bool:
    """Take ``first`` out, unless another thread has."""
    try:
        queue.remove(first)
    except ValueError:
        return False
    return True
