"""One hook before and one after the steps of an optimizer, for all that is attached to it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.utils.weak import TensorWeakRef

from disthooks._torch import gives_scaler, sequence_number, steps_under_way
from disthooks.engines.skip import over, skip_if
from disthooks.errors import UsageError

BeforeStep = Callable[[Any, tuple[Any, ...], dict[str, Any]], torch.Tensor | None]


class Begun:
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
        # it there. Not every backward reaches every parameter: two of them are watched.
        ends = {id(parameter): parameter for parameter in (*found[:1], *found[-1:])}.values()
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

    def under_way(self, optimizer: Any) -> bool:
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

    All of ``before`` runs first, each on the gradients as they are; then the step is skipped if any of it decided so.

    Attributes:
        before: called with the optimizer and the arguments of its step.
        after: called when the update has been made.
    """

    def __init__(self, optimizer: Any) -> None:
        self.before: list[BeforeStep] = []
        self.after: list[Callable[[], None]] = []
        self._optimizer = weakref.ref(optimizer)
        self._begun: Begun | None = None
        self._handles = [
            optimizer.register_step_pre_hook(self._begin),
            optimizer.register_step_post_hook(self._end),
        ]

    @classmethod
    def of(cls, optimizer: Any) -> StepHooks:
        """The one of ``optimizer``, made when it is first asked for.

        It is found among the optimizer's own hooks: a table of all of them would keep every model that is attached.
        """
        owners = (getattr(hook, "__self__", None) for hook in optimizer._optimizer_step_pre_hooks.values())
        return next((owner for owner in owners if isinstance(owner, cls)), None) or cls(optimizer)

    def add(self, to: list[Any], run: Any) -> Entry:
        """Put ``run`` at the end of ``before`` or ``after``; gives what takes it off."""
        to.append(run)
        return Entry(self, to, run)

    def leave(self) -> None:
        """With nothing left to run, take the hooks off and put back what a step that raised had taken."""
        optimizer = self._optimizer()
        if self.before or self.after or optimizer is None:
            return
        for handle in self._handles:
            handle.remove()
        self._ended()
        if not any(under_way is optimizer for under_way in steps_under_way()):
            over(optimizer)

    @gives_scaler("scaler")
    def now(self, scaler: Any = None) -> None:
        """Run ``before`` now; the step that comes next does not run it again, nor does a second call before it.

        A step that was begun and never made, because a ``GradScaler`` kept it back, does not count.

        Args:
            scaler: the ``GradScaler`` that has unscaled the optimizer's gradients.
        """
        optimizer = self._optimizer()
        if optimizer is not None and not (self._begun and self._begun.under_way(optimizer)):
            self._ended()
            self._begun = Begun(optimizer, self._run(optimizer, (), {}))

    def _begin(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if not _outermost(optimizer):
            return None
        inside = functools.partial(self._inside, optimizer, iter([(args, kwargs)]))
        given = with_closure(inside, args, kwargs)
        if given is None:
            self._decide(optimizer, args, kwargs)
        return given

    def _inside(self, optimizer: Any, once: Any, closure: Callable[[], Any]) -> Any:
        """The closure of a step, which makes gradients inside it, and says itself when they are final."""
        given = next(once, None)
        if given is None:
            raise UsageError(
                f"{type(optimizer).__name__} calls its closure more than once in a step, as LBFGS does, and no "
                "gradients are final before the last time: use another optimizer, or remove() what is attached"
            )
        earlier = self._begun
        try:
            loss = closure()
        except BaseException:
            self._ended()
            raise
        if earlier is not None and earlier is self._begun and not earlier.under_way(optimizer):
            self._ended()  # of gradients that were there before; a closure may have made none, as Lightning's own
        self._decide(optimizer, *given)  # which may refuse closures
        return loss

    def _decide(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Have it decided, if it is not yet, and hold to it."""
        begun = self._ended()
        same = begun is not None and begun.same_step(optimizer)
        decision = begun.decision if begun and same else self._run(optimizer, args, kwargs)
        if decision is not None:  # not earlier: a GradScaler would put its own in the place of it
            skip_if(decision, optimizer)

    def _ended(self) -> Begun | None:
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.forget()
        return begun

    def _run(self, optimizer: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
        """Whether the step is to be left out."""
        over(optimizer, restore=False)  # of a step that raised: its gradients are of the past
        try:
            decisions = [run(optimizer, args, kwargs) for run in list(self.before)]
        except BaseException:
            over(optimizer)  # there is no step, so what one of them took away for it comes back
            raise
        made = [decision for decision in decisions if decision is not None]
        return torch.stack([each.to(made[0].device) for each in made]).any() if made else None

    def _end(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if _outermost(optimizer):
            over(optimizer)
            for run in list(self.after):
                run()


class Leaves(Protocol):
    """What runs functions, and leaves when there are none."""

    def leave(self) -> None:
        """Leave, if there is nothing left to run."""


class Entry:
    """One function that a :class:`StepHooks`, or another one that leaves, runs."""

    def __init__(self, runner: Leaves, of: list[Any], run: Any) -> None:
        self._runner, self._of, self._run = runner, of, run

    def remove(self) -> None:
        """Take it off; the last one takes the hooks with it."""
        if self._run in self._of:
            self._of.remove(self._run)
            self._runner.leave()


def _outermost(optimizer: Any) -> bool:
    """Whether the step under way is not one that a step of the same optimizer made: ``super().step()``."""
    return sum(under_way is optimizer for under_way in steps_under_way()) < 2


def _with_grads(optimizer: Any) -> Iterator[Any]:
    return (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)


def _of_fsdp1(optimizer: Any) -> bool:
    """Whether FSDP1 has the parameters: it calls no hooks after accumulating. It marks them, on every rank alike."""
    return any(hasattr(p, "_fsdp_flattened") for group in optimizer.param_groups for p in group["params"])


def with_closure(inside: Callable[[Any], Any], args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """The arguments of a step with ``inside(closure)`` in place of its closure; None when it has none."""
    found = [i for i, each in enumerate(args) if i and callable(each)]  # the first one is the optimizer
    if found:
        return (*args[: found[0]], functools.partial(inside, args[found[0]]), *args[found[0] + 1 :]), kwargs
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": functools.partial(inside, kwargs["closure"])}
    return None
