"""What a session has attached to one model, and the entries of ``save`` spread over several models."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from disthooks._match import inside, match_modules
from disthooks.config import Plan
from disthooks.config.plan import at_line
from disthooks.errors import MatchError
from disthooks.grads.attached import Gradients


class Saves:
    """The entries of a plan's ``save``; each has to match in one model at least."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._missed: dict[int, MatchError] = {}
        self._matched: set[int] = set()
        self._models: list[nn.Module] = []

    def plan_for(self, model: nn.Module, more_to_come: bool) -> tuple[Plan, bool]:
        """The plan, and whether to attach it ``partly``; without ``save`` for a model that has it, or has none of it.

        Raises:
            MatchError: when an entry matches in no model, and no other is to come.
        """
        if any(inside(model) is one for one in self._models):
            return _without_saves(self._plan), True
        here = [i for i, (patterns, _) in enumerate(self._plan.saves) if self._matches(i, patterns, model)]
        left = [] if more_to_come else self._left()
        if left and self._models:
            raise self._missed[left[0]]
        self._models.append(inside(model))
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
            self._missed[index] = error
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


class Attached:
    """The attachments to one model."""

    def __init__(self, model: nn.Module, joined: Callable[[nn.Module, Gradients], None]) -> None:
        self.model, self._joined = model, joined
        self.saving: Any = None
        self.held = 0
        self.watching: list[Gradients] = []
        self._first: list[int] = []  # the steps that each of them had been given with a state

    def attach(self, plan: Plan, partly: bool, optimizers: Sequence[Any], before: int) -> None:
        """Attach ``plan``; from the second optimizer of the script on, its records say which one it is.

        Args:
            plan: what :meth:`Saves.plan_for` gave.
            partly: what it gave too.
            optimizers: those that hold the model's parameters; None for DeepSpeed's.
            before: how many optimizers are watched already.
        """
        rest, self.held = list(optimizers), len(optimizers)
        if not before:  # on all ranks or on none
            first = rest.pop(0)
            prepared = plan.prepare(self.model, first, partly=partly)
            self.saving = prepared.saving
            if prepared.gradients is not None:
                self._watches(prepared.gradients)
        elif plan.saves:
            self.saving = plan.save(self.model, partly=partly)
        for number, optimizer in enumerate(rest, max(before, 1)) if plan.watches else ():
            self._watch(plan, optimizer, number)

    def _watch(self, plan: Plan, optimizer: Any, number: int) -> None:
        also: list[Any] = [lambda: {"optimizer": number}]
        self._watches(plan.watch(self.model, optimizer, [self.saving, *also] if self.saving else also))

    def _watches(self, watching: Gradients) -> None:
        self.watching.append(watching)
        self._joined(self.model, watching)
        self._first.append(watching.steps)

    def told(self) -> dict[str, Any]:
        """What became of it so far, on this rank."""
        report = self.saving.report() if self.saving else None
        seen = [watching.report() for watching in self.watching]
        return {
            "model": type(inside(self.model)).__name__,
            "engine": seen[0].engine if seen else None,
            "saved": {"stored": report.stored, "moved": report.moved, "calls": report.calls} if report else None,
            "watched": {"steps": seen[0].steps - self._first[0], "parameters": sum(one.parameters for one in seen)}
            if seen
            else None,
        }

    def remove(self) -> None:
        """Take them off, which writes what is still to be logged."""
        for watching in self.watching:
            watching.remove()
        if self.saving:
            self.saving.remove()
