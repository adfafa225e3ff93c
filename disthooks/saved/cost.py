"""What it costs in seconds to move saved tensors or to compute them again, and the cheapest mixture. It needs no torch.

Some saved tensors of a step do not fit under the limit. Each byte of these is moved, or computed again. A kind is a
group of tensors that are computed again in the same way: those that the same operators compute, or checkpointed layers.
"""

# [Note: the cheapest mixture]
# To compute again costs the seconds that were measured, for each kind in proportion to its bytes. To move costs nothing
# as long as the copies are hidden: what is saved first moves first, so the link has all of forward to send, and all of
# backward to bring back, but for the time of one tensor: a copy begins when its tensor is whole, and is of use when it
# is done. Beyond that each byte costs what the link takes for it. What does not fit into the host's memory goes to a
# slower place, a disk, whose copies are hidden in the same way. Both costs are convex in the number of bytes, so the
# cheapest mixture computes the cheapest kinds again, in the order of seconds for a byte, up to the point where the next
# byte is cheaper to move. That point is the end of a kind, or one of the points where the cost of moving has a
# corner, so only these are tried.
#
# A layer is computed again as a whole. So for each number of layers the best of the other kinds is found.
#
# tests/unit/saved/test_cost.py tries all mixtures of small tables. tests/unit/saved/test_cost_optimum.py compares the
# choice for 288 groups with the optimum of an integer program, and these seconds with those of a ``Tiered`` on a
# modelled clock.

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Kind(NamedTuple):
    """Saved tensors that are computed again in the same way.

    Attributes:
        name: of the kind.
        nbytes: bytes of all of them in a step.
        seconds: how long it takes to compute all of them again.
        unit: bytes that are computed again together; 1 if any part can be.
    """

    name: str
    nbytes: float
    seconds: float
    unit: float = 1.0


@dataclass(frozen=True)
class Rates:
    """The speed of a step, and of the places that saved tensors move to, as measured.

    Attributes:
        forward, backward: seconds that the step computes, without what it waits for.
        out, back: seconds that the link takes for a byte, each way.
        tensor: bytes of the largest tensor, whose copy is not hidden.
        room: bytes that the place has room for.
        then: the place that the other bytes move to, beside the copies to this one.
    """

    forward: float
    backward: float
    out: float
    back: float
    tensor: float = 0.0
    room: float = math.inf
    then: Rates | None = None

    def moving(self, nbytes: float) -> float:
        """Seconds that a step takes longer because ``nbytes`` move.

        >>> Rates(forward=1.0, backward=2.0, out=0.5, back=0.5).moving(3)  # half a second of forward is not hidden
        0.5
        """
        if nbytes <= 0:
            return 0.0
        here = nbytes if self.then is None else min(nbytes, self.room)
        beyond = 0.0 if self.then is None else self.then.moving(nbytes - here)
        return sum(max(0.0, here * pace - seconds) for seconds, pace in self._hidden()) + beyond

    def corners(self) -> tuple[float, ...]:
        """The bytes at which moving begins to cost more."""
        here = [seconds / pace for seconds, pace in self._hidden() if 0 < pace < math.inf]
        if self.then is None:  # all bytes move here
            return (0.0, *here)
        beyond = (self.room + corner for corner in self.then.corners())
        return (0.0, *(corner for corner in here if corner < self.room), *beyond)

    def _hidden(self) -> Iterator[tuple[float, float]]:
        """For each way: how many seconds of copies are hidden, and the seconds for a byte."""
        for seconds, pace in ((self.forward, self.out), (self.backward, self.back)):
            yield max(0.0, seconds - pace * self.tensor), pace


class Mixture(NamedTuple):
    """A choice of what is computed again; the rest of what does not fit moves.

    Attributes:
        again: of each kind the part that is computed again, from 0 to 1.
        seconds: how much longer the step takes, for computing again and for moving.
    """

    again: dict[str, float]
    seconds: float


def seconds_of(kinds: Sequence[Kind], again: Mapping[str, float], excess: float, rates: Rates) -> float:
    """Seconds that a step takes longer if such a part of each kind is computed ``again``, and the rest moves."""
    computed = sum(kind.seconds * again.get(kind.name, 0.0) for kind in kinds)
    return computed + rates.moving(excess - sum(kind.nbytes * again.get(kind.name, 0.0) for kind in kinds))


def cheapest(kinds: Sequence[Kind], excess: float, rates: Rates) -> Mixture:
    """The mixture that takes the least seconds. See [Note: the cheapest mixture].

    Args:
        kinds: at most one of them has a ``unit`` of more than a byte.
        excess: bytes that do not fit if nothing is computed again.
        rates: of the step.

    >>> cheap, dear = Kind("relu", 4, 0.4), Kind("layers", 8, 8.0, unit=4)
    >>> slow = Rates(forward=1.0, backward=1.0, out=1.0, back=1.0)
    >>> cheapest([cheap, dear], 9, slow).again  # one byte of nine moves for nothing
    {'relu': 1.0, 'layers': 0.5}
    >>> cheapest([cheap, dear], 9, Rates(9.0, 9.0, out=1.0, back=1.0)).again  # all nine do
    {'relu': 0.0, 'layers': 0.0}
    """
    whole = next((kind for kind in kinds if kind.unit > 1), None)
    rest = sorted((kind for kind in kinds if kind is not whole and kind.nbytes), key=lambda it: it.seconds / it.nbytes)
    ends = list(itertools.accumulate((kind.nbytes for kind in rest), initial=0.0))
    costs = list(itertools.accumulate((kind.seconds for kind in rest), initial=0.0))
    best = (math.inf, 0.0, 0.0)
    for count in range(1 + (round(whole.nbytes / whole.unit) if whole else 0)):
        taken, first = (count * whole.unit, count * whole.unit * whole.seconds / whole.nbytes) if whole else (0.0, 0.0)
        left = excess - taken
        inner = (left - corner for corner in rates.corners())
        for total in (*ends, *(each for each in inner if 0 < each < ends[-1])):
            seconds = first + _cost(total, ends, costs) + rates.moving(left - total)
            best = min(best, (seconds, taken, total))
    seconds, taken, total = best
    parts = zip(rest, ends, strict=False)
    again = {kind.name: min(1.0, max(0.0, (total - end) / kind.nbytes)) for kind, end in parts}
    return Mixture(again | ({whole.name: taken / whole.nbytes} if whole else {}), seconds)


def _cost(total: float, ends: Sequence[float], costs: Sequence[float]) -> float:
    """Seconds to compute the first ``total`` bytes again: straight lines between the points (``ends``, ``costs``)."""
    place = min(bisect_left(ends, total), len(ends) - 1)
    if not place or ends[place] <= total:
        return costs[place]
    share = (total - ends[place - 1]) / (ends[place] - ends[place - 1])
    return costs[place - 1] + share * (costs[place] - costs[place - 1])
