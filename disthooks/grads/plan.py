"""What an optimizer holds, and when a step of it is one that rules can be applied to.

In how many rounds rules can be applied, and what each round measures; all known when attached.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from disthooks._match import Pattern, as_patterns, match
from disthooks.engines.base import Engine
from disthooks.engines.shard import Shard
from disthooks.errors import AttachError, MatchError, UsageError
from disthooks.grads.collectives import Layout
from disthooks.grads.rules.base import Rule
from disthooks.grads.stats.base import Measure, Stat


def parameter_ids(optimizer: torch.optim.Optimizer) -> set[int]:
    """The identities of the parameters of all groups."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def optimized_shards(engine: Engine, held: Sequence[nn.Parameter]) -> list[int]:
    """Which of the engine's shards the optimizer holds.

    Raises:
        AttachError: when it holds a parameter that is not the model's.
    """
    known, ids = {id(shard.parameter) for shard in engine.shards}, {id(parameter) for parameter in held}
    strange = [parameter for parameter in held if id(parameter) not in known]
    if strange or not held:
        raise AttachError(_strangers(strange, [s for s in engine.shards if id(s.parameter) not in ids], engine))
    return [i for i, shard in enumerate(engine.shards) if id(shard.parameter) in ids]


def _strangers(strange: Sequence[nn.Parameter], missed: Sequence[Shard], engine: Engine) -> str:
    shapes = ", ".join(str(tuple(parameter.shape)) for parameter in strange[:3])
    names = ", ".join(shard.name for shard in missed[:5])
    return (
        f"{len(strange)} parameters of the optimizer (shapes {shapes}) are not in the model ({engine.label}), and the "
        f"model has {len(missed)} that the optimizer does not hold ({names}): make the optimizer from this model's "
        "parameters, after fully_shard or whatever else replaces them"
    )


def check_step(optimizer: torch.optim.Optimizer) -> None:
    """Raise UsageError when gradients are not final at the start of this step."""
    if getattr(optimizer, "grad_scale", None) is not None:  # a fused optimizer divides by it inside its kernel
        raise UsageError(
            f"the gradients are still multiplied by the scale of a GradScaler, which {type(optimizer).__name__} takes "
            "out inside its kernel: call scaler.unscale_(optimizer) before scaler.step(optimizer)"
        )


Use = tuple[Measure, tuple[int, ...]]  # of which parameters


@dataclass(frozen=True, eq=False)
class BoundRule:
    """A rule and the parameters it is for.

    Attributes:
        rule: the rule.
        indices: of the parameters.
        fresh: whether no rule before it rewrites any of them, so that what it measures is the gradient as it came.
        label: what is appended to its names in the log.
    """

    rule: Rule
    indices: tuple[int, ...]
    fresh: bool
    label: str


@dataclass(frozen=True, eq=False)
class Round:
    """One measurement and the rewriting that follows from it.

    Attributes:
        rules: in the order in which they are applied.
        always: what is measured in every step.
        logged: what is measured in a step that is logged.
    """

    rules: tuple[BoundRule, ...]
    always: Layout
    logged: Layout

    def layout(self, logged: bool) -> Layout:
        """What is measured in this step."""
        return self.logged if logged else self.always


class StepPlan:
    """What every step does.

    Attributes:
        rounds: before the update.
        after: what is measured once a logged step's update is made.
        shards: the parameters.
        groups: for each named group its parameters.
        scopes: all parameters, then those of each group.
    """

    def __init__(
        self,
        rules: Sequence[Rule],
        stats: Sequence[Stat],
        shards: Sequence[Shard],
        groups: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self.shards, self.groups = shards, groups or {}
        everything = tuple(range(len(shards)))
        self.scopes = [everything, *self.groups.values()]
        wanted = [(measure, everything) for stat in stats for measure in stat.measures()]
        before = [use for use in wanted if not use[0].after]
        always = [(measure, everything) for stat in stats for measure in stat.always()]
        parts = enumerate(_bound(rules, shards))
        self.rounds = tuple(self._round(part, *((always, before) if i == 0 else ([], []))) for i, part in parts)
        self.after = self._layout([use for use in wanted if use[0].after])

    @property
    def rules(self) -> list[BoundRule]:
        """All rules in their order."""
        return [bound for part in self.rounds for bound in part.rules]

    @property
    def rewritten(self) -> frozenset[int]:
        """The parameters whose gradients a rule may change."""
        return frozenset(i for bound in self.rules if bound.rule.rewrites for i in bound.indices)

    def _round(self, rules: Sequence[BoundRule], always: Iterable[Use], logged: Iterable[Use]) -> Round:
        """What the rules measure, with what statistics do in every step, and in a step that is logged."""
        needed = [(measure, bound.indices) for bound in rules for measure in bound.rule.measures()] + list(always)
        return Round(tuple(rules), self._layout(needed), self._layout([*needed, *logged]))

    def _layout(self, uses: Iterable[Use]) -> Layout:
        """Each measure once, of all the parameters that anyone wants it of."""
        union: dict[Measure, set[int]] = {}
        for measure, indices in uses:
            union.setdefault(measure, set()).update(indices)
        return Layout({m: tuple(sorted(indices)) for m, indices in union.items()}, self.shards, self.scopes)


def _bound(rules: Sequence[Rule], shards: Sequence[Shard]) -> list[list[BoundRule]]:
    """Split the rules into rounds: a rule that measures what an earlier one rewrites starts a new one.

    Rules for different parameters share a round.

    >>> from torch import nn
    >>> from disthooks.engines.base import Engine
    >>> from disthooks import ClipNorm, ClipValue, only
    >>> shards = Engine(nn.Linear(2, 1)).shards
    >>> len(_bound([ClipNorm(1.0), ClipValue(0.1)], shards))
    1
    >>> len(_bound([ClipValue(0.1), ClipNorm(1.0)], shards))
    2
    >>> len(_bound([only("weight", ClipNorm(1.0)), only("bias", ClipNorm(1.0))], shards))
    1
    """
    split: list[list[BoundRule]] = [[]]
    touched: set[int] = set()  # in this round
    rewritten: set[int] = set()  # in any
    labels = labels_of(rules)
    for rule, label in zip(rules, labels, strict=True):
        indices = scope_of(rule, shards)
        if rule.measures() and touched & set(indices):
            split.append([])
            touched = set()
        split[-1].append(BoundRule(rule, indices, not rewritten & set(indices), label))
        if rule.rewrites:
            touched |= set(indices)
            rewritten |= set(indices)
    return split


def scope_of(rule: Rule, shards: Sequence[Shard]) -> tuple[int, ...]:
    """The parameters that a rule is for, checked."""
    indices = tuple(rule.scope(shards))
    if not indices:
        raise MatchError(f"{rule!r} is for none of the {len(shards)} parameters of the optimizer")
    rule.check([shards[i] for i in indices])
    return indices


def labels_of(rules: Sequence[Rule]) -> list[str]:
    """For each rule what is appended to its names in the log, so that no two rules write the same name.

    >>> from disthooks import ClipNorm, ClipValue, only
    >>> labels_of([ClipValue(1.0), ClipNorm(1.0), only("*.bias", ClipNorm(1.0)), ClipNorm(2.0)])
    ['', '', '/*.bias', '/3']
    """
    labels: list[str] = []
    taken: set[str] = set()
    for i, rule in enumerate(rules):
        label = f"/{rule.label()}" if rule.label() else ""
        names = {name + label for name in rule.logs()}
        label = f"{label}/{i}" if names & taken else label
        labels.append(label)
        taken |= {name + label for name in rule.logs()}
    return labels


def groups_of(groups: Mapping[str, Pattern | Iterable[Pattern]], shards: Sequence[Shard]) -> dict[str, list[int]]:
    """For each named group the parameters that its patterns match.

    Raises:
        MatchError: when a pattern matches none.
    """
    named = [(shard.name, shard.as_full_parameter()) for shard in shards]
    found: dict[str, list[int]] = {}
    for group, pattern in groups.items():
        names = {name for name, _ in match(named, as_patterns(pattern), "parameter")}
        found[group] = [i for i, shard in enumerate(shards) if shard.name in names]
    return found


def check_stat(stat: object) -> Stat:
    """``stat`` itself, if it is one."""
    if not isinstance(stat, Stat):
        raise UsageError(
            f"{stat!r} is no statistic: give stats.Norm(), stats.NonFinite() or another one of disthooks.stats"
        )
    return stat


def start_stats(
    stats: Sequence[Stat], engine: Engine, shards: Sequence[Shard], groups: int
) -> list[tuple[Stat, dict[str, torch.Tensor]]]:
    """Each statistic, checked, with what it keeps from step to step.

    Raises:
        UsageError: when one cannot be right here, or two would write the same names.
    """
    for i, stat in enumerate(stats):
        if stat.alone and any(type(other) is type(stat) for other in stats[:i]):
            raise UsageError(f"two {type(stat).__name__} would write the same names into the log: give one")
        stat.check(engine, shards)
    return [(stat, stat.start(1 + groups + len(shards) * stat.per_parameter)) for stat in stats]
