"""What is read before it is wanted, within a budget."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from typing import cast

from disthooks.saved.stores.ticket import WRITTEN, Slab, Ticket
from disthooks.saved.stores.traffic import Traffic

_MOST = 64  # tickets: backward leaves the expected order by a few, so more would only cost time
_MARGIN = 1.5  # a read may take so many times what the last ones took


class Ahead:
    """The tickets that are in memory again, or will be, before they are wanted; used under the lock of its mover.

    Args:
        budget: most bytes of them; one that is larger is read alone.
        traffic: counts those that were read in vain, and knows how fast reads are.
    """

    def __init__(self, budget: int, traffic: Traffic) -> None:
        self._budget, self._traffic = budget, traffic
        self._tickets: dict[Ticket, None] = {}  # the oldest first
        self._bytes = 0
        self._enough = 0  # so many tickets that are wanted need no look at what follows

    def __iter__(self) -> Iterator[Ticket]:
        return iter(self._tickets)

    def __len__(self) -> int:
        return len(self._tickets)

    def add(self, ticket: Ticket) -> None:
        """``ticket`` is in memory, or will be."""
        if ticket not in self._tickets:
            self._tickets[ticket] = None
            self._bytes += ticket.nbytes

    def remove(self, ticket: Ticket) -> None:
        """``ticket`` is wanted now, or not at all; what was read is somebody else's, or goes."""
        ticket.ahead = None
        if ticket in self._tickets:
            del self._tickets[ticket]
            self._bytes -= ticket.nbytes

    def after(self, ticket: Ticket) -> list[Slab]:
        """What to read because ``ticket`` is wanted now, and when (``start``); room for it is made.

        Each is to be there just in time: what is read early takes memory, and most of all while an operation that
        takes long works with large tensors.
        """
        following = itertools.islice(cast("Iterator[tuple[Ticket, float]]", ticket.stream.after(ticket)), _MOST)
        first = next(following, None)
        if first is None:
            return []
        if self._enough and (first[0] in self._tickets or first[0].tensor is not None):
            self._enough -= 1
            return []
        due: dict[Ticket, float] = {}  # in order
        room = self._budget
        for other, seconds in itertools.chain([first], following):
            room -= other.nbytes
            if due and room < 0:
                break
            due[other] = seconds
        self._enough = len(due) // 4
        found = [self.one(other, {ticket, *due}) for other in due]
        self._set_starts(due)
        return [slab for slab in found if slab is not None]

    def _set_starts(self, due: dict[Ticket, float]) -> None:
        """One read after the other, and the last moment for each that all behind it can be in time."""
        now, latest = time.perf_counter(), math.inf
        for ticket, seconds in reversed(due.items()):
            if ticket.reading and ticket.slab is not None:
                latest = min(latest, seconds) - _MARGIN * ticket.nbytes * self._traffic.pace
                ticket.slab.start = now + latest

    def one(self, ticket: Ticket, wanted: set[Ticket]) -> Slab | None:
        """What to read for ``ticket``, if it has to be read and fits; others than ``wanted`` make room for it."""
        slab = ticket.slab
        if ticket.state != WRITTEN or ticket.reading or ticket.dropped or ticket in self._tickets or slab is None:
            return None
        for other in [other for other in self._tickets if other.ahead is not None and other not in wanted]:
            if self._bytes + ticket.nbytes <= self._budget:
                break
            self._traffic.in_vain += other.nbytes
            self.remove(other)
        if self._tickets and self._bytes + ticket.nbytes > self._budget:
            return None
        for member in slab.members:
            if not member.dropped and member.ahead is None:
                member.reading = True
                self.add(member)
        slab.start = 0.0  # at once, if nobody knows better
        return slab
