"""Which saved tensors stay and which go to which place, decided before they are saved. This file needs no torch.

A *tape* is what one thread saves on one device in one forward, in order. :func:`make_plan` cuts a tape whose sizes are
known into groups, and gives each group a place. :class:`Tapes` remembers the last tapes and predicts the next one, so
that a plan exists when the first tensor is saved. A store asks for each entry in turn (``turns.py`` does it for
``Tiered``)::

    tapes = Tapes(lambda sizes, reads: make_plan(sizes, limits, group=64 << 20, reads=reads))

    changed = tapes.put(nbytes)      # in `put`: the tape goes on with an entry of so many bytes
    plan = tapes.plan                # None: nothing is known of this tape; it may have fewer entries than the tape
    place = plan.group(position).place
    if changed: ...                  # another plan from here on
    tapes.end(reads)                 # everything is dropped: the tape is remembered

What a store does with it:

- A group whose place is 0 stays. Any other group is sent when it is complete, or each of its entries at its put, from
  the first put on, so that the link is busy while forward computes. No decision depends on the speed of the link or of
  a disk: under a fixed limit an early copy is never worse than a late one.
- From the first read of backward on, groups come back in the order ``plan.back``, each as soon as it fits into what
  backward has freed, and at the latest when one of its entries is read. ``MovedGroup.asked`` predicts at which
  read that is.
- Of a tape of which nothing is known, the first saved makes room for the newest.
- An entry that is dropped before backward begins counts with 0 bytes in ``end``'s tape, because it needs no room then.
"""

from __future__ import annotations

import dataclasses
import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

# [Note: the oldest tensors move first]
# Backward reads what forward saved in the reverse order. So the tensor that is saved first is read last: its copy has
# the most time in both directions, and the link can begin with it at the first put. Of T bytes under a limit of L the
# first T - L are sent, and no others. A store that begins to send when its limit is near has to move the same bytes in
# less time, and waits. On the modelled clock (benchmarks/results/simulated.json) the difference for a decoder at half
# its peak is a factor of two in the added time. The order in which the last backward read is mostly the reverse of the
# saves. Planning by it and not by the reverse saves the decoder at -30% another 0.7% of a step: one storage, which was
# saved early, is read early.


@dataclass(frozen=True)
class MovedGroup:
    """Entries of a tape that follow each other, and move together.

    Attributes:
        first, last: the positions of the first and of the last entry. The group is complete, and is sent if its place
            is not 0, when ``last`` was put.
        nbytes: bytes of all entries.
        place: the number of the place in which it is when backward begins; 0 is the nearest, where entries are saved.
        asked: at which read of backward it is asked back, counted from 1; 0 if it stays.
    """

    first: int
    last: int
    nbytes: int
    place: int
    asked: int = 0


@dataclass(frozen=True)
class Placement:
    """Where each group of a tape goes.

    Attributes:
        groups: in the order of saves. Together they have every entry once.
        back: the indices of the groups that do not stay, in the order in which they are asked back.
    """

    groups: tuple[MovedGroup, ...]
    back: tuple[int, ...]
    _lasts: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_lasts", tuple(group.last for group in self.groups))

    def __len__(self) -> int:
        return self._lasts[-1] + 1 if self._lasts else 0

    def group(self, position: int) -> MovedGroup:
        return self.groups[bisect_left(self._lasts, position)]

    def nbytes(self, place: int) -> int:
        """Bytes that are at ``place`` when backward begins."""
        return sum(group.nbytes for group in self.groups if group.place == place)


def make_plan(
    sizes: Sequence[int], limits: Sequence[int | None], *, group: int, reads: Sequence[int] | None = None
) -> Placement:
    """Cut a tape into groups, and give each group a place.

    What backward reads first stays in the nearest place up to its limit, what it reads next goes to the second place,
    and so on. See [Note: the oldest tensors move first].

    Args:
        sizes: bytes of each entry, in the order of saves.
        limits: most bytes of each place, the nearest first; None for no limit. The last place takes all that is left:
            whether its limit holds is checked when bytes arrive there.
        group: bytes of a group at least, if there are as many. An entry is never divided.
        reads: the positions of the entries in the order in which backward reads them first. Entries that are not in it
            come last. By default backward reads in the reverse order of saves.

    Ten entries of 10 bytes, of which 45 bytes may stay: the first six are sent, two in a group.

    >>> plan = make_plan([10] * 10, [45, None], group=20)
    >>> [(g.first, g.last, g.place) for g in plan.groups]
    [(0, 1, 1), (2, 3, 1), (4, 5, 1), (6, 7, 0), (8, 9, 0)]

    Backward asks for them in the reverse order, into what it has freed. At the third read the first two entries that it
    read are free.

    >>> [(plan.groups[i].first, plan.groups[i].asked) for i in plan.back]
    [(4, 3), (2, 5), (0, 7)]

    Three places, of which the last is the farthest:

    >>> [(g.first, g.place) for g in make_plan([10] * 6, [20, 20, None], group=20).groups]
    [(0, 2), (2, 1), (4, 0)]

    A backward that reads in the order of saves needs the first entries first, so the last ones are sent.

    >>> [(g.first, g.place) for g in make_plan([10] * 6, [40, None], group=20, reads=range(6)).groups]
    [(0, 0), (2, 0), (4, 1)]
    """
    order = range(len(sizes) - 1, -1, -1) if reads is None else reads
    turn = {position: i for i, position in enumerate(order)}
    never = len(turn)
    found: list[MovedGroup] = []
    place, left = 0, limits[0]
    for first, last in sorted(_runs(sizes, group), key=lambda run: _first_read(run, turn, never)):
        end = last  # what of the run has no place yet: `first` to `end`
        while end >= first:
            is_last_place = place + 1 == len(limits)
            begin = end + 1
            while begin > first and (is_last_place or left is None or sizes[begin - 1] <= left):
                begin -= 1
                left = None if left is None else left - sizes[begin]
            if begin <= end:
                found.append(MovedGroup(begin, end, sum(sizes[begin : end + 1]), place))
            if begin > first:  # the rest does not fit: this place is full
                place += 1
                left = limits[place]
            end = begin - 1
    asked = _asked(found, sizes, turn, limits[0])
    timed = [dataclasses.replace(group, asked=at) for group, at in zip(found, asked, strict=True)]
    groups = sorted(timed, key=lambda group: group.first)
    index = {group.first: i for i, group in enumerate(groups)}
    return Placement(tuple(groups), tuple(index[group.first] for group in found if group.place))


def _runs(sizes: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """The positions of the first and the last entry of runs that have at least ``most`` bytes, but for the last run."""
    first = nbytes = 0
    for position, size in enumerate(sizes):
        nbytes += size
        if nbytes >= most or position + 1 == len(sizes):
            yield first, position
            first, nbytes = position + 1, 0


def _first_read(run: tuple[int, int], turn: dict[int, int], never: int) -> tuple[int, int]:
    """When backward first reads an entry of ``run``; of runs that it never reads the last saved comes first."""
    return min(turn.get(position, never) for position in range(run[0], run[1] + 1)), -run[0]


def _asked(groups: Sequence[MovedGroup], sizes: Sequence[int], turn: dict[int, int], limit: int | None) -> list[int]:
    """At which read each group fits into the nearest place; ``groups`` are in the order of their first reads.

    An entry is freed when the next one is read.
    """
    order, never = sorted(turn, key=turn.__getitem__), len(turn)
    held = sum(group.nbytes for group in groups if not group.place)
    read, asked = 1, []
    for group in groups:
        if not group.place:
            asked.append(0)
            continue
        latest = _first_read((group.first, group.last), turn, never)[0] + 1
        while limit is not None and held + group.nbytes > limit and read < min(latest, never):
            held -= sizes[order[read - 1]]
            read += 1
        held += group.nbytes
        asked.append(min(read, latest))
    return asked


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

    >>> tapes = Tapes(lambda sizes, reads: make_plan(sizes, [15, None], group=1, reads=reads))
    >>> tapes.put(10), tapes.put(10), tapes.plan
    (False, False, None)
    >>> tapes.end()
    >>> [group.place for group in tapes.plan.groups]
    [1, 0]
    >>> tapes.put(5), [group.nbytes for group in tapes.plan.groups], [group.place for group in tapes.plan.groups]
    (True, [5, 5], [0, 0])
    """

    def __init__(self, make: Callable[[Sequence[int], Sequence[int] | None], Placement], most: int = 8) -> None:
        self.plan: Placement | None = None
        self._make, self._most = make, most
        self._known: dict[Sizes, _Known] = {}  # the newest last
        self._after: dict[Sizes, Sizes] = {}  # which tape came after a remembered one
        self._last: Sizes = ()  # of the last tape
        self._expected: Sizes | None = None  # of the tape that is expected
        self._sizes: list[int] = []  # of the tape that is being saved

    def put(self, nbytes: int) -> bool:
        """The tape goes on with an entry of ``nbytes``. Returns whether ``plan`` is another one now."""
        position, expected = len(self._sizes), self._expected
        self._sizes.append(nbytes)
        if expected is None or (position < len(expected) and expected[position] == nbytes):
            return False
        self._expect()
        return True

    def end(self, reads: Sequence[int] | None = None, needed: Sequence[int] | None = None) -> None:
        """Remember the tape, and expect the next one.

        Args:
            reads: positions in the order in which backward read them first, if that differs from the reverse order.
            needed: for each entry the bytes for which it needs a place, if some are not those that were put. The next
                tape is recognised by what is put all the same.
        """
        sizes = tuple(self._sizes)
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
        self._sizes = []
        self._expect()

    def replan(self) -> None:
        """Make the plans anew, because the limits are others now."""
        for sizes, known in self._known.items():
            self._known[sizes] = known._replace(plan=self._make(known.needed, known.reads))
        self._expect()

    def _expect(self) -> None:
        """Choose the tape that begins with the sizes so far."""
        begin = tuple(self._sizes)
        candidates = itertools.chain([self._after.get(self._last, ())], reversed(self._known))
        matching = (sizes for sizes in candidates if sizes in self._known and sizes[: len(begin)] == begin)
        self._expected = next(matching, None)
        self.plan = self._guess() if self._expected is None else self._known[self._expected].plan

    def _guess(self) -> Placement | None:
        """A plan for a tape that is like the last one, with other sizes from the newest entry on.

        The sizes of most entries grow with the length of the batch, and those of some do not. So two tapes with as many
        entries tell how much each of them grows. If there is only one tape, all its sizes are taken to grow alike.
        """
        last, at = self._last, len(self._sizes) - 1
        if last not in self._known or not 0 <= at < len(last) or not last[at]:
            return None
        known = self._known[last]
        growth = self._sizes[at] / last[at]
        if not 1 / _FAR < growth < _FAR:
            return None  # another model
        same = (sizes for sizes in reversed(self._known) if len(sizes) == len(last) and sizes[at] != last[at])
        other = next(same, None)
        if other is None:
            guessed = [round(size * growth) for size in known.needed]
        else:
            share = (self._sizes[at] - last[at]) / (other[at] - last[at])
            pairs = zip(known.needed, self._known[other].needed, strict=True)
            guessed = [max(0, round(one + share * (two - one))) for one, two in pairs]
        return self._make(guessed, known.reads)
