"""The numbers of a logged step on their way to the host, and the record that is made of them.

Errors that depend on a number on the device: raised at the next step, when reading it waits for nothing new.

Running the rounds of a step: measure over all ranks, then rewrite, on this rank's part of the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from disthooks._streams import current_stream, event_on, on_accelerator
from disthooks.engines.base import Engine
from disthooks.engines.shard import Shard
from disthooks.grads import collectives
from disthooks.grads.collectives import Layout
from disthooks.grads.plan import BoundRule, Round, StepPlan
from disthooks.grads.rules.base import State as RuleState
from disthooks.grads.rules.base import Work
from disthooks.grads.stats.base import Found, Local, LocalStats, Measure, Stat, State

Merged = tuple[torch.Tensor, torch.Tensor]


class HostCopy:
    """Tensors that are being copied to the host; from an accelerator into pinned memory, so that nothing waits.

    >>> HostCopy([torch.tensor([1.0])]).tensors()
    [tensor([1.])]
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
        devices = {tensor.device for tensor in tensors if on_accelerator(tensor)}
        self._arrived = [event_on(current_stream(device)) for device in devices]

    def arrived(self) -> bool:
        """Whether the copies are there, so that :meth:`tensors` waits for nothing."""
        return all(event.query() for event in self._arrived)

    def tensors(self) -> list[torch.Tensor]:
        """The copies, once they have arrived."""
        for event in self._arrived:
            event.synchronize()
        return self._copies


class PendingRecord(NamedTuple):
    """What was measured and decided in a logged step.

    Attributes:
        step: which.
        merged: the merged vectors of each round, then those measured after the update.
        names: of the numbers that rules wrote.
        copy: all of it: two vectors for each round, and the rules' numbers in one.
    """

    step: int
    names: Sequence[str]
    copy: HostCopy

    @staticmethod
    def of(step: int, merged: Sequence[Merged], log: Mapping[str, torch.Tensor]) -> PendingRecord:
        """Start the copies."""
        numbers = torch.stack([value.double() for value in log.values()]) if log else torch.zeros(0)
        return PendingRecord(step, list(log), HostCopy([*(vector for pair in merged for vector in pair), numbers]))

    def record(self, steps: StepPlan, stats: Sequence[tuple[Stat, State]], ranks: Sequence[int]) -> dict[str, Any]:
        """What goes into the log; each statistic with what it keeps from step to step."""
        *vectors, numbers = self.copy.tensors()
        record: dict[str, Any] = {"step": self.step} | dict(zip(self.names, numbers.tolist(), strict=True))
        merged = list(zip(vectors[::2], vectors[1::2], strict=True))
        layouts = [steps.rounds[0].logged, *([steps.after] if steps.after.uses else [])]
        pairs = [merged[0], *merged[len(steps.rounds) :]]
        rows: dict[Measure, torch.Tensor] = {}
        for layout, pair in zip(layouts, pairs, strict=True):
            rows |= _rows(layout, pair, {m for stat, _ in stats for m in stat.measures()})
        found = Found([shard.name for shard in steps.shards], steps.groups, rows, ranks)
        for stat, state in stats:
            record |= stat.record(found, state)
        return record


def _rows(layout: Layout, merged: Merged, wanted: set[Measure]) -> dict[Measure, torch.Tensor]:
    values = layout.unpack(merged)
    return {m: values[m].view(len(layout.sizes(m)), -1) for m in layout.uses if m in wanted}


#: A number that all ranks have alike, and what to do with it on the host: raise, if it says so.
DeferredError = tuple[torch.Tensor, Callable[[float], None]]


class DeferredErrors:
    """Numbers on their way to the host, and what may be raised because of them.

    >>> def loud(value: float) -> None:
    ...     print(f"it was {value}")
    >>> deferred_errors = DeferredErrors()
    >>> deferred_errors.set([(torch.tensor(2.0), loud)])
    >>> deferred_errors.check()
    it was 2.0
    >>> deferred_errors.check()
    """

    def __init__(self) -> None:
        self._set: list[tuple[HostCopy, Callable[[float], None]]] = []

    def set(self, deferred_errors: Iterable[DeferredError]) -> None:
        """Start copying the numbers of this step."""
        self._set = [(HostCopy([value]), tell) for value, tell in deferred_errors]

    def check(self) -> None:
        """Read those of the step before; every rank reads the same, so all raise or none."""
        found, self._set = self._set, []
        for copy, tell in found:
            tell(float(copy.tensors()[0]))


Grads = list[torch.Tensor | None]


@dataclass
class StepResult:
    """What came of a step's rounds.

    Attributes:
        merged: the vectors of each round, merged over the ranks.
        log: the numbers that rules wrote, by name.
        skips: decisions that the optimizer is to leave everything as it is.
        excluded: parameters that it is not to move.
        deferred_errors: numbers that may make the next step raise.
    """

    merged: list[Merged] = field(default_factory=list)
    log: dict[str, torch.Tensor] = field(default_factory=dict)
    skips: list[torch.Tensor] = field(default_factory=list)
    excluded: list[Shard] = field(default_factory=list)
    deferred_errors: list[DeferredError] = field(default_factory=list)

    def skip(self) -> torch.Tensor | None:
        """The decision; None when no rule ever decides."""
        return torch.stack(self.skips).any() if self.skips else None


class StepRunner:
    """Runs what :class:`~disthooks.grads.plan.StepPlan` has planned.

    Attributes:
        states: what each rule keeps from step to step, in their order.
    """

    def __init__(self, engine: Engine, steps: StepPlan, group: Any, device: torch.device) -> None:
        self._engine, self._steps, self._group, self._device = engine, steps, group, device
        self._copies: Grads = []
        self.states: list[RuleState] = [
            bound.rule.start([steps.shards[i] for i in bound.indices], device) for bound in steps.rules
        ]

    def run(
        self, grads: Grads, seen: Sequence[LocalStats], scale: torch.Tensor | None, step: int, logged: bool
    ) -> StepResult:
        """Measure and rewrite, round after round.

        Args:
            grads: for each parameter the local part of its gradient, rewritten in place.
            seen: what was seen of the gradients before their reduction.
            scale: what those are multiplied by; None for 1.
            step: how many steps there were before.
            logged: whether this step will be logged.
        """
        result, states = StepResult(), iter(self.states)
        for part in self._steps.rounds:
            layout = part.layout(logged)
            merged = self._merged(layout, self.local(grads)._replace(seen=seen, scale=scale))
            values = layout.unpack(merged)
            result.merged.append(merged)
            for bound in part.rules:
                self._rewrite(bound, layout, values, grads, next(states), step, result)
        return result

    def copies(self, keep: bool) -> Grads:
        """The parameters as they are now, where this rank owns them.

        Args:
            keep: have the memory ready for the next time; to get it anew takes longer than to fill it.
        """
        shards = self._steps.shards
        values = [shard.values().detach() if shard.is_owner else None for shard in shards]
        if not keep or [_kind(value) for value in values] != [_kind(copy) for copy in self._copies]:
            self._copies = [None if value is None else torch.empty_like(value) for value in values]
        pairs = [(c, v) for c, v in zip(self._copies, values, strict=True) if c is not None and v is not None]
        if pairs:
            torch._foreach_copy_([copy for copy, _ in pairs], [value for _, value in pairs], non_blocking=True)
        found = self._copies
        self._copies = found if keep else []
        return found

    def after(self, before: Grads) -> Merged:
        """Measure once the update is made; ``before`` are the parameters as they were, where this rank owns them."""
        nothing: Grads = [None] * len(self._steps.shards)
        return self._merged(self._steps.after, self.local(nothing)._replace(before=before))

    def local(self, grads: Grads) -> Local:
        """What this rank may look at."""
        pairs = list(zip(grads, self._steps.shards, strict=True))
        return Local(
            shards=self._steps.shards,
            grads=[grad if shard.is_owner else None for grad, shard in pairs],
            seen=[LocalStats()] * len(pairs),
            scopes=self._steps.scopes,
            position=self._engine.position,
            world=len(self._engine.ranks),
            device=self._device,
            apart=[grad if shard.sharding == "unreduced" and not shard.is_owner else None for grad, shard in pairs],
        )

    def _merged(self, layout: collectives.Layout, local: Local) -> Merged:
        return collectives.reduce(self._group, layout.pack(local))

    def _rewrite(
        self,
        bound: BoundRule,
        layout: collectives.Layout,
        values: dict[Measure, torch.Tensor],
        grads: Grads,
        state: RuleState,
        step: int,
        result: StepResult,
    ) -> None:
        shards = self._steps.shards
        work = Work(
            shards=[shards[i] for i in bound.indices],
            grads=[grads[i] for i in bound.indices],
            values=[layout.pick(values, measure, bound.indices) for measure in bound.rule.measures()],
            state=state,
            step=step,
            fresh=bound.fresh,
        )
        bound.rule.rewrite(work)
        result.log.update({f"{name}{bound.label}": value for name, value in work.log.items()})
        result.skips += work.skips
        result.excluded += work.excluded
        result.deferred_errors += work.deferred_errors
        if work.excluded:  # what follows finds no gradient there
            gone = {id(shard) for shard in work.excluded}
            grads[:] = [None if id(s) in gone else grad for s, grad in zip(shards, grads, strict=True)]


def _kind(tensor: torch.Tensor | None) -> tuple[object, ...]:
    return () if tensor is None else (tensor.shape, tensor.dtype, tensor.device)


def in_users_units(grads: Grads, scale: float | torch.Tensor) -> Grads:
    """Wide copies of gradients that are still multiplied by a loss scale, divided by it.

    Rules rewrite the copies, and :func:`put_back` multiplies what they made of them.
    """
    wide = [None if grad is None else grad.to(torch.promote_types(grad.dtype, torch.float32)) for grad in grads]
    return [None if grad is None else grad / scale for grad in wide]


def put_back(copies: Grads, grads: Grads, scale: float | torch.Tensor, rewritten: frozenset[int]) -> None:
    """Write the copies of gradients that a rule may have rewritten back, multiplied again; no others, to the bit."""
    for i in rewritten:
        copy, grad = copies[i], grads[i]
        if copy is not None and grad is not None:
            grad.copy_(copy * scale)


def count_rounds(steps: StepPlan) -> int:
    """How many measurements a logged step takes."""
    parts: list[Round] = [part for part in steps.rounds if part.logged.uses]
    return len(parts) + bool(steps.after.uses)
