"""Which ``GradScaler`` the gradients of an optimizer go through."""

# [Note: the scaler of an optimizer]
# Nothing in an optimizer tells which `GradScaler` its gradients go through, and several may be in use, one for each
# optimizer. So while a step is attached, the methods `scale`, `unscale_`, `step` and `update` of the class are replaced
# by methods that note which scaler is at work. `unscale_` and `step` name the optimizer. Before either was called, the
# one scaler that has scaled a loss in this iteration is taken for it; if several have, it is not known.
# `update` ends the iteration. If the scaler has kept a step back, its losses and gradients belong to no step.

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from disthooks._torch import scaler_under_way
from disthooks.errors import UsageError


class _Scalers:
    """Notes which scaler is at work; see [Note: the scaler of an optimizer]."""

    def __init__(self) -> None:
        self._users: WeakSet[Any] = WeakSet()
        self._undo: dict[type[Any], Callable[[], None]] = {}
        self._active: WeakSet[Any] = WeakSet()  # those that have scaled a loss in this iteration
        self._known: WeakKeyDictionary[Any, weakref.ref[Any]] = WeakKeyDictionary()  # the scaler of each optimizer
        self._unscaled: WeakSet[Any] = WeakSet()  # optimizers that have stepped without a scaler

    def use(self, step: Any) -> None:
        """Begin to note, as long as ``step`` lives or until :meth:`leave`; ``step`` is told of each ``update``."""
        self._users.add(step)
        kinds = [torch.amp.GradScaler]
        # FSDP1's scaler is not imported only to replace its methods: without it no script calls them.
        if (sharded := sys.modules.get("torch.distributed.fsdp.sharded_grad_scaler")) is not None:
            kinds.append(sharded.ShardedGradScaler)
        for kind in kinds:
            if kind not in self._undo:
                self._undo[kind] = self._replace(kind)

    def leave(self, step: Any) -> None:
        self._users.discard(step)
        if not self._users:
            for undo in self._undo.values():
                undo()
            self._undo.clear()
            self._active.clear()

    def of(self, optimizer: Any) -> Any:
        """The scaler that the gradients of ``optimizer`` go through in this iteration; None if there is none.

        Raises:
            UsageError: when several scalers are in use and nothing tells which one is this optimizer's.
        """
        known = self._known.get(optimizer)
        scaler = None if known is None else known()
        if scaler is not None and (scaler in self._active or stage_of(scaler, optimizer) != "READY"):
            return scaler
        if optimizer in self._unscaled:
            return None
        active = list(self._active)
        if len(active) > 1:
            raise UsageError(
                f"{len(active)} GradScalers are in use, and nothing tells which one the gradients of "
                f"{type(optimizer).__name__} go through: call scaler.unscale_(optimizer) for each optimizer, with its "
                "own scaler, before the first of them steps"
            )
        return active[0] if active else None

    def of_unscaled(self, optimizer: Any) -> Any:
        """The same, for a step that the loop begins early without giving a scaler.

        Raises:
            UsageError: also when a scaler may have scaled the gradients, and no call has told that it is their scaler.
        """
        scaler = self.of(optimizer)
        if scaler is None or stage_of(scaler, optimizer) != "READY" or self.is_known(optimizer):
            return scaler
        raise UsageError(
            "begin_step(): a GradScaler has scaled a loss in this iteration, and has not unscaled the gradients of "
            f"{type(optimizer).__name__}: call begin_step(scaler), or scaler.unscale_(optimizer) before. If these "
            "gradients go through no scaler, call begin_step(torch.amp.GradScaler(enabled=False))"
        )

    def is_known(self, optimizer: Any) -> bool:
        """Whether a call has told the scaler of ``optimizer``."""
        return optimizer in self._known

    def note_step(self, optimizer: Any) -> None:
        """``optimizer`` steps now; if no scaler has called it, its gradients go through none."""
        if self._users and self._active and scaler_under_way() is None:
            self._unscaled.add(optimizer)

    def _replace(self, kind: Any) -> Callable[[], None]:
        """Replace the methods of a class of scalers; the result undoes this."""
        notes = {"scale": self._note_scale, "unscale_": self._know, "step": self._know, "update": self._note_update}
        true = {name: kind.__dict__[name] for name in notes if name in kind.__dict__}
        mine = {name: _noting(function, notes[name]) for name, function in true.items()}
        for name, function in mine.items():
            setattr(kind, name, function)

        def undo() -> None:
            for name, function in mine.items():
                if kind.__dict__.get(name) is function:
                    setattr(kind, name, true[name])

        return undo

    def _note_scale(self, scaler: Any, *args: Any, **kwargs: Any) -> None:
        if scaler.is_enabled():
            self._active.add(scaler)

    def _know(self, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        if scaler.is_enabled():
            self._known[optimizer] = weakref.ref(scaler)
            self._unscaled.discard(optimizer)

    def _note_update(self, scaler: Any, *args: Any, **kwargs: Any) -> None:
        for user in list(self._users):
            if mine := [one for one in user.optimizers if (known := self._known.get(one)) and known() is scaler]:
                user.end_iteration(scaler, mine)
        self._active.discard(scaler)


def _noting(true: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
    """A method that calls ``note`` with the same arguments, and then ``true``."""

    @functools.wraps(true)
    def method(*args: Any, **kwargs: Any) -> Any:
        note(*args, **kwargs)
        return true(*args, **kwargs)

    return method


scalers = _Scalers()


def stage_of(scaler: Any, optimizer: Any) -> str:
    """What ``scaler`` has done with the gradients of ``optimizer`` in this iteration: READY, UNSCALED or STEPPED."""
    name: str = scaler._per_optimizer_states[id(optimizer)]["stage"].name
    return name


def is_final(optimizer: Any) -> bool:
    """Whether the gradients of ``optimizer`` are unscaled, and its scaler, if it has one, will call its step.

    If gradients overflowed, the scaler makes no step. Its own ``step`` reads the same numbers later. A fused optimizer
    reads them on the device, and its step is called.
    """
    try:
        scaler = scalers.of(optimizer)
    except UsageError:  # it is not known yet
        return False
    if scaler is None or not scaler.is_enabled():
        return True
    state = scaler._per_optimizer_states[id(optimizer)]
    if state["stage"].name != "UNSCALED":
        return False
    is_fused = getattr(optimizer, "_step_supports_amp_scaling", False)
    return is_fused or not any(found.item() for found in state["found_inf_per_device"].values())
