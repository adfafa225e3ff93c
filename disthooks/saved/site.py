"""A place where hooks open around calls: a module, a function, an autograd Function."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Generator, Hashable
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from disthooks._torch import uncompiled
from disthooks.saved.entry import BREAK, why_not
from disthooks.saved.frame import Frame
from disthooks.saved.ledger import Ledger
from disthooks.saved.pipeline import Pipeline


class Site(NamedTuple):
    """What to do with the tensors saved in a call, who counts them, and the name for errors."""

    pipeline: Pipeline
    ledger: Ledger
    name: str = ""
    openers: tuple[Any, ...] = ()  # of an attached module: those whose ``__call__`` opens it; see classes.py

    @uncompiled(BREAK, callees=False)
    def call(self, module: nn.Module | None, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What ``function`` returns, run with the hooks on, or without and counted where they cannot be.

        The body of a generator runs after the call: it gets one that opens the hooks each time it goes on.
        """
        result = self._once(module, function, *args, **kwargs)
        return self._resumed(module, result) if type(result) is types.GeneratorType else result

    @uncompiled(BREAK, callees=False)
    def _once(self, module: nn.Module | None, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        run = _calls(cast(Hashable, type(module)))
        reason = why_not()
        if reason is not None:
            self.ledger.count_pass(reason, self.name)
            return run(function, *args, **kwargs)
        frame = Frame(self.pipeline, self.ledger, self.name, module)
        with frame:
            result = run(function, *args, **kwargs)
        if frame.has_seen_nothing and module is not None and function is not _until_it_ends:
            self._look_elsewhere(module, result, args)
        return result

    @uncompiled(BREAK)
    def _look_elsewhere(self, module: nn.Module, result: Any, args: tuple[Any, ...]) -> None:
        """Say so if the layers of ``module``, in whose call nothing was saved, seem to have run in other threads.

        The graph tells: what came out has a history that what went in has not, and weights that train.
        """
        if self.ledger.has_said("threads") or next(module.children(), None) is None:
            return
        if not any(p.requires_grad for p in module.parameters()):
            return
        before = {id(tensor.grad_fn) for tensor in _tensors(args)}
        if any(tensor.grad_fn is not None and id(tensor.grad_fn) not in before for tensor in _tensors(result)):
            self.ledger.say_elsewhere(self.name)

    @uncompiled(BREAK, callees=False)
    def _resumed(self, module: nn.Module | None, body: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """``body`` with the hooks on while its own code runs and off while its consumer's does."""
        go_on: Callable[[], Any] = functools.partial(next, body)
        while True:
            ended, value = self._once(module, _until_it_ends, go_on)
            if ended:
                return value
            try:
                go_on = functools.partial(body.send, (yield value))
            except GeneratorExit:
                body.close()  # without hooks: a collection may have ended it, in the middle of anything
                raise
            except BaseException as error:
                go_on = functools.partial(body.throw, error)


@functools.lru_cache(maxsize=256)
@uncompiled()
def _calls(kind: Hashable) -> Callable[..., Any]:
    """What calls a function, in a frame that can be compiled: the compiler inlines those of torch, or skips them.

    Compiled code is found, and its number limited, by code object: each ``kind`` of module gets one.
    """

    def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    run.__code__ = run.__code__.replace()
    return run


def _until_it_ends(go_on: Callable[[], Any]) -> tuple[bool, Any]:
    """Whether the generator has ended, and what it gave; its end is no error, after which nothing is stored."""
    try:
        return False, go_on()
    except StopIteration as stop:
        return True, stop.value


def _tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in ``value`` and in the tuples, lists and dicts in it."""
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [tensor for part in parts for tensor in _tensors(part)]
