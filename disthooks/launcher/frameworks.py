"""What a session asks of the frameworks that a script imports: which checkpoint it went on from, and its own log.

Nothing is imported here. A framework's class gets its hooks when the script has imported it.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import sys
import types
import weakref
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from typing import Any

import torch
from torch import nn

from disthooks._match import unwrap_compiled
from disthooks.engines.base import inner_optimizer
from disthooks.errors import AttachError
from disthooks.grads.attach import Gradients

Undo = Callable[[], None]

# [Note: state waits for its attachment]
# A script loads its checkpoint before it trains, and a session attaches when the model is first called: there is
# nothing yet that the state could be loaded into. So the session remembers the folder and the optimizers that it was
# loaded for, and reads the file when one of these optimizers gets its hooks.


class Frameworks:
    """The accelerators and Trainers of a script, and what each of them has loaded."""

    def __init__(self, attached: Callable[[Any], Gradients | None]) -> None:
        self._attached = attached  # what is attached to an optimizer
        self._accelerators: weakref.WeakSet[Any] = weakref.WeakSet()
        self._loads: list[tuple[weakref.ref[Any], str, list[weakref.ref[Any]]]] = []
        self._callbacks: weakref.WeakSet[Any] = weakref.WeakSet()
        self._loaded: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers that were given a state
        self._undo: list[Undo] = []

    def open(self) -> None:
        """Begin to listen, to those that are imported already and to those that will be."""
        self._undo += [
            when_imported("accelerate.accelerator", self._accelerate),
            when_imported("transformers.trainer", self._transformers),
            when_imported("lightning.pytorch.trainer.trainer", self._lightning),
            when_imported("pytorch_lightning.trainer.trainer", self._lightning),
        ]

    def close(self) -> None:
        """Put everything back; what was made meanwhile keeps what it has."""
        while self._undo:
            self._undo.pop()()

    def made(self, optimizer: torch.optim.Optimizer) -> None:
        """See whether a state is loaded into ``optimizer``; accelerate loads an empty one when it prepares."""
        loaded = self._loaded
        optimizer.register_load_state_dict_post_hook(lambda one: loaded.add(one) if one.state else None)

    def join(self, model: nn.Module, gradients: Gradients) -> bool:
        """Connect what was attached to the accelerator or the Trainer it belongs to, and give it the state it had.

        Returns:
            Whether rules and statistics are where they should be: False when the script has loaded a state into the
            optimizer, and none of them.
        """
        resumed = False
        for accelerator in self._accelerators:
            if _prepared(accelerator, model, gradients.optimizer):
                resumed |= self._join_accelerator(accelerator, gradients)
        for callback in list(self._callbacks):
            resumed |= callback.join(model, gradients)
        return resumed or gradients.optimizer not in self._loaded

    def _join_accelerator(self, accelerator: Any, gradients: Gradients) -> bool:
        from disthooks.integrations.accelerate import connect, load_from, log_to_trackers

        connect(accelerator, gradients)
        log_to_trackers(accelerator, gradients)
        for owner, folder, optimizers in reversed(self._loads):
            if owner() is accelerator and any(one() is gradients.optimizer for one in optimizers):
                load_from(accelerator, gradients, folder)
                return True
        return False

    def _accelerate(self, module: types.ModuleType) -> Undo:
        def init(accelerator: Any) -> None:
            self._accelerators.add(accelerator)
            mine = weakref.ref(accelerator)

            def load(models: Any, folder: str) -> None:
                if self._undo and (found := mine()) is not None:
                    optimizers = [weakref.ref(_inner(one)) for one in found._optimizers]
                    self._loads.append((mine, folder, optimizers))

            accelerator.register_load_state_pre_hook(load)

        return after_init(module.Accelerator, init)

    def _transformers(self, module: types.ModuleType) -> Undo:
        def init(trainer: Any) -> None:
            from disthooks.integrations.transformers import DisthooksCallback, WaitingCallback

            if self._undo and not any(isinstance(one, DisthooksCallback) for one in trainer.callback_handler.callbacks):
                waiting = WaitingCallback(self._attached)
                self._callbacks.add(waiting)
                trainer.add_callback(waiting)
                waiting.to_the_front(trainer)

        return after_init(module.Trainer, init)

    def _lightning(self, module: types.ModuleType) -> Undo:
        def init(trainer: Any) -> None:
            from disthooks.integrations.lightning import DisthooksCallback, WaitingCallback

            if self._undo and not any(isinstance(one, DisthooksCallback) for one in trainer.callbacks):
                waiting = WaitingCallback(self._attached)
                self._callbacks.add(waiting)
                trainer.callbacks.insert(0, waiting)  # before those that monitor, and those that write checkpoints

        return after_init(module.Trainer, init)


def after_init(owner: type, then: Callable[[Any], None]) -> Undo:
    """Have ``then`` called with each object of ``owner`` when it is made; gives what puts ``__init__`` back."""
    original: Callable[..., None] = owner.__dict__["__init__"]

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        then(self)

    owner.__init__ = init  # type: ignore[misc]

    def undo() -> None:
        if owner.__dict__.get("__init__") is init:
            owner.__init__ = original  # type: ignore[misc]

    return undo


class _Finder(importlib.abc.MetaPathFinder):
    """Has a function called when the module ``name`` has been imported; finds nothing itself."""

    def __init__(self, name: str, then: Callable[[types.ModuleType], None]) -> None:
        self._name, self._then, self._looking = name, then, False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name or self._looking:
            return None
        self._looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._looking = False
        loader: Any = spec.loader if spec is not None else None
        if loader is not None:
            execute, then = loader.exec_module, self._then

            def exec_module(module: types.ModuleType) -> None:
                execute(module)
                then(module)

            loader.exec_module = exec_module
        return spec


def when_imported(name: str, then: Callable[[types.ModuleType], Undo]) -> Undo:
    """Have ``then`` called with the module ``name``: now if it is imported, else when it is; gives what undoes it."""
    undo: list[Undo] = []
    there = sys.modules.get(name)
    if there is not None:
        return then(there)
    finder = _Finder(name, lambda module: undo.append(then(module)) if finder in sys.meta_path else None)
    sys.meta_path.insert(0, finder)

    def close() -> None:
        sys.meta_path.remove(finder)
        while undo:
            undo.pop()()

    return close


def _prepared(accelerator: Any, model: nn.Module, optimizer: Any) -> bool:
    """Whether ``accelerator`` prepared the optimizer or the model."""
    mine = any(_inner(one) is optimizer for one in accelerator._optimizers)
    return mine or any(unwrap_compiled(one) is model for one in accelerator._models)


def _inner(optimizer: Any) -> Any:
    try:
        return inner_optimizer(optimizer)
    except AttachError:  # a dummy, in the place of what DeepSpeed makes
        return optimizer
