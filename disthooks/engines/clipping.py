"""Loops that clip gradients by themselves: what is attached to the optimizer is told just before."""

from __future__ import annotations

import functools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from disthooks._torch import Inner, in_backward

# [Note: before the loop clips]
# A loop that clips between backward and step leaves gradients of which nobody can tell what they were: the norm that is
# logged would be the limit, and a rule that waits for large gradients would never see one. So torch's own functions are
# preceded. Scripts import them by name, often before anything is attached, so it is not the name in torch's module that
# is exchanged but the function that the wrapper behind every name calls (disthooks._torch.Inner).
# Functions that only measure (get_total_norm) do not begin a step: loops call them to log the norm of one micro-batch.
# Under a GradScaler gradients are final once it has unscaled them, so its scale() and unscale_() are listened to: a
# loop that clips before leaves rules and statistics to the step, in which the scaler unscales. Its update() ends the
# iteration: what another optimizer's loop clips next, nobody has scaled.

ClipListener = Callable[[Sequence[torch.Tensor], Any], None]


class _Clipping:
    """Our functions in the place of torch's, while anybody listens."""

    def __init__(self) -> None:
        self._ears: list[weakref.WeakMethod[ClipListener]] = []
        self._undo: dict[str, Callable[[], None]] = {}
        self._inside = threading.local()
        self._scaled_by: weakref.ref[Any] | None = None
        self._scalers: WeakKeyDictionary[Any, weakref.ref[Any]] = WeakKeyDictionary()

    def add(self, hears: ClipListener) -> Handle:
        """Have ``hears(parameters, scaler_of)`` called before each clipping, as long as its object lives."""
        ear = weakref.WeakMethod(hears)
        self._ears.append(ear)
        for name, (owner, attribute) in _wrappers().items():
            if name not in self._undo:
                self._undo[name] = _precede(Inner(getattr(owner, attribute)), self._before)
        for name, kind in _scaler_kinds().items():
            if name not in self._undo:
                self._undo[name] = _listen(kind, self._scales, self._unscales, self._updates)
        return Handle(self, ear)

    def discard(self, ear: weakref.WeakMethod[ClipListener]) -> None:
        """The last one that leaves puts torch's functions back."""
        self._ears = [one for one in self._ears if one is not ear and one() is not None]
        if not self._ears:
            for undo in self._undo.values():
                undo()
            self._undo.clear()
            self._scaled_by = None

    def scaler_of(self, optimizer: Any) -> tuple[Any, bool]:
        """The ``GradScaler`` that the optimizer's gradients go through, and whether gradients are final by now."""
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
            for ear in list(self._ears):
                if (hears := ear()) is not None:
                    hears(parameters, self.scaler_of)
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

    def __init__(self, clipping: _Clipping, ear: weakref.WeakMethod[ClipListener]) -> None:
        self._clipping, self._ear = clipping, ear

    def remove(self) -> None:
        """Be told no more."""
        self._clipping.discard(self._ear)


_clipping = _Clipping()


def before_clipping(hears: ClipListener) -> Handle:
    """Have a method called before torch's functions clip gradients; see [Note: before the loop clips].

    They are ``clip_grad_norm_``, ``clip_grad_value_`` and ``clip_grads_with_norm_`` of ``torch.nn.utils``, under
    whatever name a script has them, and the method ``clip_grad_norm_`` of FSDP1.

    Args:
        hears: a bound method, of an object that is not kept alive; called with the parameters that are about to be
            clipped, and a function that tells of an optimizer which ``GradScaler`` has unscaled its gradients, and
            whether they are final.
    """
    return _clipping.add(hears)


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
        # torch warns of a generator that is empty
        return true(_again(given) if isinstance(parameters, types.GeneratorType) else given, *args, **kwargs)

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
    """Whether the scaler will keep the step back, so that there is none to begin.

    The host reads what it reads in the scaler's step anyway. A fused optimizer is told on the device, and steps.
    """
    told = getattr(optimizer, "_step_supports_amp_scaling", False)
    return not told and any(found.item() for found in state["found_inf_per_device"].values())


def _again(given: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    yield from given


def _listen(
    kind: Any,
    scales: Callable[[Any], None],
    unscales: Callable[[Any, Any], None],
    updates: Callable[[Any], None],
) -> Callable[[], None]:
    """Be told when a ``GradScaler`` scales a loss, unscales the gradients of an optimizer, and ends an iteration."""
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
