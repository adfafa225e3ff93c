"""``KeptStates``: what rules and statistics keep from step to step, as a dict for a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from disthooks.errors import UsageError
from disthooks.grads.plan import BoundRule
from disthooks.grads.rules.base import Only, Rule
from disthooks.grads.stats.base import Stat, State
from disthooks.grads.step import StepRunner


class KeptStates:
    """The states of the rules of ``runner``, and of statistics, each with the name of its kind.

    What a rule keeps of each parameter is saved with the names of the parameters, so it can be loaded where they are in
    another order, or on other ranks.
    """

    def __init__(self, runner: StepRunner, stats: Sequence[tuple[Stat, State]]) -> None:
        self._runner, self._stats = runner, stats

    def to_dict(self) -> dict[str, Any]:
        """Plain values, and copies of the tensors on the CPU."""
        copied = {
            part: [[kind, {name: value.cpu().clone() for name, value in state.items()}] for kind, state in states]
            for part, states in self._by_part().items()
        }
        for bound, entry in zip(self._runner.plan.rules, copied["rules"], strict=True):
            if bound.rule.by_parameter:
                entry.append(self._names(bound))
        return copied

    def load(self, state: Mapping[str, Any]) -> None:
        """Take the values of :meth:`to_dict`.

        Raises:
            UsageError: when they are of other kinds or shapes; nothing is changed then.
        """
        mine = self.to_dict()
        given = {part: [[kind, dict(found)] for kind, found, *_ in state.get(part, [])] for part in ("rules", "stats")}
        for part in given:
            # All is checked before anything changes.
            _check(part, [entry[:2] for entry in mine[part]], given[part])
        for bound, entry, (_, found) in zip(self._runner.plan.rules, state["rules"], given["rules"], strict=True):
            if bound.rule.by_parameter:
                found |= _in_order(bound.rule, found, entry[2], self._names(bound))
        for part, states in self._by_part().items():
            for (_, target), (_, found) in zip(states, given[part], strict=True):
                for name, value in found.items():
                    target[name].copy_(value)

    def _names(self, bound: BoundRule) -> list[str]:
        return [self._runner.plan.shards[i].name for i in bound.indices]

    def _by_part(self) -> dict[str, list[tuple[str, State]]]:
        kinds = [f"{_kind(bound.rule)}{bound.label}" for bound in self._runner.plan.rules]
        stats = [(type(stat).__name__, state) for stat, state in self._stats if state]
        return {"rules": list(zip(kinds, self._runner.states, strict=True)), "stats": stats}


def _check(part: str, mine: Sequence[Any], theirs: Sequence[Any]) -> None:
    kinds, given = [kind for kind, _ in mine], [kind for kind, _ in theirs]
    if kinds != given:
        raise UsageError(f"the state is of the {part} {given}, and these are attached: {kinds}")
    for (kind, own), (_, found) in zip(mine, theirs, strict=True):
        shapes, others = ({name: tuple(value.shape) for name, value in state.items()} for state in (own, found))
        if shapes != others:
            raise UsageError(f"the state of {kind} has the shapes {others}, and {shapes} are needed")


def _in_order(rule: Rule, state: State, given: Sequence[str], wanted: Sequence[str]) -> State:
    """The tensors of a rule that are by parameter, in the order of ``wanted``."""
    place = {name: i for i, name in enumerate(given)}
    if missing := [name for name in wanted if name not in place]:
        shown = ", ".join(map(repr, missing[:3]))
        raise UsageError(f"the state of {rule!r} has nothing of {shown}: load a state of the same parameters")
    order = torch.tensor([place[name] for name in wanted])
    return {name: state[name].index_select(-1, order) for name in rule.by_parameter}


def _kind(rule: Rule) -> str:
    return f"only:{_kind(rule.rule)}" if isinstance(rule, Only) else type(rule).__name__
