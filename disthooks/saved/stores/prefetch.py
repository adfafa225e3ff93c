"""In which order stored tensors will be wanted: guessed from the last backward."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar, cast

Learns = TypeVar("Learns")

_ORDERS = 8  # that are remembered: of several models, or batches of several lengths, in turn
_LOOK = 256  # places: beyond so many that are gone or passed there is nothing worth a guess


class Ordered(Protocol):
    """What a :class:`Stream` remembers: its place there, and whether it is still wanted."""

    position: int
    dropped: bool


class Own(Generic[Learns]):
    """One for each thread that asks; that of a thread that has ended is for the next new one.

    ``nn.DataParallel`` starts a thread for each replica in each forward: what the last one learned is not to be lost.

    >>> own = Own(Stream)
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


class Stream:
    """What one thread put into a store since all of it was gone, and the order in which it is read.

    A backward reads what its forward put from the last to the first, with small exceptions. Those repeat from step
    to step, so the order of the last time that as many were put is expected; the reverse one where there was none.
    A wrong guess costs a read, never a wrong tensor.

    >>> class Ticket:
    ...     position, dropped = 0, False
    >>> stream, tickets = Stream(), [Ticket() for _ in range(4)]
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
