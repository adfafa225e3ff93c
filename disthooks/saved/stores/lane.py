"""What one thread puts into a store from a device: which of it comes back soon, and when each is wanted, there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, cast

import torch

from disthooks.saved.stores.prefetch import _ORDERS, Ordered, Stream


class Sized(Ordered, Protocol):
    """What a :class:`Lane` remembers besides: its bytes."""

    nbytes: int


class Lane(Stream):
    """A :class:`Stream` that learns two things more, from one backward for the next.

    How many bytes are put between the put of a tensor and its first read: few for the last modules of a forward, or
    for the last stage of a pipeline. And when each read comes, in the time of the device: the host runs ahead of it,
    so its clock says nothing. Both only make things faster; nothing is wrong when they are.

    >>> class Ticket:
    ...     position, dropped, nbytes = 0, False, 8
    >>> lane = Lane()
    >>> for _ in range(2):
    ...     tickets = [Ticket(), Ticket(), Ticket()]
    ...     for ticket in tickets: lane.put(ticket)
    ...     stays = [lane.is_back_soon(ticket, 16) for ticket in tickets]
    ...     for ticket in reversed(tickets): lane.read(ticket); ticket.dropped = True; lane.drop(ticket)
    >>> stays
    [False, True, True]
    """

    def __init__(self) -> None:
        super().__init__()
        self._before: list[int] = []  # bytes put before each position
        self._total = 0
        self._turns: dict[int, int] = {}  # by position: bytes put between put and first read
        self._expected: Mapping[int, int] = {}  # the same of the last time
        self._marks: dict[int, tuple[torch.Event, torch.Event]] = {}  # before a read, and when it could go on
        self._rounds: dict[int, int] = {}  # by how many were put: how often
        self._unread: dict[int, dict[int, tuple[torch.Event, torch.Event]]] = {}  # marks, not asked yet
        self._times: dict[int, dict[int, float]] = {}

    def put(self, ticket: Ordered) -> None:
        """``ticket`` is the next one."""
        super().put(ticket)
        place = ticket.position
        if place != len(self._before):  # all of it is new, or was numbered anew: what is not known is long ago
            self._before = [0] * place
            self._total = 0 if place == 0 else self._total
        self._before.append(self._total)
        self._total += cast(Sized, ticket).nbytes

    def is_back_soon(self, ticket: Sized, room: int) -> bool:
        """Whether ``ticket``, just put, was read last time before it and what was put after it had ``room`` bytes."""
        turn = self._expected.get(ticket.position)
        return turn is not None and turn + ticket.nbytes <= room

    def read(self, ticket: Ordered) -> None:
        """``ticket`` is wanted."""
        place = ticket.position
        if place not in self._turns and place < len(self._before):
            self._turns[place] = self._total - self._before[place] - cast(Sized, ticket).nbytes
        super().read(ticket)

    def drop(self, ticket: Ordered) -> None:
        """``ticket`` is dropped; after the last of them what was learned is what the next time expects."""
        count = len(self._tickets)
        super().drop(ticket)
        if not count or self._tickets:
            return
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
        """Whether to note when this read is: the first of a ticket, the 1st, 2nd, 3rd, 5th, 9th, ... time around."""
        rounds = self._rounds.get(len(self._tickets), 0)
        return rounds.bit_count() <= 1 and ticket.position not in self._marks

    def mark(self, ticket: Ordered, came: torch.Event, went: torch.Event) -> None:
        """The computation ``came`` to this read, and ``went`` on from it."""
        self._marks[ticket.position] = came, went

    def times(self) -> Mapping[int, float]:
        """By position: seconds of computation before its read, from the last time that it was measured; or nothing.

        The device is not waited for: what it has not said yet is not known yet.
        """
        count = len(self._tickets)
        marks = self._unread.get(count)
        # The last of them first, but another stream or thread may be behind it.
        if marks is not None and all(event.query() for _, event in reversed(marks.values())):
            self._times[count] = _seconds(marks)
            del self._unread[count]
        return self._times.get(count, {})


def _seconds(marks: Mapping[int, tuple[torch.Event, torch.Event]]) -> dict[int, float]:
    found: dict[int, float] = {}
    at, last = 0.0, None
    for position, (came, went) in marks.items():
        at += 0.0 if last is None else max(0.0, last.elapsed_time(came)) / 1000
        found[position], last = at, went
    return found
