"""In which order stored tensors will be wanted: guessed from the last backward.

In which order what lies in tiers will be wanted, and which of a tier is wanted last.
"""

from __future__ import annotations

import collections
import heapq
import itertools
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast

from disthooks._fork_safe import Order, own, shared

Learns = TypeVar("Learns")

_ORDERS = 8  # that are remembered: of several models, or batches of several lengths, in turn
_LOOK = 256  # places: beyond so many that are gone or passed there is nothing worth a guess


class Ordered(Protocol):
    """What a :class:`AccessOrder` remembers: its place there, and whether it is still wanted."""

    position: int
    dropped: bool


class PerThread(Generic[Learns]):
    """One for each thread that asks; that of a thread that has ended is for the next new one.

    ``nn.DataParallel`` starts a thread for each replica in each forward: what the last one learned is not to be lost.

    >>> own = PerThread(AccessOrder)
    >>> own() is own()
    True
    >>> found = []
    >>> for _ in range(2):
    ...     thread = threading.Thread(target=lambda: found.append(own()))
    ...     thread.start(); thread.join()
    >>> found[0] is found[1] is not own()
    True
    """

    def __init__(self, make: Callable[[], Learns]) -> None:
        self._make, self._mine = make, threading.local()
        self._all: dict[threading.Thread, Learns] = {}

    def __call__(self) -> Learns:
        """That of this thread."""
        mine = getattr(self._mine, "one", None)
        if mine is None:
            left = (self._all.pop(thread, None) for thread in list(self._all) if not thread.is_alive())
            one = next((one for one in left if one is not None), None)  # whoever takes it out has it: no lock
            self._all[threading.current_thread()] = self._mine.one = mine = self._make() if one is None else one
        return cast(Learns, mine)


class _Order(NamedTuple):
    """In which order one backward read, and when."""

    order: Sequence[int]  # positions
    times: Sequence[float]  # seconds, in that order
    rank: dict[int, int]  # by position
    waiting: float  # part of the time

    @staticmethod
    def of(reads: dict[int, float], waited: float) -> _Order:
        times = tuple(reads.values())
        waiting = waited / (waited + times[-1] - times[0] + 1e-9)
        return _Order(tuple(reads), times, {position: i for i, position in enumerate(reads)}, waiting)


class AccessOrder:
    """What one thread put into a store since all of it was gone, and the order in which it is read.

    A backward reads what its forward put from the last to the first, with small exceptions. Those repeat from step
    to step, so the order of the last time that as many were put is expected; the reverse one where there was none.
    A wrong guess costs a read, never a wrong tensor.

    >>> class Ticket:
    ...     position, dropped = 0, False
    >>> stream, tickets = AccessOrder(), [Ticket() for _ in range(4)]
    >>> for ticket in tickets: stream.put(ticket)
    >>> [ticket.position for ticket, _ in stream.after(tickets[2])]
    [1, 0]
    """

    def __init__(self) -> None:
        self._tickets: list[Ordered] = []
        self._live: set[Ordered] = set()
        self._reads: dict[int, float] = {}  # positions in the order of their first read, and when that was
        self._passed: set[int] = set()  # those that this backward has read
        self._again = False  # whether what was read last had been read before
        self._reached: Ordered | None = None  # what was read last of those that had not
        self._known: dict[int, _Order] = {}  # by how many were put; the last one last
        self._waited = 0.0  # seconds, which are not in the times: a clock of what is computed

    def put(self, ticket: Ordered) -> None:
        """``ticket`` is the next one."""
        # Something is never let go of: begin anew with what is left.
        if len(self._tickets) > 4 * len(self._live) + 4096:
            self._tickets = [ticket for ticket in self._tickets if not ticket.dropped]
            for i, other in enumerate(self._tickets):
                other.position = i
            self._reads, self._known, self._reached = {}, {}, None
            self._passed.clear()
        ticket.position = len(self._tickets)
        self._tickets.append(ticket)
        self._live.add(ticket)

    def read(self, ticket: Ordered) -> None:
        """``ticket`` is wanted; a second time by another reader of the same backward, or when another one begins.

        That is told by the next one, which then is wanted again, too.
        """
        again = ticket.position in self._passed
        if again and self._again:
            self._passed.clear()
        if not again or self._again:
            self._reached = ticket
        self._again = again
        self._passed.add(ticket.position)
        self._reads.setdefault(ticket.position, time.perf_counter() - self._waited)

    def waited(self, seconds: float) -> None:
        """The last read took so long."""
        self._waited += seconds

    def drop(self, ticket: Ordered) -> None:
        """``ticket`` is dropped, perhaps again.

        After the last of them the order of their reads is what the next time expects.
        """
        self._live.discard(ticket)
        if self._live or not self._tickets:
            return
        if self._reads:
            self._known.pop(len(self._tickets), None)
            self._known[len(self._tickets)] = _Order.of(self._reads, self._waited)
            if len(self._known) > _ORDERS:
                del self._known[next(iter(self._known))]
        self._tickets, self._reads, self._waited, self._reached = [], {}, 0.0, None
        self._passed.clear()

    @property
    def waiting(self) -> float:
        """The part of the last backward like this one that was waiting for reads."""
        known = self._known.get(len(self._tickets))
        return 0.0 if known is None else known.waiting

    def turn(self, ticket: Ordered) -> float:
        """When ``ticket`` will be wanted, as a number to compare with those of others: a larger one is later.

        By the last backward; what that did not read is wanted last, and of what it cannot tell the newest first.
        """
        if not self._known:
            return -ticket.position
        count = next(reversed(self._known))
        rank = self._known[count].rank.get(ticket.position)
        if rank is not None:
            return rank
        return math.inf if ticket.position < count else -ticket.position

    def after(self, ticket: Ordered) -> Iterator[tuple[Ordered, float]]:
        """Those that will be wanted after ``ticket``, the next one first, and in how many seconds of computing.

        0 seconds where that is not known.
        """
        if self._again and self._reached is not None:
            ticket = self._reached
        known = self._known.get(len(self._tickets))
        rank = None if known is None else known.rank.get(ticket.position)
        if known is None or rank is None:
            expected: Iterator[tuple[int, float]] = ((i, 0.0) for i in range(ticket.position - 1, -1, -1))
        else:
            now = known.times[rank]
            expected = ((known.order[i], known.times[i] - now) for i in range(rank + 1, len(known.order)))
        for position, seconds in itertools.islice(expected, _LOOK):
            other = self._tickets[position]
            if not other.dropped and position not in self._passed:
                yield other, seconds


class Placed:
    """A tensor in one of the tiers; it moves down when those that will be wanted sooner need its place.

    Attributes:
        tier: its number; -1 for nowhere.
        ticket: the tier's own.
        nbytes: of the tensor.
        at: the stream of an accelerator that filled it, if it is on one.
        turn: its place among the others.
        asked: whether its tier was told that it will be wanted soon.
    """

    __slots__ = ("__weakref__", "asked", "at", "dropped", "lock", "nbytes", "ticket", "tier", "turn")

    def __init__(self, nbytes: int, at: Any = None) -> None:
        self.lock = own(Order.PLACED, again=False)  # held while it is moved or read
        self.tier = -1
        self.ticket: Any = None
        self.nbytes, self.at = nbytes, at
        self.turn: Turn | None = None
        self.asked = self.dropped = False


class Turn:
    """What is remembered of a :class:`Placed` until all of its stream are gone; it does not hold it."""

    __slots__ = ("dropped", "order", "placed", "position")

    def __init__(self, placed: Placed, order: AccessOrder) -> None:
        self.placed, self.order = weakref.ref(placed), order
        self.position, self.dropped = 0, False


class Turns:
    """Learns from each backward in which order the next one will want what each thread puts."""

    def __init__(self) -> None:
        self._own = PerThread(AccessOrder)  # that of each thread
        self._gone: collections.deque[Turn] = collections.deque()
        self._lock = shared(Order.TURNS)

    def put(self, placed: Placed) -> None:
        """``placed`` is the next one of this thread."""
        with self._lock:
            self._settle()
            placed.turn = Turn(placed, self._own())
            placed.turn.order.put(placed.turn)

    def read(self, placed: Placed, look: int) -> list[Placed]:
        """``placed`` is wanted; the next ones, up to ``look`` of them."""
        turn = placed.turn
        if turn is None:
            return []
        with self._lock:
            self._settle()
            turn.order.read(turn)
            following = itertools.islice(turn.order.after(turn), look)
            found = [cast(Turn, other).placed() for other, _ in following]
        return [other for other in found if other is not None]

    def of(self, placed: Placed) -> float:
        """When it will be wanted; a larger number is later."""
        turn = placed.turn
        if turn is None:
            return 0.0
        with self._lock:
            return turn.order.turn(turn)

    def drop(self, placed: Placed) -> None:
        """``placed`` is not wanted any more; called from destructors, so it takes no lock."""
        turn = placed.turn
        if turn is not None and not turn.dropped:
            turn.dropped = True
            self._gone.append(turn)

    def _settle(self) -> None:
        while self._gone:
            turn = self._gone[0]
            turn.order.drop(turn)
            self._gone.popleft()  # now: after an interrupt, all of it is done again


class Queue:
    """What lies in one tier; it holds none of it, and sorts out from time to time what is gone.

    >>> queue, old, new = Queue(0), Placed(8), Placed(8)
    >>> for placed, turn in ((old, 7), (new, 3)):
    ...     placed.tier = 0
    ...     queue.add(placed, turn)
    >>> queue.last() is old
    True
    """

    def __init__(self, tier: int) -> None:
        self._tier = tier
        self._heap: list[tuple[float, int, weakref.ref[Placed]]] = []  # what is wanted last is the first
        self._numbers = itertools.count()
        self._most = 1024
        self._lock = shared(Order.QUEUE)

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
        """What will be wanted last of those that are there; the oldest of several."""
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
