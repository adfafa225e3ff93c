"""Lightning: a callback that attaches what a configuration says, for as long as ``fit`` runs.

It works with ``lightning.pytorch`` and with ``pytorch_lightning``: import the one you use before this module.
"""

# [Note: the callback attaches in on_fit_start]
# In `setup` a LightningModule with `configure_model` has no modules yet, and there is no activation checkpointing yet.
# In `on_fit_start` the strategy has taken the model and made the optimizers, and no batch has run (docs/decisions.md,
# 68). Lightning calls `on_before_optimizer_step` before it clips, so rules and statistics begin the step there and see
# gradients as backward left them.

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from disthooks._match import is_match
from disthooks.config.locate import engine_config, locate_config, read_plan
from disthooks.config.plan import Plan, Prepared, attach
from disthooks.errors import AttachError
from disthooks.grads.attachment import Gradients
from disthooks.grads.sinks.base import foremost, portable, scalars
from disthooks.integrations._shared import BatchIndices, fitted_of, of_any_rank
from disthooks.saved.fit import Fitted
from disthooks.saved.report import SavedReport

_NAMESPACES = ("lightning.pytorch", "pytorch_lightning")


def _callback_classes() -> tuple[type, ...]:
    """The ``Callback`` of each namespace that is imported; of the first one that is installed, if none is yet."""
    names = [name for name in _NAMESPACES if name in sys.modules]
    if not names:
        names = [name for name in _NAMESPACES if importlib.util.find_spec(name.partition(".")[0])][:1]
    if not names:
        raise ImportError("disthooks.integrations.lightning needs Lightning: pip install lightning")
    return tuple(importlib.import_module(name).Callback for name in names)


class DisthooksCallback(*_callback_classes()):  # type: ignore[misc]
    """Attach a configuration to what ``Trainer.fit`` trains, under any of Lightning's strategies.

    Modules and gradients are attached in ``on_fit_start``, when the strategy has taken the model, and detached when
    training ends, also by an exception. Rules and statistics see gradients before Lightning clips them. The state of
    adaptive rules is in Lightning's checkpoints.

    Args:
        config: a file, or a dict with its content; by default the file that ``DISTHOOKS_CONFIG`` names, else
            ``disthooks`` in the configuration of the DeepSpeed strategy, else ``disthooks.yaml`` or ``hooks.yaml`` in
            the working directory.
        optimizer: the number of the optimizer to watch, if ``configure_optimizers`` gives several. To watch several of
            them, give one callback for each, and ``save`` in one of them only.
        prefix: the text in front of every name in Lightning's loggers and in ``trainer.callback_metrics``.
        monitor: names of numbers that go to ``trainer.callback_metrics`` too, for a ``ModelCheckpoint``, besides the
            three foremost of each record (``grad_norm``, ``clip_ratio``, what was moved in a step). Loggers get all.

    Attributes:
        prepared: the handle of what is attached, with ``.saving`` and ``.gradients``; None while nothing is.
        latest: the last record that was logged, on every rank; one step late while training.
        saved: the report of saved tensors of the last ``fit``, on this rank; ``saved.budget`` says whether a budget
            was kept.

    Raises:
        ConfigError: from ``fit``, before it trains, if there is no configuration, or it has an unknown key or kind.
        MatchError, AttachError: from ``fit``, see :func:`disthooks.save_activations` and
            :func:`disthooks.gradients`; also if it is not clear which of several optimizers to watch.

    >>> from disthooks.integrations.lightning import DisthooksCallback
    >>> callback = DisthooksCallback({"watch": {"rules": [{"kind": "ClipNorm", "max_norm": 1.0}]}}, prefix="train/")
    >>> callback.prepared, callback.latest
    (None, {})
    """

    def __init__(
        self,
        config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        optimizer: int | None = None,
        prefix: str = "gradients/",
        monitor: Iterable[str] = (),
    ) -> None:
        super().__init__()
        self._config, self._number, self._prefix = config, optimizer, prefix
        self._monitor = tuple(monitor)
        self.prepared: Prepared | None = None
        self.latest: dict[str, Any] = {}
        self.saved: SavedReport | None = None
        self._optimizer: Any = None
        self._drawn: BatchIndices | None = None
        self._state: Mapping[str, Any] = {}  # of the last fit
        self._loaded: Mapping[str, Any] = {}  # of a checkpoint

    @property
    def state_key(self) -> str:
        """The key of the state in checkpoints; it tells several of these callbacks apart."""
        key: str = self._generate_state_key(optimizer=self._number, prefix=self._prefix)
        return key

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach. See [Note: the callback attaches in on_fit_start]."""
        self._detach(trainer)
        optimizer = dict(enumerate(trainer.optimizers)).get(self._number or 0)
        # `attach` gathers the errors of all ranks: if one cannot read the plan, all of them raise.
        self.prepared = attach(functools.partial(self._read, trainer), trainer.model, optimizer)
        self._optimizer = optimizer
        if (watch := self._watch()) is not None:
            wrap_closures(trainer, watch)
            self._drawn = follow_loaders(trainer, watch)
        self._go_on(self._loaded or (self._state if trainer.global_step else {}))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Note which samples the batch has, and begin a round of ``fit``.

        See [Note: the callback attaches in on_fit_start].
        """
        if self._drawn is not None:
            self._drawn.note()
        if (fitted := self._fitted(trainer)) is not None:
            fitted.begin_round(trainer.model, batch)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Hand in the loss of a micro-batch, for ``stats.Loss``."""
        if (fitted := self._fitted(trainer)) is not None:
            fitted.end_forward()
        if (watch := self._watch()) is not None:
            watch.note_loss(_whole_loss(trainer, loss))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Begin the step: gradients are final, and Lightning has not clipped them yet."""
        if (watch := self._watch()) is not None and optimizer is self._optimizer:
            watch.begin_step(getattr(trainer.precision_plugin, "scaler", None))
            self._log(trainer, watch)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        """Log the record of the step before, if it became known in the engine's own step."""
        if (fitted := self._fitted(trainer)) is not None:
            fitted.end_round()
        if (watch := self._watch()) is not None:
            self._log(trainer, watch)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._detach(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._detach(trainer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._detach(trainer)

    def state_dict(self) -> dict[str, Any]:
        """The state of adaptive rules, the number of steps, and what ``fit`` has learnt on this rank."""
        return dict(self._state) if self.prepared is None else self.prepared.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a checkpoint. Lightning calls this before or after attaching, depending on the strategy."""
        self._loaded = state_dict
        if self.prepared is not None:
            self._go_on(state_dict)

    def _fitted(self, trainer: Any) -> Fitted | None:
        """What ``fit`` attached, if Lightning calls the LightningModule's ``training_step`` and not the module."""
        return fitted_of(self.prepared) if trainer.model is trainer.lightning_module else None

    def _watch(self) -> Gradients | None:
        return self.prepared.gradients if self.prepared else None

    def _read(self, trainer: Any) -> Plan:
        """Read the plan, and refuse what would have no effect under this trainer."""
        plan = read_plan(locate_config(self._config, engine_config(trainer.model)))
        named = f"Lightning's {type(trainer.strategy).__name__}"
        # Lightning calls `training_step` of the LightningModule, so hooks on that module would never be called. A
        # strategy such as DDP wraps it in a module that is called.
        module = trainer.lightning_module
        patterns = [pattern for patterns, _ in plan.saves for pattern in patterns]
        if trainer.model is module and any(is_match(pattern, "", module) for pattern in patterns):
            raise AttachError(
                f"a pattern of 'save' matches the {type(module).__name__} itself, which {named} never calls as a "
                "module: name the modules inside it, as 'net' or 'net.*'"
            )
        if not plan.watches:
            return plan
        count = len(trainer.optimizers)
        if count > 1 and self._number is None:
            raise AttachError(
                f"configure_optimizers() gave {count} optimizers: which one's gradients? Give "
                "DisthooksCallback(optimizer=0), or a callback for each"
            )
        if not 0 <= (self._number or 0) < count:
            raise AttachError(
                f"DisthooksCallback(optimizer={self._number}): configure_optimizers() gave {count}; give the place of "
                "one of them, or leave 'watch' out of the configuration"
            )
        optimizer = trainer.optimizers[self._number or 0]
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None and scaler.is_enabled() and getattr(optimizer, "_step_supports_amp_scaling", False):
            raise AttachError(
                f"{type(optimizer).__name__}(fused=True) takes the scale of the GradScaler out inside its kernel, "
                f"where no hook sees the gradients: make it with fused=False, or train in bfloat16 ({named})"
            )
        return plan

    def _go_on(self, state: Mapping[str, Any]) -> None:
        watch, fitted, self._loaded = self._watch(), fitted_of(self.prepared), {}
        watched = {key: value for key, value in state.items() if key != "fit"}
        if watched and watch is not None:
            watch.load_state_dict(watched)
        if fitted is not None and "fit" in state:
            fitted.load_state_dict(of_any_rank(state["fit"]))  # Lightning writes the state of the first rank

    def _log(self, trainer: Any, watch: Gradients) -> None:
        if watch.latest is self.latest or not watch.latest:
            return
        self.latest = watch.latest
        _publish(trainer, self.latest, self._prefix, self._monitor)

    def _detach(self, trainer: Any) -> None:
        prepared, watch = self.prepared, self._watch()
        if prepared is None:
            return
        try:
            self._state = prepared.state_dict()
            if watch is not None:
                watch.flush()
                self._log(trainer, watch)
            if prepared.saving is not None:
                self.saved = prepared.saving.report()
        finally:
            self.prepared = self._optimizer = self._drawn = None
            prepared.remove()


class WaitingCallback(*_callback_classes()):  # type: ignore[misc]
    """The callback that :mod:`disthooks.run` adds to a Trainer whose script has no :class:`DisthooksCallback`.

    The session attaches when the model is first called, and then calls :meth:`join`. If there are several optimizers,
    each has its own numbers, under ``gradients/0/``, ``gradients/1/``.
    """

    def __init__(self, attached: Callable[[Any], Gradients | None]) -> None:
        super().__init__()
        self._attached = attached
        self._trainer: Any = None  # while it fits
        self._joined: dict[int, Gradients] = {}  # by the number of the optimizer
        self._latest: dict[int, Any] = {}
        self._states: dict[int, Any] = {}  # of a checkpoint, or of the last fit

    def __reduce__(self) -> tuple[Any, ...]:
        return WaitingCallback, (_no_session,)  # processes that Lightning spawns have no session

    def join(self, model: Any, gradients: Gradients) -> bool:
        """Serve an attachment from now on, if the Trainer fits now; returns whether a state was loaded into it."""
        number = None if self._trainer is None else self._number(model, gradients)
        if number is None:
            return False
        self._joined[number], self._latest[number] = gradients, gradients.latest
        wrap_closures(self._trainer, gradients)
        state = self._states.get(number)
        if state:
            gradients.load_state_dict(state)
        return bool(state)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._trainer = trainer

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Join the attachments of optimizers that an earlier fit had."""
        for optimizer in trainer.optimizers:
            gradients = self._attached(optimizer)
            if gradients is not None and gradients not in self._joined.values():
                self.join(None, gradients)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        for gradients in self._joined.values():
            gradients.note_loss(_whole_loss(trainer, loss))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Log the record of the step before. The attachment measures by itself, before Lightning clips."""
        self._log(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self._log(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Log the last record, and keep the state for checkpoints that are made after the fit."""
        self._leave(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._leave(trainer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._leave(trainer)

    def state_dict(self) -> dict[str, Any]:
        self._states |= {number: gradients.state_dict() for number, gradients in self._joined.items()}
        return {"optimizers": dict(self._states)} if self._states else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state into the attachments, and keep it for those that the session makes later."""
        self._states = dict(state_dict["optimizers"])
        for number, gradients in self._joined.items():
            if number in self._states:
                gradients.load_state_dict(self._states[number])

    def _number(self, model: Any, gradients: Gradients) -> int | None:
        optimizers = self._trainer.optimizers
        inner = [getattr(each, "optimizer", each) for each in optimizers]
        found = [i for i, pair in enumerate(zip(optimizers, inner, strict=True)) if gradients.optimizer in pair]
        if not found and model is not None and model is self._trainer.model:
            return 0  # the engine has its own optimizer
        return found[0] if found else None

    def _log(self, trainer: Any) -> None:
        several = len(trainer.optimizers) > 1
        for number, gradients in self._joined.items():
            record = gradients.latest
            if record and record is not self._latest[number]:
                self._latest[number] = record
                _publish(trainer, record, f"gradients/{number}/" if several else "gradients/")

    def _leave(self, trainer: Any) -> None:
        if self._trainer is None:
            return
        try:
            self.state_dict()
            for gradients in self._joined.values():
                gradients.flush()
            self._log(trainer)
        finally:
            self._trainer = None
            self._joined, self._latest = {}, {}


def follow_loaders(trainer: Any, gradients: Gradients) -> BatchIndices:
    """Follow the loader of the training: Lightning makes it after ``on_fit_start``, and iterates before callbacks."""
    drawn, strategy = BatchIndices(gradients), trainer.strategy
    made = strategy.process_dataloader
    strategy.process_dataloader = lambda loader: drawn.follow(made(loader)) if trainer.training else made(loader)
    gradients.on_remove(lambda: vars(strategy).pop("process_dataloader", None))
    return drawn


def wrap_closures(trainer: Any, gradients: Gradients) -> None:
    """With ``rerun: true``, let Lightning's closures run through ``rerun``, until training ends.

    A closure zeroes the gradients after its forward; here they are zeroed before it, as a second run needs them.
    """
    if not gradients.wants_rerun:
        return
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    made, call = loop._make_closure, gradients.rerun(lambda closure: closure())

    def make(*args: Any, **kwargs: Any) -> Any:
        closure = made(*args, **kwargs)
        run = closure.closure

        def again() -> Any:
            if closure._zero_grad_fn is not None:
                closure._zero_grad_fn()
            return call(run)

        closure.closure = again
        return closure

    loop._make_closure = make
    gradients.on_remove(functools.partial(loop.__dict__.pop, "_make_closure", None))


def _no_session(optimizer: Any) -> Gradients | None:
    return None


def _whole_loss(trainer: Any, loss: Any) -> Any:
    """The loss of a micro-batch: Lightning has divided it by their number."""
    return loss.detach() * trainer.accumulate_grad_batches


def _publish(trainer: Any, record: Mapping[str, Any], prefix: str, monitor: Iterable[str] = ()) -> None:
    """Log a record. Progress bars and monitors get its three foremost numbers, and those in ``monitor``."""
    found = scalars(record)
    shown = foremost(record) | {name: found[name] for name in monitor if name in found}
    metrics = {portable(prefix + name): torch.tensor(float(value)) for name, value in shown.items()}
    trainer.callback_metrics.update(metrics)
    numbers = {portable(prefix + name): value for name, value in found.items()}
    # Not log_dict(): it would drop the records between the steps that it logs. Loggers log on the first rank only.
    for logger in trainer.loggers:
        logger.log_metrics(numbers, step=record["step"])
