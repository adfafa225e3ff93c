"""Where the tensors of a forward go, from the order and the sizes in which they are saved. This file needs no torch.

A *tape* is what one thread saves on one device in one forward, in order. :func:`make_plan` gives each entry of a tape
whose sizes are known a place. :class:`Tapes` remembers the last tapes and predicts the next one, so that a plan exists
when the first tensor is saved. A store asks for each entry in turn (``placed.py`` does it for ``Tiered``)::

    tapes = Tapes(lambda sizes, reads: make_plan(sizes, limits, reads))

    place = tapes.put(nbytes)        # in `put`: the tape goes on with an entry of so many bytes; None: nothing is known
    order = tapes.plan.order         # in which order backward is expected to read the entries
    tapes.end(reads)                 # everything is dropped: the tape is remembered

What a store does with it:

- An entry whose place is 0 stays. Any other is sent at its put, from the first put on, so that the link is busy while
  forward computes. No decision depends on the speed of the link or of a disk: under a fixed limit an early copy is
  never worse than a late one.
- From the first read of backward on, entries come back in the order of reads, each as soon as it fits into what
  backward has freed, and at the latest when it is read.
- Of a tape of which nothing is known, the first saved makes room for the newest.
- What a forward without a backward has saved counts with 0 bytes in ``end``, because it needs no room.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

# [Note: the oldest tensors move first]
# Backward reads what forward saved in the reverse order. So the tensor that is saved first is read last: its copy has
# the most time in both directions, and the link can begin with it at the first put. Of T bytes under a limit of L the
# first T - L are sent, and no others. A store that begins to send when its limit is near has to move the same bytes in
# less time, and waits. On the modelled clock (benchmarks/results/simulated.json) the difference for a decoder at half
# its peak is a factor of two in the added time. The order in which the last backward read is mostly the reverse of the
# saves. Planning by it and not by the reverse saves the decoder at -30% another 0.7% of a step: one storage, which was
# saved early, is read early.


class Placement(NamedTuple):
    """Where each entry of a tape goes.

    Attributes:
        places: by position, the number of the place in which the entry is when backward begins; 0 is the nearest, where
            entries are saved.
        order: the positions in the order in which backward is expected to read them.
    """

    places: tuple[int, ...]
    order: tuple[int, ...]


def make_plan(sizes: Sequence[int], limits: Sequence[int | None], reads: Iterable[int] | None = None) -> Placement:
    """Give each entry of a tape a place.

    What backward reads first stays in the nearest place up to its limit, what it reads next goes to the second place,
    and so on. See [Note: the oldest tensors move first].

    Args:
        sizes: bytes of each entry, in the order of saves.
        limits: most bytes of each place, the nearest first; None for no limit. The last place takes all that is left:
            whether its limit holds is checked when bytes arrive there.
        reads: the positions of the entries in the order in which backward reads them first. Entries that are not in it
            come last. By default backward reads in the reverse order of saves.

    Ten entries of 10 bytes, of which 45 bytes may stay: the first six are sent.

    >>> make_plan([10] * 10, [45, None]).places
    (1, 1, 1, 1, 1, 1, 0, 0, 0, 0)

    Three places, of which the last is the farthest:

    >>> make_plan([10] * 6, [20, 20, None]).places
    (2, 2, 1, 1, 0, 0)

    A backward that reads in the order of saves needs the first entries first, so the last ones are sent.

    >>> make_plan([10] * 6, [40, None], reads=range(6)).places
    (0, 0, 0, 0, 1, 1)
    """
    order = dict.fromkeys(() if reads is None else reads)
    order.update(dict.fromkeys(reversed(range(len(sizes)))))
    places, place, left = [0] * len(sizes), 0, limits[0]
    for position in order:
        while left is not None and sizes[position] > left and place + 1 < len(limits):
            place += 1  # the nearer place is full
            left = limits[place]
        places[position] = place
        left = None if left is None else left - sizes[position]
    return Placement(tuple(places), tuple(order))


Sizes = tuple[int, ...]  # bytes of each entry of a tape
_FAR = 16  # an entry that is so many times as large as in the last tape, or so small a part, is of another model


class _Known(NamedTuple):
    needed: Sizes
    reads: Sizes | None
    plan: Placement


class Tapes:
    """The last tapes of one thread and device, and the one of them that the tape which is being saved seems to be.

    The prediction is checked at each entry. If the sizes differ, another remembered tape that begins with the same
    sizes takes its place. If there is none, the batch has a length that was not seen before: the sizes of the tape are
    guessed from the last one, and are not checked any more. A wrong prediction costs time and never gives a wrong
    tensor.

    Before the first entry, and among several tapes that begin alike, that tape is expected which came after the last
    tape the last time; then the newest. So lengths in turn are predicted even if their first entries have equal sizes.

    Attributes:
        plan: of the expected tape; None if nothing is known. It may have fewer entries than the tape.
        sizes: of the tape that is being saved.

    >>> tapes = Tapes(lambda sizes, reads: make_plan(sizes, [15, None], reads))
    >>> tapes.put(10), tapes.put(10)
    (None, None)
    >>> tapes.end()
    >>> tapes.plan.places
    (1, 0)
    >>> tapes.put(5), tapes.plan.places
    (0, (0, 0))
    """

    def __init__(self, make: Callable[[Sequence[int], Sequence[int] | None], Placement], most: int = 8) -> None:
        self.plan: Placement | None = None
        self._make, self._most = make, most
        self._known: dict[Sizes, _Known] = {}  # the newest last
        self._after: dict[Sizes, Sizes] = {}  # which tape came after a remembered one
        self._last: Sizes = ()  # of the last tape
        self._expected: Sizes | None = None  # of the tape that is expected
        self.sizes: list[int] = []

    def put(self, nbytes: int) -> int | None:
        """The tape goes on with an entry of ``nbytes``. Returns its place; None if the tape is not known."""
        position, expected = len(self.sizes), self._expected
        self.sizes.append(nbytes)
        if expected is not None and expected[position : position + 1] != (nbytes,):
            self._expect()
        return self.place(position)

    def place(self, position: int) -> int | None:
        """The place of an entry; None if the tape is not known."""
        try:
            return None if self.plan is None else self.plan.places[position]
        except IndexError:  # the tape is longer than the expected one
            return None

    def end(self, reads: Sequence[int] | None = None, needed: Sequence[int] | None = None) -> None:
        """Remember the tape, and expect the next one.

        Args:
            reads: positions in the order in which backward read them first, if that differs from the reverse order.
            needed: for each entry the bytes for which it needs a place, if some are not those that were put. The next
                tape is recognised by what is put all the same.
        """
        sizes = tuple(self.sizes)
        if sizes:
            needed = sizes if needed is None else tuple(needed)
            reads = None if reads is None else tuple(reads)
            known = self._known.pop(sizes, None)
            if known is None or (known.needed, known.reads) != (needed, reads):
                known = _Known(needed, reads, self._make(needed, reads))
            self._known[sizes] = known
            self._after[self._last], self._last = sizes, sizes
            while len(self._known) > self._most:
                oldest = next(iter(self._known))
                del self._known[oldest]
                self._after.pop(oldest, None)
        self.sizes = []
        self._expect()

    def replan(self) -> None:
        """Make the plans anew, because the limits are others now."""
        for sizes, known in self._known.items():
            self._known[sizes] = known._replace(plan=self._make(known.needed, known.reads))
        self._expect()

    def _expect(self) -> None:
        """Choose the tape that begins with the sizes so far."""
        begin = tuple(self.sizes)
        candidates = itertools.chain([self._after.get(self._last, ())], reversed(self._known))
        matching = (sizes for sizes in candidates if sizes in self._known and sizes[: len(begin)] == begin)
        self._expected = next(matching, None)
        self.plan = self._guess() if self._expected is None else self._known[self._expected].plan

    def _guess(self) -> Placement | None:
        """A plan for a tape that is like the last one, with other sizes from the newest entry on.

        The sizes of most entries grow with the length of the batch, and those of some do not. So two tapes with as many
        entries tell how much each of them grows. If there is only one tape, all its sizes are taken to grow alike.
        """
        last, at = self._last, len(self.sizes) - 1
        if last not in self._known or not 0 <= at < len(last) or not last[at]:
            return None
        known = self._known[last]
        growth = self.sizes[at] / last[at]
        if not 1 / _FAR < growth < _FAR:
            return None  # another model
        same = (sizes for sizes in reversed(self._known) if len(sizes) == len(last) and sizes[at] != last[at])
        other = next(same, None)
        if other is None:
            guessed = [round(size * growth) for size in known.needed]
        else:
            share = (self.sizes[at] - last[at]) / (other[at] - last[at])
            pairs = zip(known.needed, self._known[other].needed, strict=True)
            guessed = [max(0, round(one + share * (two - one))) for one, two in pairs]
        return self._make(guessed, known.reads)
