"""``gradients()``: rules and statistics at the moment when gradients are final, just before the optimizer steps."""

# [Note: the life of a step]
# At attach, `gradients` checks its arguments and `_attach` finds everything that does not change: the engine, the
# parameters, which rule, statistic and group is for which of them, and how many collectives a step takes (plan.py).
# In backward, hooks look at this rank's own gradients and rules at "local" rewrite them (local_hooks.py).
# At the step, `Gradients._before_step` runs. The engine calls it when gradients are final, or `begin_step` does so
# earlier, before a loop clips by itself. It checks that the step is one to measure (`StepChecks`), reads the record of
# the step before, and measures and rewrites round after round (`StepRunner`). It returns the decision to leave the step
# out.
# After the update, `Gradients._after_step` measures how far it moved the parameters, if a statistic asks for it.
# At logging, which is at the next step, in `flush()` and in `remove()`, the numbers are on the host. They become a
# record (records.py), and the first rank gives it to the sinks (`RecordWriter` in sinks/base.py).

from __future__ import annotations

import contextlib
import functools
import platform
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from disthooks._handles import Attachment, UncopiedHook
from disthooks._match import Pattern
from disthooks._ranks import describe, has_several_ranks
from disthooks.engines.base import Engine
from disthooks.engines.detect import detect_engine, refuse_replicate
from disthooks.engines.optimizer_step import OnRepeat
from disthooks.engines.skip import exclude_from_step
from disthooks.engines.when_final import before_clipping
from disthooks.errors import AttachError, UsageError
from disthooks.grads import collectives
from disthooks.grads.collectives import StepCounts
from disthooks.grads.forward_hooks import ForwardHooks
from disthooks.grads.local_hooks import LocalGradientHooks, LocalNeeds, LocalRules
from disthooks.grads.plan import StepPlan, groups_of, optimized_shards
from disthooks.grads.records import Reading, RecentStep, StepRecords, UnwrittenRecords
from disthooks.grads.rules.base import Only, Rule, as_rule
from disthooks.grads.sinks.base import AlsoLogged, RecordWriter, Sink, as_also_logged
from disthooks.grads.stats.base import Stat, State
from disthooks.grads.step import StepChecks, StepResult, StepRunner


def gradients(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    rules: Iterable[Rule | Callable[[str, torch.Tensor], torch.Tensor]] = (),
    stats: Iterable[Stat] = (),
    sinks: Iterable[Sink] = (),
    every: int = 50,
    recent: int = 0,
    groups: Mapping[str, Pattern | Iterable[Pattern]] | None = None,
    also: Iterable[Any] = (),
    scaler: Any = None,
    _engine: Engine | None = None,
) -> Gradients:
    """Before every step of ``optimizer``, apply ``rules`` to the final gradients; log ``stats`` of some steps.

    The same on a plain module, ``nn.DataParallel``, DDP, ``fully_shard`` and DeepSpeed's ZeRO: every element of
    every gradient is counted once over all ranks, and every rank does the same. Attach after the engine took the
    model, and call it on every rank. A round of measuring is at most two all-reduces on a process group of its own;
    between logged steps nothing waits for the device.

    Args:
        model: the model that the engine returned; for ``fully_shard`` the model itself.
        optimizer: the optimizer whose steps count, or accelerate's wrapper around it. Parameters of the model that it
            does not hold are not changed and not measured. A DeepSpeed engine has an optimizer of its own, so none is
            needed there.
        rules: applied in this order: :class:`~disthooks.ClipValue`, :class:`~disthooks.ClipNorm`,
            :func:`~disthooks.only`, or a function of a name and the local part of a gradient, which returns
            the new gradient.
        stats: of the gradients before any rule: :mod:`disthooks.stats` has them.
        sinks: called on the first rank with a dict for each logged step.
        every: steps 0, ``every``, ``2 * every`` ... are logged.
        recent: of so many steps that are not logged the statistics stay on the device, and are logged if something
            happens in one of them: a gradient that is not finite, or a norm that is a spike. The steps around it are
            then in the log, with ``recent``. Every step costs what a logged one does on the device.
        groups: names of groups of parameters and the patterns of each; statistics are logged of each group too, as
            ``grad_norm/group/<name>``. A parameter may be in several.
        also: objects whose numbers are logged too: the handle of :func:`~disthooks.save_activations`, a wrapper or
            another object whose ``report()`` has a ``record()``, or a function that returns a dict. Each rank asks its
            own objects when the step is logged, which is one step late. If one raises, or has a name that is logged
            already, a warning names it, and it is left out.
        scaler: the ``GradScaler``, which rules at "local" need to work in your units. Statistics find it.

    Returns:
        A handle with ``latest``, ``flush()``, ``report()`` and ``remove()``; also a context manager.

    Raises:
        UsageError: when an argument can never work.
        MatchError: when a pattern in ``only`` matches no parameter.
        AttachError: when hooks would not fire: the optimizer holds other parameters than the model, or the engine
            is not supported. Also from ``step()``, if parameters were replaced since.

    >>> from disthooks import ClipNorm
    >>> model = nn.Linear(2, 1, bias=False)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with gradients(model, optimizer, rules=[ClipNorm(1.0)], every=1) as watch:
    ...     model(torch.tensor([[3.0, 4.0]])).sum().backward()
    ...     optimizer.step()
    >>> watch.latest["grad_norm"], model.weight.grad
    (5.0, tensor([[0.6000, 0.8000]]))
    """
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise UsageError(f"every={every!r}: log every how many steps? An int of at least 1")
    if not isinstance(recent, int) or isinstance(recent, bool) or recent < 0:
        raise UsageError(f"recent={recent!r}: how many steps stay on the device? An int of at least 0")
    chosen = [as_rule(rule) for rule in _listed("rules", rules)]
    watched = list(_listed("stats", stats))
    for stat in watched:
        if not isinstance(stat, Stat):
            raise UsageError(
                f"{stat!r} is no statistic: give stats.Norm(), stats.NonFinite() or another one of disthooks.stats"
            )
    targets, named = list(_listed("sinks", sinks)), _grouped(groups)
    for sink in targets:
        if not callable(sink):
            raise UsageError(f"{sink!r} is no sink: give sinks.Jsonl(path), sinks.Console() or a function of a dict")
    if not chosen and not watched:
        raise UsageError("gradients() without rules and stats would do nothing: give at least one")
    asked = [sink for sink in targets if not getattr(sink, "may_wait", False)]  # an integration's own is no error
    if asked and not watched and not any(rule.logs() for rule in chosen):
        raise UsageError("gradients(): these rules log nothing, so the sinks would never be called; add stats")
    engine = _engine or detect_engine(model)  # a configuration's plan has detected it already
    refuse_replicate(engine)
    others = [as_also_logged(it) for it in _listed("also", also)]
    config = GradientsConfig(chosen, watched, targets, every, named, others, scaler, recent)
    return _attach(engine, model, engine.inner_optimizer(optimizer), config)


def _listed(what: str, given: Any) -> Iterable[Any]:
    if isinstance(given, (str, Mapping)) or not isinstance(given, Iterable):
        raise UsageError(f"{what}={given!r}: give a list, [...], of them (stats.standard() is one already)")
    return given


def _grouped(groups: Any) -> dict[str, Any]:
    if groups is None:
        return {}
    if not isinstance(groups, Mapping):
        raise UsageError(f"groups={groups!r}: give a dict of names and patterns, {{'attention': '*.attn.*'}}")
    for name, pattern in groups.items():
        if not isinstance(name, str) or not name or (not pattern and not callable(pattern)):
            raise UsageError(f"groups: {name!r}: {pattern!r} is no name with a pattern or a list of them")
    return dict(groups)


@dataclass(frozen=True)
class GradientsConfig:
    """The arguments of :func:`disthooks.gradients`, checked."""

    rules: Sequence[Rule] = ()
    stats: Sequence[Stat] = ()
    sinks: Sequence[Sink] = ()
    every: int = 50
    groups: Mapping[str, Pattern | Iterable[Pattern]] = field(default_factory=dict)
    also: Sequence[AlsoLogged] = ()
    scaler: Any = None
    recent: int = 0


def _attach(engine: Engine, model: nn.Module, optimizer: Any, config: GradientsConfig) -> Gradients:
    """Find what every step needs, once; agree with the other ranks; then put the hooks on."""
    local = [rule for rule in config.rules if _is_local(rule)]
    final = [rule for rule in config.rules if not _is_local(rule)]
    parameters = engine.optimizer_parameters(optimizer)
    indices = optimized_shards(engine, parameters)
    shards = [engine.shards[i] for i in indices]
    for rule in final:
        if rule.excludes and not engine.can_exclude_parameters:
            raise AttachError(
                f"{rule!r} keeps single parameters from the optimizer, and on {engine.label} it updates them together "
                "with others, in one piece: set requires_grad_(False), or use an optimizer that does not hold them, "
                "before the engine takes the model"
            )
    with_parameters = {shard.name.rpartition(".")[0] for shard in engine.shards}
    needs_of_forward = [stat.forward_needs() for stat in config.stats]
    forward_hooks = ForwardHooks(engine.model, model, needs_of_forward, with_parameters)
    plan = StepPlan(final, config.stats, shards, groups_of(config.groups, shards), forward_hooks.names)
    for i, stat in enumerate(config.stats):
        if stat.alone and any(type(other) is type(stat) for other in config.stats[:i]):
            raise UsageError(f"two {type(stat).__name__} would write the same names into the log: give one")
        stat.check(engine, shards)
    # Each statistic with the state that it keeps from one logged step to the next.
    stats = [(stat, stat.start(len(plan.scopes) + len(shards) * stat.per_parameter)) for stat in config.stats]
    local_rules = LocalRules(engine, local, indices, config.scaler)
    needs = LocalNeeds.of(plan, config.stats, indices)
    local_hooks = LocalGradientHooks(engine, indices, needs, local_rules)
    group = collectives.group_of(engine.ranks)
    device = collectives.device_for(group, shards[0].parameter.device)
    runner = StepRunner(engine, plan, local_hooks, forward_hooks, config.scaler, group, device)
    counts = StepCounts(engine.ranks, engine.ranks[engine.position], collectives.seconds_to_wait(group))
    checks = StepChecks(engine, optimizer, parameters, counts, has_rules=bool(plan.rules))
    records = StepRecords(plan, stats, engine.ranks, config.recent)
    if config.recent and not records.sees_every_step:
        raise UsageError(
            f"recent={config.recent}: nothing tells in which step something happens: add stats.NonFinite(), "
            "SkipNonFinite or ClipNorm, which look at every step"
        )
    return Gradients(config, checks, runner, records, _open_sinks(config, engine, runner))


def _is_local(rule: Rule) -> bool:
    return isinstance(rule, Only) and rule.at == "local"


def _open_sinks(config: GradientsConfig, engine: Engine, runner: StepRunner) -> RecordWriter:
    """Open the sinks on the first rank, and agree that all ranks attach the same: one collective.

    Ranks that attach different rules or statistics would add up different numbers, or wait for each other for ever. If
    the first rank cannot open its sinks, every rank raises.
    """
    writer = RecordWriter(config.also)
    failure: Exception | None = None
    about = {
        "engine": engine.label,
        "ranks": len(engine.ranks),
        "parameters": len(runner.plan.shards),
        "every": config.every,
        "rules": [describe(rule) for rule in config.rules],
        "stats": [describe(stat) for stat in config.stats],
        "versions": {
            "disthooks": sys.modules["disthooks"].__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }
    names = [shard.name for shard in runner.plan.shards]
    try:
        named = {"param": names, "module": runner.plan.modules, "called": runner.forward_hooks.called}
        writer.open(config.sinks if engine.position == 0 else (), about, named)
    except Exception as error:
        failure = error
    scopes = [bound.indices for bound in runner.plan.rules], [sorted(s) for s in runner.local_hooks.rules.scopes]
    asked = (
        f"every={config.every}, recent={config.recent}, rules={describe(config.rules)}, stats={describe(config.stats)}"
    )
    mine = (
        f"{asked}, groups={runner.plan.groups}, for the parameters {scopes} of {names}, modules {runner.plan.modules}"
    )
    has_failed, is_alike = collectives.agree(runner.group, runner.device, failure is not None, mine)
    if not has_failed and is_alike:
        return writer
    writer.close()
    if failure is not None:
        raise failure
    if not is_alike:
        raise AttachError(
            f"the ranks {list(engine.ranks)} do not attach the same: they must give the same rules, stats, groups and "
            f"every, for the same parameters; this one has {mine}"
        )
    raise AttachError(f"rank {engine.ranks[0]} could not open its sinks; its error says why")


@dataclass(frozen=True)
class GradientsReport:
    """The engine of an attachment, and the cost of its steps.

    Attributes:
        engine: which engine was found.
        ranks: the global ranks whose gradients belong together.
        parameters: how many parameters the optimizer holds.
        rounds: how many measurements a logged step takes; each rule that measures gradients which another rule rewrote
            adds one, and so do statistics of the update.
        collectives: all-reduces in a step that is not logged, and in one that is; at most two a round.
        bytes: how many bytes each rank gives to them, in a step that is not logged, and in one that is.
        steps: how many steps there have been.
    """

    engine: str
    ranks: tuple[int, ...]
    parameters: int
    rounds: int
    collectives: tuple[int, int]
    bytes: tuple[int, int]
    steps: int


class Gradients(Attachment):
    """The attachment that :func:`gradients` returns. See [Note: the life of a step].

    Attributes:
        latest: the record that was logged last, on every rank; it is one step behind until :meth:`flush`.
        last_nonfinite: the record of the last step whose gradients were not finite, on every rank. None before there
            was one, and where neither ``stats.NonFinite`` nor ``SkipNonFinite`` looks for such steps.
        steps: how many steps of the optimizer there have been.
        nonfinite_steps: how many of them are known to have had gradients that were not finite. Each of them is known
            where ``stats.NonFinite`` or ``SkipNonFinite`` looks, otherwise those that were logged with a norm.
    """

    def __init__(
        self,
        config: GradientsConfig,
        checks: StepChecks,
        runner: StepRunner,
        records: StepRecords,
        writer: RecordWriter,
    ) -> None:
        super().__init__()
        self.latest: dict[str, Any] = {}
        self.last_nonfinite: dict[str, Any] | None = None
        self.steps = 0
        self.nonfinite_steps = 0
        self._config, self._checks, self._runner = config, checks, runner
        self._records, self._writer = records, writer
        self._was_logged = True  # the step that was made last
        self._settings: dict[str, float] = {}  # of the optimizer, in the step that is logged
        self._log_when: list[Callable[[int], bool]] = []
        self._tell: list[Callable[[dict[str, Any]], object]] = []
        self._heir: Callable[[UnwrittenRecords], object] | None = None
        self.on_remove(writer.close)  # given first, so called last: after the last flush
        engine, optimizer, plan = checks.engine, checks.optimizer, runner.plan
        try:
            for handle in [*runner.local_hooks.attach(), *runner.forward_hooks.attach()]:
                self.on_remove(handle.remove)
            if engine.trains_alone and has_several_ranks():
                self.on_remove(engine.model.register_forward_pre_hook(UncopiedHook(self._before_forward)).remove)
            # See [Note: one step hook for all] in engines/optimizer_step.py. A step that calls its closure several
            # times would apply the rules several times, so it is refused.
            on_repeat: OnRepeat = "refuse" if plan.rules else "first"
            self.on_remove(engine.before_step(optimizer, self._before_step, on_repeat).remove)
            self.on_remove(before_clipping(self._before_clipping).remove)
            if plan.after.uses or runner.forward_hooks.has_times:
                self.on_remove(engine.after_step(optimizer, self._after_step).remove)
            self.on_remove(self.flush)
            self.on_remove(functools.partial(setattr, self, "_heir", None))
            self.at_exit(self.remove)  # which flushes, then closes the sinks
        except BaseException:
            self.remove()
            raise

    # In each step.

    def begin_step(self, scaler: Any = None) -> None:
        """Measure and apply the rules now, on gradients that are final; the next step does not do it again.

        This is for loops that clip gradients by code of their own: call it on every rank just before the loop clips,
        when all of the step's backwards are done. torch's clip_grad_norm_, clip_grad_value_ and clip_grads_with_norm_
        call it by themselves. A second call before the step does nothing. All attachments to the optimizer run. In a
        step with a closure, call it in the closure, after backward. DeepSpeed clips inside its step, after disthooks:
        there this does nothing.

        Args:
            scaler: the ``GradScaler``, if there is one; its ``unscale_(optimizer)`` is called first.
        """
        self._checks.engine.begin_step(self._checks.optimizer, scaler)

    def note_loss(self, loss: torch.Tensor | float) -> None:
        """Hand in the loss of a micro-batch, on every rank, for :class:`disthooks.stats.Loss`. Nothing waits for it.

        Without that statistic the loss is not used.

        Args:
            loss: a number, or a tensor of one element, on any device.

        Raises:
            UsageError: when it is no single number.
        """
        self._runner.forward_hooks.note_loss(loss)

    def _before_clipping(
        self, parameters: Sequence[torch.Tensor], scaler_of: Callable[[Any], tuple[Any, bool]]
    ) -> None:
        """Begin the step, if torch's clipping is about to change this step's gradients and they are final."""
        if self._checks.has_reduced(parameters):
            scaler, is_final = scaler_of(self._checks.optimizer)
            if is_final:
                self.begin_step(scaler)

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        self._checks.before_forward(module)

    @torch.no_grad()
    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        """Measure and rewrite; returns whether to leave the step out, as a bool on the device."""
        self._checks.before_step(optimizer, self.steps)
        if self._checks.is_left_to_ranks():
            self._runner.local_hooks.take()
            self._runner.forward_hooks.take(self._runner.device, is_logged=False)
            self._begin_next_step()
            return None
        if self._records.has_pending:
            self.flush()
        else:
            self._publish(self._records.read(wait=False))
        is_logged, is_measured = self._is_logged(), self._is_measured()
        self._settings = self._largest_settings() if is_measured else {}
        is_frequent = self._config.every == 1 or self._config.recent > 0
        result = self._runner.run(self.steps, is_measured, reuse_copies=is_frequent)
        if result.excluded:
            exclude_from_step(optimizer, [shard.parameter for shard in result.excluded])
        decision = result.skip()
        self._was_logged = is_logged
        self._records.watch(self.steps, result.merged, decision, is_measured)
        if is_measured and not self._runner.plan.after.uses and (self._config.stats or result.log):
            self._record(self.steps, result, is_logged)
        self._begin_next_step()
        return decision

    @torch.no_grad()
    def _after_step(self) -> None:
        result = self._runner.after_update()
        if result is not None:
            self._record(self.steps - 1, result, self._was_logged)
        self._runner.forward_hooks.end_step()

    def _record(self, step: int, result: StepResult, is_logged: bool) -> None:
        """Start the record of a step that is logged, or keep its numbers. See [Note: recent steps] in records.py."""
        if is_logged:
            self._records.start(step, result.merged, result.log, self._settings)
        else:
            self._records.keep(RecentStep(step, result.merged, result.log, self._settings))

    def _largest_settings(self) -> dict[str, float]:
        """The optimizer's settings that a statistic asks for, the largest of its parameter groups."""
        found: dict[str, float] = {}
        for name in sorted({name for stat in self._config.stats for name in stat.settings}):
            given = [group[name] for group in self._checks.optimizer.param_groups if name in group]
            # A tensor on a device would make the host wait, and an optimizer that finds its own rate may have None.
            known = [float(each) for each in given if isinstance(each, (int, float)) or _is_on_host(each)]
            if known:
                found[name] = max(known)
        return found

    def _begin_next_step(self) -> None:
        self.steps += 1
        self._begin_hooks()

    def _begin_hooks(self) -> None:
        is_measured = self._is_measured()
        self._runner.local_hooks.begin(self.steps, is_measured)
        self._runner.forward_hooks.begin(self.steps, is_measured)

    def _is_measured(self) -> bool:
        """Whether all statistics are measured in the step that is made next."""
        return self._config.recent > 0 or self._is_logged()

    def _is_logged(self) -> bool:
        """Whether the step that is made next is to be logged."""
        return self.steps % self._config.every == 0 or any(when(self.steps) for when in self._log_when)

    # At logging.

    def log_also(self, when: Callable[[int], bool]) -> None:
        """Log also the steps for which ``when(step)`` is true, beside each ``every``-th step.

        This is for trainers that choose the steps that they log. Call it before the backward of the next step.

        Args:
            when: called once for each step, before its backward; it must return the same on every rank.
        """
        self._log_when.append(when)
        self._begin_hooks()

    def log_to(self, sink: Sink) -> None:
        """Give the records to ``sink`` too, on the first rank; the attachment does not call its ``close()``."""
        if self.is_first_rank:
            self._writer.add(sink)

    def on_nonfinite(self, tell: Callable[[dict[str, Any]], object]) -> None:
        """Call ``tell``, on every rank, when gradients have become infinite or NaN: once for several steps in a row.

        Args:
            tell: called with the record of the first of these steps, at the latest in the next :meth:`flush`.
        """
        self._tell.append(tell)

    def leave_to(self, heir: Callable[[UnwrittenRecords], object]) -> None:
        """Call ``heir`` with the records that are not written yet, if this object is collected without ``remove()``.

        Args:
            heir: called from a destructor, so it must not wait, and it must not hold this object.
        """
        self._heir = heir

    def flush(self, **known: float) -> None:
        """Read the step that was logged last, give its record to the sinks, and wait for the device if necessary.

        Args:
            known: numbers of that step that the caller knows, such as ``loss=0.3``; they go into its record too.
        """
        self._publish(self._records.read(wait=True), known)

    def _publish(self, reading: Reading, known: Mapping[str, float] | None = None) -> None:
        """Give the records to the sinks. The record of the logged step gets the values of ``also`` and ``known``."""
        self._note_nonfinite(reading)
        for fields, is_logged, _ in reading.records:
            if is_logged:
                self._writer.add_also(fields)
                fields.update({name: value for name, value in (known or {}).items() if name not in fields})
                self.latest = fields
            self._writer.write(fields)
            if is_logged:
                if fields.get("grad_norm") == 0:
                    self._runner.warn_of_no_gradient(fields["step"], "a gradient of 0")
                is_bad, is_first = self._records.judge_norm(fields)
                self.nonfinite_steps += is_bad
                if is_first:
                    self._tell_of(fields)

    def _note_nonfinite(self, reading: Reading) -> None:
        self.nonfinite_steps += reading.nonfinite_steps
        for fields, _, is_first_nonfinite in reading.records:
            if is_first_nonfinite:
                self.last_nonfinite = fields
                self._tell_of(fields)

    def _tell_of(self, record: dict[str, Any]) -> None:
        for tell in self._tell:
            try:
                tell(record)
            except Exception as error:  # raising here, on one rank, would leave the others waiting
                warnings.warn(f"{tell!r} failed: {error!r}", RuntimeWarning, stacklevel=3)

    def __del__(self) -> None:
        heir = getattr(self, "_heir", None)
        if heir is None:
            return
        unwritten: list[dict[str, Any]] = []
        with contextlib.suppress(Exception):  # while torch traces a function, its tensors have no numbers
            reading = self._records.read(wait=True)
            self._note_nonfinite(reading)
            unwritten = [record.fields for record in reading.records]
        heir(UnwrittenRecords(self.steps, self.nonfinite_steps, unwritten, self._writer))

    # The handle's description and state.

    def __repr__(self) -> str:
        rules, stats = (", ".join(map(str, part)) or "none" for part in (self._config.rules, self._config.stats))
        where = f"{self._checks.engine.label}, {len(self._runner.plan.shards)} parameters"
        return f"<Gradients on {where}, {self.steps} steps, rules: {rules}; stats: {stats}>"

    @property
    def optimizer(self) -> Any:
        """The torch optimizer whose steps count, inside whatever wraps it."""
        return self._checks.optimizer

    @property
    def sinks(self) -> Sequence[Sink]:
        """The sinks that get the records; only the first rank has any."""
        return tuple(self._writer.sinks)

    @property
    def is_first_rank(self) -> bool:
        """Whether this rank is the one that writes to the sinks."""
        return self._checks.engine.position == 0

    def report(self) -> GradientsReport:
        """The engine, and the cost of a step."""
        plan, engine = self._runner.plan, self._checks.engine
        always = [part.always for part in plan.rounds]
        logged = [*(part.logged for part in plan.rounds), plan.after]
        has_others = len(engine.ranks) > 1
        return GradientsReport(
            engine=engine.label,
            ranks=engine.ranks,
            parameters=len(plan.shards),
            rounds=sum(bool(layout.uses) for layout in logged),
            collectives=(
                has_others * sum(layout.collectives() for layout in always),
                has_others * sum(layout.collectives() for layout in logged),
            ),
            bytes=(
                has_others * sum(layout.bytes() for layout in always),
                has_others * sum(layout.bytes() for layout in logged),
            ),
            steps=self.steps,
        )

    def state_dict(self) -> dict[str, Any]:
        """The state of adaptive rules, the averages of statistics and the number of steps; the same on every rank.

        Returns:
            A dict of plain values and of tensors on the CPU, to be saved beside the optimizer's state.
        """
        if any(state for _, state in self._records.stats):
            self.flush()  # the step that was logged last belongs to the averages
        copied = {
            part: [[kind, {name: value.cpu().clone() for name, value in state.items()}] for kind, state in states]
            for part, states in self._states().items()
        }
        return {"steps": self.steps, **copied}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of :meth:`state_dict`; call it on every rank, between the same two steps.

        The next step raises AttachError if the ranks count different numbers of steps.

        Raises:
            UsageError: when the rules or statistics are of other kinds, or for other numbers of parameters; nothing is
                changed then.
        """
        mine = self.state_dict()
        for part in ("rules", "stats"):
            # All is checked before anything changes.
            _check_states(part, mine[part], state.get(part, []))
        self._checks.counts.loaded()
        self.steps = int(state["steps"])
        self._records.forget_recent()  # of steps that are made again now
        self._begin_hooks()
        for part, states in self._states().items():
            for (_, target), (_, found) in zip(states, state.get(part, []), strict=True):
                for name, value in found.items():
                    target[name].copy_(value)

    def _states(self) -> dict[str, list[tuple[str, State]]]:
        """The states of rules and of statistics, each with the name of its kind."""
        kinds = [f"{_kind(bound.rule)}{bound.label}" for bound in self._runner.plan.rules]
        stats = [(type(stat).__name__, state) for stat, state in self._records.stats if state]
        return {"rules": list(zip(kinds, self._runner.states, strict=True)), "stats": stats}


def _check_states(part: str, mine: Sequence[Any], theirs: Sequence[Any]) -> None:
    kinds, given = [kind for kind, _ in mine], [kind for kind, _ in theirs]
    if kinds != given:
        raise UsageError(f"the state is of the {part} {given}, and these are attached: {kinds}")
    for (kind, own), (_, found) in zip(mine, theirs, strict=True):
        shapes, others = ({name: tuple(value.shape) for name, value in state.items()} for state in (own, found))
        if shapes != others:
            raise UsageError(f"the state of {kind} has the shapes {others}, and {shapes} are needed")


def _is_on_host(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cpu and value.numel() == 1


def _kind(rule: Rule) -> str:
    return f"only:{_kind(rule.rule)}" if isinstance(rule, Only) else type(rule).__name__
