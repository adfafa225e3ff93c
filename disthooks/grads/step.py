"""A step: check that gradients are final, then measure over all ranks and rewrite, round after round."""

# [Note: one decision]
# All ranks decide alike whether to skip a step, to clip, or to adapt a threshold, and they decide as one rank would
# that had all elements. A rule sees only merged numbers, which are the same bits on every rank, and its state is made
# of them; so replicas of a parameter stay equal, and no rank steps alone. A rank that raised alone would leave the
# others waiting in the next collective. So a check here depends only on the calls that the program made, not on the
# elements that a rank has, and an error that depends on a number is deferred until all ranks can read it.

# [Note: whose units]
# If the loss was multiplied by a scale, a rule still works in the user's units: `ClipNorm(1.0)` means a norm of 1.0 of
# the user's loss. DeepSpeed's fp16 leaves the scale in the gradients until its optimizer takes it out. So rules get
# copies of these gradients, in float32 or wider and divided by the scale. Gradients that a rule may have rewritten are
# multiplied again and written back. The others are not written, so they keep their bits. A `GradScaler` takes the scale
# out before the step. The numbers that hooks kept in backward still have it, so measures divide by it.

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from disthooks._ranks import global_rank
from disthooks._streams import refuse_capture
from disthooks._torch import scaler_under_way
from disthooks.engines.base import Engine, Shard
from disthooks.engines.detect import refuse_reduced, refuse_replicate
from disthooks.engines.step import Step, parameters_of
from disthooks.errors import AttachError, UsageError
from disthooks.grads import collectives
from disthooks.grads.collectives import StepCounts
from disthooks.grads.forward_hooks import ForwardHooks
from disthooks.grads.local_hooks import UNCAPTURED, LocalGradientHooks
from disthooks.grads.plan import BoundRule, StepPlan, VectorLayout, Vectors
from disthooks.grads.records import DeferredError, Event
from disthooks.grads.rules.base import State, Work, named
from disthooks.grads.stats.across_ranks import UnreducedSquares
from disthooks.grads.stats.base import Local, LocalStats, Measure, scalar
from disthooks.grads.stats.norms import Power

Grads = list[torch.Tensor | None]


def refuse_scaled(optimizer: torch.optim.Optimizer) -> None:
    """Raise UsageError when gradients are not final at the start of this step, since its kernel divides them."""
    if getattr(optimizer, "grad_scale", None) is not None:
        raise UsageError(
            f"the gradients are still multiplied by the scale of a GradScaler, which {type(optimizer).__name__} takes "
            "out inside its kernel: call scaler.unscale_(optimizer) before scaler.step(optimizer)"
        )


class StepChecks:
    """The checks before a step is measured. See [Note: one decision].

    Attributes:
        engine: the engine of the model.
        step: the step of the optimizers whose steps count.
        counts: the agreement of the ranks about the number of steps.
    """

    def __init__(
        self,
        engine: Engine,
        step: Step,
        parameters: Sequence[nn.Parameter],
        counts: StepCounts,
        has_rules: bool,
    ) -> None:
        self.engine, self.step, self.counts = engine, step, counts
        self._parameters, self._has_rules = parameters, has_rules
        self._is_known_to_be_alone = False
        self._has_warned = False

    def before_forward(self, module: nn.Module) -> None:
        """Check that this rank trains the model by itself. This is for several ranks and a model without an engine.

        Raises:
            AttachError: when ``replicate`` or DDP reduces its gradients; either may have taken it since attach.
        """
        if getattr(module, "_is_replica", False):
            return
        if not self._is_known_to_be_alone:
            refuse_replicate(self.engine)
            self._is_known_to_be_alone = True
        refuse_reduced(self.engine)

    def before_step(self, steps: int) -> None:
        """Check that this is a step of the parameters that were attached to, and of final gradients.

        Raises:
            AttachError: when optimizer or model have other parameters now, a CUDA graph is captured, or the ranks count
                different numbers of steps.
            UsageError: when the gradients are still multiplied by a scale.
        """
        refuse_capture("gradients(...) in this optimizer's step", UNCAPTURED)
        for optimizer in self.step.optimizers:
            refuse_scaled(optimizer)
        now = self.engine.optimizer_parameters(self.step)
        if len(now) != len(self._parameters) or any(a is not b for a, b in zip(now, self._parameters, strict=True)):
            raise AttachError(
                f"the optimizer holds other parameters ({len(now)}) than when gradients() was attached "
                f"({len(self._parameters)}): remove() the attachment and attach again after changing parameter groups"
            )
        self.engine.check()
        self.counts.check(steps)

    def is_left_to_ranks(self) -> bool:
        """Whether nothing is measured in this step, because each rank steps with gradients of its own (local SGD).

        Raises:
            UsageError: when rules would act on such gradients: all ranks could not decide alike.
        """
        why = self.engine.reason_unreduced()
        if not why:
            return False
        if self._has_rules or not self.engine.may_step_unreduced:
            raise UsageError(why)
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(f"this step is not measured, and none of its kind: {why}", stacklevel=2)
        return True

    def has_reduced(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether any of ``parameters`` is this optimizer's, and its gradients are reduced over the ranks."""
        ids = {id(parameter) for parameter in self._parameters}
        return any(id(parameter) in ids for parameter in parameters) and not self.engine.reason_unreduced()


@dataclass
class StepResult:
    """The result of the rounds of a step.

    Attributes:
        merged: the vectors of each round, merged over the ranks; then those measured after the update.
        log: the numbers that rules logged, by name.
        skips: decisions to leave the step out.
        deferred_errors: numbers that may make the next step raise.
        events: bools, and the numbers that are recorded if one is true, whether the step is logged or not.
    """

    merged: list[Vectors] = field(default_factory=list)
    log: dict[str, torch.Tensor] = field(default_factory=dict)
    skips: list[torch.Tensor] = field(default_factory=list)
    deferred_errors: list[DeferredError] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def add(self, bound: BoundRule, work: Work) -> None:
        """Add what a rule has logged and decided."""
        self.log.update({f"{name}{bound.label}": value for name, value in work.log.items()})
        self.skips += work.skips
        self.deferred_errors += work.deferred_errors
        for is_true, numbers in work.events:
            self.events.append((is_true, {f"{name}{bound.label}": value for name, value in numbers.items()}))

    def skip(self) -> torch.Tensor | None:
        """Whether to leave the step out, as a bool on the device; None when no rule ever decides."""
        return torch.stack(self.skips).any() if self.skips else None


class BegunStep(NamedTuple):
    """A step whose rules have been applied, until an optimizer steps.

    Attributes:
        result: what was measured and decided; None if nothing was.
        is_logged: whether it is to be logged.
        is_measured: whether all statistics were measured.
        states: copies of the states of rules from before.
    """

    result: StepResult | None = None
    is_logged: bool = False
    is_measured: bool = False
    states: Sequence[State] = ()


class _Update(NamedTuple):
    """A step between its rounds and the end of the optimizer's update.

    Attributes:
        result: the result so far.
        is_logged: whether the step will be logged.
        before: copies of the parameters.
    """

    result: StepResult
    is_logged: bool
    before: Grads


class StepRunner:
    """Measures and rewrites the gradients of each step by a :class:`~disthooks.grads.plan.StepPlan`.

    Attributes:
        plan: the plan.
        local_hooks: the hooks on this rank's own gradients, whose numbers are merged in the first round.
        forward_hooks: the hooks on modules, whose numbers are merged in the first round of a logged step.
        group: the process group of the collectives; None for one rank alone.
        device: where numbers are merged.
        states: the state of each rule, in the order of the rules.
    """

    def __init__(
        self,
        engine: Engine,
        plan: StepPlan,
        local_hooks: LocalGradientHooks,
        forward_hooks: ForwardHooks,
        scaler: Any,
        group: Any,
        device: torch.device,
    ) -> None:
        self.plan, self.local_hooks, self.forward_hooks = plan, local_hooks, forward_hooks
        self.group, self.device = group, device
        if forward_hooks.has_times:
            local_hooks.on_gradient = forward_hooks.saw_gradient
        self.states: list[State] = [
            bound.rule.start([plan.shards[i] for i in bound.indices], device) for bound in plan.rules
        ]
        self._engine, self._scaler = engine, scaler
        # Found once: with thousands of parameters, to ask each shard in every step takes longer than to clip.
        self._is_plain = all(type(shard) is Shard and shard._plain for shard in plan.shards)
        self._parameters = [shard.parameter for shard in plan.shards]
        self._is_owner = [shard.is_owner for shard in plan.shards]
        self._is_unreduced = [shard.sharding == "unreduced" and not shard.is_owner for shard in plan.shards]
        self._copies: Grads = []
        self._left_out: Sequence[int] = ()  # parameters of optimizers that did not step in the last step
        self._update: _Update | None = None
        self._has_warned, self._step = False, 0
        self._squares: torch.Tensor | None = None  # of all gradients in the last step, before any rule

    @property
    def norm(self) -> torch.Tensor | None:
        """The norm of all gradients in the last step, before any rule; None if nothing measured it."""
        return None if self._squares is None else Power(2.0).norm(self._squares, dim=0)

    def run(
        self, step: int, is_logged: bool, reuse_copies: bool, optimizers: Sequence[Any], has_others: bool = False
    ) -> StepResult:
        """Measure the gradients, and rewrite them in place."""
        self._update, self._step = None, step
        final = self._gradients()
        if not self._has_warned and all(grad is None for grad in final):
            self.warn_of_no_gradient(step)
        local_scale, scale = self._local_scale(), self._engine.gradient_scale()
        grads = final
        if scale is not None:  # See [Note: whose units].
            wide = (g if g is None else g.to(torch.promote_types(g.dtype, torch.float32)) for g in final)
            grads = [None if grad is None else grad / scale for grad in wide]
        left_out: list[int] = []
        if has_others:
            mine = {id(parameter) for optimizer in optimizers for parameter in parameters_of(optimizer)}
            left_out = [i for i, parameter in enumerate(self._parameters) if id(parameter) not in mine]
        self._left_out = left_out
        result = self._run_rounds(grads, local_scale, step, is_logged)
        if scale is not None:
            for i in self.plan.rewritten:
                copy, grad = grads[i], final[i]
                if copy is not None and grad is not None:
                    grad.copy_(copy * scale)
        if self.plan.after.layout(is_logged).uses:
            self._update = _Update(result, is_logged, self._copy_parameters(reuse_copies))
        return result

    def end_step(self, is_made: bool = True) -> None:
        """The step is made, or dropped: hooks see the next one from now on."""
        self.local_hooks.clear(self._left_out if is_made else ())
        self.forward_hooks.clear()

    def copied_states(self) -> list[State]:
        """Copies of the states of rules."""
        return [{name: value.clone() for name, value in state.items()} for state in self.states]

    def restore_states(self, states: Sequence[State]) -> None:
        """Put the values of :meth:`copied_states` back."""
        for state, copy in zip(self.states, states, strict=False):
            for name, value in copy.items():
                state[name].copy_(value)

    def _gradients(self) -> Grads:
        """The local part of each final gradient; see :meth:`Shard.gradient`."""
        if self._is_plain:
            grads = [parameter.grad for parameter in self._parameters]
            there = [grad for grad in grads if grad is not None]
            if set(map(type, there)) <= {torch.Tensor} and all(grad.layout is torch.strided for grad in there):
                return grads
        return [shard.gradient() for shard in self.plan.shards]

    def warn_of_no_gradient(self, step: int, what: str = "no gradient") -> None:
        """Warn once that all parameters have ``what``; a rank that has no elements of any is silent."""
        if self._has_warned:
            return
        self._has_warned = True
        if any(shard.values().numel() for shard in self.plan.shards):
            warnings.warn(
                f"step {step}, rank {global_rank()}: {what} in {len(self.plan.shards)} parameters when "
                "optimizer.step() begins: rules do nothing, and the log says 0. If other optimizers step in backward, "
                "in hooks that zero gradients, attach to those, with rules for one gradient at a time: "
                "gradients(model, those_optimizers, rules=[ClipValue(...)]). If not, call step() after backward() and "
                "before zero_grad(). This is said once",
                stacklevel=2,
            )

    def after_update(self) -> StepResult | None:
        """Measure how the update moved the parameters; None if nothing of this step asks for it.

        The result is that of :meth:`run`, with what was added.
        """
        update, self._update = self._update, None
        if update is None:
            return None
        shards, result = self.plan.shards, update.result
        inputs = self._inputs([None] * len(shards))._replace(before=update.before, step=self._step)
        layout = self.plan.after.layout(update.is_logged)
        result.merged.append(collectives.reduce(self.group, layout.pack(inputs)))
        return result

    def _run_rounds(self, grads: Grads, local_scale: torch.Tensor | None, step: int, is_logged: bool) -> StepResult:
        result, shards = StepResult(), self.plan.shards
        local_stats = self.local_hooks.found(self._left_out)
        forward = self.forward_hooks.found(self.device, is_logged)
        for part in self.plan.rounds:
            layout = part.layout(is_logged)
            inputs = self._inputs(grads)._replace(
                local_stats=local_stats, scale=local_scale, forward=forward, step=step
            )
            merged = collectives.reduce(self.group, layout.pack(inputs))
            values = layout.unpack(merged)
            if not result.merged:
                is_whole = len(layout.uses.get(Power(2.0), ())) == len(shards)
                self._squares = values[Power(2.0)] if is_whole else None
                self._check_copies(values, result)
            result.merged.append(merged)
            for bound in part.rules:
                work = self._work(bound, grads, layout, values)
                bound.rule.rewrite(work)
                result.add(bound, work)
        return result

    def _work(
        self, bound: BoundRule, grads: Grads, layout: VectorLayout, values: Mapping[Measure, torch.Tensor]
    ) -> Work:
        shards = self.plan.shards
        is_for_all = len(bound.indices) == len(shards)
        return Work(
            shards=shards if is_for_all else [shards[i] for i in bound.indices],
            grads=grads if is_for_all else [grads[i] for i in bound.indices],
            values=[layout.pick(values, measure, bound.indices) for measure in bound.rule.measures()],
            state=self.states[bound.number],
            step=self._step,
            fresh=bound.fresh,
        )

    def _check_copies(self, values: Mapping[Measure, torch.Tensor], result: StepResult) -> None:
        """Make the next step raise if ranks have different gradients of a parameter that nobody reduces."""
        if unreduced := self.plan.unreduced:
            sums = values[UnreducedSquares()].view(-1, 2)
            many = [len(s.replica_ranks) if len(s.replica_ranks) > 1 else len(self._engine.ranks) for s in unreduced]
            copies = torch.tensor(many, dtype=sums.dtype, device=sums.device)
            mean = sums[:, 0] / copies
            spread = sums[:, 1] / copies - mean.square()
            differs = (spread > 1e-10 * mean.square()).any().double()  # of copies it is rounding, 1e-15
            result.deferred_errors.append((differs, functools.partial(_raise_if_apart, self.plan.unreduced)))

    def _inputs(self, grads: Grads) -> Local:
        """The values that measures may read here: elements that this rank owns, so each element counts on one rank."""
        shards = self.plan.shards
        return Local(
            shards=shards,
            grads=[grad if is_owner else None for grad, is_owner in zip(grads, self._is_owner, strict=True)],
            local_stats=[LocalStats()] * len(shards),
            scopes=self.plan.scopes,
            position=self._engine.position,
            world=len(self._engine.ranks),
            device=self.device,
            # No engine reduces these gradients, so a NaN in one of them is on this rank alone.
            unreduced=[grad if is_one else None for grad, is_one in zip(grads, self._is_unreduced, strict=True)],
        )

    def _copy_parameters(self, reuse: bool) -> Grads:
        """The parameters that this rank owns, as they are now.

        With ``reuse`` the memory stays for the next logged step: to allocate it takes longer than to fill it.
        """
        if not self.plan.after.needs_before:
            return []
        shards = self.plan.shards
        values = [shard.values().detach() if shard.is_owner else None for shard in shards]
        copies = self._copies
        if not reuse or [_kind(value) for value in values] != [_kind(copy) for copy in copies]:
            copies = [None if value is None else torch.empty_like(value) for value in values]
        pairs = [(c, v) for c, v in zip(copies, values, strict=True) if c is not None and v is not None]
        if pairs:
            torch._foreach_copy_([copy for copy, _ in pairs], [value for _, value in pairs], non_blocking=True)
        self._copies = copies if reuse else []
        return copies

    def _local_scale(self) -> torch.Tensor | None:
        """The factor of the gradients that hooks saw in backward; None for 1. See [Note: whose units]."""
        found = self._engine.gradient_scale()
        scaler = self._scaler or (scaler_under_way() if self.local_hooks.is_used else None)
        if found is None and scaler is not None and scaler.is_enabled():
            if self.local_hooks.has_rules and self._scaler is None:
                raise UsageError(
                    "rules at 'local' see gradients multiplied by the scale of a GradScaler: give it to "
                    "gradients(scaler=...), and they work in your units"
                )
            found = scaler._scale
        return None if found is None else scalar(found, self.device)


def _raise_if_apart(shards: Sequence[Shard], differs: float) -> None:
    if differs:
        raise UsageError(
            f"ranks have different gradients of {named(shards)}, which the engine ignores and nobody reduces: norms "
            "and decisions would be those of the first rank. If these are experts, name them: gradients(..., "
            "experts='*.experts.*'); otherwise average their gradients over these ranks before the step, or let the "
            "engine do it"
        )


def _kind(tensor: torch.Tensor | None) -> tuple[object, ...]:
    return () if tensor is None else (tensor.shape, tensor.dtype, tensor.device)
