"""Which parts of a range of bytes are in use: in a segment of host memory, or in a file."""

from __future__ import annotations

import bisect


class Extent:
    """A part of a range that is in use: its first byte and its number of bytes."""

    __slots__ = ("offset", "room")

    def __init__(self, offset: int, room: int) -> None:
        self.offset, self.room = offset, room

    def __repr__(self) -> str:
        return f"Extent({self.offset}, {self.room})"


class Extents:
    """The free and the used parts of a range of ``size`` bytes. It has no lock.

    The free parts are one sorted list. Space is taken from the first part that is large enough, and neighbours that are
    free become one part again. So a range in which nothing is in use is always whole, whatever sizes come.

    Attributes:
        free: the free parts in their order, each with its begin and its end.
        in_use: bytes of all extents that are in use.

    >>> parts = Extents(100)
    >>> one = parts.take(60)
    >>> one, parts.take(50), parts.take(40)
    (Extent(0, 60), None, Extent(60, 40))
    >>> parts.give(one); parts.free, parts.in_use
    ([(0, 60)], 40)
    """

    def __init__(self, size: int) -> None:
        self.free = [(0, size)]
        self.in_use = 0

    def take(self, room: int) -> Extent | None:
        """The first free ``room`` bytes; None if there are not so many in one part."""
        for at, (begin, end) in enumerate(self.free):
            if end - begin >= room:
                self.free[at : at + 1] = [(begin + room, end)] if begin + room < end else []
                self.in_use += room
                return Extent(begin, room)
        return None

    def give(self, extent: Extent) -> None:
        """Let ``extent`` be free; nothing if that was done already."""
        room, extent.room = extent.room, 0
        if not room:
            return
        begin, end = extent.offset, extent.offset + room
        first = last = bisect.bisect_left(self.free, (begin, end))
        if first and self.free[first - 1][1] == begin:
            first -= 1
            begin = self.free[first][0]
        if last < len(self.free) and self.free[last][0] == end:
            end = self.free[last][1]
            last += 1
        self.free[first:last] = [(begin, end)]
        self.in_use -= room
