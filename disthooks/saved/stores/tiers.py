"""Stores in front of other stores: saved tensors stay where they are, or go to the next tier when one is full."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch

from disthooks._fork_safe import ForkSafe, Order, shared_lock, tensor_lock
from disthooks._registry import register
from disthooks._streams import handed_over, on, stream_of
from disthooks._tensors import resident
from disthooks.errors import StoreError, UsageError
from disthooks.saved.stores.base import ByteBudget, Functions, Store, StoreReport
from disthooks.saved.stores.order import AccessOrder, PerThread


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


class Placed:
    """A tensor in one of the tiers; it moves down when tensors that are read sooner need its room.

    Attributes:
        tier: its number; -1 for nowhere.
        ticket: the ticket of its tier.
        nbytes: of the tensor.
        at: the stream of an accelerator that filled it, if it is on one.
        turn: its place in the order of reads.
        asked: whether its tier was told that it will be read soon.
    """

    __slots__ = ("__weakref__", "asked", "at", "dropped", "lock", "nbytes", "ticket", "tier", "turn")

    def __init__(self, nbytes: int, at: Any = None) -> None:
        self.lock = tensor_lock(Order.PLACED, again=False)  # held while it is moved or read
        self.tier = -1
        self.ticket: Any = None
        self.nbytes, self.at = nbytes, at
        self.turn: Turn | None = None
        self.asked = self.dropped = False


class Turn:
    """What is remembered of a :class:`Placed`, without keeping it alive, until all tensors of its thread are gone."""

    __slots__ = ("dropped", "order", "placed", "position")

    def __init__(self, placed: Placed, order: AccessOrder) -> None:
        self.placed, self.order = weakref.ref(placed), order
        self.position, self.dropped = 0, False


class Turns(ForkSafe[Turn]):
    """Learns from each backward in which order the next one will read the tensors of each thread."""

    def __init__(self) -> None:
        super().__init__(Order.TURNS)
        self._own = PerThread(AccessOrder)  # that of each thread

    def put(self, placed: Placed) -> None:
        """``placed`` is put, as the next tensor of this thread."""
        with self._lock:
            self._drain_releases()
            placed.turn = Turn(placed, self._own())
            placed.turn.order.put(placed.turn)

    def read(self, placed: Placed, look: int) -> list[Placed]:
        """``placed`` is read now; return up to ``look`` tensors that will be read next."""
        turn = placed.turn
        if turn is None:
            return []
        with self._lock:
            self._drain_releases()
            turn.order.read(turn)
            following = itertools.islice(turn.order.after(turn), look)
            found = [cast(Turn, other).placed() for other, _ in following]
        return [other for other in found if other is not None]

    def of(self, placed: Placed) -> float:
        """When ``placed`` will be read; a larger number is later."""
        turn = placed.turn
        if turn is None:
            return 0.0
        with self._lock:
            return turn.order.turn(turn)

    def drop(self, placed: Placed) -> None:
        """``placed`` is dropped; called from destructors. See [Note: destructors]."""
        turn = placed.turn
        if turn is not None and not turn.dropped:
            turn.dropped = True
            self.release(turn)

    def _apply_release(self, release: Turn) -> None:
        release.order.drop(release)


class Queue:
    """The tensors of one tier, the one that is read last first; it keeps none of them alive.

    >>> queue, old, new = Queue(0), Placed(8), Placed(8)
    >>> for placed, turn in ((old, 7), (new, 3)):
    ...     placed.tier = 0
    ...     queue.add(placed, turn)
    >>> queue.last() is old
    True
    """

    def __init__(self, tier: int) -> None:
        self._tier = tier
        self._heap: list[tuple[float, int, weakref.ref[Placed]]] = []  # the one that is read last comes first
        self._numbers = itertools.count()
        self._most = 1024
        self._lock = shared_lock(Order.QUEUE)

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, placed: Placed, turn: float) -> None:
        """``placed`` lies in this tier now."""
        with self._lock:
            if len(self._heap) > self._most:
                self._heap = [entry for entry in self._heap if self._there(entry) is not None]
                heapq.heapify(self._heap)
                self._most = 2 * len(self._heap) + 1024
            heapq.heappush(self._heap, (-turn, next(self._numbers), weakref.ref(placed)))

    def last(self) -> Placed | None:
        """The tensor of this tier that will be read last; the oldest if there are several."""
        with self._lock:
            while self._heap:
                found = self._there(self._heap[0])
                if found is not None:
                    return found
                heapq.heappop(self._heap)
        return None

    def _there(self, entry: tuple[float, int, weakref.ref[Placed]]) -> Placed | None:
        placed = entry[2]()
        return None if placed is None or placed.dropped or placed.tier != self._tier else placed


_LOOK = 8  # tensors: of what will be wanted next, so many are looked at
_AHEAD = 32 << 20  # bytes of them that a tier is told of


def _tiered(stores: Sequence[Store]) -> Tiered:
    return Tiered(*stores)


@register("store", build=_tiered)
@dataclass(frozen=True)
class Tiered(Store):
    """Several stores, the fastest first; when one is full, the tensors in it that backward reads last go to the next.

    Backward reads last what was saved first, so the oldest tensors make room for a new one. If they would have to be
    read back for that, as from a full disk, the new tensor goes further down instead. A store that fails counts as
    full. A tensor that is still in memory when its write fails is not lost.

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
                # The error may be that of another tensor, which the store reports once.
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
        """Move the tensor of ``tier`` that is read last further down, for one of ``nbytes``; whether one moved."""
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
        """Make room for a new tensor of ``nbytes``, which is on the device already.

        A tensor that moves down takes memory of the device until it is copied. So that nobody waits for the copy, the
        move begins before the limit is reached: in up to an eighth of the limit, a tensor of the largest size can be on
        its way while the next one comes.
        """
        first = self.stores[0]
        limit = first.budget.limit if isinstance(first, OnDevice) else None
        if limit is None or not isinstance(first, OnDevice):
            return
        self._largest[0] = max(self._largest[0], nbytes)
        early = limit - min(limit // 8, 2 * self._largest[0])
        with contextlib.suppress(StoreError):  # the tiers below are full: putting the new tensor says so
            while nbytes <= limit and first.budget.held + nbytes > early and self._make_room(0, nbytes):
                pass
        self._leave_room(nbytes)

    def _leave_room(self, nbytes: int) -> None:
        """Limit what the tiers below hold on the device to what the first tier leaves of its limit, less ``nbytes``."""
        first = self.stores[0]
        if not isinstance(first, OnDevice) or first.budget.limit is None:
            return
        room = first.budget.limit - first.budget.held - nbytes
        below = list(first.below.values())
        held = [store.device_bytes() for store in below]
        for store, own in zip(below, held, strict=True):
            store.set_device_limit(max(0, room - sum(held) + own))

    def _look_ahead(self, following: Sequence[Placed]) -> None:
        """Have the tensors that will be read next brought nearer."""
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
        """Hold the lock of ``placed``; if it is dropped meanwhile, drop it at the end."""
        try:
            with placed.lock:
                yield
        finally:
            self._let_go(placed)

    def _let_go(self, placed: Placed) -> None:
        """Drop it from its tier if it was dropped, unless another thread holds its lock and will do so."""
        while placed.dropped and placed.tier >= 0 and placed.lock.acquire(blocking=False):
            try:
                tier, placed.tier = placed.tier, -1
                if tier >= 0:
                    self.stores[tier].drop(placed.ticket)
                    placed.ticket = None
            finally:
                placed.lock.release()
