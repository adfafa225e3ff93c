"""The step of a torch optimizer: functions that run before and after it, and the decision whether it is made.

:class:`StepHooks` belongs to one optimizer and runs the functions that are attached to it. ``all_optimizers`` has the
functions that run before the step of every optimizer.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import TensorWeakRef

from disthooks._torch import Inner, gives_scaler, sequence_number, step_wrapper, uncompiled
from disthooks.engines.skip import Witness, end_step, should_skip
from disthooks.errors import UsageError

# [Note: one step hook for all]
# Everything that is attached to an optimizer shares one pre-hook and one post-hook of torch's. Several attachments may
# watch the same optimizer: all of their functions see the gradients of one moment, before any of them decides that the
# step is skipped; one restore follows the step; and if a step is begun early (by `begin_step`, or by the loop's own
# clipping), it is begun once for all of them. The hooks are found among the optimizer's own (`StepHooks.find`), because
# a table of optimizers would keep each model alive that was ever attached.
#
# [Note: the step itself]
# torch puts a wrapper around the step of each class of optimizers, which calls the hooks and then the class's own
# function. A hook cannot keep the step from being made, and nothing tells a hook that a step raised. So while anything
# is attached to an optimizer of a class, the function that the wrapper calls is replaced by one of ours (`_StepPatch`).
# It asks the optimizer that steps for its StepHooks, and is the plain function for all other optimizers. It knows which
# steps are under way, and skips a step by not calling the plain function.
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
#
# [Note: a step that was begun]
# `prepare` runs the functions before the optimizer's step, because the loop is about to clip. The step that follows
# must not run them again, but it may never follow: a GradScaler keeps it back, or the loop goes on with the next batch.
# `PreparedStep` decides whether the optimizer still has the gradients that it was begun with. A gradient that was
# replaced by another tensor shows that it has not. So does a post-accumulate hook that fired, which is needed because
# DDP (`gradient_as_bucket_view`) and `zero_grad(set_to_none=False)` put the next gradient into the same tensor. Not
# every backward reaches every parameter, so two parameters are watched. A parameter that was frozen since its backward
# keeps its gradient and gets no other, and torch takes no hook for it. FSDP1 calls no post-accumulate hooks, so under
# FSDP1 only the graph's sequence number shows a new gradient. The gradient is referred to by torch's weak reference: a
# tensor that Python's weak reference returns may be freed while it is used.

BeforeStep = Callable[[Any, tuple[Any, ...], dict[str, Any]], torch.Tensor | None]

#: How a step is treated that calls its closure again, as LBFGS does: the step is refused, the first call alone counts,
#: or each call counts. See [Note: steps with a closure].
OnRepeat = Literal["refuse", "first", "each"]


class StepCallback(NamedTuple):
    """A function that runs before a step, and how it is treated if the step calls its closure again."""

    run: BeforeStep
    on_repeat: OnRepeat = "refuse"


class PreparedStep:
    """A step that was begun before the optimizer was called; see [Note: a step that was begun].

    Attributes:
        decision: whether the optimizer must skip the step.
    """

    def __init__(self, optimizer: Any, decision: torch.Tensor | None) -> None:
        self.decision = decision
        parameters = list(_with_grads(optimizer))
        self._grad = TensorWeakRef(parameters[0].grad) if parameters else None
        self._has_new_gradient = False
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        ends = {id(parameter): parameter for parameter in (*trained[:1], *trained[-1:])}.values()
        self._handles = [parameter.register_post_accumulate_grad_hook(self._note_new_gradient) for parameter in ends]
        # FSDP1 marks the parameters that it has, on every rank alike, and calls no hooks after accumulating.
        flat = (hasattr(p, "_fsdp_flattened") for group in optimizer.param_groups for p in group["params"])
        self._sees_gradients = not any(flat)
        self._sequence_number = sequence_number()

    def is_same_moment(self) -> bool:
        """Whether no node of an autograd graph was made since the step was begun, so that no other forward has run."""
        return sequence_number() == self._sequence_number

    def is_same_step(self, optimizer: Any) -> bool:
        """Whether the optimizer still has the gradients with which the step was begun.

        A loop may replace the gradients itself, to clip them, or it may compute another loss. If it did both, the
        answer is no.
        """
        if self.is_same_moment():
            return True
        now = [parameter.grad for parameter in _with_grads(optimizer)]
        is_there = not now if self._grad is None else any(grad is self._grad() for grad in now)
        return is_there and not self._has_new_gradient

    def is_under_way(self, optimizer: Any) -> bool:
        """Whether this step is certainly the one that is under way, so that it is not begun a second time.

        One rank may compute something of its own in between, such as a metric, but all ranks must decide alike.
        """
        return self.is_same_moment() or (self._sees_gradients and self.is_same_step(optimizer))

    def remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _note_new_gradient(self, parameter: torch.Tensor) -> None:
        self._has_new_gradient = True


class StepHooks:
    """The functions that run before and after each step of one optimizer; see [Note: one step hook for all].

    First all functions of ``before`` run, on the same gradients. Then the step is skipped if any of them decided so. In
    a step with a closure, ``before`` runs when the closure is done.

    Attributes:
        before: called with the optimizer and the arguments of its step.
        after: called when the update has been made.
    """

    def __init__(self, optimizer: Any) -> None:
        self.before: list[StepCallback] = []
        self.after: list[Callable[[], None]] = []
        self._optimizer = weakref.ref(optimizer)
        self._prepared: PreparedStep | None = None
        # These four are about the step under way; `_calls` counts the calls of its closure.
        self._is_skipped, self._calls = False, 0
        self._has_closure = False
        self._witness: Witness | None = None
        self._patch = _StepPatch.of(type(optimizer))
        self._patch.users.add(self)
        self._handles = [
            optimizer.register_step_pre_hook(self._begin),
            optimizer.register_step_post_hook(self._end),
        ]
        _existing.add(self)

    @classmethod
    def find(cls, optimizer: Any) -> StepHooks | None:
        owners = (getattr(hook, "__self__", None) for hook in optimizer._optimizer_step_pre_hooks.values())
        return next((owner for owner in owners if isinstance(owner, cls)), None)

    @classmethod
    def of(cls, optimizer: Any) -> StepHooks:
        return cls.find(optimizer) or cls(optimizer)

    def add(self, to: list[Any], run: Any) -> CallbackHandle:
        to.append(run)
        return CallbackHandle(self, to, run)

    def leave(self) -> None:
        """If no function is left, take the hooks off."""
        optimizer = self._optimizer()
        if self.before or self.after or optimizer is None or all_optimizers.before:
            return
        for handle in self._handles:
            handle.remove()
        self._patch.leave(self)
        self._take_prepared()
        if not _is_stepping(optimizer):
            end_step(optimizer)  # the step was begun and never made

    @gives_scaler("scaler")
    def prepare(self, scaler: Any = None) -> None:
        """Run ``before`` now. It does not run again in the step that comes next, or if this is called twice before it.

        If an earlier step was begun and never made, because a ``GradScaler`` kept it back, a new step begins.
        See [Note: a step that was begun].
        """
        optimizer = self._optimizer()
        if optimizer is None or self._calls > 1:  # in a repeated closure, functions run when the closure is done
            return
        if not self.is_prepared():
            self._take_prepared()
            self._prepared = PreparedStep(optimizer, self._run(optimizer, (), {}))

    def is_prepared(self) -> bool:
        """Whether :meth:`prepare` has begun the step that the optimizer makes next."""
        return self._prepared is not None and self._prepared.is_under_way(self._optimizer())

    def make(self, true: Callable[..., Any], optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Make the step by calling ``true``, unless the step is skipped; see [Note: the step itself]."""
        if _is_stepping(optimizer):  # this call is super().step()
            return true(*args, **kwargs)
        stack = _under_way.stack
        stack.append(optimizer)
        try:
            if self._is_skipped:
                return None
            result = true(*args, **kwargs)
            if self._has_closure and not self._calls:
                raise UsageError(
                    f"{type(optimizer).__name__}.step(closure) never called its closure, so nothing that is attached "
                    "saw this step: run backward first and call step() without a closure"
                )
            return result
        except _SkipStep as skipped:
            if skipped.hooks is not self:
                raise
            return skipped.loss
        finally:
            stack.pop()
            end_step(optimizer)
            self._is_skipped, self._calls, self._witness = False, 0, None

    def _begin(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if _is_stepping(optimizer):
            return None
        self._is_skipped, self._calls, self._witness = False, 0, None
        given = wrap_closure(functools.partial(self._call, optimizer, args, kwargs), args, kwargs)
        self._has_closure = given is not None
        if given is None:
            self._is_skipped = self._decide(optimizer, args, kwargs)
            return None
        if isinstance(optimizer, torch.optim.LBFGS) and any(
            group["max_iter"] > 1 or group["line_search_fn"] is not None for group in optimizer.param_groups
        ):
            self._check_repeats(optimizer)  # LBFGS with these options calls its closure again
        self._witness = Witness(optimizer)
        return given

    def _call(self, optimizer: Any, args: Any, kwargs: Any, closure: Callable[[], Any]) -> Any:
        """Run the closure of a step, and then ``before``; see [Note: steps with a closure]."""
        self._calls += 1
        if self._calls > 1:
            self._check_repeats(optimizer)
            loss = closure()
            for each in [*all_optimizers.before, *self.before]:
                if each.on_repeat == "each":
                    each.run(optimizer, args, kwargs)
            return loss
        earlier = self._prepared
        try:
            loss = closure()
        except BaseException:
            self._take_prepared()
            raise
        # If the closure made new gradients, a step that was begun before is one of earlier gradients. Lightning's own
        # closure makes none, and the step that was begun stays.
        if earlier is not None and earlier is self._prepared and not earlier.is_under_way(optimizer):
            self._take_prepared()
        if self._decide(optimizer, args, kwargs):
            if self._witness is not None and not self._witness.is_untouched(optimizer):
                raise UsageError(
                    f"{type(optimizer).__name__} changed its parameters, its groups or its state before it called the "
                    "closure of its step, so the step cannot be left out as if it had never begun: run backward first "
                    "and call step() without a closure, or leave out the rule that skips steps"
                )
            raise _SkipStep(self, loss)
        return loss

    def _check_repeats(self, optimizer: Any) -> None:
        if any(each.on_repeat == "refuse" for each in self.before):
            raise UsageError(
                f"{type(optimizer).__name__} calls its closure more than once in a step, as LBFGS does, and uses the "
                "gradients of each call, so no rule can act on the gradients of the step: leave the rules out "
                "(statistics are of the first call), give functions to on_gradient(), which sees each call, or use "
                "another optimizer"
            )

    def _decide(self, optimizer: Any, args: Any, kwargs: Any) -> bool:
        """Run ``before``, unless it has run for these gradients; return whether the step must not be made."""
        prepared = self._take_prepared()
        is_same = prepared is not None and prepared.is_same_step(optimizer)
        decision = prepared.decision if prepared and is_same else self._run(optimizer, args, kwargs)
        # The optimizer gets the decision now and not in prepare(), because a GradScaler would write over it.
        return decision is not None and should_skip(decision, optimizer)

    def _take_prepared(self) -> PreparedStep | None:
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            prepared.remove_hooks()
        return prepared

    def _run(self, optimizer: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
        """Run ``before``; return whether to skip the step, as a tensor on the device, or None if nothing decided."""
        return joint_decision(each.run(optimizer, args, kwargs) for each in [*all_optimizers.before, *self.before])

    def _end(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not _is_stepping(optimizer):
            for run in list(self.after):
                run()


def joint_decision(decisions: Iterable[torch.Tensor | None]) -> torch.Tensor | None:
    """Whether any of ``decisions`` is to skip the step, as a tensor on the device; None if nothing decided."""
    made = [decision for decision in decisions if decision is not None]
    return torch.stack([each.to(made[0].device) for each in made]).any() if made else None


_existing: weakref.WeakSet[StepHooks] = weakref.WeakSet()


class _SkipStep(BaseException):
    """Ends a step from within its closure. It is no Exception, so that no optimizer catches it."""

    def __init__(self, hooks: StepHooks, loss: Any) -> None:
        super().__init__()
        self.hooks, self.loss = hooks, loss


class _AllOptimizers:
    """The functions that run before the step of every optimizer, and before the functions attached to that optimizer.

    A global hook of torch's gives each optimizer that steps a :class:`StepHooks`. torch calls the hooks of a
    ``StepHooks`` in the same step in which the global hook made it.
    """

    def __init__(self) -> None:
        self.before: list[StepCallback] = []
        self._handle: Any = None

    def add(self, run: BeforeStep) -> CallbackHandle:
        if self._handle is None:
            self._handle = register_optimizer_step_pre_hook(self._make_hooks)
        each = StepCallback(run, "each")
        self.before.append(each)
        return CallbackHandle(self, self.before, each)

    def leave(self) -> None:
        """If no function is left, take torch's global hook off, and the hooks of optimizers that need none."""
        if not self.before and self._handle is not None:
            self._handle.remove()
            self._handle = None
            for hooks in list(_existing):
                hooks.leave()

    def _make_hooks(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        StepHooks.of(optimizer)


all_optimizers = _AllOptimizers()


class _StepPatch:
    """Our function in the place of the one that torch's wrapper calls for a class; see [Note: the step itself].

    Attributes:
        users: the hooks of the optimizers that need it.
    """

    def __init__(self, inner: Inner) -> None:
        self.users: weakref.WeakSet[StepHooks] = weakref.WeakSet()
        self._inner, self._true = inner, inner.function
        true = inner.function

        @functools.wraps(true)
        @uncompiled("disthooks decides on the host whether the step is made", callees=False)
        def step(*args: Any, **kwargs: Any) -> Any:
            hooks = StepHooks.find(args[0])
            return true(*args, **kwargs) if hooks is None else hooks.make(true, args[0], args, kwargs)

        step.__dict__["patch"] = self
        self._mine = inner.function = step

    @classmethod
    def of(cls, kind: type[Any]) -> _StepPatch:
        """The patch of a class, or of the class whose step it inherits."""
        inner = Inner(step_wrapper(kind))
        patch = getattr(inner.function, "patch", None)
        return patch if isinstance(patch, cls) else cls(inner)

    def leave(self, hooks: StepHooks) -> None:
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


def _with_grads(optimizer: Any) -> Iterator[Any]:
    return (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)


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
