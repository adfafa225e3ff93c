"""Steps whose gradients are not finite: each is recorded, whatever ``every`` is, and of several in a row the first."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from disthooks.grads.plan import StepPlan
from disthooks.grads.stats.norms import Power
from disthooks.grads.stats.scan import NonFiniteCount, OwnNonFinite, ranks_in
from disthooks.grads.step import HostCopy, Merged

_MOST = 10  # parameters that a record names


class NonFiniteStep(NamedTuple):
    """The message about one step.

    Attributes:
        step: which.
        fields: what of its gradients was not finite.
        first: whether it is the first of several in a row, so that it gets a record even if it is not logged.
    """

    step: int
    fields: dict[str, Any]
    first: bool


class _Step(NamedTuple):
    """The numbers of one step on their way to the host."""

    step: int
    decides: bool  # whether a rule decided about the step
    copy: HostCopy


class _Row(NamedTuple):
    """The steps in a row that were not finite until now."""

    since: int
    skipped: bool
    seen: tuple[Any, ...]


class NonFiniteSteps:
    """Finds the steps that are not finite, from numbers that are copied in every step and read when they have arrived.

    Nothing waits for them: on an accelerator the host may be several steps ahead, and then they are read some steps
    later. A step that an optimizer makes with such gradients spoils the parameters, so that all steps that follow are
    not finite either: these are not told again. After a step that was left out (:class:`~disthooks.SkipNonFinite`) the
    parameters are as they were, and the next one is told unless it is the same parameters and ranks again.
    """

    def __init__(self, steps: StepPlan, ranks: Sequence[int]) -> None:
        self._steps, self._ranks = steps, ranks
        self._round, self._indices = _where(steps)
        self._names = [steps.shards[i].name for i in self._indices]
        self._on_way: deque[_Step] = deque()
        self._row: _Row | None = None

    @property
    def looks(self) -> bool:
        """Whether every step is looked at."""
        return bool(self._indices)

    def watch(self, step: int, merged: Sequence[Merged], skip: torch.Tensor | None, logged: bool) -> None:
        """Start copying what tells whether this step is finite."""
        if not self._indices:
            return
        layout = self._steps.rounds[self._round].layout(logged)
        values = layout.unpack(merged[self._round])
        counted = NonFiniteCount() in layout.uses
        sizes = layout.pick(values, NonFiniteCount() if counted else Power(2.0), self._indices)
        numbers = [sizes, layout.pick(values, OwnNonFinite(), self._indices)]
        decision = [] if skip is None else [skip.double().reshape(1)]
        self._on_way.append(_Step(step, skip is not None, HostCopy([torch.cat([*numbers, *decision])])))

    def read(self, wait: bool) -> list[NonFiniteStep]:
        """Those that are not finite among the steps whose numbers have arrived, or with ``wait`` among all."""
        found = []
        while self._on_way and (wait or self._on_way[0].copy.arrived()):
            each = self._on_way.popleft()
            (numbers,) = each.copy.tensors()
            told = self._told(each, numbers)
            found += [told] if told is not None else []
        return found

    def _told(self, each: _Step, numbers: torch.Tensor) -> NonFiniteStep | None:
        many = len(self._indices)
        sizes, marks, decision = numbers[:many], numbers[many : 2 * many], numbers[2 * many :]
        skipped = bool(decision.any())
        counted = self._counted
        bad = sizes > 0 if counted else ~torch.isfinite(sizes)
        if not skipped and not bool(bad.any()):
            self._row = None
            return None
        own = marks > 0
        if not counted and bool(own.any()):
            bad = own  # a rule before this one may have made every gradient NaN
        places = bad.nonzero().flatten().tolist()
        seen = (tuple(places), tuple(marks.tolist()))
        row, first = self._row, True
        if row is not None:
            first = row.skipped and seen != row.seen
        self._row = _Row(each.step if first or row is None else row.since, skipped, seen)
        fields = self._fields(places, sizes.tolist() if counted else None, marks.tolist())
        fields |= {"skipped": float(skipped)} if each.decides else {}
        return NonFiniteStep(each.step, fields if first else fields | {"nonfinite_since": self._row.since}, first)

    @property
    def _counted(self) -> bool:
        return NonFiniteCount() in self._steps.rounds[self._round].always.uses

    def _fields(self, places: Sequence[int], counts: Sequence[float] | None, marks: Sequence[float]) -> dict[str, Any]:
        made: set[int] = set()
        at: list[dict[str, Any]] = []
        for place in places:
            ranks = ranks_in(marks[place], self._ranks)
            made |= set(ranks or ())
            count = {} if counts is None else {"count": int(counts[place])}
            at.append({"param": self._names[place], **count, "rank": min(ranks) if ranks else None})
        total = {} if counts is None else {"nonfinite": int(sum(counts))}
        return total | {
            "nonfinite_params": len(places),
            "nonfinite_at": at[:_MOST],
            "nonfinite_ranks": sorted(made),
        }


def _where(steps: StepPlan) -> tuple[int, tuple[int, ...]]:
    """The first round that measures in every step which ranks had non-finite gradients, and of which parameters."""
    for i, part in enumerate(steps.rounds):
        if OwnNonFinite() in part.always.uses:
            return i, part.always.uses[OwnNonFinite()]
    return 0, ()
