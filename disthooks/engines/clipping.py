"""Loops that clip gradients by themselves: attachments are called just before torch's functions clip."""

from __future__ import annotations

import functools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from disthooks._torch import Inner, in_backward

# [Note: before the loop clips]
# A loop that clips between backward and step destroys what the gradients were: the norm that is logged would be the
# limit, and a rule that waits for large gradients would never see one. So attachments run before torch's own clipping
# functions. Scripts import these by name, often before anything is attached. So the name in torch's module is left
# alone, and the function is replaced that the wrapper behind every name calls (disthooks._torch.Inner).
# Functions that only measure (get_total_norm) do not begin a step, because loops call them to log the norm of one
# micro-batch.
#
# [Note: clipping under a GradScaler]
# Under a GradScaler gradients are final once it has unscaled them. So its scale(), unscale_() and update() are replaced
# by methods that note which scaler is at work. If a loop clips before unscale_(), rules and statistics wait for the
# step, in which the scaler unscales. update() ends the iteration: gradients that another optimizer's loop clips next
# have not been scaled.

ClipListener = Callable[[Sequence[torch.Tensor], Any], None]


class _Clipping:
    """Our functions in the place of torch's, while anybody listens; see [Note: before the loop clips]."""

    def __init__(self) -> None:
        self._listeners: list[weakref.WeakMethod[ClipListener]] = []
        self._undo: dict[str, Callable[[], None]] = {}
        self._inside = threading.local()
        self._scaled_by: weakref.ref[Any] | None = None
        self._scalers: WeakKeyDictionary[Any, weakref.ref[Any]] = WeakKeyDictionary()

    def add(self, method: ClipListener) -> Handle:
        """Call ``method(parameters, scaler_of)`` before each clipping, as long as its object lives."""
        listener = weakref.WeakMethod(method)
        self._listeners.append(listener)
        for name, (owner, attribute) in _wrappers().items():
            if name not in self._undo:
                self._undo[name] = _precede(Inner(getattr(owner, attribute)), self._before)
        for name, kind in _scaler_kinds().items():
            if name not in self._undo:
                self._undo[name] = _listen(kind, self._scales, self._unscales, self._updates)
        return Handle(self, listener)

    def discard(self, listener: weakref.WeakMethod[ClipListener]) -> None:
        """Take a listener off; the last one puts torch's functions back."""
        self._listeners = [one for one in self._listeners if one is not listener and one() is not None]
        if not self._listeners:
            for undo in self._undo.values():
                undo()
            self._undo.clear()
            self._scaled_by = None

    def scaler_of(self, optimizer: Any) -> tuple[Any, bool]:
        """The ``GradScaler`` that the optimizer's gradients go through, and whether gradients are final by now.

        See [Note: clipping under a GradScaler].
        """
        known = self._scalers.get(optimizer)
        scaler = known() if known is not None else self._scaled_by() if self._scaled_by is not None else None
        if scaler is None or not scaler.is_enabled():
            return None, True
        state = scaler._per_optimizer_states[id(optimizer)]
        if state["stage"].name != "UNSCALED" or _overflowed(state, optimizer):
            return None, False
        return scaler, True

    def _before(self, parameters: Sequence[torch.Tensor]) -> None:
        if in_backward() or getattr(self._inside, "now", False):
            return
        self._inside.now = True
        try:
            for listener in list(self._listeners):
                if (method := listener()) is not None:
                    method(parameters, self.scaler_of)
        finally:
            self._inside.now = False

    def _scales(self, scaler: Any) -> None:
        self._scaled_by = weakref.ref(scaler)

    def _updates(self, scaler: Any) -> None:
        if self._scaled_by is not None and self._scaled_by() is scaler:
            self._scaled_by = None

    def _unscales(self, scaler: Any, optimizer: Any) -> None:
        self._scalers[optimizer] = weakref.ref(scaler)


class Handle:
    """Ends what :func:`before_clipping` began."""

    def __init__(self, clipping: _Clipping, listener: weakref.WeakMethod[ClipListener]) -> None:
        self._clipping, self._listener = clipping, listener

    def remove(self) -> None:
        """Take the listener off."""
        self._clipping.discard(self._listener)


_clipping = _Clipping()


def before_clipping(method: ClipListener) -> Handle:
    """Call a method before torch's functions clip gradients; see [Note: before the loop clips].

    The functions are ``clip_grad_norm_``, ``clip_grad_value_`` and ``clip_grads_with_norm_`` of ``torch.nn.utils``,
    under whatever name a script has them, and the method ``clip_grad_norm_`` of FSDP1.

    Args:
        method: a bound method, whose object is not kept alive. It is called with the parameters that are about to be
            clipped, and with a function that gives for an optimizer the ``GradScaler`` that has unscaled its gradients,
            and whether they are final.
    """
    return _clipping.add(method)


def _wrappers() -> dict[str, tuple[Any, str]]:
    functions = {name: (torch.nn.utils, name) for name in ("clip_grad_norm_", "clip_grad_value_")}
    functions["clip_grads_with_norm_"] = (torch.nn.utils.clip_grad, "_clip_grads_with_norm_")
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    return functions if kind is None else {**functions, "FSDP1": (kind, "clip_grad_norm_")}


def _scaler_kinds() -> dict[str, Any]:
    kinds: dict[str, Any] = {"GradScaler": torch.amp.GradScaler}
    sharded = sys.modules.get("torch.distributed.fsdp.sharded_grad_scaler")
    return kinds if sharded is None else {**kinds, "ShardedGradScaler": sharded.ShardedGradScaler}


def _precede(inner: Inner, before: Callable[[Sequence[torch.Tensor]], None]) -> Callable[[], None]:
    true = inner.function

    @functools.wraps(true)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return true(parameters, *args, **kwargs)
        if isinstance(parameters, torch.nn.Module):  # FSDP1's method
            before(list(parameters.parameters()))
            return true(parameters, *args, **kwargs)
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        before(given)
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


def _overflowed(state: Any, optimizer: Any) -> bool:
    """Whether the scaler will keep the step back, so that there is no step to begin.

    The host reads what the scaler's own step reads later. A fused optimizer is told on the device, and steps.
    """
    told = getattr(optimizer, "_step_supports_amp_scaling", False)
    return not told and any(found.item() for found in state["found_inf_per_device"].values())


def _listen(
    kind: Any,
    scales: Callable[[Any], None],
    unscales: Callable[[Any, Any], None],
    updates: Callable[[Any], None],
) -> Callable[[], None]:
    """Call the given functions when a ``GradScaler`` scales a loss, unscales gradients, and ends an iteration."""
    true = {name: kind.__dict__[name] for name in ("scale", "unscale_", "update")}

    @functools.wraps(true["scale"])
    def scale(self: Any, outputs: Any) -> Any:
        scales(self)
        return true["scale"](self, outputs)

    @functools.wraps(true["unscale_"])
    def unscale_(self: Any, optimizer: Any) -> None:
        unscales(self, optimizer)
        true["unscale_"](self, optimizer)

    @functools.wraps(true["update"])
    def update(self: Any, *args: Any, **kwargs: Any) -> None:
        updates(self)
        true["update"](self, *args, **kwargs)

    mine = {"scale": scale, "unscale_": unscale_, "update": update}
    for name, function in mine.items():
        setattr(kind, name, function)

    def undo() -> None:
        for name, function in mine.items():
            if kind.__dict__.get(name) is function:
                setattr(kind, name, true[name])

    return undo
