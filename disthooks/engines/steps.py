"""One hook before and one after the steps of an optimizer, for all that is attached to it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from disthooks._torch import steps_under_way
from disthooks.engines.skip import over, skip_if
from disthooks.errors import UsageError

BeforeStep = Callable[[Any, tuple[Any, ...], dict[str, Any]], torch.Tensor | None]


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
        self._begun = False
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
        if not any(under_way is optimizer for under_way in steps_under_way()):
            over(optimizer)

    def now(self) -> None:
        """Run ``before`` now; the step that comes next does not run it again."""
        optimizer = self._optimizer()
        if optimizer is not None:  # begun already and never made: a GradScaler kept it back
            self._run(optimizer, (), {})
            self._begun = True

    def _begin(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if not _outermost(optimizer):
            return None
        begun, self._begun = self._begun, False
        inside = functools.partial(self._inside, optimizer, iter([(args, kwargs)]))
        given = _with_closure(inside, args, kwargs)
        if given is None and not begun:
            self._run(optimizer, args, kwargs)
        return given

    def _inside(self, optimizer: Any, once: Any, closure: Callable[[], Any]) -> Any:
        """The closure of a step, which makes gradients inside it, and says itself when they are final."""
        given = next(once, None)
        if given is None:
            raise UsageError(
                f"{type(optimizer).__name__} calls its closure more than once in a step, as LBFGS does, and no "
                "gradients are final before the last time: use another optimizer, or remove() what is attached"
            )
        try:
            loss = closure()
        finally:
            begun, self._begun = self._begun, False
        if not begun:
            self._run(optimizer, *given)  # which may refuse closures
        return loss

    def _run(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        over(optimizer, restore=False)  # of a step that raised: its gradients are of the past
        try:
            decisions = [run(optimizer, args, kwargs) for run in list(self.before)]
        except BaseException:
            over(optimizer)  # there is no step, so what one of them took away for it comes back
            raise
        made = [decision for decision in decisions if decision is not None]
        if made:
            skip_if(torch.stack([each.to(made[0].device) for each in made]).any(), optimizer)

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


def _with_closure(inside: Callable[[Any], Any], args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """The arguments of a step with ``inside(closure)`` in place of its closure; None when it has none."""
    found = [i for i, each in enumerate(args) if i and callable(each)]  # the first one is the optimizer
    if found:
        return (*args[: found[0]], functools.partial(inside, args[found[0]]), *args[found[0] + 1 :]), kwargs
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": functools.partial(inside, kwargs["closure"])}
    return None
