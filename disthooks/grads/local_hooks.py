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
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from disthooks._handles import weak_method
from disthooks._streams import capturing, refuse_capture
from disthooks._tensors import local_part
from disthooks._torch import backward_id
from disthooks.engines.base import Engine, Removable
from disthooks.errors import UsageError
from disthooks.grads.plan import StepPlan, scope_of
from disthooks.grads.rules.base import MicroBatch, Rule
from disthooks.grads.stats.base import LocalFact, LocalStats, Stat, onto
from disthooks.grads.stats.norms import norms
from disthooks.grads.stats.scan import finite_probe

UNCAPTURED = (
    "let the optimizer step outside of the graph, and in a captured backward have nothing look at gradients before "
    "their reduction (rules at='local', statistics of ranks: NonFinite, NoiseScale); or remove() the hooks first"
)
_NOTHING_SEEN = LocalStats()


class LocalNeeds(NamedTuple):
    """What statistics and rules at "final" need to know of gradients before their reduction.

    Attributes:
        logged: what is needed in a step that is logged.
        always: what is needed in every step.
        accumulated: the parameters whose gradients are added up in a step that is logged, as indices of the engine.
        is_required: whether a statistic cannot do without: a gradient that no hook sees is then an error.
    """

    logged: frozenset[LocalFact]
    always: frozenset[LocalFact]
    accumulated: frozenset[int]
    is_required: bool

    @staticmethod
    def of(plan: StepPlan, stats: Iterable[Stat], indices: Sequence[int]) -> LocalNeeds:
        """What ``stats`` and the rules of ``plan`` need, of the engine's parameters ``indices``."""
        measures = [measure for stat in stats for measure in stat.measures()]
        logged = frozenset(fact for measure in measures for fact in measure.local_facts)
        return LocalNeeds(
            logged=logged,
            always=frozenset(
                fact for part in plan.rounds for measure in part.always.uses for fact in measure.local_facts
            ),
            accumulated=frozenset(indices[i] for measure in measures for i in measure.accumulates(plan.shards)),
            is_required=bool(logged),
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
        self._engine, self._rules, self._scaler = engine, rules, scaler
        self._batches = Counter[int]()  # of each parameter, since the last step

    def of(self, index: int) -> list[Rule]:
        """The rules for one parameter, in the order in which they are applied."""
        return [rule for rule, indices in zip(self._rules, self.scopes, strict=True) if index in indices]

    def forget_batches(self) -> None:
        """A step was made: the next gradient is of its first micro-batch."""
        self._batches.clear()

    @torch.no_grad()
    def rewrite(self, index: int, grad: torch.Tensor) -> torch.Tensor | None:
        """The gradient that takes its place; None if no rule applies to it."""
        rules, shard = self.of(index), self._engine.shards[index]
        if not rules:
            return None
        if grad.requires_grad:
            raise UsageError(
                f"create_graph=True: the rules at 'local' for {shard.name!r} would cut the graph of its gradient; use "
                "on_gradient(at='local') with a function that autograd can follow"
            )
        scale, result = self._loss_scale(grad), grad.detach()
        if scale is not None:  # in float32 at the least: small numbers are why a loss of float16 is multiplied
            result = result.to(torch.promote_types(grad.dtype, torch.float32)) / scale
        batch = MicroBatch(self.step, self._batches[index], self._engine.position)
        self._batches[index] += 1
        for rule in rules:
            result = rule.rewrite_local(shard, result, batch)
        return result if scale is None else (result * scale).to(grad.dtype)

    def _loss_scale(self, grad: torch.Tensor) -> torch.Tensor | None:
        """What the engine, or a ``GradScaler``, has multiplied the loss by."""
        own = self._engine.gradient_scale()
        if own is not None:
            return torch.as_tensor(own, device=grad.device)
        if self._scaler is None or not self._scaler.is_enabled():
            return None
        scale: torch.Tensor = self._scaler._scale
        return onto(scale, grad.device)


class LocalGradientHooks:
    """The hooks on this rank's own gradients. They communicate with nobody, and never wait for the device.

    See [Note: no collective inside a hook].

    Attributes:
        rules: the rules at "local".
    """

    def __init__(self, engine: Engine, indices: Sequence[int], needs: LocalNeeds, rules: LocalRules) -> None:
        self.rules = rules
        self._engine, self._indices, self._needs = engine, indices, needs
        self._is_logged, self._is_required = True, needs.is_required or bool(rules.scopes)
        self._stats: dict[int, LocalStats] = {}
        self._last_backward: dict[int, int] = {}
        self._none_seen = [_NOTHING_SEEN] * len(indices)

    @property
    def is_used(self) -> bool:
        """Whether anything looks at gradients before their reduction."""
        return self.has_rules or bool(self._needs.logged | self._needs.always)

    @property
    def has_rules(self) -> bool:
        """Whether anything changes gradients before their reduction."""
        return bool(self.rules.scopes)

    def attach(self) -> list[Removable]:
        """Put the hooks on, where anything needs them."""
        looks_at_all = bool(self._needs.logged | self._needs.always)
        indices = [i for i in self._indices if looks_at_all or self.rules.of(i)]
        if not indices:
            return []
        return self._engine.on_local(indices, weak_method(self._hook), self._is_required)

    def begin(self, step: int, is_logged: bool) -> None:
        """From now on gradients are those of ``step``; statistics look at those of a step that is logged."""
        self.rules.step, self._is_logged = step, is_logged

    def take(self) -> list[LocalStats]:
        """What was seen of each parameter since the last time; the step's micro-batches end here."""
        self.rules.forget_batches()
        if not self._stats:
            return self._none_seen
        stats, self._stats = self._stats, {}
        return [stats.get(index, _NOTHING_SEEN) for index in self._indices]

    def _hook(self, index: int, grad: torch.Tensor) -> torch.Tensor | None:
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
        facts = self._needs.logged | self._needs.always if self._is_logged else self._needs.always
        if facts:
            self._look(index, local_part(grad.detach()), facts)
        return self.rules.rewrite(index, grad) if self.rules.scopes else None

    @torch.no_grad()
    def _look(self, index: int, grad: torch.Tensor, facts: frozenset[LocalFact]) -> None:
        if index in self._stats and self._engine.is_first_gradient(index):
            # There is no gradient to add to, so what was seen before this backward belongs to a step that was never
            # made: the loop set the gradients to None. Other parameters may have been seen in this backward already.
            now = backward_id()
            self._stats = {i: stats for i, stats in self._stats.items() if self._last_backward[i] == now}
        seen = self._stats.get(index, _NOTHING_SEEN)
        if "norms" in facts:
            seen = seen._replace(norms=(*seen.norms, *norms([grad], 2.0)))
        elif "finite" in facts:
            seen = seen._replace(finite_probes=(*seen.finite_probes, finite_probe(grad)))
        if self._is_logged and index in self._needs.accumulated:
            seen = seen._replace(accumulated=grad.clone() if seen.accumulated is None else seen.accumulated + grad)
        self._stats[index], self._last_backward[index] = seen, backward_id()
