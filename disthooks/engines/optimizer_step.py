"""The call of a torch optimizer's ``step``: what runs before and after it, and whether it is made.

:class:`OptimizerHooks` belongs to one optimizer and tells every :class:`~disthooks.engines.step.Step` that has the
optimizer. ``all_optimizers`` has the functions that run before the step of every optimizer.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Literal, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from disthooks._torch import Inner, step_wrapper, uncompiled
from disthooks.engines.new_gradients import GradientMark, NewGradients
from disthooks.engines.skip import Witness, end_step, should_skip, tell_accelerate
from disthooks.errors import UsageError

# [Note: one step hook for all]
# Everything that is attached to an optimizer shares one pre-hook and one post-hook of torch's. Several attachments may
# watch the same optimizer: all of their functions see the gradients of one moment, before any of them decides that the
# step is skipped; and if a step is begun early (by `begin_step`, or by the loop's own clipping), it is begun for all of
# them. The hooks are found among the optimizer's own (`OptimizerHooks.find`), because a table of optimizers would keep
# each model alive that was ever attached.
#
# [Note: the step itself]
# torch puts a wrapper around the step of each class of optimizers, which calls the hooks and then the class's own
# function. A hook cannot keep the step from being made, and nothing tells a hook that a step raised. So while anything
# is attached to an optimizer of a class, the function that the wrapper calls is replaced by one of ours (`_StepPatch`).
# It asks the optimizer that steps for its OptimizerHooks, and is the plain function for all other optimizers. It knows
# which steps are under way, and skips a step by not calling the plain function.
# Setting `optimizer.step` would do this only for callers of that attribute. accelerate keeps the method that it found
# and puts it back in every step, a learning rate schedule calls the function that it found, and a copy or a pickle of
# the optimizer would contain our function. All of them call torch's wrapper.
#
# [Note: steps with a closure]
# A closure makes the gradients inside the step. So the closure is wrapped, and functions run when it is done. If they
# decide that the step is skipped, an exception (`_SkipStep`) leaves the optimizer's step from inside the closure: the
# optimizer must not have changed anything before it called the closure, which `skip.Witness` checks. LBFGS calls its
# closure again for each point of its line search and uses all of these gradients, so there is no one set of gradients
# that a rule could act on; `OnRepeat` has the three ways to treat such a step.

#: How a step is treated that calls its closure again, as LBFGS does: the step is refused, the first call alone counts,
#: or each call counts. See [Note: steps with a closure].
OnRepeat = Literal["refuse", "first", "each"]


class JoinedStep(Protocol):
    """What :class:`OptimizerHooks` needs of a :class:`~disthooks.engines.step.Step`."""

    on_repeat: OnRepeat
    skipped: torch.Tensor | None

    def begin(self, optimizer: Any, is_early: bool) -> torch.Tensor | None:
        """Run the functions, unless they have run for these gradients; return the decision to skip the step."""

    def enter(self, optimizer: Any) -> torch.Tensor | None:
        """``optimizer`` steps now: run the functions if they have to run; return the decision to skip the step."""

    def finish(self, optimizer: Any, is_skipped: bool, has_repeated: bool) -> None:
        """``optimizer`` has made its update, or skipped it; ``has_repeated`` if it called its closure again."""


class _Call:
    """One call of an optimizer's ``step``.

    Attributes:
        is_skipped: whether the update must not be made.
        has_closure: whether the step was given a closure.
        closure_calls: how many times the closure was called.
        witness: tells whether the optimizer has changed anything before it called the closure.
    """

    def __init__(self) -> None:
        self.is_skipped = self.has_closure = False
        self.closure_calls = 0
        self.witness: Witness | None = None


class OptimizerHooks:
    """torch's hooks on one optimizer; see [Note: one step hook for all].

    First the functions of all steps run, on the same gradients. Then the optimizer skips its update if any of them
    decided so. With a closure, the functions run when the closure is done.

    Attributes:
        steps: the steps that have this optimizer, in the order in which they were attached.
        gradients: tells whether backward has added to this optimizer's gradients.
    """

    def __init__(self, optimizer: Any) -> None:
        self.steps: list[JoinedStep] = []
        self.gradients = NewGradients(optimizer)
        self._optimizer = weakref.ref(optimizer)
        self._call = _Call()
        self._mark_of_all: GradientMark | None = None  # the gradients for which `all_optimizers` has run
        self._patch = _StepPatch.of(type(optimizer))
        self._patch.users.add(self)
        self._handles = [
            optimizer.register_step_pre_hook(self._begin),
            optimizer.register_step_post_hook(self._end),
        ]
        _existing.add(self)

    @classmethod
    def find(cls, optimizer: Any) -> OptimizerHooks | None:
        owners = (getattr(hook, "__self__", None) for hook in optimizer._optimizer_step_pre_hooks.values())
        return next((owner for owner in owners if isinstance(owner, cls)), None)

    @classmethod
    def of(cls, optimizer: Any) -> OptimizerHooks:
        return cls.find(optimizer) or cls(optimizer)

    def leave(self) -> None:
        """If no step and no function is left, take the hooks off."""
        optimizer = self._optimizer()
        if self.steps or optimizer is None or all_optimizers.before:
            return
        for handle in self._handles:
            handle.remove()
        self.gradients.remove()
        self._patch.leave(self)
        if not _is_stepping(optimizer):
            end_step(optimizer)  # the step was begun and never made

    def begin_early(self) -> None:
        """Run all functions now; they do not run again in the step that comes next, if its gradients are these."""
        optimizer = self._optimizer()
        if optimizer is None or self._call.closure_calls > 1:  # a repeated closure: functions run when it is done
            return
        if all_optimizers.before and not self._has_run_for_all():
            for run in all_optimizers.before:
                run(optimizer)
            self._mark_of_all = self.gradients.mark()
        for step in list(self.steps):
            step.begin(optimizer, is_early=True)

    def make(self, true: Callable[..., Any], optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Make the step by calling ``true``, unless the step is skipped; see [Note: the step itself]."""
        if _is_stepping(optimizer):  # this call is super().step()
            return true(*args, **kwargs)
        call, stack = self._call, _under_way.stack
        stack.append(optimizer)
        try:
            if call.is_skipped:
                return None
            result = true(*args, **kwargs)
            if call.has_closure and not call.closure_calls:
                raise UsageError(
                    f"{type(optimizer).__name__}.step(closure) never called its closure, so nothing that is attached "
                    "saw this step: run backward first and call step() without a closure"
                )
            return result
        except _SkipStep as skipped:
            if skipped.hooks is not self:
                raise
            call.is_skipped = True
            return skipped.loss
        finally:
            stack.pop()
            end_step(optimizer)

    def _begin(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if _is_stepping(optimizer):
            return None
        call = self._call = _Call()
        given = wrap_closure(functools.partial(self._run_closure, optimizer), args, kwargs)
        if given is None:
            call.is_skipped = self._decide(optimizer)
            return None
        call.has_closure = True
        if isinstance(optimizer, torch.optim.LBFGS) and any(
            group["max_iter"] > 1 or group["line_search_fn"] is not None for group in optimizer.param_groups
        ):
            self._refuse_repeats(optimizer)  # LBFGS with these options calls its closure again
        call.witness = Witness(optimizer)
        return given

    def _run_closure(self, optimizer: Any, closure: Callable[[], Any]) -> Any:
        """Run the closure of a step, and then the functions; see [Note: steps with a closure]."""
        call = self._call
        call.closure_calls += 1
        if call.closure_calls > 1:
            self._refuse_repeats(optimizer)
            loss = closure()
            for run in all_optimizers.before:
                run(optimizer)
            return loss
        loss = closure()
        if self._decide(optimizer):
            if call.witness is not None and not call.witness.is_untouched(optimizer):
                raise UsageError(
                    f"{type(optimizer).__name__} changed its parameters, its groups or its state before it called the "
                    "closure of its step, so the step cannot be left out as if it had never begun: run backward first "
                    "and call step() without a closure, or leave out the rule that skips steps"
                )
            raise _SkipStep(self, loss)
        return loss

    def _refuse_repeats(self, optimizer: Any) -> None:
        if any(step.on_repeat == "refuse" for step in self.steps):
            raise UsageError(
                f"{type(optimizer).__name__} calls its closure more than once in a step, as LBFGS does, and uses the "
                "gradients of each call, so no rule can act on the gradients of the step: leave the rules out "
                "(statistics are of the first call), give functions to on_gradient(), which sees each call, or use "
                "another optimizer"
            )

    def _decide(self, optimizer: Any) -> bool:
        """Run the functions that have not run for these gradients; return whether the step must not be made."""
        if all_optimizers.before and not self._has_run_for_all():
            for run in all_optimizers.before:
                run(optimizer)
        self._mark_of_all = None
        decision = joint_decision([step.enter(optimizer) for step in list(self.steps)])
        for step in self.steps:
            step.skipped = decision
        # The optimizer gets the decision now and not when the step is begun, as a GradScaler would write over it.
        if decision is None:
            return False
        is_skipped = should_skip(decision, optimizer)
        tell_accelerate(decision)
        return is_skipped

    def _has_run_for_all(self) -> bool:
        return self._mark_of_all is not None and self.gradients.is_same(self._mark_of_all)

    def _end(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not _is_stepping(optimizer):
            for step in list(self.steps):
                step.finish(optimizer, self._call.is_skipped, self._call.closure_calls > 1)
            self._call = _Call()


def joint_decision(decisions: Iterable[torch.Tensor | None]) -> torch.Tensor | None:
    """Whether any of ``decisions`` is to skip the step, as a tensor on the device; None if nothing decided."""
    made = [decision for decision in decisions if decision is not None]
    if len(made) < 2:
        return made[0] if made else None
    return torch.stack([each.to(made[0].device) for each in made]).any()


_existing: weakref.WeakSet[OptimizerHooks] = weakref.WeakSet()


class _SkipStep(BaseException):
    """Ends a step from within its closure. It is no Exception, so that no optimizer catches it."""

    def __init__(self, hooks: OptimizerHooks, loss: Any) -> None:
        super().__init__()
        self.hooks, self.loss = hooks, loss


class _AllOptimizers:
    """The functions that run before the step of every optimizer, and before the functions attached to that optimizer.

    A global hook of torch's gives each optimizer that steps its :class:`OptimizerHooks`. torch calls the hooks of
    ``OptimizerHooks`` in the same step in which the global hook made it.

    Attributes:
        before: called with the optimizer; if a step calls its closure again, after each call.
    """

    def __init__(self) -> None:
        self.before: list[Callable[[Any], None]] = []
        self._handle: Any = None

    def add(self, run: Callable[[Any], None]) -> CallbackHandle:
        if self._handle is None:
            self._handle = register_optimizer_step_pre_hook(self._make_hooks)
        self.before.append(run)
        return CallbackHandle(self, self.before, run)

    def leave(self) -> None:
        """If no function is left, take torch's global hook off, and the hooks of optimizers that need none."""
        if not self.before and self._handle is not None:
            self._handle.remove()
            self._handle = None
            for hooks in list(_existing):
                hooks.leave()

    def _make_hooks(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        OptimizerHooks.of(optimizer)


all_optimizers = _AllOptimizers()


class _StepPatch:
    """Our function in the place of the one that torch's wrapper calls for a class; see [Note: the step itself].

    Attributes:
        users: the hooks of the optimizers that need it.
    """

    def __init__(self, inner: Inner) -> None:
        self.users: weakref.WeakSet[OptimizerHooks] = weakref.WeakSet()
        self._inner, self._true = inner, inner.function
        true = inner.function

        @functools.wraps(true)
        @uncompiled("disthooks decides on the host whether the step is made", callees=False)
        def step(*args: Any, **kwargs: Any) -> Any:
            hooks = OptimizerHooks.find(args[0])
            return true(*args, **kwargs) if hooks is None else hooks.make(true, args[0], args, kwargs)

        step.__dict__["patch"] = self
        self._mine = inner.function = step

    @classmethod
    def of(cls, kind: type[Any]) -> _StepPatch:
        """The patch of a class, or of the class whose step it inherits."""
        inner = Inner(step_wrapper(kind))
        patch = getattr(inner.function, "patch", None)
        return patch if isinstance(patch, cls) else cls(inner)

    def leave(self, hooks: OptimizerHooks) -> None:
        """Forget ``hooks``. The last one puts back torch's function, unless somebody has replaced it since."""
        self.users.discard(hooks)
        if not self.users and self._inner.function is self._mine:
            self._inner.function = self._true


class Runner(Protocol):
    """An object with lists of functions to run, and with hooks that it needs as long as there are any."""

    def leave(self) -> None:
        """Take the hooks off, if no function is left to run."""


class CallbackHandle:
    def __init__(self, runner: Runner, functions: list[Any], run: Any) -> None:
        self._runner, self._functions, self._run = runner, functions, run

    def remove(self) -> None:
        if self._run in self._functions:
            self._functions.remove(self._run)
            self._runner.leave()


class _UnderWay(threading.local):
    """The optimizers with something attached whose step this thread is making, outermost first."""

    def __init__(self) -> None:
        self.stack: list[Any] = []


_under_way = _UnderWay()


def optimizers_stepping() -> list[Any]:
    """The optimizers with something attached whose step this thread is making, innermost first.

    One step may run another: ``super().step()``, ZeroRedundancyOptimizer, Lookahead. torch calls the hooks of each.
    """
    return _under_way.stack[::-1]


def _is_stepping(optimizer: Any) -> bool:
    """Whether a step of ``optimizer`` is under way, so that another call is a part of it: ``super().step()``."""
    return any(one is optimizer for one in _under_way.stack)


def wrap_closure(inside: Callable[[Any], Any], args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """The arguments of a step, in which a function that calls ``inside(closure)`` replaces the closure.

    The result is None if the step has no closure.
    """
    # The first argument is the optimizer.
    at = next((i for i, each in enumerate(args) if i and callable(each)), None)
    if at is not None:
        return (*args[:at], functools.partial(inside, args[at]), *args[at + 1 :]), kwargs
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": functools.partial(inside, kwargs["closure"])}
    return None
