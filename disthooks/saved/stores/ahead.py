"""What is read before it is wanted, within a budget."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import cast

from disthooks.saved.stores.ticket import WRITTEN, Slab, Ticket
from disthooks.saved.stores.traffic import Traffic

_WINDOW = 64  # tickets: backward leaves the expected order by a few, so more would only cost time


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
        """What to read next because ``ticket`` is wanted now; room for it is made."""
        following = cast("Iterator[Ticket]", ticket.stream.after(ticket))
        first = next(following, None)
        enough = self._bytes > self._budget // 2 or len(self._tickets) > _WINDOW // 2
        if first is None or (enough and (first in self._tickets or first.tensor is not None)):
            return []
        wanted: dict[Ticket, None] = {}  # in order
        room = self._budget
        for other in itertools.chain((first,), itertools.islice(following, _WINDOW)):
            room -= other.nbytes
            if room < 0 and wanted:
                break
            wanted[other] = None
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
