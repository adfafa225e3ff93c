"""``Step``: one step of training, of one optimizer or of several that step together."""

# [Note: the states of a step]
# A step is an object with a state:
#
#     idle       functions have not run
#     begun      functions have run early, before any of its optimizers has stepped: the loop has clipped its gradients,
#                or called `begin_step`
#     stepping   an optimizer has stepped, and others have not
#     done       all of its optimizers have stepped
#     skipped    all of them have, and left their parameters as they were
#
# In each state two things can happen, and `is_same` of [Note: the gradients that a step was begun with] decides what
# they mean:
#
#     begun, its gradients are the same     functions do not run again; the optimizer gets their decision
#     begun, backward has added to them     functions run again, as if they had not run before: this step counts once
#     stepping, an optimizer that has       functions do not run again; the optimizer gets their decision
#       not stepped, gradients the same
#     stepping, gradients have changed,     this step is over, and the next one begins
#       or the optimizer has stepped
#     idle, done, skipped                   the next step begins
#
# [Note: optimizers that step together]
# A loop with two optimizers runs one backward and calls both steps. Before the first of these steps all gradients are
# final. So functions run there, once, and see the gradients of all optimizers; the other optimizers get the same
# decision. All ranks run the same program, so their steps begin at the same calls.
# When the first optimizer steps, nothing tells whether the others will. If one of them does not, a norm was measured
# with its gradients, and a rule has changed gradients that the next backward adds to. So that is an error when the next
# step begins, unless a `GradScaler` kept the optimizer back, or it had no gradients. A loop whose optimizers step at
# different times tells which ones step: `begin_step(optimizers=[a])`. The gradients of the others are taken away while
# functions run, so they are neither measured nor changed.
#
# [Note: a scaler for each optimizer]
# A loop may call `update` of the first scaler before the second optimizer steps. If the first scaler has kept its
# optimizer back, the step goes on: the gradients of that optimizer are unscaled, no other scaler may unscale them
# again, and only the scaler of the second optimizer can end the step. But one scaler for both forgets in `update` that
# the gradients of the second optimizer are unscaled, and would divide them once more. So that is an error.
#
# [Note: optimizers that step inside backward]
# torch's tutorial on memory has an optimizer for each parameter, which steps in a post-accumulate hook and frees the
# gradient. No moment has all gradients then. Such a step is one of that optimizer alone, and functions learn that it is
# inside backward: rules for one gradient at a time work, and all others are an error.

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from disthooks._torch import backward_id, found_inf, gives_scaler, in_backward, scaler_under_way, unscale
from disthooks.engines.new_gradients import GradientMark
from disthooks.engines.optimizer_step import CallbackHandle, OnRepeat, OptimizerHooks
from disthooks.engines.scalers import scalers, stage_of
from disthooks.engines.strangers import strangers
from disthooks.errors import UsageError


def _nothing() -> None:
    """Do nothing."""


class StepFunctions(NamedTuple):
    """The functions of one attachment.

    Attributes:
        run: called with the step when gradients are final; returns whether to skip it, as a bool on the device, or
            None. If gradients change before the optimizer steps, it is called again.
        made: called when the first optimizer steps, after ``run``.
        dropped: called when a ``GradScaler`` has kept the step back, whether ``run`` was called or not.
    """

    run: Callable[[Any], torch.Tensor | None]
    made: Callable[[], None] = _nothing
    dropped: Callable[[], None] = _nothing


class Step:
    """One step of one optimizer, or of several together.

    See [Note: the states of a step] and [Note: optimizers that step together].

    An object of this class stands for its optimizers: it has the parameter groups and the states of all of them.

    Raises:
        UsageError: when there is no optimizer, or two have the same parameter.

    Attributes:
        optimizers: the optimizers.
        stepping: the optimizers of the step that was begun last.
        state: the state; see [Note: the states of a step].
        skipped: whether the step that was made last was skipped, as a bool on the device; None if nothing decided. All
            that is attached to its optimizers decides together.
        on_repeat: how a step is treated that calls its closure again.
        is_early: whether it was begun before an optimizer's step was called.
        is_in_backward: whether it was begun inside backward; see [Note: optimizers that step inside backward].
        is_first_in_backward: whether it was the first one of that backward.
    """

    def __init__(self, optimizers: Sequence[Any]) -> None:
        if not optimizers:
            raise UsageError("optimizer=[]: give the optimizers that step together, [muon, adamw]")
        self.optimizers = self.stepping = tuple(optimizers)
        _refuse_shared(self.optimizers)
        self.state: Literal["idle", "begun", "stepping", "done", "skipped"] = "idle"
        self.skipped: torch.Tensor | None = None
        self.on_repeat: OnRepeat = "first"
        self.is_early = self.is_in_backward = self.is_first_in_backward = False
        self._functions: list[StepFunctions] = []
        self._after: list[Callable[[], None]] = []
        self._decision: torch.Tensor | None = None
        # The optimizers that have not stepped, by place, with the gradients that the functions have seen; and those
        # whose update is not made.
        self._marks: dict[int, GradientMark] = {}
        self._unfinished: set[int] = set()
        self._found_inf: dict[int, list[torch.Tensor]] = {}  # of each optimizer's scaler, by place
        # What a scaler has unscaled before it ended the iteration, by place, and what it found.
        self._over: dict[int, tuple[GradientMark, list[torch.Tensor]]] = {}
        self._backward = -1  # the number of the backward in which the last step was begun
        self._backwards_before = 0  # how many backwards there were when the last step was made
        self._most_backwards = 0  # in one step
        self._has_seen_backward = False  # whether there was one before the step that was made last

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def state_of(self, parameter: nn.Parameter) -> Any:
        """What the optimizers keep for ``parameter``; {} if they keep nothing."""
        return next((one.state[parameter] for one in self.optimizers if parameter in one.state), {})

    def __repr__(self) -> str:
        return f"[{', '.join(type(optimizer).__name__ for optimizer in self.optimizers)}]"

    # -- attaching

    def attach(self, functions: StepFunctions, on_repeat: OnRepeat) -> CallbackHandle:
        self.on_repeat = on_repeat
        strangers.watch(self)
        return self._add(self._functions, functions)

    def attach_after(self, run: Callable[[], None]) -> CallbackHandle:
        """Call ``run`` when all optimizers have made their updates."""
        return self._add(self._after, run)

    def _add(self, to: list[Any], run: Any) -> CallbackHandle:
        if not self._functions and not self._after:
            for optimizer in self.optimizers:
                hooks = OptimizerHooks.of(optimizer)
                hooks.steps.append(self)
                if len(self.optimizers) > 1:
                    hooks.gradients.watch_all()
            scalers.use(self)
            self._backwards_before = self.backwards
        to.append(run)
        return CallbackHandle(self, to, run)

    def leave(self) -> None:
        """If no function is left, take the hooks off the optimizers."""
        if not self._functions and not self._after:
            self._forget()
            strangers.forget(self)
            scalers.leave(self)
            for one in self.optimizers:
                hooks = OptimizerHooks.of(one)
                hooks.steps.remove(self)
                hooks.leave()

    def see_backward(self) -> None:
        """The backward that runs now adds to the gradients of all optimizers (``Engine.watch_backward``)."""
        for optimizer in self.optimizers:
            if (hooks := OptimizerHooks.find(optimizer)) is not None:
                hooks.gradients.see()

    # -- in each step

    @property
    def backwards(self) -> int:
        """How many backwards have reached the parameters."""
        found = [OptimizerHooks.find(optimizer) for optimizer in self.optimizers]
        return max(0 if hooks is None else hooks.gradients.backwards for hooks in found)

    @property
    def has_other_functions(self) -> bool:
        """Whether another attachment has functions for one of the optimizers."""
        hooks = [OptimizerHooks.find(optimizer) for optimizer in self.optimizers]
        return any(each is not None and len(each.steps) > 1 for each in hooks)

    @property
    def has_unused_backward(self) -> bool:
        """Whether there was a backward since the last step was made."""
        return self.backwards > self._backwards_before

    @property
    def lacks_step(self) -> bool:
        """Whether there were more backwards since the last step than any step had."""
        return self.backwards - self._backwards_before > self._most_backwards

    def has_new_gradients(self) -> bool:
        """Whether there are gradients that no step was made with.

        If a loop makes gradients in a way that no hook sees, such as ``torch.autograd.grad``, each gradient is new.
        """
        if self.has_unused_backward:
            return True
        is_seen = self._has_seen_backward or self.state == "idle"
        return not is_seen or (self.backwards == 0 and has_gradients(self))

    @gives_scaler("scaler")
    def begin_early(self, scaler: Any = None, chosen: Iterable[Any] | None = None) -> None:
        """Run the functions now; they do not run again in the step that comes next, if its gradients are these.

        Args:
            scaler: the ``GradScaler`` that the gradients go through; gradients are unscaled by it first.
            chosen: the optimizers that step now; None for all.

        Raises:
            UsageError: when one of ``chosen`` is none of these optimizers.
        """
        told = None if chosen is None else self._checked(chosen)
        # A loop that clips the gradients of each optimizer by itself calls this several times in one step.
        marks = sorted(self._marks.items())
        waiting = [self.optimizers[place] for place, mark in marks if mark.is_trained and self._is_same(place)]
        with _choosing(told):
            for optimizer in waiting if waiting and told is None else self._chosen():
                OptimizerHooks.of(optimizer).begin_early()

    def begin(self, optimizer: Any, is_early: bool = False) -> torch.Tensor | None:
        """Run the functions, unless they have run for these gradients; see [Note: the states of a step]."""
        place = self._place(optimizer)
        # Before the first optimizer steps, new gradients of any of them make the norm another one.
        places = list(self._marks) if self.state == "begun" else [place]
        if place in self._marks and all(map(self._is_same, places)):
            return self._decision
        if self.state == "stepping":
            self._end()
        self._run(place, is_early)
        return self._decision

    def enter(self, optimizer: Any) -> torch.Tensor | None:
        """``optimizer`` steps now; the decision to skip its update.

        Raises:
            UsageError: when its scaler has divided its gradients twice; see [Note: a scaler for each optimizer].
        """
        scalers.note_step(optimizer)
        place = self._place(optimizer)
        if self.state == "stepping" and place in self._marks and self._is_over(place):
            raise UsageError(
                f"GradScaler.update() was called before {type(optimizer).__name__}, one of {self!r}, stepped. Its "
                "gradients were unscaled for the joint step, and now once more: call scaler.step() of all optimizers, "
                "then scaler.update() once"
            )
        decision = self.begin(optimizer)
        self._marks.pop(place, None)
        if self.state == "begun":
            self.state = "stepping"
            if not self.is_in_backward:
                self._has_seen_backward = self.has_unused_backward
                self._most_backwards = max(self._most_backwards, self.backwards - self._backwards_before)
                self._backwards_before = self.backwards
            for functions in list(self._functions):
                functions.made()
        return decision

    def finish(self, optimizer: Any, is_skipped: bool, has_repeated: bool) -> None:
        """``optimizer`` has made its update, or skipped it."""
        place = self._place(optimizer)
        if place not in self._unfinished:
            return
        self._unfinished.discard(place)
        if has_repeated:  # the closure of this step has made the gradients of the others anew
            self._marks = {i: OptimizerHooks.of(self.optimizers[i]).gradients.mark() for i in self._marks}
            self._backwards_before = self.backwards
        if not self._unfinished:
            self.state = "skipped" if is_skipped else "done"
            self._run_after()

    def end_iteration(self, scaler: Any, optimizers: Iterable[Any]) -> None:
        """``scaler``, which is that of ``optimizers``, ends the iteration: it has kept back a step that was not made.

        See [Note: a scaler for each optimizer].
        """
        if len(self.optimizers) > 1:
            mine = {self._place(one): one for one in optimizers if stage_of(scaler, one) != "READY"}
            for i, one in mine.items():
                self._over[i] = OptimizerHooks.of(one).gradients.mark(), found_inf(scaler, one)
            stepping = self.stepping if self.state == "begun" else self.optimizers
            if any(has_gradients(one) and not self._is_over(self._place(one)) for one in stepping):
                if self.state == "begun":  # the others step with the decision that was made
                    self._marks = {i: mark for i, mark in self._marks.items() if i not in mine}
                    self._unfinished -= set(mine)
                return
        if self.state == "begun" or (self.state != "stepping" and self.has_unused_backward):
            self._forget()
            self._backwards_before = self.backwards
            for functions in list(self._functions):
                functions.dropped()

    def _run(self, place: int, is_early: bool) -> None:
        self._marks, self._decision, self._found_inf = {}, None, {}
        self.is_early, self.is_in_backward = is_early, in_backward()
        self.is_first_in_backward = backward_id() != self._backward
        self._backward = backward_id()
        self.stepping = (self.optimizers[place],) if self.is_in_backward else tuple(self._chosen())
        stepping = {i: one for i, one in enumerate(self.optimizers) if any(one is other for other in self.stepping)}
        self._unscale(place, stepping, is_early)
        left_out = [one for i, one in enumerate(self.optimizers) if i not in stepping]
        with _without_gradients(left_out):
            decisions = [functions.run(self) for functions in list(self._functions)]
        self._decision = next((decision for decision in decisions if decision is not None), None)
        waiting = stepping if is_early else {i: one for i, one in stepping.items() if i != place}
        self._marks = {i: OptimizerHooks.of(one).gradients.mark() for i, one in waiting.items()}
        self._unfinished = set(stepping)
        self.state = "begun"

    def _unscale(self, place: int, stepping: dict[int, Any], is_early: bool) -> None:
        """Unscale the gradients that the functions are about to see, each optimizer's by its own ``GradScaler``.

        Raises:
            UsageError: when it is not known which scaler that is; nothing was changed then.
        """
        others = stepping if is_early else {i: one for i, one in stepping.items() if i != place}
        if not others or not self._functions:  # the scaler of one optimizer has called its step
            return
        given = scaler_under_way()
        own: dict[int, Any] = {}
        for i, one in others.items():
            if self._is_over(i):
                self._found_inf[i] = self._over[i][1]
            elif not is_early:
                own[i] = scalers.of(one)
            elif given is None:
                own[i] = scalers.of_unscaled(one)
            else:
                own[i] = scalers.of(one) if scalers.is_known(one) else given
        for i, scaler in own.items():
            if scaler is not None and scaler.is_enabled() and scaler._scale is not None:
                unscale(scaler, stepping[i])
                self._found_inf[i] = found_inf(scaler, stepping[i])
        if not is_early and given is not None and given.is_enabled():
            self._found_inf[place] = found_inf(given, stepping[place])

    def _end(self) -> None:
        """End a step of which an optimizer has not stepped.

        Raises:
            UsageError: when nothing explains why it has not, though it had gradients.
        """
        has_begun, kept_back = len(self._unfinished) < len(self.stepping), self._found_inf
        unstepped = {i: mark for i, mark in self._marks.items() if mark.is_trained and mark.first is not None}
        self._forget()
        if not has_begun:
            return
        self._run_after()
        for place in sorted(unstepped):
            if not any(bool(found) for found in kept_back.get(place, ())):
                raise UsageError(
                    f"{self!r} were attached together, and in the last step {type(self.optimizers[place]).__name__} "
                    f"(number {place}) did not step, though its gradients were measured and changed with the others. "
                    "If they step at different times, call watch.begin_step(optimizers=[...]) with those that step "
                    "now, just before the first of them steps; or call gradients() for each optimizer by itself (in a "
                    "hooks file, optimizers: apart)"
                )

    def _run_after(self) -> None:
        for run in list(self._after):
            run()

    def _forget(self) -> None:
        self._marks, self._unfinished, self._decision, self._found_inf = {}, set(), None, {}
        self.state = "idle"

    # -- which optimizers

    def _place(self, optimizer: Any) -> int:
        return next(i for i, one in enumerate(self.optimizers) if one is optimizer)

    def _checked(self, chosen: Iterable[Any]) -> list[Any]:
        given = list(chosen)
        if len(self.optimizers) == 1:
            raise UsageError("begin_step(optimizers=...) is for several optimizers: this attachment has one")
        if not given or any(all(one is not other for other in self.optimizers) for one in given):
            raise UsageError(f"begin_step(optimizers={given!r}): give some of the optimizers of {self!r}")
        return given

    def _chosen(self) -> list[Any]:
        """The optimizers whose step begins now, as far as the loop has told."""
        chosen = _announced.chosen
        mine = [one for one in self.optimizers if chosen is None or any(one is other for other in chosen)]
        return mine or list(self.optimizers)

    def _is_over(self, place: int) -> bool:
        """Whether a scaler has unscaled the gradients of an optimizer and ended the iteration; they may be zeroed."""
        if place not in self._over:
            return False
        one, mark = self.optimizers[place], self._over[place][0]
        gradients = OptimizerHooks.of(one).gradients
        return gradients.is_same(mark) or (gradients.backwards == mark.backwards and not has_gradients(one))

    def _is_same(self, place: int) -> bool:
        """Whether an optimizer that has not stepped still has the gradients with which the step was begun."""
        return OptimizerHooks.of(self.optimizers[place]).gradients.is_same(self._marks[place])


class _Announced(threading.local):
    """The optimizers that the loop has told to step now; None if it has told nothing."""

    chosen: list[Any] | None = None


_announced = _Announced()


@contextlib.contextmanager
def _choosing(optimizers: list[Any] | None) -> Iterator[None]:
    """Inside, a step that begins is one of ``optimizers`` alone; None for all."""
    _announced.chosen = optimizers
    try:
        yield
    finally:
        _announced.chosen = None


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


def has_gradients(optimizer: Any) -> bool:
    return any(parameter.grad is not None for parameter in parameters_of(optimizer))


def _refuse_shared(optimizers: Sequence[Any]) -> None:
    owner: dict[int, int] = {}
    for place, optimizer in enumerate(optimizers):
        for parameter in parameters_of(optimizer):
            if owner.setdefault(id(parameter), place) != place:
                raise UsageError(
                    f"a parameter of shape {tuple(parameter.shape)} is in two of the optimizers, "
                    f"{type(optimizers[owner[id(parameter)]]).__name__} and {type(optimizer).__name__}: each parameter "
                    "belongs to one optimizer"
                )
