"""Several optimizers that make one step together."""

# [Note: optimizers that step together]
# A loop with two optimizers runs one backward and calls both steps. Before the first of these steps all gradients are
# final. So functions run there, once, and see the gradients of all optimizers; the other optimizers get the same
# decision. A joint step ends when each optimizer has stepped. An optimizer may step in every second iteration only: if
# an optimizer steps that has stepped already, or that has gradients of a later backward (`PreparedStep`), another joint
# step begins. What runs after the update then runs before that. All ranks run the same program, so their joint steps
# begin at the same calls.
# `GradScaler.step` takes the scale out of the gradients of one optimizer, just before it steps. So the gradients of the
# others are unscaled before functions run; `GradScaler` remembers that.

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from disthooks._torch import scaler_under_way, unscale
from disthooks.engines.optimizer_step import CallbackHandle, PreparedStep, StepCallback, StepHooks, joint_decision
from disthooks.engines.skip import exclude_from_step
from disthooks.errors import UsageError


class JointSteps:
    """The steps of several optimizers as one step; see [Note: optimizers that step together].

    An object of this class stands wherever one optimizer does: it has the parameter groups of all of them.

    Args:
        optimizers: torch optimizers, which have no parameter in common.

    Raises:
        UsageError: when there is none, or two have the same parameter.

    Attributes:
        optimizers: the optimizers.
        before: called once for a joint step, with this object.
        after: called when all optimizers have made their updates.
    """

    def __init__(self, optimizers: Sequence[Any]) -> None:
        if not optimizers:
            raise UsageError("optimizer=[]: give the optimizers that step together, [muon, adamw]")
        self.optimizers = tuple(optimizers)
        self.before: list[StepCallback] = []
        self.after: list[Callable[[], None]] = []
        self._place_of: dict[int, int] = {}
        for place, optimizer in enumerate(self.optimizers):
            for parameter in parameters_of(optimizer):
                if self._place_of.setdefault(id(parameter), place) != place:
                    one = type(self.optimizers[self._place_of[id(parameter)]]).__name__
                    raise UsageError(
                        f"a parameter of shape {tuple(parameter.shape)} is in two of the optimizers, {one} and "
                        f"{type(optimizer).__name__}: each parameter belongs to one optimizer"
                    )
        self._handles: list[CallbackHandle] = []
        self._decision: torch.Tensor | None = None
        self._excluded: list[nn.Parameter] = []
        # The optimizers that have not asked for the decision yet, and those that have not stepped yet, by place.
        self._prepared: dict[int, PreparedStep] = {}
        self._unstepped: set[int] = set()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Any, Any]:
        """The states of all optimizers, by parameter."""
        return {key: value for optimizer in self.optimizers for key, value in optimizer.state.items()}

    def __repr__(self) -> str:
        return f"[{', '.join(type(optimizer).__name__ for optimizer in self.optimizers)}]"

    def add(self, to: list[Any], run: Any) -> CallbackHandle:
        """Put ``run`` at the end of ``before`` or ``after``; the handle takes it off."""
        if not self._handles:
            on_repeat = run.on_repeat if isinstance(run, StepCallback) else "refuse"
            for place, optimizer in enumerate(self.optimizers):
                hooks = StepHooks.of(optimizer)
                begin = StepCallback(functools.partial(self._before_step, place), on_repeat)
                self._handles.append(hooks.add(hooks.before, begin))
                self._handles.append(hooks.add(hooks.after, functools.partial(self._after_step, place)))
        to.append(run)
        return CallbackHandle(self, to, run)

    def leave(self) -> None:
        """If no function is left, take the hooks off the optimizers."""
        if not self.before and not self.after:
            self._forget()
            for handle in self._handles:
                handle.remove()
            self._handles = []

    def prepare(self, scaler: Any = None) -> None:
        """Run ``before`` now; it does not run again in the steps that come next. See :meth:`StepHooks.prepare`."""
        for optimizer in self.optimizers:
            StepHooks.of(optimizer).prepare(scaler)

    def exclude(self, parameters: Iterable[nn.Parameter]) -> None:
        """Make the optimizers leave ``parameters`` as they are in this joint step."""
        self._excluded = list(parameters)

    def _before_step(self, place: int, optimizer: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
        prepared = self._prepared.pop(place, None)
        if prepared is not None:
            prepared.remove_hooks()
        if prepared is None or not prepared.is_same_step(optimizer):
            self._begin(place, args, kwargs)
        if self._excluded:
            mine = [parameter for parameter in self._excluded if self._place_of[id(parameter)] == place]
            exclude_from_step(optimizer, mine)
        return self._decision

    def _begin(self, place: int, args: Any, kwargs: Any) -> None:
        self._end()
        scaler = scaler_under_way()
        others = [(i, other) for i, other in enumerate(self.optimizers) if i != place]
        for _, other in others if scaler is not None and scaler.is_enabled() else ():
            unscale(scaler, other)
        self._excluded = []
        self._decision = joint_decision([each.run(self, args, kwargs) for each in self.before])
        self._prepared = {i: PreparedStep(other, self._decision) for i, other in others}
        self._unstepped = set(range(len(self.optimizers)))

    def _after_step(self, place: int) -> None:
        self._unstepped.discard(place)
        if not self._unstepped:
            self._run_after()

    def _end(self) -> None:
        """End the joint step, in which an optimizer may not have stepped."""
        if self._unstepped and len(self._unstepped) < len(self.optimizers):
            self._run_after()
        self._forget()

    def _run_after(self) -> None:
        for run in list(self.after):
            run()

    def _forget(self) -> None:
        for prepared in self._prepared.values():
            prepared.remove_hooks()
        self._prepared, self._unstepped, self._decision = {}, set(), None


def parameters_of(optimizer: Any) -> list[nn.Parameter]:
    """The parameters in the groups of an optimizer, or of a :class:`JointSteps`."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def optimizers_of(optimizer: Any) -> tuple[Any, ...]:
    """The optimizers of a :class:`JointSteps`, or the one optimizer."""
    return optimizer.optimizers if isinstance(optimizer, JointSteps) else (optimizer,)
