"""What :func:`disthooks.gradients` gives back."""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from disthooks._handles import Attachment, UncopiedHook
from disthooks._match import Pattern
from disthooks._ranks import describe, has_several_ranks
from disthooks._streams import refuse_capture
from disthooks._torch import scaler_under_way
from disthooks.engines.base import Engine, refuse_reduced, refuse_replicate
from disthooks.engines.clipping import before_clipping
from disthooks.engines.optimizer_step import OnRepeat
from disthooks.engines.skip import exclude_from_step
from disthooks.errors import AttachError, UsageError
from disthooks.grads import collectives
from disthooks.grads.collectives import StepCounts
from disthooks.grads.local_hooks import UNCAPTURED, LocalGradientHooks, LocalNeeds
from disthooks.grads.nonfinite import NonFiniteStep, NonFiniteSteps
from disthooks.grads.plan import StepPlan, check_step, groups_of, optimized_shards, scope_of, start_stats
from disthooks.grads.rules.base import Rule
from disthooks.grads.rules.only import Only
from disthooks.grads.sinks.base import Numbers, Sink, add_to, close_all, open_all, write
from disthooks.grads.stats.base import Stat
from disthooks.grads.step import (
    DeferredErrors,
    Grads,
    PendingRecord,
    StepResult,
    StepRunner,
    count_rounds,
    in_users_units,
    put_back,
)


@dataclass(frozen=True)
class GradientsReport:
    """What an attachment does in every step.

    Attributes:
        engine: which engine was found.
        ranks: the global ranks whose gradients belong together.
        parameters: how many the optimizer holds.
        rounds: how many measurements a logged step takes; each rule that measures what another one rewrote adds one,
            and so do statistics of the update.
        collectives: all-reduces in a step that is not logged, and in one that is; at most two a round.
        bytes: what each rank gives to them, in a step that is not logged, and in one that is.
        steps: how many steps there have been.
    """

    engine: str
    ranks: tuple[int, ...]
    parameters: int
    rounds: int
    collectives: tuple[int, int]
    bytes: tuple[int, int]
    steps: int


@dataclass(frozen=True)
class GradientsConfig:
    """What the user asked for; see :func:`disthooks.gradients`."""

    rules: Sequence[Rule] = ()
    stats: Sequence[Stat] = ()
    sinks: Sequence[Sink] = ()
    every: int = 50
    groups: Mapping[str, Pattern | Iterable[Pattern]] = field(default_factory=dict)
    also: Sequence[Numbers] = ()
    scaler: Any = None


@dataclass(frozen=True)
class UnwrittenRecords:
    """What an attachment had not yet written when it was collected.

    Attributes:
        steps: how many steps there had been.
        nonfinite_steps: how many of them are known to have had gradients that were not finite.
        records: of the steps that were logged last, the last of all with what ``also`` says.
        also: what was to be logged with it.
        sinks: those that are open.
    """

    steps: int
    nonfinite_steps: int
    records: Sequence[dict[str, Any]]
    also: Sequence[Numbers]
    sinks: Sequence[Sink]

    def write(self) -> None:
        """Write the records and close the sinks."""
        for record in self.records:
            if record is self.records[-1]:
                add_to(record, self.also)
            write(self.sinks, record)
        close_all(self.sinks)


class Gradients(Attachment):
    """What :func:`gradients` attached.

    Attributes:
        latest: what was logged last, on every rank; one step behind until :meth:`flush`.
        last_nonfinite: what was recorded of the last step whose gradients were not finite, on every rank; None before
            one was, and where neither ``stats.NonFinite`` nor ``SkipNonFinite`` looks for them.
        steps: how many steps of the optimizer there have been.
        nonfinite_steps: how many of them are known to have had gradients that were not finite. Each of them is known
            where ``stats.NonFinite`` or ``SkipNonFinite`` looks, else those that were logged with a norm.
    """

    def __init__(self, engine: Engine, optimizer: Any, config: GradientsConfig) -> None:
        super().__init__()
        self.nonfinite_steps = 0
        self._in_a_row = False  # whether the step that was read last was one of these
        self._tell: list[Callable[[dict[str, Any]], object]] = []
        self.latest: dict[str, Any] = {}
        self.last_nonfinite: dict[str, Any] | None = None
        self.steps = 0
        self._warned = False
        self._engine, self._optimizer, self._config = engine, optimizer, config
        self._also = config.also
        self._is_alone = False
        self._when: list[Callable[[int], bool]] = []
        self._held = engine.optimizer_parameters(optimizer)
        wanted = optimized_shards(engine, self._held)
        self._shards = [engine.shards[i] for i in wanted]
        final = [rule for rule in config.rules if not _at_local(rule)]
        _check_can_exclude(final, engine)
        self._plan = StepPlan(final, config.stats, self._shards, groups_of(config.groups, self._shards))
        self._stats = start_stats(config.stats, engine, self._shards, len(self._plan.groups))
        self._local_hooks = self._look_at(wanted)
        self._group = collectives.group_of(engine.ranks)
        self._device = collectives.device_for(self._group, self._shards[0].parameter.device)
        self._runner = StepRunner(engine, self._plan, self._group, self._device)
        self._counts = StepCounts(engine.ranks, engine.ranks[engine.position], collectives.seconds_to_wait(self._group))
        self._deferred_errors, self._nonfinite = DeferredErrors(), NonFiniteSteps(self._plan, engine.ranks)
        self._open: tuple[StepResult, Grads] | None = None
        self._pending: PendingRecord | None = None
        self._heir: Callable[[UnwrittenRecords], object] | None = None
        self._sinks = self._opened(config.sinks)
        try:
            self._attach(optimizer)
        except BaseException:
            self.remove()
            raise

    def __repr__(self) -> str:
        rules, stats = (", ".join(map(str, part)) or "none" for part in (self._config.rules, self._config.stats))
        where = f"{self._engine.label}, {len(self._shards)} parameters"
        return f"<Gradients on {where}, {self.steps} steps, rules: {rules}; stats: {stats}>"

    def report(self) -> GradientsReport:
        """The engine found, and what a step costs."""
        always = [part.always for part in self._plan.rounds]
        logged = [*(part.logged for part in self._plan.rounds), self._plan.after]
        one = len(self._engine.ranks) == 1
        calls, sizes = (
            [sum(getattr(layout, cost)() for layout in layouts) * (not one) for layouts in (always, logged)]
            for cost in ("collectives", "bytes")
        )
        return GradientsReport(
            engine=self._engine.label,
            ranks=self._engine.ranks,
            parameters=len(self._shards),
            rounds=count_rounds(self._plan),
            collectives=(calls[0], calls[1]),
            bytes=(sizes[0], sizes[1]),
            steps=self.steps,
        )

    def begin_step(self, scaler: Any = None) -> None:
        """Measure and apply the rules now, on gradients that are final; the step that comes next does not again.

        For loops that clip gradients by code of their own and are to be measured before: call it on every rank where
        the loop is about to clip, when all of the step's backwards are done. torch's clip_grad_norm_,
        clip_grad_value_ and clip_grads_with_norm_ call it by themselves. A second call before the step does nothing.
        Whatever is attached to the optimizer runs. In a step with a closure, call it in the closure, after backward.
        DeepSpeed clips inside its step, after disthooks: nothing happens there.

        Args:
            scaler: the ``GradScaler``, if there is one; its ``unscale_(optimizer)`` comes first.
        """
        self._engine.begin_step(self._optimizer, scaler)

    @property
    def optimizer(self) -> Any:
        """The torch optimizer whose steps count, inside whatever wraps it."""
        return self._optimizer

    def log_also(self, when: Callable[[int], bool]) -> None:
        """Log the steps too for which ``when(step)`` is true, beside each ``every``-th.

        For trainers that log when they want to. Call it before the backward of the step that comes next.

        Args:
            when: asked once for each step, before its backward; it must say the same on every rank.
        """
        self._when.append(when)
        self._local_hooks.begin(self.steps, self._logged())

    def flush(self, **known: float) -> None:
        """Read the step that was logged last and give it to the sinks, waiting for the device if need be.

        Args:
            known: numbers of that step that the caller knows, ``loss=0.3``; they are in its record, too.
        """
        others, record = self._read()
        for other in others:
            self._sinks = write(self._sinks, other)
        if record is None:
            return
        self._also = add_to(record, self._also)
        record.update({name: value for name, value in known.items() if name not in record})
        self.latest = record
        self._sinks = write(self._sinks, self.latest)
        self._look_at_norm(record)

    def log_to(self, sink: Sink) -> None:
        """Give the records to ``sink`` too, on the first rank; its ``close()`` is not called."""
        if self.is_first_rank:
            self._sinks = [*self._sinks, sink]

    @property
    def sinks(self) -> Sequence[Sink]:
        """What the records are given to; none on other ranks than the first."""
        return tuple(self._sinks)

    def on_nonfinite(self, tell: Callable[[dict[str, Any]], object]) -> None:
        """Have ``tell`` called, on every rank, when gradients have become infinite or NaN: once for steps in a row.

        Args:
            tell: called with what was recorded of the first of these steps: at the latest with the next :meth:`flush`.
        """
        self._tell.append(tell)

    @property
    def is_first_rank(self) -> bool:
        """Whether this rank is the one that writes to the sinks."""
        return self._engine.position == 0

    def _look_at_norm(self, record: dict[str, Any]) -> None:
        """Where nothing looks at each step, a norm in the log says that gradients were not finite."""
        if self._nonfinite.looks:
            return
        bad = not math.isfinite(record.get("grad_norm", 0.0))
        self.nonfinite_steps += bad
        if bad and not self._in_a_row:
            self._tell_of(record)
        self._in_a_row = bad

    def _tell_of(self, record: dict[str, Any]) -> None:
        for tell in self._tell:
            try:
                tell(record)
            except Exception as error:  # raising here, on one rank, would leave the others waiting
                warnings.warn(f"{tell!r} failed: {error!r}", RuntimeWarning, stacklevel=3)

    def _read(self) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
        """Records of steps that are not finite and not logged; then that of the step that was logged last."""
        pending, self._pending = self._pending, None
        told = self._nonfinite.read(wait=True)
        self.nonfinite_steps += len(told)
        step = None if pending is None else pending.step
        others = self._not_finite(each for each in told if each.step != step)
        if pending is None:
            return others, None
        record = pending.record(self._plan, self._stats, self._engine.ranks)
        for each in told:
            if each.step == step:
                record = {"step": step, **each.fields, **record}
                if each.first:
                    self.last_nonfinite = record
                    self._tell_of(record)
        return others, record

    def _not_finite(self, told: Iterable[NonFiniteStep]) -> list[dict[str, Any]]:
        """A record for each step that is not logged and is the first of several that are not finite."""
        found = [{"step": each.step, **each.fields} for each in told if each.first]
        for record in found:
            self.last_nonfinite = record
            self._tell_of(record)
        return found

    def _record_nonfinite(self, told: Iterable[NonFiniteStep]) -> None:
        for record in self._not_finite(told):
            self._sinks = write(self._sinks, record)

    def leave_to(self, heir: Callable[[UnwrittenRecords], object]) -> None:
        """Have ``heir`` called with what is left to write, should this be collected without ``remove()``.

        Args:
            heir: called from a destructor, so it must not wait; it must not hold this object.
        """
        self._heir = heir

    def __del__(self) -> None:
        heir = getattr(self, "_heir", None)
        if heir is None:
            return
        others: list[dict[str, Any]] = []
        record = None
        with contextlib.suppress(Exception):  # while torch traces something there are no numbers
            others, record = self._read()
        heir(
            UnwrittenRecords(
                self.steps, self.nonfinite_steps, (*others, record) if record else others, self._also, self._sinks
            )
        )

    def state_dict(self) -> dict[str, Any]:
        """What adaptive rules have learned, averages of statistics, the number of steps; the same on every rank.

        Returns:
            A dict of plain values and of tensors on the CPU, to be saved beside the optimizer's.
        """
        if any(state for _, state in self._stats):
            self.flush()  # the step that was logged last belongs to the averages
        kept = {
            part: [[kind, {name: value.cpu().clone() for name, value in state.items()}] for kind, state in states]
            for part, states in self._states().items()
        }
        return {"steps": self.steps, **kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave; call it on every rank, between the same two steps.

        The next step raises AttachError if the ranks count different numbers of steps.

        Raises:
            UsageError: when the rules or statistics are of other kinds, or for other numbers of parameters; nothing is
                changed then.
        """
        mine = self.state_dict()
        for part in ("rules", "stats"):
            _check_states(part, mine[part], state.get(part, []))
        self._counts.loaded()
        self.steps = int(state["steps"])
        self._local_hooks.begin(self.steps, self._logged())
        for part, states in self._states().items():
            for (_, target), (_, found) in zip(states, state.get(part, []), strict=True):
                for name, value in found.items():
                    target[name].copy_(value)

    def _states(self) -> dict[str, list[tuple[str, dict[str, torch.Tensor]]]]:
        """What rules and statistics keep from step to step, by kinds."""
        kinds = [f"{_kind(bound.rule)}{bound.label}" for bound in self._plan.rules]
        stats = [(type(stat).__name__, state) for stat, state in self._stats if state]
        return {"rules": list(zip(kinds, self._runner.states, strict=True)), "stats": stats}

    def _attach(self, optimizer: Any) -> None:
        for handle in self._local_hooks.attach():
            self.on_remove(handle.remove)
        again: OnRepeat = "refuse" if self._plan.rules else "first"
        if self._engine.trains_alone and has_several_ranks():
            self.on_remove(self._engine.model.register_forward_pre_hook(UncopiedHook(self._must_be_alone)).remove)
        self.on_remove(self._engine.before_step(optimizer, self._before_step, again).remove)
        self.on_remove(before_clipping(self._about_to_clip).remove)
        if self._plan.after.uses:
            self.on_remove(self._engine.after_step(optimizer, self._after_step).remove)
        self.on_remove(self.flush)
        self.on_remove(functools.partial(setattr, self, "_heir", None))
        self.at_exit(self.remove)  # which flushes, then closes the sinks

    def _must_be_alone(self, module: torch.nn.Module, args: Any) -> None:
        """Among several ranks a model that no engine holds must be one that this rank trains by itself."""
        if getattr(module, "_is_replica", False):
            return
        if not self._is_alone:
            refuse_replicate(self._engine)  # it may have come since
            self._is_alone = True
        refuse_reduced(self._engine)

    def _look_at(self, wanted: Sequence[int]) -> LocalGradientHooks:
        measures = [measure for stat in self._config.stats for measure in stat.measures()]
        rules = [
            (rule, frozenset(wanted[i] for i in scope_of(rule, self._shards)))
            for rule in self._config.rules
            if _at_local(rule)
        ]
        kept = {wanted[i] for measure in measures for i in measure.accumulates(self._shards)}
        always = {fact for part in self._plan.rounds for measure in part.always.uses for fact in measure.local_facts}
        logged = {fact for measure in measures for fact in measure.local_facts}
        needs = LocalNeeds(frozenset(logged), frozenset(always), frozenset(kept), must=bool(logged))
        return LocalGradientHooks(self._engine, wanted, needs, rules, self._config.scaler)

    def _opened(self, sinks: Sequence[Sink]) -> Sequence[Sink]:
        """The sinks on the first rank, none on the others; when it cannot open them every rank raises."""
        opened: list[Sink] = []
        failure: Exception | None = None
        try:
            opened = open_all(sinks if self._engine.position == 0 else ())
        except Exception as error:
            failure = error
        self.on_remove(functools.partial(close_all, opened))  # given first, so called last: after the last flush
        failed, alike = collectives.agree(self._group, self._device, failure is not None, self._described())
        if failed or not alike:
            self.remove()
        if failure is not None:
            raise failure
        if not alike:
            raise AttachError(
                f"the ranks {list(self._engine.ranks)} do not attach the same: they must give the same rules, stats, "
                f"groups and every, for the same parameters; this one has {self._described()}"
            )
        if failed:
            raise AttachError(f"rank {self._engine.ranks[0]} could not open its sinks; its error says why")
        return opened

    def _described(self) -> str:
        """What all ranks must have alike, or they would add up different things, or wait for each other."""
        config, names = self._config, [shard.name for shard in self._shards]
        scopes = [bound.indices for bound in self._plan.rules], self._local_hooks.scopes()
        asked = f"every={config.every}, rules={describe(config.rules)}, stats={describe(config.stats)}"
        return f"{asked}, groups={self._plan.groups}, for the parameters {scopes} of {names}"

    @torch.no_grad()
    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        refuse_capture("gradients(...) in this optimizer's step", UNCAPTURED)
        check_step(optimizer)
        self._check_same()
        self._counts.check(self.steps)
        if self._left_to_ranks():
            return None
        if self._pending is not None:
            self.flush()
        else:
            told = self._nonfinite.read(wait=False)
            self.nonfinite_steps += len(told)
            self._record_nonfinite(told)
        self._deferred_errors.check()
        self._open, logged = None, self._logged()
        result = self._run([shard.gradient() for shard in self._shards], logged)
        if result.excluded:
            exclude_from_step(optimizer, [shard.parameter for shard in result.excluded])
        self._deferred_errors.set(result.deferred_errors)
        skip = result.skip()
        self._nonfinite.watch(self.steps, result.merged, skip, logged)
        if logged and self._plan.after.uses:
            self._open = result, self._runner.copies(keep=self._config.every == 1)
        elif logged and (self._config.stats or result.log):
            self._pending = PendingRecord.of(self.steps, result.merged, result.log)
        self.steps += 1
        self._local_hooks.begin(self.steps, self._logged())
        return skip

    def _left_to_ranks(self) -> bool:
        """Whether nothing is measured in this step, because each rank steps with gradients of its own.

        Raises:
            UsageError: when rules would act on them.
        """
        why = self._engine.reason_unreduced()
        if not why:
            return False
        if self._plan.rules or not self._engine.may_step_unreduced:
            raise UsageError(why)
        if not self._warned:
            self._warned = True
            warnings.warn(f"this step is not measured, and none of its kind: {why}", stacklevel=2)
        self._local_hooks.take()
        self.steps += 1
        self._local_hooks.begin(self.steps, self._logged())
        return True

    def _about_to_clip(self, parameters: Sequence[torch.Tensor], scaler_of: Callable[[Any], tuple[Any, bool]]) -> None:
        """Begin the step, if it is this one's gradients that the loop clips, and if they are final."""
        held = {id(parameter) for parameter in self._held}
        if not any(id(parameter) in held for parameter in parameters) or self._engine.reason_unreduced():
            return
        scaler, final = scaler_of(self._optimizer)
        if final:
            self.begin_step(scaler)

    def _logged(self) -> bool:
        """Whether the step that is made next is to be logged."""
        return self.steps % self._config.every == 0 or any(when(self.steps) for when in self._when)

    def _run(self, grads: Grads, logged: bool) -> StepResult:
        scale, factor = self._loss_scale(), self._engine.gradient_scale()
        copies = grads if factor is None else in_users_units(grads, factor)
        result = self._runner.run(copies, self._local_hooks.take(), scale, self.steps, logged)
        if factor is not None:
            put_back(copies, grads, factor, self._plan.rewritten)
        return result

    @torch.no_grad()
    def _after_step(self) -> None:
        if self._open is not None:
            (result, before), self._open = self._open, None
            merged = [*result.merged, self._runner.after(before)]
            self._pending = PendingRecord.of(self.steps - 1, merged, result.log)

    def _loss_scale(self) -> torch.Tensor | None:
        """What gradients were multiplied by when they were looked at before their reduction."""
        found = self._engine.gradient_scale()
        scaler = self._config.scaler or (scaler_under_way() if self._local_hooks.used else None)
        if found is None and scaler is not None and scaler.is_enabled():
            if self._local_hooks.ruled and self._config.scaler is None:
                raise UsageError(
                    "rules at 'local' see gradients multiplied by the scale of a GradScaler: give it to "
                    "gradients(scaler=...), and they work in your units"
                )
            found = scaler._scale
        return None if found is None else torch.as_tensor(found, device=self._device)

    def _check_same(self) -> None:
        held = self._engine.optimizer_parameters(self._optimizer)
        if len(held) != len(self._held) or any(a is not b for a, b in zip(held, self._held, strict=True)):
            raise AttachError(
                f"the optimizer holds other parameters ({len(held)}) than when gradients() was attached "
                f"({len(self._held)}): remove() the attachment and attach again after changing parameter groups"
            )
        self._engine.check()


def _check_can_exclude(rules: Iterable[Rule], engine: Engine) -> None:
    asked = [rule for rule in rules if rule.excludes]
    if asked and not engine.can_exclude_parameters:
        raise AttachError(
            f"{asked[0]!r} keeps single parameters from the optimizer, and on {engine.label} it updates them together "
            "with others, in one piece: set requires_grad_(False), or use an optimizer that does not hold them, "
            "before the engine takes the model"
        )


def _check_states(part: str, mine: Sequence[Any], theirs: Sequence[Any]) -> None:
    kinds, given = [kind for kind, _ in mine], [kind for kind, _ in theirs]
    if kinds != given:
        raise UsageError(f"the state is of the {part} {given}, and these are attached: {kinds}")
    for (kind, own), (_, found) in zip(mine, theirs, strict=True):
        shapes, others = ({name: tuple(value.shape) for name, value in state.items()} for state in (own, found))
        if shapes != others:
            raise UsageError(f"the state of {kind} has the shapes {others}, and {shapes} are needed")


def _at_local(rule: Rule) -> bool:
    return isinstance(rule, Only) and rule.at == "local"


def _kind(rule: Rule) -> str:
    return f"only:{_kind(rule.rule)}" if isinstance(rule, Only) else type(rule).__name__
