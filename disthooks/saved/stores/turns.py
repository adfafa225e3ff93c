"""In which order what lies in tiers will be wanted, and which of a tier is wanted last."""

from __future__ import annotations

import collections
import heapq
import itertools
import weakref
from typing import Any, cast

from disthooks._locks import Order, own, shared
from disthooks.saved.stores.prefetch import Own, Stream


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

    __slots__ = ("dropped", "placed", "position", "stream")

    def __init__(self, placed: Placed, stream: Stream) -> None:
        self.placed, self.stream = weakref.ref(placed), stream
        self.position, self.dropped = 0, False


class Turns:
    """Learns from each backward in which order the next one will want what each thread puts."""

    def __init__(self) -> None:
        self._own = Own(Stream)  # that of each thread
        self._gone: collections.deque[Turn] = collections.deque()
        self._lock = shared(Order.TURNS)

    def put(self, placed: Placed) -> None:
        """``placed`` is the next one of this thread."""
        with self._lock:
            self._settle()
            placed.turn = Turn(placed, self._own())
            placed.turn.stream.put(placed.turn)

    def read(self, placed: Placed, look: int) -> list[Placed]:
        """``placed`` is wanted; the next ones, up to ``look`` of them."""
        turn = placed.turn
        if turn is None:
            return []
        with self._lock:
            self._settle()
            turn.stream.read(turn)
            following = itertools.islice(turn.stream.after(turn), look)
            found = [cast(Turn, other).placed() for other, _ in following]
        return [other for other in found if other is not None]

    def of(self, placed: Placed) -> float:
        """When it will be wanted; a larger number is later."""
        turn = placed.turn
        if turn is None:
            return 0.0
        with self._lock:
            return turn.stream.turn(turn)

    def drop(self, placed: Placed) -> None:
        """``placed`` is not wanted any more; called from destructors, so it takes no lock."""
        turn = placed.turn
        if turn is not None and not turn.dropped:
            turn.dropped = True
            self._gone.append(turn)

    def _settle(self) -> None:
        while self._gone:
            turn = self._gone[0]
            turn.stream.drop(turn)
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
