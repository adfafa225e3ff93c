"""What is read before it is wanted, within a budget."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import cast

from disthooks.saved.stores.ticket import WRITTEN, Slab, Ticket
from disthooks.saved.stores.traffic import Traffic

_MOST = 64  # tickets: backward leaves the expected order by a few, so more would only cost time
_MARGIN = 1.0  # x


class Ahead:
    """The tickets that are in memory again, or will be, before they are wanted; used under the lock of its mover.

    Args:
        budget: most bytes of them; one that is larger is read alone.
        traffic: counts those that were read in vain.
    """

    def __init__(self, budget: int, traffic: Traffic) -> None:
        self._budget, self._traffic = budget, traffic
        self._tickets: dict[Ticket, None] = {}  # the oldest first
        self._bytes = 0
        self._pace = 1e-9  # seconds for a byte
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

    def took(self, nbytes: int, seconds: float) -> None:
        """A read of ``nbytes`` took so long."""
        self._pace += (seconds / max(nbytes, 1) - self._pace) / 8

    def after(self, ticket: Ticket) -> list[Slab]:
        """What to read now because ``ticket`` is wanted now; room for it is made.

        That is what would come too late if its read began only when the next one is wanted. More would be in memory
        longer than it has to.
        """
        following = itertools.islice(cast("Iterator[tuple[Ticket, float]]", ticket.stream.after(ticket)), _MOST)
        first, begin = next(following, (None, 0.0))
        if first is None:
            return []
        if self._enough and (first in self._tickets or first.tensor is not None):
            self._enough -= 1
            return []
        seen: list[Ticket] = []
        urgent, room, cost = 1, self._budget, 0.0
        for other, due in itertools.chain([(first, begin)], following):
            room -= other.nbytes
            if seen and (room < 0 or due - begin > _MARGIN * (cost + room * self._pace)):
                break
            seen.append(other)
            if other.state == WRITTEN and other not in self._tickets:
                cost += other.nbytes * self._pace
            if due - begin <= _MARGIN * cost:
                urgent = len(seen)
        self._enough = urgent // 2
        wanted = dict.fromkeys(seen[:urgent])  # in order
        found = [self.one(other, {ticket, *wanted}) for other in wanted]
        return [slab for slab in found if slab is not None]

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
        return slab
