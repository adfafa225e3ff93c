"""One hook before and one after the steps of an optimizer, for all that is attached to it."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import TensorWeakRef

from disthooks._torch import Inner, gives_scaler, sequence_number, step_wrapper, uncompiled
from disthooks.engines.skip import Witness, end_step, remove_excluded, should_skip
from disthooks.errors import UsageError

# [Note: the step itself]
# torch puts a wrapper around the step of each class of optimizers, which calls the hooks and then the class's own
# function. Hooks before and after the step are torch's. A hook cannot keep the step from being made, and nothing
# tells it that a step raised. So the function that the wrapper calls has one of ours in its place while anything is
# attached to an optimizer of the class (_Seam). It asks the optimizer that steps for its StepHooks, and is the plain
# function for all others. It knows which steps are under way, leaves a step out by not calling the function, and puts
# back what was taken away for the step, however the step ends.
# To set `optimizer.step` would do the same for those who call that attribute. accelerate keeps the method that it found
# and puts it back in every step, a learning rate schedule calls the function that it found, copies and pickles take
# what is in the object: all of them go through torch's wrapper.

BeforeStep = Callable[[Any, tuple[Any, ...], dict[str, Any]], torch.Tensor | None]

#: What is done where the closure of one step is called again, as LBFGS does: the step is refused, the first call alone
#: counts, or each call does.
OnRepeat = Literal["refuse", "first", "each"]


class StepCallback(NamedTuple):
    """A function that runs before a step, and what to do with it when the step calls a closure again."""

    run: BeforeStep
    on_repeat: OnRepeat = "refuse"


class PreparedStep:
    """A step that was begun before the optimizer was called.

    Attributes:
        decision: whether the optimizer is to leave the step out.
    """

    def __init__(self, optimizer: Any, decision: torch.Tensor | None) -> None:
        self.decision = decision
        found = list(_with_grads(optimizer))
        # Not Python's weak reference: what that gives back of a tensor may be freed under one's hands.
        self._grad = TensorWeakRef(found[0].grad) if found else None
        self._added = False
        # DDP puts the next gradient into the same tensor (gradient_as_bucket_view), zero_grad(set_to_none=False) leaves
        # it there. Not every backward reaches every parameter: two of them are watched. One that was frozen since its
        # backward keeps its gradient, gets no other, and torch takes no hook for it.
        growing = [parameter for parameter in found if parameter.requires_grad]
        ends = {id(parameter): parameter for parameter in (*growing[:1], *growing[-1:])}.values()
        self._handles = [parameter.register_post_accumulate_grad_hook(self._see) for parameter in ends]
        self._sees = not _of_fsdp1(optimizer)
        self._place = sequence_number()

    def same_moment(self) -> bool:
        """Whether nothing was computed since that a backward could go through."""
        return sequence_number() == self._place

    def same_step(self, optimizer: Any) -> bool:
        """Whether the optimizer has the gradients that it had.

        A loop may replace them itself, to clip them, and it may compute another loss: both together are a new step.
        """
        if self.same_moment():
            return True
        now = [parameter.grad for parameter in _with_grads(optimizer)]
        kept = not now if self._grad is None else any(grad is self._grad() for grad in now)
        return kept and not self._added

    def is_under_way(self, optimizer: Any) -> bool:
        """Whether it is certain that no other step has begun: then it is not begun a second time.

        Each rank computes what it likes in between, a metric to be logged; all of them must decide alike.
        """
        return self.same_moment() or (self._sees and self.same_step(optimizer))

    def forget(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _see(self, parameter: torch.Tensor) -> None:
        self._added = True


class StepHooks:
    """What runs before and after each step of one optimizer.

    All of ``before`` runs first, each on the gradients as they are; then the step is left out if any of it decided so.
    A closure makes gradients inside the step: all of ``before`` then runs when the closure is done.

    Attributes:
        before: called with the optimizer and the arguments of its step.
        after: called when the update has been made.
    """

    def __init__(self, optimizer: Any) -> None:
        self.before: list[StepCallback] = []
        self.after: list[Callable[[], None]] = []
        self._optimizer = weakref.ref(optimizer)
        self._begun: PreparedStep | None = None
        self._left_out, self._calls = False, 0  # of the closure, in the step under way
        self._waits = False
        self._witness: Witness | None = None
        self._seam = _StepPatch.of(type(optimizer))
        self._seam.users.add(self)
        self._handles = [
            optimizer.register_step_pre_hook(self._begin),
            optimizer.register_step_post_hook(self._end),
        ]
        _all.add(self)

    @classmethod
    def found(cls, optimizer: Any) -> StepHooks | None:
        """The one of ``optimizer``, if there is one.

        It is found among the optimizer's own hooks: a table of all of them would keep every model that is attached.
        """
        owners = (getattr(hook, "__self__", None) for hook in optimizer._optimizer_step_pre_hooks.values())
        return next((owner for owner in owners if isinstance(owner, cls)), None)

    @classmethod
    def of(cls, optimizer: Any) -> StepHooks:
        """The one of ``optimizer``, made when it is first asked for."""
        return cls.found(optimizer) or cls(optimizer)

    def add(self, to: list[Any], run: Any) -> CallbackHandle:
        """Put ``run`` at the end of ``before`` or ``after``; gives what takes it off."""
        to.append(run)
        return CallbackHandle(self, to, run)

    def leave(self) -> None:
        """With nothing left to run, take the hooks off and put back what a step that was never made had taken."""
        optimizer = self._optimizer()
        if self.before or self.after or optimizer is None or _everywhere.before:
            return
        for handle in self._handles:
            handle.remove()
        self._seam.leave(self)
        self._ended()
        if not _is_stepping(optimizer):
            end_step(optimizer)

    @gives_scaler("scaler")
    def now(self, scaler: Any = None) -> None:
        """Run ``before`` now; the step that comes next does not run it again, nor does a second call before it.

        A step that was begun and never made, because a ``GradScaler`` kept it back, does not count.

        Args:
            scaler: the ``GradScaler`` that has unscaled the optimizer's gradients.
        """
        optimizer = self._optimizer()
        again = self._calls > 1  # of a closure: what runs again, runs when the closure is done
        if optimizer is not None and not again and not (self._begun and self._begun.is_under_way(optimizer)):
            self._ended()
            self._begun = PreparedStep(optimizer, self._run(optimizer, (), {}))

    def make(self, true: Callable[..., Any], optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Have ``true`` make the step, unless it is to be left out."""
        if _is_stepping(optimizer):  # super().step()
            return true(*args, **kwargs)
        stack = _stack()
        stack.append(optimizer)
        try:
            if self._left_out:
                return None
            remove_excluded(optimizer)
            result = true(*args, **kwargs)
            if self._waits and not self._calls:
                raise UsageError(
                    f"{type(optimizer).__name__}.step(closure) never called its closure, so nothing that is attached "
                    "saw this step: run backward first and call step() without a closure"
                )
            return result
        except _LeftOut as left:
            if left.hooks is not self:
                raise
            return left.loss
        finally:
            stack.pop()
            end_step(optimizer)
            self._left_out, self._calls, self._witness = False, 0, None

    def _begin(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if _is_stepping(optimizer):
            return None
        self._left_out, self._calls, self._witness = False, 0, None
        given = wrap_closure(functools.partial(self._call, optimizer, args, kwargs), args, kwargs)
        self._waits = given is not None
        if given is None:
            self._left_out = self._decide(optimizer, args, kwargs)
        else:
            self._check_again(optimizer, _calls_again(optimizer))
            self._witness = Witness(optimizer)
        return given

    def _call(self, optimizer: Any, args: Any, kwargs: Any, closure: Callable[[], Any]) -> Any:
        """The closure of a step, which makes gradients inside it; they are final when it is done."""
        self._calls += 1
        if self._calls > 1:
            return self._call_again(optimizer, args, kwargs, closure)
        earlier = self._begun
        try:
            loss = closure()
        except BaseException:
            self._ended()
            raise
        if earlier is not None and earlier is self._begun and not earlier.is_under_way(optimizer):
            self._ended()  # of gradients that were there before; a closure may have made none, as Lightning's own
        if self._decide(optimizer, args, kwargs):
            self._must_be_untouched(optimizer)
            raise _LeftOut(self, loss)
        remove_excluded(optimizer)
        return loss

    def _call_again(self, optimizer: Any, args: Any, kwargs: Any, closure: Callable[[], Any]) -> Any:
        self._check_again(optimizer, True)
        loss = closure()
        for each in [*_everywhere.before, *self.before]:
            if each.on_repeat == "each":
                each.run(optimizer, args, kwargs)
        return loss

    def _check_again(self, optimizer: Any, again: bool) -> None:
        if again and any(each.on_repeat == "refuse" for each in self.before):
            raise UsageError(
                f"{type(optimizer).__name__} calls its closure more than once in a step, as LBFGS does, and uses the "
                "gradients of each call, so a rule for the step's gradients has no place: leave the rules out "
                "(statistics are of the first call), give functions to on_gradient(), which sees each call, or use "
                "another optimizer"
            )

    def _must_be_untouched(self, optimizer: Any) -> None:
        if self._witness is not None and not self._witness.untouched(optimizer):
            raise UsageError(
                f"{type(optimizer).__name__} changed its parameters, its groups or its state before it called the "
                "closure of its step, so the step cannot be left out as if it had never begun: run backward first and "
                "call step() without a closure, or leave out the rule that skips steps"
            )

    def _decide(self, optimizer: Any, args: Any, kwargs: Any) -> bool:
        """Have it decided, if it is not yet; whether the step must not be made."""
        begun = self._ended()
        same = begun is not None and begun.same_step(optimizer)
        decision = begun.decision if begun and same else self._run(optimizer, args, kwargs)
        return decision is not None and should_skip(decision, optimizer)  # not earlier: a GradScaler writes over it

    def _ended(self) -> PreparedStep | None:
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.forget()
        return begun

    def _run(self, optimizer: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
        """Whether the step is to be left out."""
        end_step(optimizer, restore=False)  # of a step that was never made: its gradients are of the past
        try:
            decisions = [each.run(optimizer, args, kwargs) for each in [*_everywhere.before, *self.before]]
        except BaseException:
            end_step(optimizer)  # there is no step, so what one of them took away for it comes back
            raise
        made = [decision for decision in decisions if decision is not None]
        return torch.stack([each.to(made[0].device) for each in made]).any() if made else None

    def _end(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not _is_stepping(optimizer):
            for run in list(self.after):
                run()


_all: weakref.WeakSet[StepHooks] = weakref.WeakSet()


class _LeftOut(BaseException):
    """Ends a step from within its closure; no optimizer means to catch it."""

    def __init__(self, hooks: StepHooks, loss: Any) -> None:
        super().__init__()
        self.hooks, self.loss = hooks, loss


class _AllOptimizers:
    """What runs before the steps of all optimizers, ahead of what is attached to one of them.

    Each optimizer that steps is given a :class:`StepHooks` for it; a hook that is put on by a global one is called in
    the same step.
    """

    def __init__(self) -> None:
        self.before: list[StepCallback] = []
        self._handle: Any = None

    def add(self, run: BeforeStep) -> CallbackHandle:
        if self._handle is None:
            self._handle = register_optimizer_step_pre_hook(self._ready)
        each = StepCallback(run, "each")
        self.before.append(each)
        return CallbackHandle(self, self.before, each)

    def leave(self) -> None:
        if not self.before and self._handle is not None:
            self._handle.remove()
            self._handle = None
            for hooks in list(_all):
                hooks.leave()

    def _ready(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        StepHooks.of(optimizer)


_everywhere = _AllOptimizers()


def before_any_step(run: BeforeStep) -> CallbackHandle:
    """Have ``run`` called before any optimizer steps, and before what is attached to that optimizer."""
    return _everywhere.add(run)


class _StepPatch:
    """Our function in the place of the one that torch's wrapper calls for a class; see [Note: the step itself].

    Attributes:
        users: those that need it.
    """

    def __init__(self, inner: Inner) -> None:
        self.users: weakref.WeakSet[StepHooks] = weakref.WeakSet()
        self._inner, self._true = inner, inner.function
        self._mine = _stepping(self._true, self)
        inner.function = self._mine

    @classmethod
    def of(cls, kind: type[Any]) -> _StepPatch:
        """The one of a class, or of the class whose step it inherits."""
        inner = Inner(step_wrapper(kind))
        found = getattr(inner.function, "seam", None)
        return found if isinstance(found, cls) else cls(inner)

    def leave(self, hooks: StepHooks) -> None:
        """The last one puts back the function that was there, unless somebody has put another one in its place."""
        self.users.discard(hooks)
        if not self.users and self._inner.function is self._mine:
            self._inner.function = self._true


def _stepping(true: Callable[..., Any], seam: _StepPatch) -> Callable[..., Any]:
    @functools.wraps(true)
    @uncompiled("what is attached decides on the host about the step", callees=False)
    def step(*args: Any, **kwargs: Any) -> Any:
        hooks = StepHooks.found(args[0])
        return true(*args, **kwargs) if hooks is None else hooks.make(true, args[0], args, kwargs)

    step.__dict__["seam"] = seam
    return step


class Leaves(Protocol):
    """What runs functions, and leaves when there are none."""

    def leave(self) -> None:
        """Leave, if there is nothing left to run."""


class CallbackHandle:
    """One function that a :class:`StepHooks`, or another one that leaves, runs."""

    def __init__(self, runner: Leaves, of: list[Any], run: Any) -> None:
        self._runner, self._of, self._run = runner, of, run

    def remove(self) -> None:
        """Take it off; the last one takes the hooks with it."""
        if self._run in self._of:
            self._of.remove(self._run)
            self._runner.leave()


_thread = threading.local()


def _stack() -> list[Any]:
    if not hasattr(_thread, "stack"):
        _thread.stack = []
    found: list[Any] = _thread.stack
    return found


def optimizers_stepping() -> list[Any]:
    """The optimizers whose step this thread is making, innermost first, of those that anything is attached to.

    A step may run another one: ``super().step()``, ZeroRedundancyOptimizer, Lookahead. torch calls the hooks of each.
    """
    return _stack()[::-1]


def _is_stepping(optimizer: Any) -> bool:
    """Whether a step of the same optimizer is under way: this one is a part of it, as in ``super().step()``."""
    return any(one is optimizer for one in _stack())


def _calls_again(optimizer: Any) -> bool:
    """Whether it is known before the step that the optimizer calls its closure more than once."""
    return isinstance(optimizer, torch.optim.LBFGS) and any(
        group["max_iter"] > 1 or group["line_search_fn"] is not None for group in optimizer.param_groups
    )


def _with_grads(optimizer: Any) -> Iterator[Any]:
    return (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)


def _of_fsdp1(optimizer: Any) -> bool:
    """Whether FSDP1 has the parameters: it calls no hooks after accumulating. It marks them, on every rank alike."""
    return any(hasattr(p, "_fsdp_flattened") for group in optimizer.param_groups for p in group["params"])


def wrap_closure(inside: Callable[[Any], Any], args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """The arguments of a step with ``inside(closure)`` in place of its closure; None when it has none."""
    found = [i for i, each in enumerate(args) if i and callable(each)]  # the first one is the optimizer
    if found:
        return (*args[: found[0]], functools.partial(inside, args[found[0]]), *args[found[0] + 1 :]), kwargs
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": functools.partial(inside, kwargs["closure"])}
    return None
