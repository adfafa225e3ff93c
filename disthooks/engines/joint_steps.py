"""Several optimizers that make one step together."""

# [Note: optimizers that step together]
# A loop with two optimizers runs one backward and calls both steps. Before the first of these steps all gradients are
# final. So functions run there, once, and see the gradients of all optimizers; the other optimizers get the same
# decision. A joint step ends when each optimizer has stepped. If an optimizer steps that has stepped already, or that
# has gradients of a later backward (`PreparedStep`), another joint step begins. All ranks run the same program, so
# their joint steps begin at the same calls.
# When the first optimizer steps, nothing tells whether the others will. If one of them does not, a norm was measured
# with its gradients, and a rule has changed gradients that the next backward adds to. So that is an error when the next
# joint step begins, unless a `GradScaler` kept the optimizer back, or all of its parameters are frozen. A loop whose
# optimizers step at different times tells which ones step: `begin_step(optimizers=[a])`. The gradients of the others
# are taken away while functions run, so they are neither measured nor changed.
# `GradScaler.step` takes the scale out of the gradients of one optimizer, just before it steps. So the gradients of the
# others are unscaled before functions run; `GradScaler` remembers that.
#
# [Note: optimizers that step inside backward]
# torch's tutorial on memory has an optimizer for each parameter, which steps in a post-accumulate hook and frees the
# gradient. No moment has all gradients then. Such a step is a joint step of that optimizer alone, and functions learn
# that it is inside backward: rules for one gradient at a time work, and all others are an error.

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from disthooks._torch import backward_id, found_inf, in_backward, scaler_under_way, unscale
from disthooks.engines.optimizer_step import CallbackHandle, PreparedStep, StepCallback, StepHooks, joint_decision
from disthooks.errors import UsageError


class JointSteps:
    """The steps of several optimizers as one step; see [Note: optimizers that step together].

    An object of this class stands wherever one optimizer does: it has the parameter groups of all of them.

    Raises:
        UsageError: when there is none, or two have the same parameter.

    Attributes:
        optimizers: the optimizers.
        before: called once for a joint step, with this object.
        after: called when all optimizers have made their updates.
        stepping: the optimizers of the joint step that was begun last.
        is_in_backward: whether it was begun inside backward; see [Note: optimizers that step inside backward].
        is_first_in_backward: whether it was the first one of that backward.
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
        self.stepping: tuple[Any, ...] = self.optimizers
        self.is_in_backward = self.is_first_in_backward = False
        self._backward = -1  # the number of the backward in which the last joint step was begun
        self._decision: torch.Tensor | None = None
        self._found_inf: dict[int, list[torch.Tensor]] = {}  # of the scaler, by place
        # The optimizers that have not asked for the decision yet, and those that have not stepped yet, by place.
        self._prepared: dict[int, PreparedStep] = {}
        self._unstepped: set[int] = set()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Any, Any]:
        return {key: value for optimizer in self.optimizers for key, value in optimizer.state.items()}

    def __repr__(self) -> str:
        return f"[{', '.join(type(optimizer).__name__ for optimizer in self.optimizers)}]"

    def add(self, to: list[Any], run: Any) -> CallbackHandle:
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
        # A loop that clips the gradients of each optimizer by itself calls this several times in one joint step.
        waiting = [self.optimizers[place] for place in sorted(self._unstepped) if self._waits(place)]
        for optimizer in waiting if waiting and _told.chosen is None else self._chosen():
            StepHooks.of(optimizer).prepare(scaler)

    @contextlib.contextmanager
    def only(self, optimizers: Iterable[Any]) -> Iterator[None]:
        """Inside, a joint step that begins is one of ``optimizers`` alone.

        Raises:
            UsageError: when one of them is none of these optimizers.
        """
        chosen = list(optimizers)
        if not chosen or any(all(one is not other for other in self.optimizers) for one in chosen):
            raise UsageError(f"begin_step(optimizers={chosen!r}): give some of the optimizers of {self!r}")
        _told.chosen = chosen
        try:
            yield
        finally:
            _told.chosen = None

    def _chosen(self) -> list[Any]:
        """The optimizers whose joint step begins now, as far as the loop has told."""
        told = _told.chosen
        return [one for one in self.optimizers if told is None or any(one is other for other in told)]

    def _waits(self, place: int) -> bool:
        """Whether an optimizer still has the gradients with which the joint step was begun."""
        optimizer, prepared = self.optimizers[place], self._prepared.get(place)
        if not _is_trained(optimizer):  # it gets no new gradients, which would show that the joint step is over
            return False
        return StepHooks.of(optimizer).is_prepared() or (prepared is not None and prepared.is_under_way(optimizer))

    def _before_step(self, place: int, optimizer: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
        prepared = self._prepared.pop(place, None)
        if prepared is not None:
            prepared.remove_hooks()
        if prepared is None or not prepared.is_same_step(optimizer):
            self._begin(place, args, kwargs)
        return self._decision

    def _begin(self, place: int, args: Any, kwargs: Any) -> None:
        self._end()
        self.is_in_backward = in_backward()
        self.is_first_in_backward = backward_id() != self._backward
        self._backward = backward_id()
        self.stepping = (self.optimizers[place],) if self.is_in_backward else tuple(self._chosen())
        scaler = scaler_under_way()
        stepping = [(i, one) for i, one in enumerate(self.optimizers) if one in self.stepping]
        others = [(i, one) for i, one in stepping if i != place]
        if scaler is not None and scaler.is_enabled():
            for _, other in others:
                unscale(scaler, other)
            self._found_inf = {i: found_inf(scaler, one) for i, one in stepping}
        left_out = [one for one in self.optimizers if one not in self.stepping]
        with _without_gradients(left_out):
            self._decision = joint_decision([each.run(self, args, kwargs) for each in self.before])
        self._prepared = {i: PreparedStep(other, self._decision) for i, other in others}
        self._unstepped = {place, *self._prepared}

    def _after_step(self, place: int) -> None:
        self._unstepped.discard(place)
        if not self._unstepped:
            self._run_after()

    def _end(self) -> None:
        """End the joint step, if not all of its optimizers have stepped.

        Raises:
            UsageError: when nothing explains why an optimizer has not stepped that belongs to the joint step.
        """
        unstepped, kept_back = self._unstepped, self._found_inf
        has_begun = len(unstepped) < len(self.stepping)  # if none has stepped, the loop has left the iteration out
        self._forget()
        if not unstepped or not has_begun:
            return
        self._run_after()
        for place in sorted(unstepped):
            optimizer = self.optimizers[place]
            is_kept_back = any(bool(found) for found in kept_back.get(place, ()))
            if not is_kept_back and _is_trained(optimizer):
                self._raise_unstepped(type(optimizer).__name__, place)

    def _raise_unstepped(self, name: str, place: int) -> None:
        raise UsageError(
            f"{self!r} were attached together, and in the last step {name} (number {place}) did not step, though its "
            "gradients were measured and changed with the others. If they step at different times, call "
            "watch.begin_step(optimizers=[...]) with those that step now, just before the first of them steps; or call "
            "gradients() for each optimizer by itself (in a hooks file, optimizers: apart)"
        )

    def _run_after(self) -> None:
        for run in list(self.after):
            run()

    def _forget(self) -> None:
        for prepared in self._prepared.values():
            prepared.remove_hooks()
        self._prepared, self._unstepped, self._decision, self._found_inf = {}, set(), None, {}


def _is_trained(optimizer: Any) -> bool:
    """Whether any parameter of ``optimizer`` needs gradients; all ranks answer alike."""
    return any(parameter.requires_grad for parameter in parameters_of(optimizer))


class _Told(threading.local):
    """The optimizers that the loop has told to step now; None if it has told nothing."""

    chosen: list[Any] | None = None


_told = _Told()


@contextlib.contextmanager
def _without_gradients(optimizers: Iterable[Any]) -> Iterator[None]:
    """Inside, the parameters of ``optimizers`` have no gradients."""
    taken = [(parameter, parameter.grad) for one in optimizers for parameter in parameters_of(one)]
    for parameter, _ in taken:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, grad in taken:
            parameter.grad = grad


def parameters_of(optimizer: Any) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def optimizers_of(optimizer: Any) -> tuple[Any, ...]:
    """The optimizers of a :class:`JointSteps`, or the one optimizer."""
    return optimizer.optimizers if isinstance(optimizer, JointSteps) else (optimizer,)
