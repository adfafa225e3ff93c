"""Saved tensors where they are.

Several stores, the fastest first: what does not fit into one goes to the next.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from disthooks._registry import register
from disthooks._streams import handed_over, on, stream_of
from disthooks._tensors import resident
from disthooks.errors import StoreError, UsageError
from disthooks.saved.stores.base import ByteBudget, Functions, Store, StoreReport
from disthooks.saved.stores.order import Placed, Queue, Turns


@register("store")
@dataclass(frozen=True)
class OnDevice(Store):
    """Keep saved tensors where they are, up to a limit: the first tier of a :class:`Tiered`, or behind codecs.

    Args:
        limit: most bytes at any time in this process, an int or text such as ``"8 GiB"``, or ``"64 GiB per node"``;
            None for no limit.

    Raises:
        UsageError: when ``limit`` is not a size.
        StoreError: in forward, at the limit.

    >>> store = OnDevice("1 MiB")
    >>> x = torch.ones(3)
    >>> store.get(store.put(x)).data_ptr() == x.data_ptr()
    True
    """

    limit: int | str | None = None
    budget: ByteBudget = field(init=False, repr=False, compare=False)
    #: Stores that take what does not fit here, by identity; what they hold on the device counts, too.
    below: weakref.WeakValueDictionary[int, Store] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", ByteBudget(self.limit, "OnDevice"))
        object.__setattr__(self, "below", weakref.WeakValueDictionary())

    def __reduce__(self) -> tuple[Any, ...]:
        return OnDevice, (self.limit,)

    def leaves_memory(self, tensor: torch.Tensor) -> bool:
        """Never."""
        return False

    def put(self, tensor: torch.Tensor) -> _There:
        """Hold ``tensor``."""
        nbytes = max(tensor.nbytes, resident(tensor))  # a view keeps all of its storage
        self.budget.reserve(nbytes)
        return _There(tensor, stream_of(tensor), nbytes)

    def get(self, ticket: _There) -> torch.Tensor:
        """The tensor itself, for the current stream."""
        return ticket.tensor if ticket.stream is None else handed_over(ticket.tensor, ticket.stream)

    def peek(self, ticket: _There) -> torch.Tensor:
        """The tensor itself."""
        return ticket.tensor

    def drop(self, ticket: _There) -> None:
        """Let go of it."""
        self.budget.release(ticket.nbytes)

    def report(self) -> tuple[StoreReport, ...]:
        """Bytes held."""
        return (StoreReport("OnDevice()", held=self.budget.held, limit=self.budget.limit),)


class _There(NamedTuple):
    """A tensor, and the stream of its device that filled it, if it is an accelerator's."""

    tensor: torch.Tensor
    stream: torch.Stream | None
    nbytes: int


_LOOK = 8  # tensors: of what will be wanted next, so many are looked at
_AHEAD = 32 << 20  # bytes of them that a tier is told of


def _tiered(stores: Sequence[Store]) -> Tiered:
    return Tiered(*stores)


@register("store", build=_tiered)
@dataclass(frozen=True)
class Tiered(Store):
    """Several stores, the fastest first; when one is full, the tensors in it that will be wanted last go to the next.

    A backward wants last what was saved first, so the oldest make room for a new one. Where reading them back would
    take as long as writing the new one (a disk that is full), it is the new one that goes further down. A store that
    fails counts as full. What is in memory still when a write fails is not lost.

    Args:
        stores: two or more, such as ``OnDevice("8 GiB"), OnCpu("64 GiB per node"), OnDisk("/scratch")``.

    Raises:
        UsageError: when there are fewer than two, one of them is no store that can be a tier, or an ``OnDevice`` that
            has stores behind it has no limit.
        StoreError: in forward, when the last one is full too.

    >>> tiers = Tiered(OnDevice(8), OnDevice(100))
    >>> tickets = [tiers.put(torch.ones(1)) for _ in range(5)]
    >>> [report.held for report in tiers.report()]
    [8, 12]
    >>> tiers.tier_of(tickets[0]), tiers.tier_of(tickets[4])
    (1, 0)
    """

    stores: tuple[Store, ...]
    _queues: tuple[Queue, ...] = field(init=False, repr=False, compare=False)  # the tensors of each tier
    _turns: Turns = field(init=False, repr=False, compare=False)
    _largest: list[int] = field(init=False, repr=False, compare=False)  # bytes of one tensor
    _broken: set[int] = field(init=False, repr=False, compare=False)  # tiers that failed, until they are empty

    def __init__(self, *stores: Store) -> None:
        if len(stores) < 2 or not all(isinstance(s, Store) and not isinstance(s, (Functions, Tiered)) for s in stores):
            raise UsageError(f"Tiered takes two or more stores, not Functions and no other Tiered, got {stores!r}")
        if any(isinstance(store, OnDevice) and store.budget.limit is None for store in stores[:-1]):
            raise UsageError(
                f"{stores!r}: OnDevice() without a limit takes everything, and the stores behind it get nothing; "
                "give it one, such as OnDevice('8 GiB')"
            )
        object.__setattr__(self, "stores", stores)
        object.__setattr__(self, "min_bytes", max(store.min_bytes for store in stores))
        object.__setattr__(self, "_queues", tuple(map(Queue, range(len(stores)))))
        object.__setattr__(self, "_turns", Turns())
        object.__setattr__(self, "_largest", [0])
        object.__setattr__(self, "_broken", set())
        if isinstance(stores[0], OnDevice):
            stores[0].below.update({id(store): store for store in stores[1:]})

    def __reduce__(self) -> tuple[Any, ...]:
        return Tiered, self.stores

    def __repr__(self) -> str:
        return f"Tiered({', '.join(map(repr, self.stores))})"

    def leaves_memory(self, tensor: torch.Tensor) -> bool:
        """Whether any of the tiers takes it out of the memory it is in."""
        return any(store.leaves_memory(tensor) for store in self.stores)

    def put(self, tensor: torch.Tensor) -> Placed:
        """Put ``tensor`` into the first tier, or the next one that takes it."""
        placed = Placed(tensor.nbytes, stream_of(tensor))
        self._turns.put(placed)
        try:
            if placed.at is not None:
                self._make_way(tensor.nbytes)
            self._place(placed, tensor, 0)
        except BaseException:
            self.drop(placed)
            raise
        if placed.at is not None and placed.tier > 0:
            self._leave_room(0)
        return placed

    def get(self, ticket: Placed) -> torch.Tensor:
        """The tensor, from wherever it is."""
        following = self._turns.read(ticket, _LOOK)
        if ticket.at is not None:
            self._leave_room(0)
        with self._at(ticket):
            ticket.asked = False
            store = self.stores[ticket.tier]
            try:
                tensor = store.get(ticket.ticket)
            except StoreError:
                # It may be the failure of another tensor, which is said once.
                held = store.peek(ticket.ticket)
                tensor = store.get(ticket.ticket) if held is None else held
                tensor = tensor if ticket.at is None else tensor.to(ticket.at.device)
        self._look_ahead(following)
        return tensor

    def pop_transfer_seconds(self, ticket: Placed) -> float:
        """Seconds of the tier that it is in."""
        with self._at(ticket):
            return self.stores[ticket.tier].pop_transfer_seconds(ticket.ticket)

    def prefetch(self, ticket: Placed) -> None:
        """Have its tier read it ahead."""
        with self._at(ticket):
            self.stores[ticket.tier].prefetch(ticket.ticket)

    def drop(self, ticket: Placed) -> None:
        """Let go of it."""
        ticket.dropped = True
        self._turns.drop(ticket)
        self._let_go(ticket)

    def wait(self) -> None:
        """Wait until all tiers have what was put into them."""
        for store in self.stores:
            store.wait()

    def release_idle(self) -> None:
        """Let go of what is idle in all tiers."""
        for store in self.stores:
            store.release_idle()

    def report(self) -> tuple[StoreReport, ...]:
        """One entry for each tier."""
        return tuple(report for store in self.stores for report in store.report())

    def tier_of(self, ticket: Placed) -> int:
        """The number of the tier that a tensor is in now; the first is 0."""
        return ticket.tier

    def _place(self, placed: Placed, tensor: torch.Tensor, first: int) -> None:
        """Put ``tensor`` into tier ``first``, or the next one that takes it."""
        why = ""  # not the error: its traceback would hold what this frame holds, in a cycle
        for tier in range(first, len(self.stores)):
            try:
                placed.ticket = self._put_at(tier, tensor, placed.at)
            except StoreError as error:
                why = str(error)
                continue
            placed.tier = tier
            self._queues[tier].add(placed, self._turns.of(placed))
            return
        raise StoreError(f"{self!r}: the last tier is full, or failed: {why}", wanted=tensor.nbytes)

    def _put_at(self, tier: int, tensor: torch.Tensor, at: torch.Stream | None) -> Any:
        """A ticket of one tier; StoreError when there is no way to make room there."""
        store = self.stores[tier]
        self._mend(tier)
        while True:
            try:
                return store.put(tensor) if at is None or not tensor.is_cpu else store.put_from_host(tensor, at)
            except StoreError:
                budget = getattr(store, "budget", None)
                if not isinstance(budget, ByteBudget) or budget.has_room(tensor.nbytes):
                    self._broken.add(tier)  # it is not its limit
                    raise
                if not budget.could_have_room(tensor.nbytes) or not self._make_room(tier):
                    raise

    def _mend(self, tier: int) -> None:
        """Try a tier that failed again once it is empty."""
        if tier in self._broken:
            budget = getattr(self.stores[tier], "budget", None)
            if isinstance(budget, ByteBudget) and budget.held:
                raise StoreError(f"{self.stores[tier]!r} failed, and is not empty yet")
            self._broken.discard(tier)

    def _make_room(self, tier: int, nbytes: int = 0) -> bool:
        """Move the tensor of ``tier`` that will be wanted last further down, for a new one of ``nbytes``.

        False when that cannot be done.
        """
        if tier + 1 == len(self.stores):
            return False
        while (last := self._queues[tier].last()) is not None:
            with self._at(last):
                if last.tier != tier:
                    continue  # another thread was faster
                held = self.stores[tier].peek(last.ticket)
                if held is None:
                    return False  # it would have to be read
                before = last.ticket
                if last.at is None:
                    self._place(last, held, tier + 1)
                else:
                    self._leave_room(nbytes - last.nbytes)
                    with on(last.at):  # what filled it, and what the next tier has to come after
                        self._place(last, held, tier + 1)
                self.stores[tier].drop(before)
            return True
        return False

    # -- the device

    def _make_way(self, nbytes: int) -> None:
        """Have what is on the device leave room for ``nbytes`` more, which are there already.

        What moves down is there until it is copied. So that nothing waits for that, it begins before the limit is
        reached: a tensor of the largest size can be on its way while the next one comes, in up to an eighth of the
        limit.
        """
        first = self.stores[0]
        limit = first.budget.limit if isinstance(first, OnDevice) else None
        if limit is None or not isinstance(first, OnDevice):
            return
        self._largest[0] = max(self._largest[0], nbytes)
        early = limit - min(limit // 8, 2 * self._largest[0])
        with contextlib.suppress(StoreError):  # the tiers below are full: it is the new one that finds out
            while nbytes <= limit and first.budget.held + nbytes > early and self._make_room(0, nbytes):
                pass
        self._leave_room(nbytes)

    def _leave_room(self, nbytes: int) -> None:
        """Let the tiers below hold on the device what the first one leaves of its limit, less ``nbytes``."""
        first = self.stores[0]
        if not isinstance(first, OnDevice) or first.budget.limit is None:
            return
        room = first.budget.limit - first.budget.held - nbytes
        below = list(first.below.values())
        held = [store.device_bytes() for store in below]
        for store, own in zip(below, held, strict=True):
            store.set_device_limit(max(0, room - sum(held) + own))

    def _look_ahead(self, following: Sequence[Placed]) -> None:
        """Have what will be wanted next, and is further down, brought nearer."""
        most = _AHEAD
        for placed in following:
            most -= placed.nbytes if placed.tier > 0 else 0
            if most < 0:
                return
            if placed.tier > 0 and not placed.asked and placed.lock.acquire(blocking=False):
                try:
                    if placed.tier > 0 and not placed.dropped:
                        placed.asked = True
                        self.stores[placed.tier].prefetch(placed.ticket)
                finally:
                    placed.lock.release()
                    self._let_go(placed)

    @contextlib.contextmanager
    def _at(self, placed: Placed) -> Iterator[None]:
        """Nobody else is at it; who drops it meanwhile leaves that to this one."""
        try:
            with placed.lock:
                yield
        finally:
            self._let_go(placed)

    def _let_go(self, placed: Placed) -> None:
        """Drop it if it is to be dropped, unless somebody is at it, who will then."""
        while placed.dropped and placed.tier >= 0 and placed.lock.acquire(blocking=False):
            try:
                tier, placed.tier = placed.tier, -1
                if tier >= 0:
                    self.stores[tier].drop(placed.ticket)
                    placed.ticket = None
            finally:
                placed.lock.release()
