"""Which parts of a range of bytes are in use: in a segment of host memory, or in a file."""

from __future__ import annotations

import bisect

# [Note: extents]
# The free parts are one sorted list. Space is taken from the first part that is large enough, and neighbours that are
# free become one part again. So what a tape does, to take space in one order and to give it back in reverse, moves the
# border of one free part up and down, and a range in which nothing is in use is always whole, whatever sizes come.
#
# Ctrl-C may end a method at any call (see [Note: interrupts]). So the lines that change a range have no call: either
# all of them run, or none. What was given back is known by the identity of its ``Extent``. So it does no harm to give
# an extent back twice, and the release queues of the callers repeat a release that was interrupted.


class Extent:
    """A part of a range: its first byte and its number of bytes. A new one is in use from :meth:`Extents.take` on."""

    __slots__ = ("offset", "room")

    def __init__(self) -> None:
        self.offset = self.room = 0

    def __repr__(self) -> str:
        return f"Extent({self.offset}, {self.room})"


class Extents:
    """The free and the used parts of a range of ``size`` bytes. It has no lock; see [Note: extents].

    Attributes:
        size: the bytes of the range.
        free: the free parts in their order, each with its begin and its end.
        in_use: bytes of all extents that are in use.

    >>> parts, one, other = Extents(100), Extent(), Extent()
    >>> parts.take(one, 60), parts.take(other, 50), parts.take(other, 40)
    (True, False, True)
    >>> parts.give(one); parts.free, parts.in_use
    ([(0, 60)], 40)
    >>> parts.give(one); parts.give(other); parts.free
    [(0, 100)]
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.free = [(0, size)]
        self.in_use = 0
        self._used: dict[Extent, None] = {}

    def __len__(self) -> int:
        """How many extents are in use."""
        return len(self._used)

    def __contains__(self, extent: Extent) -> bool:
        return extent in self._used

    def take(self, extent: Extent, room: int) -> bool:
        """Let ``extent`` be the first free ``room`` bytes. Returns whether there are so many in one part."""
        if room > self.size - self.in_use:
            return False
        for at, (begin, end) in enumerate(self.free):
            if end - begin >= room:
                rest = [(begin + room, end)] if begin + room < end else []
                # No call from here on; see [Note: extents].
                extent.offset, extent.room = begin, room
                self._used[extent] = None
                self.in_use += room
                self.free[at : at + 1] = rest
                return True
        return False

    def give(self, extent: Extent) -> None:
        """Let ``extent`` be free. This does nothing if it is not in use."""
        if extent not in self._used:
            return
        begin, end = extent.offset, extent.offset + extent.room
        first = last = bisect.bisect_left(self.free, (begin, end))
        if first and self.free[first - 1][1] == begin:
            first -= 1
            begin = self.free[first][0]
        if last < len(self.free) and self.free[last][0] == end:
            end = self.free[last][1]
            last += 1
        # No call from here on; see [Note: extents].
        self.free[first:last] = [(begin, end)]
        self.in_use -= extent.room
        del self._used[extent]
