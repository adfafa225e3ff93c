"""The order in which backward will read stored tensors. Each thread learns it from its last backward."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast

import torch

from disthooks._handles import is_power_of_two

Learns = TypeVar("Learns")

_ORDERS = 8  # orders that are remembered: a thread may train several models, or batches of several lengths, in turn
_GUESSED = 256  # positions that a guess looks at; if all of them are dropped or were read, there is no guess


class Ordered(Protocol):
    """An object that an :class:`AccessOrder` remembers: its position in the order, and whether it was dropped."""

    position: int
    dropped: bool


class _Mine(threading.local):
    """The object of this thread."""

    one: Any = None


class PerThread(Generic[Learns]):
    """One object for each thread that asks. A new thread inherits the object of a thread that has ended.

    ``nn.DataParallel`` starts a thread for each replica in each forward. The new thread must know the order that the
    last one has learned.

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
        self._make, self._mine = make, _Mine()
        self._all: dict[threading.Thread, Learns] = {}

    def __call__(self) -> Learns:
        mine: Learns | None = self._mine.one
        if mine is None:
            # No lock: `pop` gives each object to one thread only.
            left = (self._all.pop(thread, None) for thread in list(self._all) if not thread.is_alive())
            one = next((one for one in left if one is not None), None)
            self._all[threading.current_thread()] = self._mine.one = mine = self._make() if one is None else one
        return mine

    def all(self) -> list[Learns]:
        return list(self._all.values())


class _Order(NamedTuple):
    """The order and the times of the reads of one backward."""

    order: Sequence[int]  # positions, in the order of reads
    times: Sequence[float]  # the seconds of these reads, in the same order
    rank: dict[int, int]  # the place of each position in ``order``
    waiting: float  # the part of the time in which the computation waited for reads, from 0 to 1

    @staticmethod
    def of(reads: dict[int, float], waited: float) -> _Order:
        times = tuple(reads.values())
        waiting = waited / (waited + times[-1] - times[0] + 1e-9)
        return _Order(tuple(reads), times, {position: i for i, position in enumerate(reads)}, waiting)


class AccessOrder:
    """The tensors that one thread has put since the store last held none of it, and the order of their reads.

    A backward reads the tensors of its forward from the last to the first, with small exceptions that repeat from step
    to step. So the expected order is the order of the last backward with the same number of tensors, and the reverse
    order if there was none. A wrong guess costs a read, and never gives a wrong tensor.

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
        self._passed: set[int] = set()  # positions that this backward has read
        self._again = False  # whether the last read was of a ticket that had been read before
        self._reached: Ordered | None = None  # the last ticket that was read for the first time
        self._known: dict[int, _Order] = {}  # by the number of tickets that were put; the newest last
        self._waited = 0.0  # seconds of waiting for reads; the times in ``_reads`` do not include them

    def put(self, ticket: Ordered) -> None:
        # A loop that keeps its graphs never drops some tickets, and the list would grow for ever. So it begins anew
        # with the tickets that are left.
        if len(self._tickets) > 4 * len(self._live) + 4096:
            self._tickets = [ticket for ticket in self._tickets if not ticket.dropped]
            for i, other in enumerate(self._tickets):
                other.position = i
            self._reads, self._known, self._reached = {}, {}, None
            self._passed.clear()
        ticket.position = len(self._tickets)
        self._tickets.append(ticket)
        self._live.add(ticket)

    def read(self, ticket: Ordered, now: float | None = None) -> None:
        """Note that ``ticket`` is read, ``now`` by ``time.perf_counter``.

        If it was read before, either another node of the same backward reads it, or another backward has begun. In the
        second case the next ticket was read before, too. So two such reads in a row count as a new backward.
        """
        again = ticket.position in self._passed
        if again and self._again:
            self._passed.clear()
        if not again or self._again:
            self._reached = ticket
        self._again = again
        self._passed.add(ticket.position)
        self._reads.setdefault(ticket.position, (time.perf_counter() if now is None else now) - self._waited)

    def waited(self, seconds: float) -> None:
        """Note that the last read made the computation wait for ``seconds``."""
        self._waited += seconds

    def drop(self, ticket: Ordered) -> None:
        """Note that ``ticket`` is dropped. When all are dropped, the order of their reads is expected the next time."""
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
        """The part of the last backward with as many tickets in which the computation waited for reads."""
        known = self._known.get(len(self._tickets))
        return 0.0 if known is None else known.waiting

    def after(self, ticket: Ordered) -> Iterator[tuple[Ordered, float]]:
        """The tickets that will be read after ``ticket``, the next one first, each with the seconds until its read.

        The seconds are those of the computation, without waiting. They are 0 if they are not known.
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
        for position, seconds in itertools.islice(expected, _GUESSED):
            other = self._tickets[position]
            if not other.dropped and position not in self._passed:
                yield other, seconds


class Sized(Ordered, Protocol):
    """An object that a :class:`TimedOrder` remembers: it also has a size in bytes."""

    nbytes: int


class TimedOrder(AccessOrder):
    """An :class:`AccessOrder` that learns two things more from each backward.

    The first is how many bytes are put between the put of a tensor and its first read. They are few for the last
    modules of a forward, and in the last stage of a pipeline. The second is the time of each read by the clock of the
    device, because the host runs ahead of the device. Both only save time: if they are wrong, results are still right.

    >>> class Ticket:
    ...     position, dropped, nbytes = 0, False, 8
    >>> order = TimedOrder()
    >>> for _ in range(2):
    ...     tickets = [Ticket(), Ticket(), Ticket()]
    ...     for ticket in tickets: order.put(ticket)
    ...     stays = [order.is_back_soon(ticket, 16) for ticket in tickets]
    ...     for ticket in reversed(tickets): order.read(ticket); ticket.dropped = True; order.drop(ticket)
    >>> stays
    [False, True, True]
    """

    def __init__(self) -> None:
        super().__init__()
        self._before: list[int] = []  # bytes put before each position
        self._total = 0
        self._turns: dict[int, int] = {}  # by position: bytes put between the put of a ticket and its first read
        self._expected: Mapping[int, int] = {}  # these bytes in the last backward
        # By position: the event before a read, and the event after it.
        self._marks: dict[int, tuple[torch.Event, torch.Event]] = {}
        # The three below are by the number of tickets that were put.
        self._rounds: dict[int, int] = {}  # how many backwards there were
        self._unread: dict[int, dict[int, tuple[torch.Event, torch.Event]]] = {}  # marks whose times were not read yet
        self._times: dict[int, dict[int, float]] = {}  # by position: seconds of computing before the read

    def put(self, ticket: Ordered) -> None:
        super().put(ticket)
        place = ticket.position
        # After the last ticket was dropped, or after `put` gave new positions, these bytes are not known. The tickets
        # before this one then count as put long ago.
        if place != len(self._before):
            self._before = [0] * place
            self._total = 0 if place == 0 else self._total
        self._before.append(self._total)
        self._total += cast(Sized, ticket).nbytes

    def is_back_soon(self, ticket: Sized, room: int) -> bool:
        """Whether the last backward read ``ticket``, which was just put, before ``room`` bytes were put.

        The bytes of ``ticket`` itself count.
        """
        turn = self._expected.get(ticket.position)
        return turn is not None and turn + ticket.nbytes <= room

    def read(self, ticket: Ordered, now: float | None = None) -> None:
        place = ticket.position
        if place not in self._turns and place < len(self._before):
            self._turns[place] = self._total - self._before[place] - cast(Sized, ticket).nbytes
        super().read(ticket, now)

    def drop(self, ticket: Ordered) -> None:
        count = len(self._tickets)
        super().drop(ticket)
        if not count or self._tickets:
            return
        # The last ticket is dropped: the next forward and backward expect what this one measured.
        if self._turns:
            self._expected = self._turns
            self._rounds[count] = self._rounds.get(count, 0) + 1
        if self._marks:
            self._unread[count] = self._marks
        for known in (self._rounds, self._unread, self._times):
            while len(known) > _ORDERS:
                known.pop(next(iter(known)))
        self._turns, self._marks, self._before, self._total = {}, {}, [], 0

    # -- the time of the device

    def is_timed(self, ticket: Ordered) -> bool:
        """Whether to time this read: the first read of each ticket, in the 1st, 2nd, 3rd, 5th, 9th, ... step."""
        rounds = self._rounds.get(len(self._tickets), 0)
        return (rounds == 0 or is_power_of_two(rounds)) and ticket.position not in self._marks

    def mark(self, ticket: Ordered, came: torch.Event, went: torch.Event) -> None:
        """Keep two events: when the computation ``came`` to this read, and when it ``went`` on."""
        self._marks[ticket.position] = came, went

    def times(self) -> Mapping[int, float]:
        """By position, the seconds of computing before each read, as last measured; empty while they are not known.

        This never waits for the device.
        """
        count = len(self._tickets)
        marks = self._unread.get(count)
        # The last event is asked first, because it mostly happens last; events of another stream may be later.
        if marks is not None and all(event.query() for _, event in reversed(marks.values())):
            # The computation between two reads: from the event after one to the event before the next.
            seconds: dict[int, float] = {}
            at, last = 0.0, None
            for position, (came, went) in marks.items():
                at += 0.0 if last is None else max(0.0, last.elapsed_time(came)) / 1000
                seconds[position], last = at, went
            self._times[count] = seconds
            del self._unread[count]
        return self._times.get(count, {})
