"""Accelerate: statistics before ``clip_grad_norm_`` clips, state in ``save_state``, numbers in the trackers.

Hooks can be attached without this file too, before or after ``accelerator.prepare``. :func:`prepare` and
:func:`connect` add what needs the accelerator: its clipping, its checkpoints and its trackers.
"""

# [Note: the accelerator clips before the step]
# A script clips with `accelerator.clip_grad_norm_` before `optimizer.step()`, so the hooks of the step are called too
# late to see gradients as backward left them. Each way of clipping calls `unscale_gradients` first. So that method is
# replaced on the accelerator: when it returns, gradients are unscaled and not clipped yet, and the step's rules and
# statistics are applied. Of several models only the one that is being clipped has its gradients ready. So the clipping
# methods are replaced too, and say which parameters they were given.

from __future__ import annotations

import functools
import importlib
import json
import os
import pathlib
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from disthooks._handles import Attachment
from disthooks.config import Plan, Prepared
from disthooks.errors import UsageError
from disthooks.grads.attachment import Gradients
from disthooks.grads.sinks import AccelerateTracker, Jsonl
from disthooks.grads.sinks.trackers import known_accelerators
from disthooks.integrations._shared import (
    attach_found,
    file_in,
    fitted_of,
    framework,
    load_fit,
    load_into,
    save_fit,
)
from disthooks.saved.fit import Fitted

_tracking: Any = framework("accelerate.tracking", __name__, "accelerate")


def prepare(
    accelerator: Any,
    model: nn.Module,
    optimizer: Any = None,
    config: str | os.PathLike[str] | Mapping[str, Any] | Plan | None = None,
) -> Prepared:
    """Attach what a configuration says to what ``accelerator.prepare`` returned, and :func:`connect` it.

    Records also go to ``accelerator.log``, once there are trackers.

    Args:
        accelerator: the ``Accelerator``.
        model: the model that ``accelerator.prepare`` returned.
        optimizer: the optimizer that it returned; none is needed under DeepSpeed.
        config: a file, a dict or a plan; by default the file that ``DISTHOOKS_CONFIG`` names, else ``disthooks`` in the
            JSON of DeepSpeed, else ``disthooks.yaml`` or ``hooks.yaml`` in the working directory.

    Returns:
        A handle with ``saving``, ``gradients`` and ``remove()``; also a context manager.

    Raises:
        ConfigError: when there is no configuration, or it has an unknown key or kind.
        MatchError, AttachError: see :func:`disthooks.save_activations` and :func:`disthooks.gradients`.
        UsageError: when ``accelerator`` is no ``Accelerator``.

    >>> from accelerate import Accelerator
    >>> accelerator, model = Accelerator(cpu=True), nn.Linear(2, 1, bias=False)
    >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    >>> config = {"watch": {"every": 1, "stats": [{"kind": "Norm"}]}}
    >>> with prepare(accelerator, model, optimizer, config) as hooks:
    ...     accelerator.backward(model(torch.tensor([[3.0, 4.0]])).sum())
    ...     _ = accelerator.clip_grad_norm_(model.parameters(), 1.0)
    ...     optimizer.step()
    >>> hooks.gradients.latest["grad_norm"]
    5.0
    """
    _check(accelerator)
    known_accelerators.add(accelerator)
    prepared = attach_found(config, model, optimizer, [_ToTrackers(accelerator)])
    if prepared.gradients is not None:
        connect(accelerator, prepared.gradients)
    if (fitted := fitted_of(prepared)) is not None:
        around = _Around.of(accelerator)
        around.fits[id(fitted)] = fitted
        fitted.on_remove(functools.partial(around.leave, around.fits, id(fitted)))
    return prepared


def connect(accelerator: Any, gradients: Gradients) -> Attachment:
    """Connect an ``Accelerator`` with what :func:`disthooks.gradients` attached, until the handle is removed.

    - ``accelerator.clip_grad_norm_``, ``clip_grad_value_`` and ``unscale_gradients`` first measure and apply the rules,
      once a step, so that statistics are of gradients before your own clipping. (DeepSpeed clips after disthooks.)
    - ``accelerator.backward(loss)`` hands in the loss, for ``stats.Loss`` and ``SkipSpike``.
    - ``accelerator.save_state`` writes the state of rules and statistics, and the number of steps, to its own file;
      ``load_state`` reads it. With :func:`prepare` and ``fit: true`` each rank also writes what ``fit`` has learnt. The
      other files are as they would be without disthooks, and a checkpoint can be loaded with and without it.
    - ``accelerator.end_training`` waits for the last record.

    Returns:
        A handle whose ``remove()`` leaves ``gradients`` attached.

    Raises:
        UsageError: when ``accelerator`` is no ``Accelerator``.
    """
    _check(accelerator)
    around, connection = _Around.of(accelerator), Attachment()
    connection.on_remove(functools.partial(around.leave, around.attached, id(gradients)))
    around.attached.setdefault(id(gradients), gradients)
    gradients.on_remove(connection.remove)
    return connection


def load_from(accelerator: Any, gradients: Gradients, folder: str) -> bool:
    """Load the state of connected ``gradients`` from a checkpoint; warn and return False if there is none."""
    return load_into(gradients, file_in(folder, [*_Around.of(accelerator).attached].index(id(gradients))))


def log_to_trackers(accelerator: Any, gradients: Gradients) -> None:
    """Log records to the trackers that ``accelerator`` has or will have, unless a sink does so already."""
    if not any(getattr(sink, "accelerator", None) is accelerator for sink in gradients.sinks):
        gradients.log_to(_ToTrackers(accelerator))


class DisthooksTracker(_tracking.GeneralTracker):  # type: ignore[misc]  # accelerate ships no types
    """A tracker that writes the values given to ``accelerator.log`` as lines of JSON. It needs no other package.

    ``Accelerator(log_with="disthooks", project_dir=...)`` after importing this file, then ``init_trackers(name)``: the
    lines are in ``name/log.jsonl`` under the logging directory, the configuration in ``name/config.json``. Numbers of
    disthooks come with yours after :func:`prepare`, or with ``sinks=[sinks.AccelerateTracker(accelerator)]``.
    """

    name = "disthooks"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str]) -> None:
        super().__init__()
        self.folder = pathlib.Path(logging_dir, run_name)

    @property
    def tracker(self) -> Jsonl:
        """The sink that writes the lines."""
        return Jsonl(self.folder / "log.jsonl")

    @_tracking.on_main_process  # type: ignore[untyped-decorator]
    def start(self) -> None:
        """Make the file; UsageError if it cannot be written."""
        self.tracker.open()

    @_tracking.on_main_process  # type: ignore[untyped-decorator]
    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        (self.folder / "config.json").write_text(json.dumps(dict(values), indent=1, default=str) + "\n")

    @_tracking.on_main_process  # type: ignore[untyped-decorator]
    def log(self, values: Mapping[str, Any], step: int | None = None, **ignored: Any) -> None:
        """Write one line; a tensor of one element is written as its number."""
        plain = {name: value.item() if hasattr(value, "item") else value for name, value in values.items()}
        self.tracker({"step": step, **plain})


# An older accelerate has no such function; there ``log_with`` takes an instance: ``DisthooksTracker(name, folder)``.
if hasattr(_tracking, "register_tracker_class"):
    _tracking.register_tracker_class(DisthooksTracker)


class _ToTrackers:
    """A sink that logs to the trackers of an accelerator, once it has some: scripts may make them after attaching."""

    may_wait = True  # it may never log, because the user did not ask for this sink, and there may be no trackers

    def __init__(self, accelerator: Any) -> None:
        self.accelerator = accelerator

    def __repr__(self) -> str:
        return "accelerator.log"

    def __call__(self, record: Mapping[str, Any]) -> None:
        if self.accelerator.trackers:
            AccelerateTracker(self.accelerator)(record)


class _Around:
    """The replaced methods of one accelerator, which serve every attachment that is connected to it.

    See [Note: the accelerator clips before the step].
    """

    def __init__(self, accelerator: Any) -> None:
        self.accelerator = accelerator
        # The connected attachments by their id, in order. They are held weakly, because an accelerator outlives models
        # that are dropped.
        self.attached: weakref.WeakValueDictionary[int, Gradients] = weakref.WeakValueDictionary()
        self.fits: weakref.WeakValueDictionary[int, Fitted] = weakref.WeakValueDictionary()
        self.clipping: set[int] | None = None
        names = ("backward", "unscale_gradients", "clip_grad_norm_", "clip_grad_value_", "end_training")
        self.true: dict[str, Callable[..., Any]] = {name: getattr(accelerator, name) for name in names}
        for name in names:
            setattr(accelerator, name, getattr(self, name))
        self.handles = [
            accelerator.register_save_state_pre_hook(self.save),
            accelerator.register_load_state_pre_hook(self.load),
        ]

    @classmethod
    def of(cls, accelerator: Any) -> _Around:
        own = getattr(vars(accelerator).get("clip_grad_norm_"), "__self__", None)
        return own if isinstance(own, cls) else cls(accelerator)

    def leave(self, connected: weakref.WeakValueDictionary[int, Any], key: int) -> None:
        """Disconnect an attachment; after the last one the accelerator has its own methods again."""
        connected.pop(key, None)
        if len(self.attached) or len(self.fits):
            return
        for handle in self.handles:
            handle.remove()
        for name, true in self.true.items():
            # Another library may have replaced the method after disthooks: then it stays.
            if getattr(vars(self.accelerator).get(name), "__self__", None) is self:
                vars(self.accelerator).pop(name)
                if getattr(self.accelerator, name) != true:
                    setattr(self.accelerator, name, true)

    def backward(self, loss: Any, **kwargs: Any) -> Any:
        """Hand in the loss, then run backward. With several models it is unknown whose loss it is."""
        if len(found := list(self.attached.values())) == 1:
            found[0].note_loss_of_backward(loss)
        return self.true["backward"](loss, **kwargs)

    def clip_grad_norm_(self, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        return self._clip("clip_grad_norm_", parameters, *args, **kwargs)

    def clip_grad_value_(self, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        return self._clip("clip_grad_value_", parameters, *args, **kwargs)

    def _clip(self, method: str, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        """Clip, and note which parameters are clipped. See [Note: the accelerator clips before the step]."""
        # `parameters` may be an iterator, which can be read once.
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        self.clipping = {id(parameter) for parameter in given}
        try:
            return self.true[method](given, *args, **kwargs)
        finally:
            self.clipping = None

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscale, then begin the step. See [Note: the accelerator clips before the step]."""
        self.true["unscale_gradients"](optimizer)
        if self.accelerator.sync_gradients:
            for gradients in list(self.attached.values()):
                if self.concerns(gradients, optimizer):
                    gradients.begin_step(self.accelerator.scaler)

    def concerns(self, gradients: Gradients, optimizer: Any) -> bool:
        """Whether the gradients of this attachment are about to be clipped."""
        if self.clipping is not None:
            groups = (group for one in gradients.optimizers for group in one.param_groups)
            return any(id(p) in self.clipping for group in groups for p in group["params"])
        if optimizer is None:  # all optimizers
            return True
        for wrapper in optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]:
            inner = wrapper
            while inner is not None and not any(inner is one for one in gradients.optimizers):
                inner = getattr(inner, "optimizer", None)
            if inner is not None:
                return True
        return False

    def end_training(self) -> None:
        """Log the last record first: a record is read when the next step begins, and after the last step none does."""
        for gradients in list(self.attached.values()):
            gradients.end_log()
        self.true["end_training"]()

    def save(self, models: Any, weights: Any, folder: str) -> None:
        """Write the state. See [Note: state beside a framework's checkpoint]."""
        each_node = self.accelerator.project_configuration.save_on_each_node
        writes = self.accelerator.is_local_main_process if each_node else self.accelerator.is_main_process
        for i, gradients in enumerate(list(self.attached.values())):
            state = gradients.state_dict()  # every rank, since it may flush
            if writes:
                torch.save(state, file_in(folder, i))
        for i, fitted in enumerate(list(self.fits.values())):
            save_fit(fitted, folder, i)

    def load(self, models: Any, folder: str) -> None:
        for i, gradients in enumerate(list(self.attached.values())):
            load_into(gradients, file_in(folder, i))
        for i, fitted in enumerate(list(self.fits.values())):
            load_fit(fitted, folder, i)


def _check(accelerator: Any) -> None:
    if not isinstance(accelerator, importlib.import_module("accelerate").Accelerator):
        raise UsageError(f"give the Accelerator, got {type(accelerator).__name__}")
