"""Training loops that clip gradients by themselves: attachments are called just before torch's functions clip."""

from __future__ import annotations

import functools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from disthooks._torch import Inner, in_backward, own_wrapper
from disthooks.engines.optimizer_step import CallbackHandle

# [Note: before the loop clips]
# If a loop clips between backward and step, the gradients in the step are no longer those of backward: the norm that is
# logged would be the limit, and a rule that waits for large gradients would never see one. So attachments run before
# torch's own clipping functions. Scripts import these by name, often before anything is attached. So the name in
# torch's module is left alone, and the function is replaced that the wrapper behind every name calls
# (disthooks._torch.Inner). Functions that only measure (get_total_norm) do not begin a step, because loops call them to
# log the norm of one micro-batch. A user's function in the place of torch's is called as it is. If torch's is not found
# behind it, by `__wrapped__` or `partial.func` or under its other name, attachments run in the step.
#
# [Note: clipping under a GradScaler]
# Under a GradScaler gradients are final once it has unscaled them. If a loop clips before `unscale_`, rules and
# statistics wait for the step, in which the scaler unscales; see [Note: the scaler of an optimizer] in scalers.py.

#: It gets the parameters, and whether the loop has measured their norm before.
ClipListener = Callable[[Sequence[torch.Tensor], bool], None]


class _Clipping:
    """Our functions in the place of torch's, while there is a listener; see [Note: before the loop clips]."""

    def __init__(self) -> None:
        self._listeners: list[weakref.WeakMethod[ClipListener]] = []
        self._undo: dict[str, Callable[[], None]] = {}
        self._inside = threading.local()

    def add(self, method: ClipListener) -> CallbackHandle:
        """Call ``method(parameters, has_norm)`` before each clipping, as long as its object lives."""
        listener = weakref.WeakMethod(method)
        self._listeners.append(listener)
        clip_grad = torch.nn.utils.clip_grad
        wrappers = {
            name: own_wrapper(getattr(clip_grad, name)) or own_wrapper(getattr(torch.nn.utils, name))
            for name in ("clip_grad_norm_", "clip_grad_value_")
        }
        # If a user's function hides the first, its norm is known before the last is called: that is no time for rules.
        hidden = wrappers["clip_grad_norm_"] is None
        wrappers["clip_grads_with_norm_"] = None if hidden else own_wrapper(clip_grad._clip_grads_with_norm_)
        # FSDP1 is not imported only to replace its method: without it no script calls the method.
        fsdp1: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
        if fsdp1 is not None:
            wrappers["FSDP1"] = own_wrapper(fsdp1.clip_grad_norm_)
        for name, wrapper in wrappers.items():
            if name not in self._undo and wrapper is not None:
                self._undo[name] = self._replace_clipping(Inner(wrapper), name == "clip_grads_with_norm_")
        return CallbackHandle(self, self._listeners, listener)

    def leave(self) -> None:
        """If no listener is left, put torch's functions back."""
        self._listeners[:] = [listener for listener in self._listeners if listener() is not None]
        if not self._listeners:
            for undo in self._undo.values():
                undo()
            self._undo.clear()

    def _before(self, parameters: Sequence[torch.Tensor], has_norm: bool) -> None:
        # A hook that clips in backward has one gradient of many, and a listener may clip too: then the loop does not
        # clip.
        if in_backward() or getattr(self._inside, "now", False):
            return
        self._inside.now = True
        try:
            for listener in list(self._listeners):
                if (method := listener()) is not None:
                    method(parameters, has_norm)
        finally:
            self._inside.now = False

    def _replace_clipping(self, inner: Inner, has_norm: bool) -> Callable[[], None]:
        """Call the listeners before one of torch's clipping functions; the result undoes this."""
        true = inner.function

        @functools.wraps(true)
        def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return true(parameters, *args, **kwargs)
            if isinstance(parameters, torch.nn.Module):  # FSDP1's method
                self._before(list(parameters.parameters()), has_norm)
                return true(parameters, *args, **kwargs)
            given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            self._before(given, has_norm)
            # A generator stays a generator, because torch warns of one that is empty.
            same = (each for each in given) if isinstance(parameters, types.GeneratorType) else given
            return true(same, *args, **kwargs)

        @functools.wraps(true)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            return clip(self, *args, **kwargs)

        mine = method if "self" in true.__code__.co_varnames[:1] else clip
        inner.function = mine

        def undo() -> None:
            if inner.function is mine:
                inner.function = true

        return undo


_clipping = _Clipping()


def before_clipping(method: ClipListener) -> CallbackHandle:
    """Call a method before torch's functions clip gradients; see [Note: before the loop clips].

    The functions are ``clip_grad_norm_``, ``clip_grad_value_`` and ``clip_grads_with_norm_`` of ``torch.nn.utils``,
    under whatever name a script has them, and the method ``clip_grad_norm_`` of FSDP1.

    Args:
        method: a bound method, whose object is not kept alive. It is called with the parameters that are about to be
            clipped, and with whether the loop has measured the norm that it clips by (``clip_grads_with_norm_``).
    """
    return _clipping.add(method)
