"""``ComputedAgain`` decides what a model under ``fit`` computes again: checkpointed layers, and what is dropped."""

# [Note: what is computed again]
# Saved tensors that do not fit under the limit are moved, or computed again: layers that run in a checkpoint, and what
# Recompute drops. The first rounds compute all of it again, because that needs the least memory, and they measure: how
# many bytes each kind has, how long it takes to compute them again, how fast the place is that tensors move to. Then
# the cheapest mixture is taken; see cost.py. As long as something was not measured, moving counts as dearer than
# anything: then no more is computed again than has to be, first what Recompute drops, because a checkpoint runs
# products of matrices. Layers are switched off from the last one on; see [Note: checkpoints that are switched off].
#
# The first of the layers that are off are counted with all that the step needs beside saved tensors, since a layer that
# is computed again lies in memory as a whole. Then their bytes are known.
#
# Another mixture changes the plan of the store, which costs a step. So a new one is taken only if it promises a part of
# the step; and if the steps after it take longer than the ones before, inputs of that size go back to computing as much
# again as has to be, for good. All of these tensors are under the limit, as any other saved tensor. So a wrong count or
# a wrong time costs time, and no budget is passed. What a step needs beside saved tensors may differ with another
# mixture, so ``fit`` halves the limit for the first step after a change by seconds. Steps that save other bytes each
# time never change by seconds.

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any, NamedTuple

from disthooks.saved.checkpointed_layers import LAYER, CheckpointedLayers
from disthooks.saved.cost import Kind, Mixture, Rates, cheapest, seconds_of
from disthooks.saved.pipeline import Droppable
from disthooks.saved.stopwatch import Stopwatch

# The part of the room that is filled with what could be dropped, if there are no layers; and the part of a step, or of
# the limit if no seconds are known, that another mixture has to save.
_FILLED, _WORTH = 0.95, 0.02
# The outlook is for so many parts of the limit more or less.
_OTHER = 10
# A limit that changes by no more than the first part of all saved bytes is the same: on a CPU resident memory differs
# by some megabytes from step to step. Steps that save bytes that differ by no more than the second part are alike.
_NEAR, _ALIKE = 0.05, 0.025
# Steps whose median is compared before and after a mixture was chosen by its seconds.
_COMPARED = 3
_LAYERS = "checkpointed layers"
#: Nothing is known of the seconds: a byte that moves is dearer than all that is computed again.
_UNKNOWN = Rates(0.0, 0.0, 1e6, 1e6)


@dataclass
class _Size:
    """What is known of rounds of inputs of one size.

    Attributes:
        saved: bytes of saved tensors, other than weights, with every checkpoint on and all dropped that can be.
        layer: bytes that each checkpoint that is off adds; too many as long as none was off.
        is_measured: whether ``layer`` is known from a round with checkpoints off.
        dropped: bytes of each place that Recompute dropped in the last round in which it dropped all that it could.
        again: of each kind the part that is computed again; empty before anything was chosen.
        by_seconds: whether seconds may choose the mixture: no longer after they have chosen a slower one.
    """

    saved: int
    layer: int
    is_measured: bool = False
    dropped: dict[str, int] = field(default_factory=dict)
    again: dict[str, float] = field(default_factory=dict)
    by_seconds: bool = True


@dataclass
class _Steps:
    """The last steps of inputs of one size with the same mixture, and nearly the same limit.

    Attributes:
        seconds: of each, the newest last.
        limit: of the last one.
        saved: bytes that the last one saved, apart from layers that were computed again.
        before: the median with the mixture before, if it is to be compared with these; None otherwise.
        is_timed: whether the mixture was chosen by seconds.
    """

    seconds: list[float] = field(default_factory=list)
    limit: int = 0
    saved: int = 0
    before: float | None = None
    is_timed: bool = False

    def add(self, seconds: float, saved: int) -> None:
        """Another step. If it saved other bytes than the last one, what a mixture needs is known by bytes alone."""
        if abs(saved - self.saved) > _ALIKE * saved:
            self.seconds.clear()
            self.is_timed, self.before = False, None
        self.saved = saved
        self.seconds = [*self.seconds[-_COMPARED:], seconds]

    def median(self) -> float:
        return statistics.median(self.seconds[-_COMPARED:])


class Outlook(NamedTuple):
    """What so many bytes more or less for saved tensors would change, by the seconds that were measured.

    Attributes:
        nbytes: how many.
        faster: the part of a step that would be saved with so many more.
        slower: the part of a step that would be added with so many less.
    """

    nbytes: int
    faster: float
    slower: float


class ComputedAgain:
    """What a model computes again in each round, from one forward with gradients on to the next.

    Attributes:
        droppable: what Recompute may drop.
        layers: those whose checkpoints can be switched off.
        off: how many of their checkpoints are off in the round that is under way, from the last layer on.
        nbytes: bytes that the last round has computed again, as far as is known.
        kinds: what that was, and how long it took; NaN if that was not measured.

    >>> again = ComputedAgain()
    >>> again.choose(size=8, limit=100)
    False
    >>> again.droppable.take("relu", 40)
    >>> again.learn(size=8, saved=50, needed=30), again.nbytes
    (0, 40)
    >>> again.choose(size=8, limit=80)  # there is room for 30 of the 40 bytes, and 95% of it is used
    False
    >>> again.droppable.left
    {'relu': 11.5}
    """

    def __init__(self, watch: Stopwatch | None = None) -> None:
        self.droppable, self.layers, self.nbytes = Droppable(watch=watch), CheckpointedLayers(None, ()), 0
        self.off = 0
        self._outlook: Callable[[], Outlook] | None = None
        self.kinds: tuple[Kind, ...] = ()
        self._is_all = True  # whether Recompute may drop all that it can in the round that is under way
        self._sizes: dict[int, _Size] = {}
        self._steps: dict[int, _Steps] = {}

    def state_dict(self) -> dict[int, Any]:
        return {size: astuple(each) for size, each in self._sizes.items()}

    def load_state_dict(self, state: Mapping[int, Any]) -> None:
        self._sizes = {size: _Size(*each) for size, each in state.items()}

    @property
    def outlook(self) -> Outlook | None:
        """What another budget would change; None while no seconds are known."""
        return None if self._outlook is None else self._outlook()

    def choose(self, size: int, limit: int, rates: Rates | None = None, is_going_on: bool = False) -> bool:
        """Decide for a round of inputs of ``size`` with so many bytes of saved tensors, and switch Recompute.

        ``rates`` are those of a step of this size; None if they were not measured. A round that is going on has dropped
        something already.

        Returns:
            Whether seconds have chosen another mixture. What a step needs with it is not known.
        """
        self.off, left, is_new = 0, None, False
        if self._sizes:
            like, growth = nearest_size(size, self._sizes)
            known = self._sizes[like]
            if like == size:
                self.off, left, is_new = self._settled(known, self._steps.setdefault(size, _Steps()), limit, rates)
            else:
                kinds = self._kinds(known, growth, None)
                mixture = cheapest(kinds, _excess(kinds, known.saved * growth, limit), _UNKNOWN)
                self.off, left = self._allowed(known, mixture.again, kinds, limit > known.saved * growth)
        self._is_all = left is None and (self._is_all or not is_going_on)
        if not is_going_on:
            self.droppable.dropped.clear()
        elif left is not None:
            rest = {name: nbytes - self.droppable.dropped[name] for name, nbytes in left.items()}
            left = {name: nbytes for name, nbytes in rest.items() if nbytes > 0}
        self.droppable.left = left
        return is_new

    def _settled(
        self, known: _Size, steps: _Steps, limit: int, rates: Rates | None
    ) -> tuple[int, dict[str, float] | None, bool]:
        """Keep the mixture of the last round of this size, unless another one is worth a change.

        Returns what :meth:`_allowed` does, and whether seconds have made the change.
        """
        untimed = self._kinds(known, 1.0, None)
        if abs(limit - steps.limit) > _NEAR * (known.saved + sum(kind.nbytes for kind in untimed)):
            steps.seconds.clear()
        steps.limit = limit
        if steps.before is not None and len(steps.seconds) > _COMPARED:  # the first step makes the plan of the store
            known.by_seconds = steps.median() <= steps.before
            steps.before = None
        was_timed, is_settled = steps.is_timed, len(steps.seconds) >= _COMPARED
        can_time = known.by_seconds and rates is not None and (steps.is_timed or is_settled)
        watch = self.droppable.watch if can_time and (known.is_measured or not len(self.layers)) else None
        kinds = self._kinds(known, 1.0, watch)
        steps.is_timed = watch is not None and all(kind.seconds > 0 for kind in kinds)
        if rates is None or not steps.is_timed:
            kinds, rates, worth = untimed, _UNKNOWN, _WORTH * limit
            self._outlook = None
        else:
            worth = _WORTH * steps.median() if is_settled else math.inf
        excess = _excess(kinds, known.saved, limit)
        best = cheapest(kinds, excess, rates)
        if steps.is_timed and is_settled and limit >= _OTHER:
            step = steps.median()
            self._outlook = functools.partial(_outlook, kinds, excess, rates, best.seconds, limit // _OTHER, step)
        is_known = known.again.keys() == best.again.keys()
        if is_known and seconds_of(kinds, known.again, excess, rates) <= best.seconds + worth:
            best = Mixture(known.again, 0.0)
        is_new = best.again != known.again
        if is_new:
            steps.before = steps.median() if steps.is_timed and is_settled else None
            steps.seconds.clear()
            known.again = best.again
        has_room = limit > known.saved
        is_trial = can_time and not has_room and not known.is_measured and len(self.layers) > 0
        allowed = self._allowed(known, best.again, kinds, has_room or is_trial)
        return *allowed, is_trial or (is_new and (was_timed or steps.is_timed))

    def _allowed(
        self, known: _Size, again: Mapping[str, float], kinds: Sequence[Kind], has_room: bool
    ) -> tuple[int, dict[str, float] | None]:
        """How many checkpoints may be off, and the bytes of each place that Recompute may drop; None for all."""
        count = len(self.layers)
        on = round(count * again.get(_LAYERS, 0.0))
        off = max(count - on, 0 if known.is_measured or not has_room else min(1, count))
        if all(again.get(name, 0.0) >= 1 for name in known.dropped):
            return off, None
        nbytes = {kind.name: math.inf if again.get(kind.name) == 1 else kind.nbytes for kind in kinds}
        return off, {name: nbytes[name] * again[name] for name in known.dropped if again.get(name)}

    def _kinds(self, known: _Size, growth: float, watch: Stopwatch | None) -> list[Kind]:
        """What may be computed again. Without a watch a byte of a layer takes twice as long as any other."""
        kinds = []
        for name, nbytes in known.dropped.items():
            pace = 1.0 if watch is None else watch.pace(name) or 0.0
            kinds.append(Kind(name, nbytes * growth, nbytes * growth * pace))
        if count := len(self.layers):
            unit = known.layer * growth
            seconds = 2 * unit if watch is None else watch.pace(LAYER) or 0.0
            kinds.append(Kind(_LAYERS, unit * count, seconds * count, unit))
        return kinds

    def learn(self, size: int, saved: int, needed: int, missing: int = 0, seconds: float | None = None) -> int:
        """Note what a round of inputs of ``size`` has shown, which took so many ``seconds``; None for no comparison.

        A first round in which tensors were ``missing`` needs more than later ones, so it tells nothing.

        Returns:
            Bytes that another round of the size may need beside those. A layer that is computed again lies in memory as
            a whole. In a round with checkpoints off that may not be seen, because the layers that are not computed
            again were freed before.
        """
        dropped, off = dict(self.droppable.dropped), self.off
        self.nbytes = total = sum(dropped.values())
        known = self._sizes.get(size)
        if known is None and off:  # as many were off as the next known size allowed; both grow alike
            like = self._sizes[nearest_size(size, self._sizes)[0]]
            scaled = int(saved * like.saved / (like.saved + off * like.layer))
            known = replace(like, saved=scaled, is_measured=False, again={})
        elif known is None and missing and size not in self._steps:
            self._steps[size] = _Steps()
            return 0
        elif known is None:
            known = _Size(saved, max(1, needed), dropped=dropped)
        self._sizes[size] = known
        if self._is_all:
            known.dropped = dropped
        everything = saved + total
        saved -= max(0, sum(known.dropped.values()) - total)  # what it could have dropped, and did not
        if off:
            # A model that uses its layers in turn adds other bytes in each round: the most count.
            known.layer = max(1, (saved - known.saved) // off, known.layer if known.is_measured else 0)
            known.is_measured = True
        else:
            known.saved = saved
        if seconds is not None:
            self._steps.setdefault(size, _Steps()).add(seconds, everything - off * known.layer)
        amounts = [(name, name, nbytes, nbytes) for name, nbytes in dropped.items()]
        if known.is_measured and (on := len(self.layers) - off):
            amounts.append((_LAYERS, LAYER, on * known.layer, on))
            self.nbytes += on * known.layer
        watch = self.droppable.watch
        paces = [None if watch is None else watch.pace(part) for _, part, _, _ in amounts]
        self.kinds = tuple(
            Kind(name, nbytes, math.nan if pace is None else pace * amount)
            for (name, _, nbytes, amount), pace in zip(amounts, paces, strict=True)
        )
        return known.layer if off else 0


def _outlook(kinds: Sequence[Kind], excess: float, rates: Rates, seconds: float, other: int, step: float) -> Outlook:
    """The outlook beside a choice that adds so many ``seconds`` to a step, which takes ``step`` seconds with them."""
    less, more = (cheapest(kinds, max(0.0, excess + nbytes), rates).seconds for nbytes in (-other, other))
    return Outlook(other, (seconds - less) / step, (more - seconds) / step)


def _excess(kinds: Sequence[Kind], saved: float, limit: int) -> float:
    """Bytes of saved tensors that do not fit under ``limit`` if nothing is computed again."""
    room = limit - saved
    has_layers = any(kind.unit > 1 for kind in kinds)
    return max(0.0, sum(kind.nbytes for kind in kinds) - (room if has_layers or room <= 0 else _FILLED * room))


def nearest_size(size: int, known: Collection[int]) -> tuple[int, float]:
    """The size of ``known`` that tells most about ``size``, and how much more ``size`` may need.

    This is the next larger one, or the largest. From that one bytes may grow by the square of the ratio, since
    attention without a fused kernel does.

    >>> nearest_size(3, [2, 4, 8]), nearest_size(16, [2, 4, 8])
    ((4, 1.0), (8, 4.0))
    """
    like = min((each for each in known if each >= size), default=max(known))
    return like, max(1.0, size / like) ** 2
