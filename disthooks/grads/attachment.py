"""``Gradients``: the attachment of rules and statistics to the steps of an optimizer. See attach.py."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from disthooks._handles import Attachment, UncopiedHook, check_state
from disthooks._ranks import has_several_ranks
from disthooks.engines.base import inner_optimizer
from disthooks.engines.optimizer_step import OnRepeat
from disthooks.engines.scalers import is_final, scalers
from disthooks.engines.step import Step, StepFunctions
from disthooks.engines.when_final import before_clipping
from disthooks.errors import UsageError
from disthooks.grads.batch_notes import BatchNotes
from disthooks.grads.buffers import BuffersBefore
from disthooks.grads.gradients_report import GradientsReport, no_step_followed
from disthooks.grads.kept_states import KeptStates
from disthooks.grads.options import GradientsConfig
from disthooks.grads.records import MeasuredStep, StepRecord, StepRecords, UnwrittenRecords
from disthooks.grads.rerun import AnyPath, P, Rerun, T
from disthooks.grads.sinks.base import RecordWriter, Sink
from disthooks.grads.stats.base import State
from disthooks.grads.step import BegunStep, StepChecks, StepResult, StepRunner


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
        self._states = KeptStates(runner, records.stats)
        self._batches = BatchNotes(config.sinks, checks.engine.ranks[checks.engine.position])
        self._parts_of_loss: Callable[[], int] | None = None
        self._was_logged = True  # the step that was made last
        self._begun: BegunStep | None = None  # the step whose rules have been applied, and that is not made yet
        self._has_said_kept = False
        self._log_when: list[Callable[[int], bool]] = []
        self._tell: list[Callable[[dict[str, Any]], object]] = []
        self._takes_unwritten: Callable[[UnwrittenRecords], object] | None = None
        self.on_remove(writer.close)  # given first, so called last: after the last flush
        engine, step, plan = checks.engine, checks.step, runner.plan
        called = (*runner.forward_hooks.models_called, *engine.models)
        self._buffers = BuffersBefore(engine.models, called, config.restore_buffers)
        self._may_skip = any(bound.rule.skips for bound in plan.rules)
        self._rerun = Rerun(engine, step, runner, self._buffers)
        self.on_remove(self._rerun.remove)
        try:
            for handle in self._buffers.attach() if self._may_skip else ():
                self.on_remove(handle.remove)
            self._warn_of_kept_gradients()
            for handle in [*runner.local_hooks.attach(), *runner.forward_hooks.attach(), *records.loop.attach()]:
                self.on_remove(handle.remove)
            for model in engine.models if engine.trains_alone and has_several_ranks() else ():
                self.on_remove(model.register_forward_pre_hook(UncopiedHook(self._before_forward)).remove)
            # See [Note: one step hook for all] in engines/optimizer_step.py. A step that calls its closure several
            # times would apply the rules several times, so it is refused.
            on_repeat: OnRepeat = "refuse" if plan.rules else "first"
            functions = StepFunctions(self._run_step, self._step_is_made, self._step_is_dropped)
            self.on_remove(engine.before_step(step, functions, on_repeat).remove)
            self.on_remove(before_clipping(self._before_clipping).remove)
            if plan.after.logged.uses or runner.forward_hooks.has_times:
                self.on_remove(engine.after_step(step, self._after_step).remove)
            self.on_remove(self.end_log)
            self.on_remove(self._warn_of_no_step)
            self.on_remove(functools.partial(setattr, self, "_takes_unwritten", None))
            self.at_exit(self.remove)  # which flushes, then closes the sinks
        except BaseException:
            self.remove()
            raise

    # In each step.

    def begin_step(self, scaler: Any = None, optimizers: Iterable[Any] | None = None) -> None:
        """Measure and apply the rules now, on gradients that are final; the next step does not do it again.

        This is for loops that clip gradients by code of their own: call it on every rank just before the loop clips,
        when all of the step's backwards are done. torch's ``clip_grad_norm_``, ``clip_grad_value_`` and
        ``clip_grads_with_norm_`` call it by themselves. A second call before the step does nothing. All attachments to
        the optimizer run. In a step with a closure, call it in the closure, after backward. DeepSpeed clips inside its
        step, after disthooks: there this does nothing.

        Several optimizers that were attached together step together. If one of them steps less often, or at another
        time, call this just before the first that steps, with those that step now: the gradients of the others are
        neither measured nor changed.

        Args:
            scaler: the ``GradScaler``, if there is one; its ``unscale_(optimizer)`` is called first.
            optimizers: those of the attached optimizers that step now; None for all.

        Raises:
            UsageError: when one of ``optimizers`` is not attached.

        >>> from disthooks import ClipNorm, gradients
        >>> model = nn.ParameterList([nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))])
        >>> often, seldom = (torch.optim.SGD([parameter], lr=1.0) for parameter in model)
        >>> with gradients(model, [often, seldom], rules=[ClipNorm(1.0)]) as watch:
        ...     (3 * model[0] + 4 * model[1]).backward()
        ...     watch.begin_step(optimizers=[often])
        ...     often.step()
        >>> model[0].grad, model[1].grad
        (tensor(1.0000), tensor(4.))
        """
        chosen = None if optimizers is None else [inner_optimizer(each) for each in optimizers]
        self._checks.engine.begin_step(self._checks.step, scaler, chosen)

    def note_loss(self, loss: torch.Tensor | float) -> None:
        """Hand in the loss of a micro-batch, on each rank that has one; nothing waits for it.

        :class:`disthooks.stats.Loss` and :class:`disthooks.SkipSpike` use it.

        Args:
            loss: a number, or a tensor of one element, on any device.

        Raises:
            UsageError: when it is no single number.
        """
        self._runner.forward_hooks.note_loss(loss)

    def rerun(
        self, function: Callable[P, T], capture: AnyPath | None = None, *, captures: int = 3, probe: bool = True
    ) -> Callable[P, T]:
        """The function that makes the gradients of a micro-batch, wrapped so that a bad step is run once more.

        Call this on every rank. When the rules would leave a step out, all ranks make the calls since the last step
        again, from the same arguments, random numbers and buffers. If the gradients are good this time, and have other
        bits, the fault was transient, and the step is made with them; otherwise it is left out. The record of the step
        has ``rerun``: "transient", "repeats" (the same bits), "differs" (not deterministic), or "refused", with
        ``rerun_why``; ``rerun_calls``, ``rerun_seconds``, and ``rerun_ranks``: where the function returned other bits.
        In each step the host waits once, for the decision. The arguments are held until the step is made.

        Args:
            function: makes the gradients of one micro-batch, forward and backward; what it draws at random comes from
                the generators of torch, numpy and Python. It must not step.
            capture: a folder. If a step repeats, its calls are made again twice more, and the call of the module that
                made it bad goes to ``CAPTURE/step-37.rank-1`` for ``disthooks replay``; ``rerun_capture`` names it.
            captures: how many of these all ranks together write at most.
            probe: whether one good step is run again, too. If it gives other bits, that is an error on all ranks.

        Raises:
            UsageError: when no rule leaves steps out, ``capture`` lacks safetensors, or a second run could not give the
                same gradients: a communication hook with a state, LBFGS, parameters of other optimizers.

        >>> from disthooks import SkipNonFinite, gradients
        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with gradients(model, optimizer, rules=[SkipNonFinite()]) as watch:
        ...     forward_backward = watch.rerun(lambda x: model(x).sum().backward())
        ...     forward_backward(torch.tensor([[1.0, torch.inf]]))
        ...     optimizer.step()
        ...     watch.flush()
        >>> watch.last_nonfinite["rerun"], watch.was_skipped
        ('repeats', True)
        """
        return self._rerun.wrap(function, probe, capture, captures)

    def note_data(self, value: Any) -> None:
        """Note which data a micro-batch has: ids, rows, names of files. It is written if the step stands out.

        Each rank keeps what it noted of the last 256 steps. If a step was left out, run again, or not finite, the rank
        appends what it noted to ``LOG.rank-N.data``, beside the log of ``sinks.Jsonl``, and ``disthooks report`` shows
        it. Nothing is sent to other ranks.

        Args:
            value: what JSON can hold, in 4 KiB at most.

        Raises:
            UsageError: when JSON cannot hold it, it is larger, or no ``sinks.Jsonl`` was given.
        """
        if not self._rerun.is_again:
            self._batches.note(value)

    @property
    def wants_rerun(self) -> bool:
        """Whether a configuration asks for :meth:`rerun`, so that an integration wraps the framework's own step."""
        return self._rerun.is_wanted

    def want_rerun(self, capture: AnyPath | None = None) -> None:
        """A configuration asks for :meth:`rerun`; a warning comes if nothing is wrapped until the second step."""
        self._rerun.is_wanted, self._rerun.folder = True, capture

    @property
    def asks_for_loss(self) -> bool:
        return self._runner.forward_hooks.has_loss

    @property
    def models(self) -> tuple[nn.Module, ...]:
        return tuple(self._checks.engine.models)

    def note_loss_of_backward(self, loss: Any) -> None:
        """Hand in the loss that a framework's ``backward`` is called with, unless the model's outputs have one."""
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            return
        if self._parts_of_loss is not None:
            self.note_loss(loss.detach() * self._parts_of_loss())
        elif not self._runner.forward_hooks.gives_loss:
            self.note_loss(loss)

    def take_loss_of_backward(self, parts: Callable[[], int]) -> None:
        """Take the loss from ``backward`` from now on, and not from the model's outputs.

        Args:
            parts: into how many parts the framework divides the loss of a step, one for each micro-batch.
        """
        self._parts_of_loss = parts
        self._runner.forward_hooks.takes_outputs = False

    def _before_clipping(self, parameters: Sequence[torch.Tensor], has_norm: bool) -> None:
        """Begin the step, if torch's clipping is about to change this step's gradients and they are final.

        See [Note: clipping under a GradScaler] in engines/when_final.py.
        """
        step = self._checks.step
        if self._checks.has_reduced(parameters) and step.has_new_gradients() and all(map(is_final, step.optimizers)):
            self._rerun.has_norm |= has_norm
            self.begin_step(scalers.of(step.optimizers[0]))

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        self._checks.before_forward(module)

    @torch.no_grad()
    def _run_step(self, step: Step) -> torch.Tensor | None:
        """Measure and rewrite; returns whether to leave the step out, as a bool on the device."""
        self._forget_begun()  # gradients have changed since the loop began this step
        self._checks.before_step(self.steps)
        self._rerun.begin_step()
        self._warn_of_kept_gradients()
        self._publish(self._records.read(wait=self._records.must_be_read))
        self._records.raise_errors()
        if step.is_in_backward:
            self._rewrite_in_backward(step)
            return None
        if self._checks.is_left_to_ranks():
            self._begun = BegunStep()
            return None
        is_logged, is_measured = self._is_logged(), self._is_measured()
        is_frequent = self._config.every == 1 or self._config.recent > 0
        has_others = len(step.stepping) < len(step.optimizers)
        states = self._runner.copied_states() if step.is_early or self._rerun.is_used else ()
        run = functools.partial(self._runner.run, self.steps, is_measured, is_frequent, step.stepping, has_others)
        result = self._rerun.judge(self.steps, is_measured, run(), functools.partial(self._put_back, states), run)
        self._begun = BegunStep(result, is_logged, is_measured, states)
        return result.skip()

    def _put_back(self, states: Sequence[State]) -> None:
        """What rules and hooks have noted of this step is forgotten, because it is run again."""
        self._runner.restore_states(states)
        self._runner.end_step(is_made=False)
        self._records.loop.forget_forwards()
        self._begin_hooks()

    def _step_is_made(self) -> None:
        """An optimizer steps, with the gradients that were measured."""
        begun, self._begun = self._begun, None
        self._rerun.end_step(self.steps)
        if begun is None:  # inside backward
            return
        result = begun.result
        if result is not None and (decision := result.skip()) is not None:
            result.deferred_errors += self._buffers.treat(self.steps, decision)
        self._runner.end_step(is_made=result is not None)
        self._records.loop.take(self.steps)
        self._batches.take(self.steps)
        if result is not None:
            self._was_logged = begun.is_logged
            self._records.begin(
                self.steps, result.merged, result.skip(), begun.is_measured, result.deferred_errors, result.events
            )
            has_after = bool(self._runner.plan.after.logged.uses)
            if begun.is_measured and not has_after and (self._config.stats or result.log):
                self._record(self.steps, result, begun.is_logged)
            if not has_after:
                self._records.send()
        self._begin_next_step()

    def _warn_of_kept_gradients(self) -> None:
        kept = self._checks.engine.keeps_gradients() if self._may_skip and not self._has_said_kept else ""
        if kept:
            self._has_said_kept = True
            warnings.warn(
                f"{kept} keeps a part of the gradients of each step and adds it to later ones. If a step whose "
                "gradients are not finite is left out, a NaN stays there, and all later gradients are NaN: use a "
                "communication hook without such a state (fp16_compress_hook, bf16_compress_hook), or make its state "
                "anew after a skipped step. This is said once",
                stacklevel=2,
            )

    def _warn_of_no_step(self) -> None:
        if self._checks.step.lacks_step:
            watched = " and ".join(type(one).__name__ for one in self.optimizers)
            warnings.warn(f"gradients() of {watched}: {no_step_followed(self.steps)}", stacklevel=3)

    def _step_is_dropped(self) -> None:
        """A ``GradScaler`` has kept the step back: what was noted for it belongs to no step."""
        self._forget_begun()
        self._rerun.forget()
        self._batches.forget()
        self._runner.end_step(is_made=False)
        self._records.loop.forget_forwards()

    def _forget_begun(self) -> None:
        begun, self._begun = self._begun, None
        if begun is not None:
            self._runner.restore_states(begun.states)

    def _rewrite_in_backward(self, step: Step) -> None:
        """Apply the rules to the gradients of the one optimizer that steps; all those of a backward count as one step.

        See [Note: optimizers that step inside backward] in engines/step.py.
        """
        name, has_collectives = type(step.stepping[0]).__name__, self._runner.group is not None
        refused = [repr(bound.rule) for bound in self._runner.plan.rules if not bound.rule.takes_one(has_collectives)]
        refused += [repr(each) for each in (*self._config.stats, *self._config.sinks)]
        if refused:
            raise UsageError(
                f"{name} steps inside backward, where the gradients of the other optimizers are not there yet, and "
                f"{', '.join(refused)} needs all of them. Rules for one gradient at a time work there: ClipValue, "
                "Scale, Sanitize, a function, and in one process ClipNorm(by='parameter'). For all others step "
                "after backward"
            )
        if self._checks.engine.reduces_late:
            raise UsageError(
                f"{name} steps inside backward, before {self._checks.engine.label} has reduced the gradient, so each "
                "rank would train another model: step after backward, or use fully_shard"
            )
        if step.is_first_in_backward:
            self._begin_next_step()
        result = self._runner.run(self.steps - 1, False, False, step.stepping)
        self._runner.end_step()
        self._records.expect(result.deferred_errors)

    @torch.no_grad()
    def _after_step(self) -> None:
        result = self._runner.after_update()
        if result is not None:
            self._record(self.steps - 1, result, self._was_logged)
        self._records.send()
        self._runner.forward_hooks.end_step()

    def _record(self, step: int, result: StepResult, is_logged: bool) -> None:
        """Start the record of a step that is logged, or keep its numbers. See [Note: recent steps] in records.py."""
        if is_logged:
            self._writer.take_also(step)
            self._records.log(MeasuredStep(step, result.merged, result.log))
        else:
            self._records.keep(MeasuredStep(step, result.merged, result.log))

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

    def leave_to(self, take: Callable[[UnwrittenRecords], object]) -> None:
        """Call ``take`` with the records that are not written yet, if this object is collected without ``remove()``.

        Args:
            take: called from a destructor, so it must not wait, and it must not hold this object.
        """
        self._takes_unwritten = take

    def flush(self, **known: float) -> None:
        """Read the step that was logged last, give its record to the sinks, and wait for the device if necessary.

        Args:
            known: numbers of that step that the caller knows, such as ``loss=0.3``; they go into its record too.
        """
        self._publish(self._records.read(wait=True), known)

    def end_log(self) -> None:
        """Flush, and write what is known of the steps since the last record; :meth:`remove` does it by itself."""
        self.flush()
        self._writer.write_rest(*self._records.rest(self.steps - 1))

    def _publish(self, reading: tuple[int, list[StepRecord]], known: Mapping[str, float] | None = None) -> None:
        """Give the records to the sinks. The record of the logged step gets the values of ``also`` and ``known``."""
        for fields, _, _ in reading[1]:
            fields.update(self._rerun.facts.pop(fields["step"], {}))
            self._batches.write(fields)
        self._note_nonfinite(reading)
        for fields, is_logged, _ in reading[1]:
            if is_logged:
                self._writer.add_also(fields)
                fields.update({name: value for name, value in (known or {}).items() if name not in fields})
                self.latest = fields
            self._writer.write(fields | self._records.loop.of(fields["step"]))
            if is_logged:
                if fields.get("grad_norm") == 0:
                    self._runner.warn_of_no_gradient(fields["step"], "a gradient of 0")
                is_bad, is_first = self._records.judge_norm(fields)
                self.nonfinite_steps += is_bad
                if is_first:
                    self._tell_of(fields)

    def _note_nonfinite(self, reading: tuple[int, list[StepRecord]]) -> None:
        self.nonfinite_steps += reading[0]
        for fields, _, is_first_nonfinite in reading[1]:
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
        take = getattr(self, "_takes_unwritten", None)
        if take is None:
            return
        unwritten: list[dict[str, Any]] = []
        with contextlib.suppress(Exception):  # while torch traces a function, its tensors have no numbers
            reading = self._records.read(wait=True)
            self._note_nonfinite(reading)
            unwritten = [each.fields | self._records.loop.of(each.fields["step"]) for each in reading[1]]
        rest = self._records.rest(self.steps - 1)
        take(UnwrittenRecords(self.steps, self.nonfinite_steps, unwritten, rest, self._writer))

    # The handle's description and state.

    def __repr__(self) -> str:
        rules, stats = (", ".join(map(str, part)) or "none" for part in (self._config.rules, self._config.stats))
        where = f"{self._checks.engine.label}, {len(self._runner.plan.shards)} parameters"
        return f"<Gradients on {where}, {self.steps} steps, rules: {rules}; stats: {stats}>"

    @property
    def optimizer(self) -> Any:
        """The torch optimizer whose steps count, inside whatever wraps it; the first of several."""
        return self.optimizers[0]

    @property
    def optimizers(self) -> tuple[Any, ...]:
        """The torch optimizers that step together."""
        return self._checks.step.optimizers

    @property
    def norm(self) -> torch.Tensor:
        """The norm of all gradients of the step that was begun last, before any rule: a float64 scalar on the device.

        It is there once the step's rules have been applied: after :meth:`begin_step`, or after the optimizer's step.
        Nothing waits for the device; ``float(watch.norm)`` does.

        Raises:
            UsageError: before the first step, and if nothing measures the norm of each step.
        """
        if self._runner.norm is None:
            raise UsageError(
                "there is no norm of this step: there was no step yet, or nothing measures the norm in each step, as "
                "ClipNorm, SkipNonFinite and stats.NonFinite do"
            )
        return self._runner.norm

    @property
    def skipped(self) -> torch.Tensor:
        """Whether the step that was made last was left out: a bool without dimensions, on the device.

        Nothing waits for the device. All that is attached to the optimizer decides together, so this is true also if
        another attachment left the step out. Steps that a ``GradScaler`` keeps back do not count.
        """
        found = self._checks.step.skipped
        return torch.zeros((), dtype=torch.bool, device=self._runner.device) if found is None else found

    @property
    def was_skipped(self) -> bool:
        """The same as a bool of Python; this waits for the device."""
        return bool(self.skipped)

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
        always = [part.always for part in (*plan.rounds, plan.after)]
        logged = [part.logged for part in (*plan.rounds, plan.after)]
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
            lacks_step=self._checks.step.lacks_step,
        )

    def state_dict(self) -> dict[str, Any]:
        """The state of adaptive rules, the averages of statistics and the number of steps; the same on every rank.

        What a rule keeps of each parameter has the names of the parameters with it, so it can be loaded where they are
        in another order, or on other ranks.

        Returns:
            A dict of plain values and of tensors on the CPU, to be saved beside the optimizer's state.
        """
        if any(state for _, state in self._records.stats):
            self.flush()  # the step that was logged last belongs to the averages
        return {"steps": self.steps, **self._states.to_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state of :meth:`state_dict`; call it on every rank, between the same two steps.

        The next step raises AttachError if the ranks count different numbers of steps.

        Raises:
            UsageError: when ``state`` is no such state, or its rules or statistics are of other kinds, or for other
                numbers of parameters; nothing is changed then.
        """
        check_state(state, "steps", "rules")  # a state of version 0.1 may have no "stats"
        self._states.load(state)
        self._begun = None
        self._checks.counts.loaded()
        self.steps = int(state["steps"])
        self._records.forget_recent()  # of steps that are made again now
        self._begin_hooks()
