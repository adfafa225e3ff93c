"""Where torch tells a session of what the script does: optimizers made, modules called, steps begun."""

from __future__ import annotations

import functools
import sys
import threading
import types
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from disthooks.config import Plan
from disthooks.engines.optimizer_step import StepHooks, wrap_closure

_DEEP = 12  # calls between the making of an optimizer and of one inside it


class Listener(Protocol):
    """What is told."""

    def made(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer was made."""

    def called(self, module: nn.Module, outermost: bool) -> None:
        """A module is about to run, with gradients on."""

    def watches(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether gradients are to be seen before an optimizer steps."""

    def steps(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step; or has stepped, where nothing is to be seen before."""

    def steps_back(self) -> None:
        """The script attaches a plan itself."""


class Seams:
    """Methods of torch that are replaced for the time of a session; classes stay what they are.

    ``nn.Module.__call__`` is replaced only while an optimizer waits for its model. It is not a global forward hook:
    those run when the module has chosen its own hooks already, and torch.compile warns of them.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener, self._inside = listener, threading.local()
        self._undo: list[Callable[[], None]] = []
        self._call: Callable[[], None] | None = None

    def open(self) -> None:
        """Replace what has to be from the start."""
        self._undo.append(_replaced(torch.optim.Optimizer, "__init__", self._noting))
        for name in ("save", "watch", "prepare"):
            self._undo.append(_replaced(Plan, name, self._stepping_back))
        self._undo.append(register_optimizer_step_pre_hook(self._step).remove)
        self._undo.append(register_optimizer_step_post_hook(self._stepped).remove)

    def close(self) -> None:
        """Put everything back."""
        self.hear_calls(False)
        while self._undo:
            self._undo.pop()()

    def hear_calls(self, wanted: bool) -> None:
        """Begin, or end, to tell of calls."""
        if wanted and self._call is None:
            self._call = _replaced(nn.Module, "__call__", self._calling)
        elif not wanted and self._call is not None:
            self._call()
            self._call = None

    def _noting(self, original: Callable[..., None]) -> Callable[..., None]:
        listener = self._listener

        @functools.wraps(original)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            if not _inner(self):
                listener.made(self)

        return init

    def _stepping_back(self, original: Callable[..., Any]) -> Callable[..., Any]:
        listener = self._listener

        @functools.wraps(original)
        def attach(self: Any, *args: Any, **kwargs: Any) -> Any:
            listener.steps_back()
            return original(self, *args, **kwargs)

        return attach

    def _calling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        seams, inside, listener = self, self._inside, self._listener

        @functools.wraps(original)
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or seams._call is None or not torch.is_grad_enabled():
                return original(self, *args, **kwargs)
            outermost = not getattr(inside, "now", False)
            listener.called(self, outermost)
            if not outermost:
                return original(self, *args, **kwargs)
            inside.now = True
            try:
                return original(self, *args, **kwargs)
            finally:
                inside.now = False

        return call

    def _step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Tell of a step; of one with a closure when that is done: the model is called in it, the first time too."""
        if not self._listener.watches(optimizer):
            return None
        given = wrap_closure(functools.partial(self._in_step, optimizer), args, kwargs)
        if given is None:
            self._listener.steps(optimizer)
        else:
            StepHooks.of(optimizer)  # what is attached in the closure finds its hooks there, in time for this step
        return given

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Tell of a step in which nothing was in the way: closures stay as they are where only saved tensors count."""
        if not self._listener.watches(optimizer):
            self._listener.steps(optimizer)

    def _in_step(self, optimizer: Any, closure: Callable[[], Any]) -> Any:
        """The closure, after which gradients are final: Lightning has clipped in it."""
        hooks = StepHooks.of(optimizer)
        try:
            loss = closure()
            self._listener.steps(optimizer)
            hooks.prepare()
        finally:
            hooks.leave()
        return loss


def _replaced(owner: type, name: str, around: Callable[[Any], Any]) -> Callable[[], None]:
    """Put ``around(method)`` in the place of a method; gives what puts it back, unless somebody came after."""
    original = owner.__dict__[name]
    mine = around(original)
    setattr(owner, name, mine)

    def undo() -> None:
        if owner.__dict__.get(name) is mine:
            setattr(owner, name, original)

    return undo


def _inner(optimizer: Any) -> bool:
    """Whether another optimizer makes this one for itself: its step is then a part of the other's."""
    frame: types.FrameType | None = sys._getframe(2)
    for _ in range(_DEEP):
        if frame is None:
            return False
        maker = frame.f_locals.get("self")
        if isinstance(maker, torch.optim.Optimizer) and maker is not optimizer:
            return True
        frame = frame.f_back
    return False


def only_fills_state() -> bool:
    """Whether torch's checkpointing makes the step under way, on gradients of zero, to have states to load into."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_init_optim_state":
            return True
        frame = frame.f_back
    return False
