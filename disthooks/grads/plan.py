"""The plan of a step: its rounds, the parameters and measures of each round, and the rules that follow it.

The plan is made once, at attach, and is the same in every step.
"""

# [Note: two collectives]
# A round is one SUM of float64 numbers and one MAX of int64 numbers over the ranks, for any number of parameters, rules
# and statistics. Every measure writes its numbers into one of two vectors, at a place that `VectorLayout` knows. Each
# vector has the same length on every rank, also on a rank that has no gradient, because the length depends only on
# names and shapes. So each rank takes part in every all-reduce, and the bytes do not grow with the world size. A step
# takes one round. It takes one more round for each rule that measures a gradient which an earlier rule in the round
# rewrites: `[ClipValue, ClipNorm]` takes two rounds, and `[ClipNorm, ClipValue]` takes one. A measure that compares the
# parameters before and after the update takes one round more. All of this is known at attach, so no rank ever has to
# ask another rank how many collectives come next.

# [Note: pieces of a vector]
# The host must not wait for the device here. So the numbers of some parameters are taken out of a vector by slices and
# by `torch.split`, whose sizes the host knows. An index tensor made from a list would have to be copied to the device,
# and the host would wait for that copy.

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from disthooks._match import Pattern, as_patterns, match
from disthooks.engines.base import Engine, Shard
from disthooks.errors import AttachError, MatchError
from disthooks.grads.rules.base import Rule
from disthooks.grads.stats.across_ranks import UnreducedSquares
from disthooks.grads.stats.base import Fact, Local, Measure, Stat
from disthooks.grads.stats.norms import Power, squares
from disthooks.grads.stats.scan import compute

#: The float64 vector of the SUM and the int64 vector of the MAX, of one rank or merged over all ranks.
Vectors = tuple[torch.Tensor, torch.Tensor]
_FACTS_OF_EVERY_STEP: frozenset[Fact] = frozenset({"squares", "nonfinite", "own"})
#: A measure, and the parameters for which a rule or a statistic needs it.
MeasureUse = tuple[Measure, tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class VectorLayout:
    """The measures of a round, the parameters of each measure, and the places of their numbers in the two vectors.

    See [Note: two collectives], and for the int64 of the MAX [Note: MAX of integers keeps NaN] in collectives.py.

    Attributes:
        uses: for each measure its parameters, as indices into ``shards``.
        shards: all parameters.
        scopes: for each scope its parameters, as indices into ``shards``.
        modules: how many modules there are whose outputs are read.
        summed: the measures of which only the sum over their parameters counts.
    """

    uses: Mapping[Measure, tuple[int, ...]]
    shards: Sequence[Shard]
    scopes: Sequence[Sequence[int]] = ()
    modules: int = 0
    summed: frozenset[Measure] = frozenset()

    @functools.cached_property
    def sizes(self) -> dict[Measure, list[int]]:
        """How many numbers each measure has for each of its scopes, and then for each of its parameters or modules."""
        # Computed once: with thousands of parameters, asking each one in every step takes longer than measuring it.
        found = {}
        for measure, indices in self.uses.items():
            if measure.per in ("module", "step"):
                found[measure] = [measure.width(None)] * (self.modules if measure.per == "module" else 1)
                continue
            scopes = [measure.width(None)] * len(self.scopes) if measure.per != "parameter" else []
            each = [measure.width(self.shards[i]) for i in indices] if measure.per != "scope" else []
            found[measure] = scopes + each
        return found

    def pack(self, local: Local) -> Vectors:
        """Measure this rank's gradients, and put the numbers into the two vectors, on ``local.device``."""
        facts = frozenset(fact for measure in self.uses for fact in measure.facts)
        if local.device.type == "cpu" and facts <= _FACTS_OF_EVERY_STEP and "nonfinite" in facts:
            # The host may look at a number on the CPU. If the norm is finite, all elements are, and no other fact needs
            # another reading than the norm's.
            norm = Power(2.0)
            is_summed = norm in self.summed and len(self.uses[norm]) == len(self.shards)
            each = squares(local.grads, local.device, is_summed)
            if math.isfinite(float(each.sum())):
                local = local._replace(computed_facts={"squares": each, "nonfinite": torch.zeros_like(each)})
                facts = frozenset()
        # One reading of the gradients finds the facts and the counts for all measures (decision 59). If only a norm is
        # needed, its measure reads them once by itself, which is faster.
        rows = {m: m.count_rows(local) for m, indices in self.uses.items() if len(indices) == len(self.shards)}
        counting = next((measure for measure, asked in rows.items() if asked), None)
        if facts and (counting or not facts <= {"squares"}):
            wanted = {i for measure, indices in self.uses.items() if measure.facts or counting for i in indices}
            grads = [grad if i in wanted else None for i, grad in enumerate(local.grads)]
            found, counts = compute(local._replace(grads=grads), facts, rows[counting] if counting else None)
            counted = {counting: counts} if counting else {}
            local = local._replace(computed_facts=found, computed_counts=counted)
        vectors: dict[str, list[torch.Tensor]] = {
            "sum": [torch.zeros(0, dtype=torch.float64, device=local.device)],
            "max": [torch.zeros(0, dtype=torch.int64, device=local.device)],
        }
        for measure, indices in self.uses.items():
            mine = local.of(indices)._replace(is_summed=measure in self.summed)
            vectors[measure.merge].append(measure.local(mine))
        return torch.cat(vectors["sum"]), torch.cat(vectors["max"])

    def unpack(self, merged: Vectors) -> dict[Measure, torch.Tensor]:
        """For each measure its numbers in the merged vectors: a view, of all its scopes and parameters in one row."""
        vectors, begins = {"sum": merged[0], "max": merged[1]}, {"sum": 0, "max": 0}
        found = {}
        for measure in self.uses:
            begin = begins[measure.merge]
            end = begins[measure.merge] = begin + sum(self.sizes[measure])
            found[measure] = vectors[measure.merge][begin:end]
        return found

    def pick(self, values: Mapping[Measure, torch.Tensor], measure: Measure, wants: Sequence[int]) -> torch.Tensor:
        """The numbers of ``measure`` for the parameters ``wants``, in one row.

        See [Note: pieces of a vector].
        """
        has = self.uses[measure]
        if measure.per in ("module", "step"):
            return values[measure]
        if has == tuple(wants):
            return values[measure]
        parts = dict(zip(has, torch.split(values[measure], self.sizes[measure]), strict=True))
        return torch.cat([parts[i] for i in wants]) if wants else values[measure][:0]

    def collectives(self) -> int:
        """How many all-reduces the round takes: 0, 1 or 2. See [Note: two collectives]."""
        return len({measure.merge for measure in self.uses})

    def bytes(self) -> int:
        """How many bytes each rank gives to the all-reduces of the round: 8 for each number."""
        return 8 * sum(sum(self.sizes[measure]) for measure in self.uses)


@dataclass(frozen=True, eq=False)
class BoundRule:
    """A rule and its parameters.

    Attributes:
        rule: the rule.
        number: its place among the rules, which is that of its state.
        indices: the indices of its parameters.
        fresh: whether no earlier rule rewrites a gradient of these parameters. Then the rule measures the gradients as
            the engine gave them.
        label: the text appended to the names that the rule logs.
    """

    rule: Rule
    number: int
    indices: tuple[int, ...]
    fresh: bool
    label: str


@dataclass(frozen=True, eq=False)
class Round:
    """One measurement, and the rules that rewrite gradients by its result. See [Note: two collectives].

    Attributes:
        rules: the rules, in the order in which they are applied.
        always: the measures of a step that is not logged.
        logged: the measures of a step that is logged.
    """

    rules: tuple[BoundRule, ...]
    always: VectorLayout
    logged: VectorLayout

    def layout(self, is_logged: bool) -> VectorLayout:
        return self.logged if is_logged else self.always

    @property
    def needs_before(self) -> bool:
        """Whether a measure needs the parameters from before the update."""
        return any(measure.before for measure in self.logged.uses)


class StepPlan:
    """The rounds of every step. Rules and statistics are matched with the parameters here, once, at attach.

    Raises:
        MatchError: when a rule is for no parameter.
        UsageError: when a rule cannot be right on one of its parameters.

    Attributes:
        shards: the parameters that the optimizer updates.
        groups: for each named group its parameters, as indices into ``shards``.
        modules: the names of the modules whose outputs are read.
        scopes: the indices of all parameters, and then those of each group.
        rounds: the rounds before the update.
        after: the measurement after the update.
        rules: all rules in the order in which they were given.
        rewritten: the parameters whose gradients a rule may change.
        unreduced: the parameters that every rank has and nobody reduces; their gradients are compared in each step.
    """

    def __init__(
        self,
        rules: Sequence[Rule],
        stats: Sequence[Stat],
        shards: Sequence[Shard],
        groups: Mapping[str, Sequence[int]] | None = None,
        modules: Sequence[str] = (),
    ) -> None:
        self.shards, self.groups, self.modules = shards, groups or {}, modules
        everything = tuple(range(len(shards)))
        self.scopes = [everything, *self.groups.values()]
        logged = [(measure, everything) for stat in stats for measure in stat.measures()]
        always = [(measure, everything) for stat in stats for measure in stat.always()]
        before_update = [use for use in logged if not use[0].after]
        self.unreduced = [shard for shard in shards if shard.sharding == "unreduced"]
        apart = [(UnreducedSquares(), everything)] if self.unreduced else []
        rounds: list[Round] = []
        self.rules = _bound(rules, shards)
        for bound in split_into_rounds(self.rules):
            needed = [(measure, each.indices) for each in bound for measure in each.rule.measures()]
            needed += [] if rounds else [*always, *apart]
            # Statistics describe the gradients before any rule, so the first round measures them.
            wanted = needed if rounds else [*needed, *before_update]
            each = {measure for one in bound if one.rule.needs_each for measure in one.rule.measures()}
            # Of the statistics of every step, the norm alone is read as a sum (WatchedSteps in records.py).
            each |= {measure for measure, _ in always} - {Power(2.0)}
            logged_each = each | {measure for measure, _ in before_update}
            rounds.append(Round(tuple(bound), self._layout(needed, each), self._layout(wanted, logged_each)))
        self.rounds = tuple(rounds)
        self.after = Round((), self._layout([]), self._layout([use for use in logged if use[0].after]))
        self.rewritten = frozenset(i for bound in self.rules if bound.rule.rewrites for i in bound.indices)

    def _layout(self, uses: Sequence[MeasureUse], each: Collection[Measure] = ()) -> VectorLayout:
        """A layout that has each measure once, for all parameters for which any rule or statistic needs it."""
        union: dict[Measure, set[int]] = {}
        for measure, indices in uses:
            union.setdefault(measure, set()).update(indices)
        sorted_uses = {measure: tuple(sorted(indices)) for measure, indices in union.items()}
        parts = {measure for measure, indices in uses if len(indices) < len(union[measure])}
        summed = sorted_uses.keys() - parts - set(each)
        return VectorLayout(sorted_uses, self.shards, self.scopes, len(self.modules), frozenset(summed))


def _bound(rules: Sequence[Rule], shards: Sequence[Shard]) -> list[BoundRule]:
    """The rules with their parameters.

    Raises:
        MatchError: when a rule is for no parameter.
        UsageError: when a rule cannot be right on one of its parameters.
    """
    bound: list[BoundRule] = []
    rewritten: set[int] = set()
    for number, (rule, label) in enumerate(zip(rules, labels_of(rules), strict=True)):
        indices = scope_of(rule, shards)
        bound.append(BoundRule(rule, number, indices, not rewritten & set(indices), label))
        rewritten |= set(indices) if rule.rewrites else set()
    return bound


def split_into_rounds(rules: Sequence[BoundRule]) -> list[list[BoundRule]]:
    """Split the rules into rounds: a rule starts a new round if it measures a gradient that an earlier rule rewrites.

    Rules for different parameters share a round. See [Note: two collectives].

    >>> from torch import nn
    >>> from disthooks.engines.base import Engine
    >>> from disthooks import ClipNorm, ClipValue, only
    >>> shards = Engine(nn.Linear(2, 1)).shards
    >>> rounds_of = lambda *rules: len(split_into_rounds(_bound(rules, shards)))
    >>> rounds_of(ClipNorm(1.0), ClipValue(0.1)), rounds_of(ClipValue(0.1), ClipNorm(1.0))
    (1, 2)
    >>> rounds_of(only("weight", ClipNorm(1.0)), only("bias", ClipNorm(1.0)))
    1
    """
    rounds: list[list[BoundRule]] = [[]]
    rewritten: set[int] = set()  # in the round that is being filled
    for bound in rules:
        if bound.rule.measures() and rewritten & set(bound.indices):
            rounds.append([])
            rewritten = set()
        rounds[-1].append(bound)
        rewritten |= set(bound.indices) if bound.rule.rewrites else set()
    return rounds


def scope_of(rule: Rule, shards: Sequence[Shard]) -> tuple[int, ...]:
    """The parameters that a rule is for, as indices into ``shards``.

    Raises:
        MatchError: when the rule is for none of them.
        UsageError: when the rule cannot be right on one of them.
    """
    indices = tuple(rule.scope(shards))
    if not indices:
        raise MatchError(f"{rule!r} is for none of the {len(shards)} parameters of the optimizer")
    rule.check([shards[i] for i in indices])
    return indices


def labels_of(rules: Sequence[Rule]) -> list[str]:
    """For each rule the text that is appended to the names that it logs, so that no two rules log the same name.

    It is the rule's own label after a slash, such as the pattern of ``only``. If a name is taken even so, the rule's
    place in the list follows.

    >>> from disthooks import ClipNorm, ClipValue, only
    >>> labels_of([ClipValue(1.0), ClipNorm(1.0), only("*.bias", ClipNorm(1.0)), ClipNorm(2.0)])
    ['', '', '/*.bias', '/3']
    """
    labels: list[str] = []
    taken: set[str] = set()
    for i, rule in enumerate(rules):
        label = f"/{rule.label()}" if rule.label() else ""
        if {name + label for name in rule.logs()} & taken:
            label = f"{label}/{i}"
        labels.append(label)
        taken |= {name + label for name in rule.logs()}
    return labels


def groups_of(groups: Mapping[str, Pattern | Iterable[Pattern]], shards: Sequence[Shard]) -> dict[str, list[int]]:
    """For each named group the parameters that its patterns match, as indices into ``shards``.

    Raises:
        MatchError: when a pattern matches no parameter.
    """
    named = [(shard.name, shard.as_full_parameter()) for shard in shards]
    found: dict[str, list[int]] = {}
    for group, pattern in groups.items():
        names = {name for name, _ in match(named, as_patterns(pattern), "parameter")}
        found[group] = [i for i, shard in enumerate(shards) if shard.name in names]
    return found


def optimized_shards(engine: Engine, parameters: Sequence[nn.Parameter]) -> list[int]:
    """The indices of the engine's shards that the optimizer updates.

    Raises:
        AttachError: when the optimizer holds a parameter that is not the model's, or none at all.
    """
    model_ids, ids = {id(shard.parameter) for shard in engine.shards}, {id(parameter) for parameter in parameters}
    strangers = [parameter for parameter in parameters if id(parameter) not in model_ids]
    if strangers or not parameters:
        missed = [shard.name for shard in engine.shards if id(shard.parameter) not in ids]
        shapes = ", ".join(str(tuple(parameter.shape)) for parameter in strangers[:3])
        raise AttachError(
            f"{len(strangers)} parameters of the optimizer (shapes {shapes}) are not in the model ({engine.label}), "
            f"and the model has {len(missed)} that the optimizer does not hold ({', '.join(missed[:5])}): make the "
            "optimizer from this model's parameters, after fully_shard or whatever else replaces them"
        )
    return [i for i, shard in enumerate(engine.shards) if id(shard.parameter) in ids]
