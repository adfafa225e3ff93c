"""The methods of torch and of frameworks that are replaced, so that a session knows what the script does."""

# [Note: what is replaced in torch]
# The session is told of new optimizers (by `Optimizer.__init__`), of modules that are called (by `nn.Module.__call__`,
# and only while an optimizer waits for its model), and of steps (by torch's own global hooks). Methods are replaced and
# classes are not, so an isinstance test, a pickle and a subclass see no difference. A global forward hook would be too
# late for the calls: when it runs, the module has chosen its own hooks already; and torch.compile warns of it
# (decision 61). If other code replaces the same method later, its method stays: undoing puts a method back only if ours
# is still there.

# [Note: a framework's class gets its hooks when it is imported]
# The session begins before the script imports accelerate, transformers or Lightning. Importing them here would cost
# seconds in a script that uses none of them. So a finder in `sys.meta_path`, which finds no module itself, waits for
# the import and then replaces `__init__` of the framework's class. Searching all objects for accelerators when hooks
# are attached would be too late, because the script has loaded its checkpoint by then (decision 91).

# [Note: state waits for its attachment]
# A script loads its checkpoint before it trains, but a session attaches only when the model is first called. When the
# checkpoint is loaded, there are no hooks yet that could take their part of the state. So the session remembers the
# folder and the optimizers that the checkpoint was loaded for, and reads the file when one of them gets its hooks.

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import sys
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from disthooks._match import unwrap_compiled
from disthooks.config import Plan
from disthooks.engines.base import inner_optimizer
from disthooks.engines.optimizer_step import OptimizerHooks, wrap_closure
from disthooks.errors import AttachError
from disthooks.grads.attachment import Gradients
from disthooks.grads.sinks.trackers import known_accelerators

Undo = Callable[[], None]

_MAX_FRAMES = 12  # most frames between the __init__ of an optimizer and the __init__ of an optimizer inside it


def replace_method(owner: type, name: str, wrap: Callable[[Any], Any]) -> Undo:
    """Put ``wrap(method)`` in the place of a method; what is returned undoes it, unless others replaced it again."""
    original = owner.__dict__[name]
    replacement = wrap(original)
    setattr(owner, name, replacement)

    def undo() -> None:
        if owner.__dict__.get(name) is replacement:
            setattr(owner, name, original)

    return undo


def after_init(owner: type, then: Callable[[Any], None]) -> Undo:
    """Call ``then`` with each new object of the class ``owner``; returns a function that ends this."""

    def wrap(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            then(self)

        return init

    return replace_method(owner, "__init__", wrap)


# -- torch


class TorchPatches:
    """The methods of torch that are replaced while a session runs. See [Note: what is replaced in torch]."""

    def __init__(self, session: Any) -> None:  # a Session, whose file imports this one
        self._session, self._in_call = session, threading.local()
        self._undo: list[Undo] = []
        self._undo_call: Undo | None = None

    def open(self) -> None:
        """Begin to tell the session of optimizers, of steps, and of plans that the script attaches."""
        session = self._session

        def made(optimizer: Any) -> None:
            if not _is_inner(optimizer):
                session.made(optimizer)

        def yielding(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def attach(self: Any, *args: Any, **kwargs: Any) -> Any:
                session.yield_to_script()
                return original(self, *args, **kwargs)

            return attach

        # All ranks call step() of the schedule; the forward of a later stage waits for that of an earlier one.
        self._undo.append(when_imported("torch.distributed.pipelining.schedules", self._patch_pipelines))
        self._undo.append(after_init(torch.optim.Optimizer, made))
        self._undo += [replace_method(Plan, name, yielding) for name in ("save", "watch", "prepare")]
        self._undo.append(register_optimizer_step_pre_hook(self._before_step).remove)
        self._undo.append(register_optimizer_step_post_hook(self._after_step).remove)

    def _patch_pipelines(self, module: types.ModuleType) -> Undo:
        """Tell the session of the modules of a pipeline's stages before its schedule runs them."""
        session = self._session

        def stepping(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def step(schedule: Any, *args: Any, **kwargs: Any) -> Any:
                for stage in getattr(schedule, "_stages", None) or [schedule._stage]:
                    session.called(stage.submod, True)
                return original(schedule, *args, **kwargs)

            return step

        kinds = (module.PipelineScheduleSingle, module.PipelineScheduleMulti)
        undo = [replace_method(kind, "step", stepping) for kind in kinds]

        def undo_all() -> None:
            for each in undo:
                each()

        return undo_all

    def close(self) -> None:
        self.hear_calls(False)
        while self._undo:
            self._undo.pop()()

    def hear_calls(self, should_hear: bool) -> None:
        if should_hear and self._undo_call is None:
            self._undo_call = replace_method(nn.Module, "__call__", self._telling)
        elif not should_hear and self._undo_call is not None:
            self._undo_call()
            self._undo_call = None

    def _telling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        patches, in_call, session = self, self._in_call, self._session

        @functools.wraps(original)
        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or patches._undo_call is None or not torch.is_grad_enabled():
                return original(self, *args, **kwargs)
            is_outermost = not getattr(in_call, "now", False)
            session.called(self, is_outermost)
            if not is_outermost:
                return original(self, *args, **kwargs)
            in_call.now = True
            try:
                return original(self, *args, **kwargs)
            finally:
                in_call.now = False

        return call

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Tell the session of a step; if the step has a closure, after the closure, which calls the model."""
        if not self._session.watches(optimizer):
            return None
        given = wrap_closure(functools.partial(self._in_closure, optimizer), args, kwargs)
        if given is None:
            self._session.steps(optimizer)
        else:
            OptimizerHooks.of(optimizer)  # hooks that are attached inside the closure join these, in time for this step
        return given

    def _in_closure(self, optimizer: Any, closure: Callable[[], Any]) -> Any:
        """Run the closure, then tell the session: gradients are final only then, as Lightning clips in it."""
        hooks = OptimizerHooks.of(optimizer)
        try:
            loss = closure()
            self._session.steps(optimizer)
            hooks.begin_early()
        finally:
            hooks.leave()
        return loss

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Tell the session of a step whose gradients are not watched: its closure was not replaced."""
        if not self._session.watches(optimizer):
            self._session.steps(optimizer)


def _is_inner(optimizer: Any) -> bool:
    """Whether another optimizer makes this one for itself. Then its step is a part of the other's step."""
    frame: types.FrameType | None = sys._getframe(3)  # past the functions of this file
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return False
        maker = frame.f_locals.get("self")
        if isinstance(maker, torch.optim.Optimizer) and maker is not optimizer:
            return True
        frame = frame.f_back
    return False


def only_fills_state() -> bool:
    """Whether torch.distributed.checkpoint makes this step, on zeros, to create states that it loads into."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_init_optim_state":
            return True
        frame = frame.f_back
    return False


# -- frameworks


class FrameworkPatches:
    """The accelerators and Trainers of a script, and the checkpoints that they have loaded."""

    def __init__(self, attached: Callable[[Any], Gradients | None]) -> None:
        self._attached = attached
        self._accelerators: weakref.WeakSet[Any] = weakref.WeakSet()
        self._loads: list[tuple[weakref.ref[Any], str, list[weakref.ref[Any]]]] = []  # accelerator, folder, optimizers
        self._callbacks: weakref.WeakSet[Any] = weakref.WeakSet()
        self._loaded: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers that have loaded a state
        self._undo: list[Undo] = []

    def open(self) -> None:
        """Begin to listen. See [Note: a framework's class gets its hooks when it is imported]."""
        self._undo += [
            when_imported("accelerate.accelerator", self._patch_accelerate),
            when_imported("transformers.trainer", self._patch_transformers),
            when_imported("lightning.pytorch.trainer.trainer", self._patch_lightning),
            when_imported("pytorch_lightning.trainer.trainer", self._patch_lightning),
        ]

    def close(self) -> None:
        """Put all methods back. Accelerators and Trainers that exist keep their hooks and callbacks."""
        while self._undo:
            self._undo.pop()()

    def made(self, optimizer: torch.optim.Optimizer) -> None:
        """Note whether a state is loaded into `optimizer`. The empty state that accelerate loads does not count."""
        loaded = self._loaded
        optimizer.register_load_state_dict_post_hook(lambda one: loaded.add(one) if one.state else None)

    def join(self, model: nn.Module, gradients: Gradients) -> bool:
        """Connect an attachment to its accelerator or Trainer, and give it the state that was loaded for it.

        See [Note: state waits for its attachment]. False if only the optimizer's state was loaded.
        """
        has_state = False
        for accelerator in self._accelerators:
            is_prepared = any(_inner(one) in gradients.optimizers for one in accelerator._optimizers)
            if not is_prepared and all(unwrap_compiled(one) is not model for one in accelerator._models):
                continue
            from disthooks.integrations.accelerate import connect, load_from, log_to_trackers

            connect(accelerator, gradients)
            log_to_trackers(accelerator, gradients)
            # The checkpoint that was loaded last counts.
            for owner, folder, optimizers in reversed(self._loads):
                if owner() is accelerator and any(one() in gradients.optimizers for one in optimizers):
                    load_from(accelerator, gradients, folder)
                    has_state = True
                    break
        for callback in list(self._callbacks):
            has_state |= callback.join(model, gradients)
        return has_state or not any(one in self._loaded for one in gradients.optimizers)

    def _patch_accelerate(self, module: types.ModuleType) -> Undo:
        def init(accelerator: Any) -> None:
            self._accelerators.add(accelerator)
            known_accelerators.add(accelerator)
            weak = weakref.ref(accelerator)  # the accelerator keeps the hook, which must not keep the accelerator

            def load(models: Any, folder: str) -> None:
                if self._undo and (owner := weak()) is not None:
                    optimizers = [weakref.ref(_inner(one)) for one in owner._optimizers]
                    self._loads.append((weak, folder, optimizers))

            accelerator.register_load_state_pre_hook(load)

        return after_init(module.Accelerator, init)

    def _patch_transformers(self, module: types.ModuleType) -> Undo:
        def init(trainer: Any) -> None:
            from disthooks.integrations.transformers import DisthooksCallback, WaitingCallback

            if self._undo and not any(isinstance(one, DisthooksCallback) for one in trainer.callback_handler.callbacks):
                waiting = WaitingCallback(self._attached)
                self._callbacks.add(waiting)
                trainer.add_callback(waiting)
                waiting.to_the_front(trainer)

        return after_init(module.Trainer, init)

    def _patch_lightning(self, module: types.ModuleType) -> Undo:
        def init(trainer: Any) -> None:
            from disthooks.integrations.lightning import DisthooksCallback, WaitingCallback

            if self._undo and not any(isinstance(one, DisthooksCallback) for one in trainer.callbacks):
                waiting = WaitingCallback(self._attached)
                self._callbacks.add(waiting)
                trainer.callbacks.insert(0, waiting)  # before callbacks that monitor numbers or write checkpoints

        return after_init(module.Trainer, init)


class _Finder(importlib.abc.MetaPathFinder):
    """Calls a function when the module ``name`` has been imported. It finds no module itself."""

    def __init__(self, name: str, then: Callable[[types.ModuleType], None]) -> None:
        self._name, self._then, self._is_searching = name, then, False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name or self._is_searching:
            return None
        self._is_searching = True  # the search below asks all finders, also this one, which must then answer None
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._is_searching = False
        loader: Any = spec.loader if spec is not None else None
        if loader is not None:
            execute, then = loader.exec_module, self._then

            def exec_module(module: types.ModuleType) -> None:
                execute(module)
                then(module)

            loader.exec_module = exec_module
        return spec


def when_imported(name: str, then: Callable[[types.ModuleType], Undo]) -> Undo:
    """Call ``then`` with the module ``name``, now if it is imported, else when it is; what is returned undoes it."""
    module = sys.modules.get(name)
    if module is not None:
        return then(module)
    undo: list[Undo] = []
    finder = _Finder(name, lambda module: undo.append(then(module)) if finder in sys.meta_path else None)
    sys.meta_path.insert(0, finder)

    def close() -> None:
        sys.meta_path.remove(finder)
        while undo:
            undo.pop()()

    return close


def _inner(optimizer: Any) -> Any:
    try:
        return inner_optimizer(optimizer)
    except AttachError:  # accelerate's dummy optimizer, in the place of the one that DeepSpeed makes
        return optimizer
