"""In how many rounds rules can be applied, and what each round measures; all known when attached."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from disthooks.errors import MatchError, UsageError
from disthooks.grads.collect import Layout
from disthooks.grads.measures import Measure
from disthooks.grads.rules import Rule
from disthooks.grads.stats import Stat


@dataclass(frozen=True, eq=False)
class Bound:
    """A rule and the parameters it is for.

    Attributes:
        rule: the rule.
        indices: of the parameters.
        fresh: whether no rule before it rewrites any of them, so that what it measures is the gradient as it came.
    """

    rule: Rule
    indices: tuple[int, ...]
    fresh: bool


@dataclass(frozen=True, eq=False)
class Round:
    """One measurement and the rewriting that follows from it.

    Attributes:
        rules: in the order in which they are applied.
        always: what is measured in every step.
        logged: what is measured in a step that is logged.
    """

    rules: tuple[Bound, ...]
    always: Layout
    logged: Layout

    def layout(self, logged: bool) -> Layout:
        """What is measured in this step."""
        return self.logged if logged else self.always


def rounds_of(
    rules: Sequence[Rule], stats: Sequence[Stat], parameters: Sequence[tuple[str, nn.Parameter]]
) -> tuple[Round, ...]:
    """Split the rules into rounds: a rule that measures what an earlier one rewrites starts a new one.

    Statistics are measured in the first round, before anything is rewritten. Rules for different parameters
    share a round.

    >>> from disthooks.grads.rules import ClipNorm, ClipValue, only
    >>> named = [("w", nn.Parameter(torch.ones(2))), ("b", nn.Parameter(torch.ones(1)))]
    >>> len(rounds_of([ClipNorm(1.0), ClipValue(0.1)], [], named))
    1
    >>> len(rounds_of([ClipValue(0.1), ClipNorm(1.0)], [], named))
    2
    >>> len(rounds_of([only("w", ClipNorm(1.0)), only("b", ClipNorm(1.0))], [], named))
    1
    """
    split: list[list[Bound]] = [[]]
    touched: set[int] = set()  # in this round
    rewritten: set[int] = set()  # in any
    for rule in rules:
        indices = tuple(rule.scope(parameters))
        if not indices:
            raise MatchError(f"{rule!r} is for none of the {len(parameters)} parameters of the optimizer")
        rule.check([parameters[i] for i in indices])
        if rule.measure() is not None and touched & set(indices):
            split.append([])
            touched = set()
        split[-1].append(Bound(rule, indices, not rewritten & set(indices)))
        touched |= set(indices)
        rewritten |= set(indices)
    everything = tuple(range(len(parameters)))
    wanted = [(measure, everything) for stat in stats for measure in stat.measures()]
    return tuple(_round(bound, wanted if i == 0 else []) for i, bound in enumerate(split))


def _round(rules: Sequence[Bound], wanted: Iterable[tuple[Measure, tuple[int, ...]]]) -> Round:
    always = [(measure, bound.indices) for bound in rules if (measure := bound.rule.measure()) is not None]
    return Round(tuple(rules), _layout(always), _layout([*always, *wanted]))


def _layout(uses: Iterable[tuple[Measure, tuple[int, ...]]]) -> Layout:
    """Each measure once, of all the parameters that anyone wants it of."""
    union: dict[Measure, set[int]] = {}
    for measure, indices in uses:
        union.setdefault(measure, set()).update(indices)
    return Layout({measure: tuple(sorted(indices)) for measure, indices in union.items()})


def pick(values: torch.Tensor, has: tuple[int, ...], wants: tuple[int, ...]) -> torch.Tensor:
    """The numbers for the parameters ``wants`` out of those for ``has``, by slices alone: the host never waits."""
    if has == wants:
        return values
    place = {index: i for i, index in enumerate(has)}
    return torch.stack([values[place[i]] for i in wants]) if wants else values[:0]


def labels_of(rules: Sequence[Bound]) -> list[str]:
    """For each rule what is appended to its names in the log, so that no two rules write the same name.

    >>> from disthooks.grads.rules import ClipNorm, ClipValue, only
    >>> rules = [ClipValue(1.0), ClipNorm(1.0), only("*.bias", ClipNorm(1.0)), ClipNorm(2.0)]
    >>> labels_of([Bound(rule, (), True) for rule in rules])
    ['', '', '/*.bias', '/3']
    """
    labels: list[str] = []
    taken: set[str] = set()
    for i, bound in enumerate(rules):
        label = f"/{bound.rule.label()}" if bound.rule.label() else ""
        label = f"{label}/{i}" if label in taken else label
        labels.append(label)
        if bound.rule.measure() is not None:  # others write nothing
            taken.add(label)
    return labels


def check_stat(stat: object) -> Stat:
    """``stat`` itself, if it is one."""
    if isinstance(stat, type) or not (hasattr(stat, "measures") and hasattr(stat, "finish")):
        raise UsageError(f"{stat!r} is no statistic: give stats.Norm(), stats.MaxAbs() or stats.NonFinite()")
    return stat  # type: ignore[return-value]
