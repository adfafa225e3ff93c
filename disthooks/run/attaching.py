"""What a session has attached to one model, and the entries of ``save`` spread over several models."""

from __future__ import annotations

import collections
import copy
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from disthooks._match import inside, match_modules
from disthooks.config import Plan
from disthooks.config.plan import at_line, tell_attached
from disthooks.config.watchers import Watchers
from disthooks.errors import MatchError
from disthooks.grads.attached import Gradients, LeftBehind

# [Note: nothing is kept alive]
# A process may train many models: folds, a search for the largest batch. The session outlives them, so it holds the
# models, optimizers and hooks weakly, and what must be told of them at the end is kept apart, in `Watched`. The last
# record of an attachment that is collected is written later, at the session's next event: a destructor runs at any
# moment, in any thread, and must neither write to a sink nor take a lock.


class Saves:
    """The entries of a plan's ``save``; each has to match in one model at least."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._missed: dict[int, MatchError] = {}
        self._matched: set[int] = set()
        self._models: list[weakref.ref[nn.Module]] = []

    def plan_for(self, model: nn.Module, more_to_come: bool) -> tuple[Plan, bool]:
        """The plan, and whether to attach it ``partly``; without ``save`` for a model that has it, or has none of it.

        Raises:
            MatchError: when an entry matches in no model, and no other is to come.
        """
        if any(inside(model) is one() for one in self._models):
            return _without_saves(self._plan), True
        here = [i for i, (patterns, _) in enumerate(self._plan.saves) if self._matches(i, patterns, model)]
        left = [] if more_to_come else self._left()
        if left and self._models:
            raise self._missed[left[0]]
        self._models.append(weakref.ref(inside(model)))
        if left:  # of the only model: attaching the whole plan says so on every rank
            return self._plan, False
        return (self._plan if here else _without_saves(self._plan)), True

    def unmatched(self) -> list[str]:
        """What matched in no model."""
        return [str(self._missed[i]) for i in self._left()]

    def _matches(self, index: int, patterns: Any, model: nn.Module) -> bool:
        try:
            with at_line(self._plan.source, ("save", index)):
                match_modules(model, patterns)
        except MatchError as error:
            self._missed[index] = error.with_traceback(None)  # whose frames would keep the model
            return False
        self._matched.add(index)
        return True

    def _left(self) -> list[int]:
        return [i for i in self._missed if i not in self._matched]


def _without_saves(plan: Plan) -> Plan:
    """The plan with ``watch`` alone; all else of it, also where it was read, stays."""
    part = copy.copy(plan)
    object.__setattr__(part, "saves", ())
    return part


class Watched:
    """What one optimizer's steps came to, known also when the optimizer and its model are gone.

    # See [Note: nothing is kept alive]
    """

    def __init__(self, gradients: Gradients) -> None:
        report = gradients.report()
        self.engine, self.parameters = report.engine, report.parameters
        self._alive = weakref.ref(gradients)
        self._first = self._last = gradients.steps
        self._nonfinite = 0
        self._left: collections.deque[LeftBehind] = collections.deque(maxlen=1)
        gradients.leave_to(self._left.append)

    @property
    def gradients(self) -> Gradients | None:
        """The attachment, while the model lives."""
        return self._alive()

    @property
    def steps(self) -> int:
        """How many steps there were here, without those of a state that was loaded."""
        gradients = self._alive()
        self._last = gradients.steps if gradients is not None else self._last
        return self._last - self._first

    @property
    def nonfinite(self) -> int:
        """How many of the steps are known to have had gradients that were not finite."""
        gradients = self._alive()
        self._nonfinite = gradients.nonfinite_steps if gradients is not None else self._nonfinite
        return self._nonfinite

    def settle(self) -> bool:
        """Write what the attachment left when it was collected; whether it is gone."""
        while self._left:
            left = self._left.popleft()
            self._last, self._nonfinite = left.steps, left.nonfinite_steps
            left.write()
        return self._alive() is None

    def flush(self) -> None:
        """Write the record of the last step."""
        gradients = self._alive()
        if gradients is not None:
            gradients.flush()

    def remove(self) -> None:
        """Take the hooks off, which writes what is still to be logged."""
        self.settle()
        gradients = self._alive()
        if gradients is not None:
            self._last = gradients.steps
            gradients.remove()
            self._nonfinite = gradients.nonfinite_steps


class Attached:
    """The attachments to one model, which none of them keeps alive.

    Attributes:
        number: how many models were attached to before.
    """

    def __init__(self, model: nn.Module, joined: Callable[[nn.Module, Gradients], None], number: int = 0) -> None:
        self.number = number
        self._model, self._name, self._joined = weakref.ref(model), type(inside(model)).__name__, joined
        self.saving: Any = None
        self._watchers: Callable[[], Watchers | None] = lambda: None
        self.held = 0
        self.watched: list[Watched] = []

    def attach(self, plan: Plan, partly: bool, optimizers: Sequence[Any], before: int) -> None:
        """Attach ``plan``; from the second optimizer of the script on, its records say which one it is.

        Args:
            plan: what :meth:`Saves.plan_for` gave.
            partly: what it gave too.
            optimizers: those that hold the model's parameters; None for DeepSpeed's.
            before: how many optimizers are watched already.
        """
        model: Any = self._model()
        rest, self.held = list(optimizers), len(optimizers)
        if not before and rest:  # on all ranks or on none
            prepared = plan.prepare(model, rest.pop(0), partly=partly)
            self.saving = prepared.saving
            self._looks(prepared.watchers)
            if prepared.gradients is not None:
                self._watches(model, prepared.gradients)
        else:
            self.saving = plan.save(model, partly=partly) if plan.saves else None
            self._looks(plan.look(model, rest[0]) if rest else None)
            if self.saving and not (plan.watches and rest):
                tell_attached(plan, model, self.saving, None)
        for number, optimizer in enumerate(rest, max(before, 1)) if plan.watches else ():
            also: list[Any] = [functools.partial(dict, optimizer=number), *([self.saving] if self.saving else [])]
            gradients = plan.watch(model, optimizer, also)
            if watchers := self._watchers():
                watchers.tell_nonfinite(gradients)
            tell_attached(plan, model, None if self.watched else self.saving, gradients)
            self._watches(model, gradients)

    @property
    def looks(self) -> bool:
        """Whether ``blame`` or ``check_replicas`` is attached."""
        return self._watchers() is not None

    def _looks(self, watchers: Watchers | None) -> None:
        if watchers is not None:
            self._watchers = weakref.ref(watchers)

    def _watches(self, model: nn.Module, gradients: Gradients) -> None:
        self._joined(model, gradients)
        self.watched.append(Watched(gradients))

    def settle(self) -> bool:
        """Whether the model and all that was attached to it is gone; what it left is written."""
        gone = [watched.settle() for watched in self.watched]
        return all(gone) and self._model() is None

    def told(self) -> dict[str, Any]:
        """What became of it so far, on this rank; what is still to be logged is written."""
        for watched in self.watched:
            watched.flush()
        report = self.saving.report() if self.saving else None
        seen = self.watched
        steps, parameters = max((one.steps for one in seen), default=0), sum(one.parameters for one in seen)
        bad = max((one.nonfinite for one in seen), default=0)
        return {
            "model": self._name,
            "engine": seen[0].engine if seen else None,
            "saved": {"stored": report.stored, "moved": report.moved, "calls": report.calls} if report else None,
            "watched": {"steps": steps, "parameters": parameters, "nonfinite": bad} if seen else None,
        }

    def remove(self) -> None:
        """Take them off, which writes what is still to be logged."""
        for watched in self.watched:
            watched.remove()
        for part in (self._watchers(), self.saving):
            if part:
                part.remove()
