"""Hooks on this rank's own gradients, in backward: statistics look at a gradient, then the rules at "local" rewrite it.

"local" is this rank's own gradient of one micro-batch, before it is accumulated or reduced; "final" is what the
optimizer will use (step.py).
"""

# [Note: no collective inside a hook]
# Ranks call hooks in different orders, and a rank may not call some of them at all: another rank's data may not reach
# the parameter. A collective inside a hook would meet another one of another rank, or wait for ever. So hooks write
# down what they see, on this rank alone, and the measurement before the step merges it over the ranks. For the same
# reason rules at "local" are those that need one gradient and nothing else.

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from disthooks._handles import weak_method
from disthooks._hashing import GOLDEN, Checksums, signed64
from disthooks._streams import refuse_capture
from disthooks._tensors import local_part
from disthooks._torch import backward_id, capturing
from disthooks.engines.base import Engine, Removable
from disthooks.errors import UsageError
from disthooks.grads.plan import StepPlan, scope_of
from disthooks.grads.rules.base import MicroBatch, Rule
from disthooks.grads.stats.base import LocalFact, LocalStats, Stat, largest_of, scalar
from disthooks.grads.stats.nonfinite import finite_probe
from disthooks.grads.stats.norms import norms

UNCAPTURED = (
    "let the optimizer step outside of the graph, and in a captured backward have nothing look at gradients before "
    "their reduction (rules at='local', statistics of ranks: NonFinite, NoiseScale); or remove() the hooks first"
)
_NO_STATS = LocalStats()
_TIME: frozenset[LocalFact] = frozenset({"time"})


class LocalNeeds(NamedTuple):
    """The facts of gradients before their reduction that statistics and rules at "final" need.

    Attributes:
        logged: the facts that a step needs if it is logged.
        always: the facts that every step needs.
        is_required: whether a statistic needs every gradient: then it is an error if no hook sees a gradient.
        print_every: every how many steps fingerprints are needed, if they are.
    """

    logged: frozenset[LocalFact]
    always: frozenset[LocalFact]
    is_required: bool
    print_every: int = 1

    @staticmethod
    def of(plan: StepPlan, stats: Sequence[Stat], indices: Sequence[int]) -> LocalNeeds:
        """The needs of ``stats`` and of the rules of ``plan``, for the engine's parameters ``indices``."""
        measures = [measure for stat in stats for measure in stat.measures()]
        logged = frozenset(fact for measure in measures for fact in measure.local_facts)
        return LocalNeeds(
            logged=logged,
            always=frozenset(
                fact for part in plan.rounds for measure in part.always.uses for fact in measure.local_facts
            ),
            is_required=bool(logged),
            print_every=max([1, *(stat.forward_needs().prints for stat in stats)]),
        )


class LocalRules:
    """The rules at "local", and the parameters of each.

    Attributes:
        scopes: for each rule its parameters, as indices of the engine.
        step: which step of the optimizer the gradients are for.
    """

    def __init__(self, engine: Engine, rules: Sequence[Rule], indices: Sequence[int], scaler: Any) -> None:
        shards = [engine.shards[i] for i in indices]
        self.scopes = [frozenset(indices[i] for i in scope_of(rule, shards)) for rule in rules]
        self.step = 0
        # Found once, because a hook asks for the rules of its parameter in every backward.
        self._rules_of: dict[int, list[Rule]] = {}
        for rule, scope in zip(rules, self.scopes, strict=True):
            for index in scope:
                self._rules_of.setdefault(index, []).append(rule)
        self._engine, self._scaler = engine, scaler
        self._batches = Counter[int]()  # how many gradients of each parameter there were since the last step

    def of(self, index: int) -> Sequence[Rule]:
        """The rules for one parameter, in the order in which they are applied."""
        return self._rules_of.get(index, ())

    def forget_batches(self) -> None:
        """Count micro-batches from 0 again, because a step was made."""
        self._batches.clear()

    @torch.no_grad()
    def rewrite(self, index: int, grad: torch.Tensor) -> torch.Tensor | None:
        """The new gradient; None if no rule applies to this one."""
        rules, shard = self.of(index), self._engine.shards[index]
        if not rules:
            return None
        if grad.requires_grad:
            raise UsageError(
                f"create_graph=True: the rules at 'local' for {shard.name!r} would cut the graph of its gradient; use "
                "on_gradient(at='local') with a function that autograd can follow"
            )
        # The factor by which the engine, or a `GradScaler`, has multiplied the loss.
        factor = self._engine.gradient_scale()
        if factor is None and self._scaler is not None and self._scaler.is_enabled():
            factor = self._scaler._scale
        scale = None if factor is None else scalar(factor, grad.device)
        result = grad.detach()
        if scale is not None:  # in float32 or wider, because divided numbers may be too small for float16
            result = result.to(torch.promote_types(grad.dtype, torch.float32)) / scale
        batch = MicroBatch(self.step, self._batches[index], self._engine.position)
        self._batches[index] += 1
        for rule in rules:
            result = rule.rewrite_local(shard, result, batch)
        return result if scale is None else (result * scale).to(grad.dtype)


class LocalGradientHooks:
    """The hooks on this rank's own gradients. They communicate with nobody, and never wait for the device.

    See [Note: no collective inside a hook].

    Attributes:
        rules: the rules at "local".
        on_gradient: called when a hook has a gradient; None for nobody.
        has_rules: whether a rule changes gradients before their reduction.
        is_used: whether a rule or a statistic needs gradients before their reduction.
    """

    def __init__(self, engine: Engine, indices: Sequence[int], needs: LocalNeeds, rules: LocalRules) -> None:
        self.rules = rules
        self._engine, self._indices, self._needs = engine, indices, needs
        self._is_logged, self._is_required = True, needs.is_required or bool(rules.scopes)
        self._stats: dict[int, LocalStats] = {}
        self._last_backward: dict[int, int] = {}
        self._no_stats, self._checksums = [_NO_STATS] * len(indices), Checksums()
        self._has_stats = bool(needs.logged | needs.always)
        # The norms of a single rank tell no rank that leads.
        lead: frozenset[LocalFact] = frozenset({"norms"} if len(engine.ranks) > 1 else ())
        logged = needs.logged | needs.always
        self._logged_facts, self._always_facts = (
            (facts | lead if "lead" in facts else facts) - _TIME for facts in (logged, needs.always)
        )
        self.on_gradient: Callable[[], None] | None = None
        self.has_rules = bool(rules.scopes)
        self.is_used = self.has_rules or self._has_stats

    def attach(self) -> list[Removable]:
        indices = [i for i in self._indices if self._has_stats or self.rules.of(i)]
        if not indices:
            return []
        return self._engine.on_local(indices, weak_method(self._hook), self._is_required)

    def begin(self, step: int, is_logged: bool) -> None:
        """Begin ``step``: the next gradients belong to it. Statistics get all facts of them if it ``is_logged``."""
        self.rules.step, self._is_logged = step, is_logged

    def found(self, left_out: Iterable[int] = ()) -> list[LocalStats]:
        """The numbers that were kept of each parameter since the last step, without those of ``left_out``."""
        if not self._stats:
            return self._no_stats
        stay = {self._indices[place] for place in left_out}
        return [_NO_STATS if index in stay else self._stats.get(index, _NO_STATS) for index in self._indices]

    def clear(self, left_out: Iterable[int] = ()) -> None:
        """Forget these numbers, because the step is made; those of ``left_out`` belong to a later one."""
        self.rules.forget_batches()
        if self._stats:
            stay = {self._indices[place] for place in left_out}
            self._stats = {index: self._stats[index] for index in stay if index in self._stats}

    def _hook(self, index: int, grad: torch.Tensor) -> torch.Tensor | None:
        if self.on_gradient is not None:
            self.on_gradient()
        if grad.is_cuda:
            if not self._is_required and capturing():
                return None
            refuse_capture(f"gradients(...) on {self._engine.shards[index].name!r} in backward", UNCAPTURED)
        if grad.layout is not torch.strided:
            if self.rules.of(index):
                raise UsageError(
                    f"the gradient of {self._engine.shards[index].name!r} is {grad.layout}: rules need dense "
                    "gradients; build the layer with sparse=False"
                )
            return None
        facts = self._logged_facts if self._is_logged else self._always_facts
        if facts:
            self._look(index, local_part(grad.detach()), facts)
        return self.rules.rewrite(index, grad) if self.rules.scopes else None

    def _look(self, index: int, grad: torch.Tensor, facts: frozenset[LocalFact]) -> None:
        if index in self._stats and self._engine.is_first_gradient(index):
            # There is no gradient to add to, so the numbers from before this backward belong to a step that was never
            # made: the loop set the gradients to None. Other parameters may have numbers of this backward already.
            now = backward_id()
            self._stats = {i: stats for i, stats in self._stats.items() if self._last_backward[i] == now}
        stats = self._stats.get(index, _NO_STATS)
        if "norms" in facts:
            stats = stats._replace(norms=(*stats.norms, *norms([grad], 2.0)))
        elif "finite" in facts:
            stats = stats._replace(finite_probes=(*stats.finite_probes, *finite_probe(grad)))
        if "largest" in facts:
            stats = stats._replace(largest=(*stats.largest, largest_of(grad)))
        if "fingerprint" in facts and self.rules.step % self._needs.print_every == 0:
            mine = self._checksums(grad)  # the order of the micro-batches counts
            stats = stats._replace(
                fingerprint=mine if stats.fingerprint is None else stats.fingerprint * signed64(GOLDEN) + mine
            )
        self._stats[index], self._last_backward[index] = stats, backward_id()
