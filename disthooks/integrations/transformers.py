"""Transformers' ``Trainer`` and those derived from it (TRL's ``SFTTrainer``) need one callback and no other change."""

# [Note: the Trainer's own frame]
# A Trainer gives its callbacks the model that it was made with, and neither itself nor the model that the engine wraps.
# Hooks on the former would miss what DDP, FSDP or DeepSpeed do. So the callback searches the stack for the frame of the
# Trainer that is calling it. The frame also has the checkpoint that the Trainer resumes from (docs/decisions.md, 68).

from __future__ import annotations

import os
import pathlib
import sys
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from disthooks.config import Plan, Prepared
from disthooks.errors import UsageError
from disthooks.grads.attachment import Gradients
from disthooks.grads.sinks.base import foremost, portable, scalars
from disthooks.integrations._shared import (
    BatchIndices,
    attach_found,
    file_in,
    fitted_of,
    framework,
    load_fit,
    load_into,
    save_fit,
)
from disthooks.integrations.accelerate import connect
from disthooks.saved.report import SavedReport

_transformers: Any = framework("transformers", __name__, "transformers accelerate")
_CONSOLES = (_transformers.PrinterCallback, _transformers.ProgressCallback)
_SAVED = ("saved/moved", "saved/pack_seconds", "saved/unpack_seconds", "saved/budget", "saved/peak")


class DisthooksCallback(_transformers.TrainerCallback):  # type: ignore[misc]
    """Attach a configuration while a ``Trainer`` trains.

    ``Trainer(..., callbacks=[DisthooksCallback("hooks.yaml")])``. It attaches when training begins, to the model that
    the engine wraps, and detaches when training ends. Rules and statistics come before the Trainer's own clipping:
    without rules, ``gradients/grad_norm`` is the Trainer's ``grad_norm``. With rules, the Trainer's ``grad_norm`` is
    that of the gradients which the rules left.

    The console shows three of the numbers beside the loss. All numbers of each step that the Trainer logs are in its
    log: in ``trainer.state.log_history``, TensorBoard (``train/gradients/grad_norm``) and every other tracker; of saved
    tensors the log has the bytes moved, the seconds waited, and the budget of ``fit`` with the peak. Sinks of the
    configuration get all numbers of those steps, and of each ``every``-th. The state of rules and statistics is in each
    checkpoint, as ``disthooks.pt``, and what ``fit`` has learnt is there too, in a file for each rank.

    Args:
        config: a file, a dict or a plan; by default the file that ``DISTHOOKS_CONFIG`` names, else ``disthooks`` in the
            JSON of DeepSpeed, else ``disthooks.yaml`` or ``hooks.yaml`` in the working directory.
        prefix: the text in front of every name in the Trainer's log.

    Attributes:
        prepared: the handle of what is attached, with ``saving`` and ``gradients``; None while the Trainer does not
            train.
        saved: the report on saved tensors of the last training, on this rank; None without ``save``. With ``fit`` its
            ``budget`` says whether the budget was kept.

    Raises:
        UsageError: when ``prefix`` is no text, or empty: the Trainer has a ``grad_norm`` of its own.
        ConfigError, MatchError, AttachError: when training begins; see :func:`disthooks.prepare`.

    >>> callback = DisthooksCallback({"watch": {"stats": [{"kind": "Norm"}]}})
    >>> callback.prepared, callback.saved
    (None, None)
    """

    def __init__(
        self,
        config: str | os.PathLike[str] | Mapping[str, Any] | Plan | None = None,
        prefix: str = "gradients/",
    ) -> None:
        if not isinstance(prefix, str) or not prefix:
            raise UsageError(f"prefix={prefix!r}: give a text, as 'gradients/'; the Trainer has a grad_norm of its own")
        self.config, self.prefix = config, prefix
        self.prepared: Prepared | None = None
        self.saved: SavedReport | None = None
        self._logged = -1
        self._drawn: BatchIndices | None = None
        self._shown: set[str] = set()  # the names of disthooks' numbers that the console shows

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.to_the_front(_calling(self)[0])

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.remove()  # the attachment of a training that raised, or that begins again with a smaller batch
        trainer, variables = _calling(self)
        self.to_the_front(trainer)
        model, optimizer = trainer.model_wrapped, trainer.optimizer
        self.prepared = attach_found(self.config, model, optimizer)
        self.saved, self._logged = None, state.global_step - 1
        if (fitted := fitted_of(self.prepared)) and (resumed := variables.get("resume_from_checkpoint")):
            load_fit(fitted, resumed)
        if (gradients := self.prepared.gradients) is not None:
            try:
                connect(trainer.accelerator, gradients)
                wrap_step(trainer, gradients)
                if not trainer.is_deepspeed_enabled:  # its engine steps before a callback is called
                    self._drawn = BatchIndices(gradients, is_resumed=bool(state.global_step))
                    self._drawn.follow(kwargs.get("train_dataloader"))
                self._go_on(trainer, gradients, variables.get("resume_from_checkpoint"))
            except BaseException:
                self.remove()
                raise

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the indices of a micro-batch, except for the last one of a step."""
        if self._drawn is not None:
            self._drawn.note()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the indices of the last micro-batch of a step."""
        if self._drawn is not None:
            self._drawn.note()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Put the numbers of the step into the log. The Trainer has read its loss, so this waits for nothing more."""
        gradients = self.prepared and self.prepared.gradients
        if not gradients or not logs or "loss" not in logs:  # it logs an evaluation, or the whole training
            return
        gradients.flush(loss=float(logs["loss"]))
        step = gradients.latest.get("step", -1)
        if step <= self._logged:
            return
        self._logged = step
        more = {}
        for name, value in scalars(gradients.latest).items():
            # All numbers of gradients. Of saved tensors, the bytes moved, the seconds waited and the budget are enough.
            if name != "loss" and (not name.startswith("saved/") or name.removesuffix("_per_step") in _SAVED):
                more[portable(self.prefix + name)] = value
        logs.update(more)
        self._shown = {portable(self.prefix + name) for name in foremost(gradients.latest)}
        if state.log_history:
            state.log_history[-1].update(more)

    def shows(self, name: str) -> bool:
        """Whether the console shows a name of the Trainer's log: three of disthooks' numbers, and all others."""
        return not name.startswith(self.prefix) or name in self._shown

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the state into the checkpoint that the Trainer has just made."""
        fitted, gradients = fitted_of(self.prepared), self.prepared and self.prepared.gradients
        if not fitted and not gradients:
            return
        trainer, variables = _calling(self)
        output = trainer._get_output_dir(variables.get("trial"))  # a search has one for each trial
        folder = pathlib.Path(output, f"checkpoint-{state.global_step}")
        if fitted:
            save_fit(fitted, folder)
        if not gradients:
            return
        kept = gradients.state_dict()  # every rank, since it may flush
        if args.should_save and folder.is_dir():
            torch.save(kept, self._file(trainer, folder))
        elif args.should_save:
            warnings.warn(
                f"{type(trainer).__name__} has made no {folder}: the state of rules and statistics is not saved; "
                "put callback.prepared.gradients.state_dict() into the checkpoint where it makes its own",
                RuntimeWarning,
                stacklevel=2,
            )

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.remove()

    def remove(self) -> None:
        """Detach now. Call it after a training that raised, because no callback is called then."""
        prepared, self.prepared, self._drawn = self.prepared, None, None
        if prepared is None:
            return
        if prepared.saving is not None:
            self.saved = prepared.saving.report()
        prepared.remove()

    def _go_on(self, trainer: Any, gradients: Gradients, resumed: str | None) -> None:
        """Load the state from the checkpoint that the Trainer resumes from, and log the steps that the Trainer logs."""
        # The Trainer divides the loss of a step by its micro-batches or its tokens, so each backward gets a part of it.
        of = weakref.ref(trainer)
        gradients.take_loss_of_backward(lambda: getattr(of(), "current_gradient_accumulation_steps", 1))
        if not resumed or not load_into(gradients, self._file(trainer, resumed)):
            gradients.load_state_dict({**gradients.state_dict(), "steps": trainer.state.global_step})
        if trainer.args.logging_strategy == "steps":
            first, every = trainer.args.logging_first_step, trainer.state.logging_steps
            gradients.log_also(lambda step: (step + 1) % every == 0 or (first and step == 0))

    def to_the_front(self, trainer: Any) -> None:
        """Go before the callbacks that report the log; those of the console get an ``on_log`` with three numbers."""
        callbacks = trainer.callback_handler.callbacks  # the handler may be iterating over this list
        others = [i for i, each in enumerate(callbacks) if not isinstance(each, DisthooksCallback)]
        if others and others[0] < callbacks.index(self):
            callbacks.remove(self)
            callbacks.insert(others[0], self)  # several DisthooksCallbacks keep their order
        for each in callbacks:
            if isinstance(each, _CONSOLES) and "on_log" not in vars(each):
                each.on_log = _Brief(each, trainer)

    def _file(self, trainer: Any, folder: str | os.PathLike[str]) -> pathlib.Path:
        """The file with the state of this callback. If there are several callbacks, each has its own file."""
        waiting = isinstance(self, WaitingCallback)  # the session's callback is not counted among those of the script
        ours = [each for each in trainer.callback_handler.callbacks if isinstance(each, DisthooksCallback)]
        ours = [each for each in ours if isinstance(each, WaitingCallback) == waiting]
        return file_in(folder, ours.index(self))


class WaitingCallback(DisthooksCallback):
    """The callback that :mod:`disthooks.run` adds to a Trainer whose script has no :class:`DisthooksCallback`.

    The session attaches when the model is first called, and then calls :meth:`join`.
    """

    def __init__(self, attached: Callable[[Any], Gradients | None]) -> None:
        super().__init__({})
        self._attached = attached
        self._training: tuple[Any, str | None] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Wait for the first call of the model, or join what an earlier training attached."""
        trainer, variables = _calling(self)
        self.to_the_front(trainer)
        self._training = trainer, variables.get("resume_from_checkpoint")
        self._logged = state.global_step - 1
        gradients = self._attached(trainer.optimizer)
        if gradients is not None:
            self.join(trainer.model_wrapped, gradients)

    def join(self, model: Any, gradients: Gradients) -> bool:
        """Serve an attachment from now on, if the Trainer trains now; returns whether it resumes from a checkpoint."""
        if self._training is None:
            return False
        trainer, resumed = self._training
        inner = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        if gradients.optimizer is not inner and trainer.model_wrapped is not model:
            return False
        self.prepared = Prepared(None, gradients)
        wrap_step(trainer, gradients)
        self._go_on(trainer, gradients, resumed)
        return resumed is not None

    def remove(self) -> None:
        """Leave the attachment; the session takes it off."""
        self.prepared = self._training = None


def wrap_step(trainer: Any, gradients: Gradients) -> None:
    """With ``rerun: true``, let the Trainer call its ``training_step`` through ``rerun``, until training ends."""
    if gradients.wants_rerun:
        own = {name: vars(trainer)[name] for name in ("training_step",) if name in vars(trainer)}  # a patch of somebody
        trainer.training_step = gradients.rerun(trainer.training_step)
        gradients.on_remove(lambda: vars(trainer).update(own) if own else vars(trainer).pop("training_step"))


class _Brief:
    """``on_log`` of a callback that prints: it shows three of disthooks' numbers, so that the loss stays visible."""

    def __init__(self, callback: Any, trainer: Any) -> None:
        self._true = callback.on_log
        self._handler = trainer.callback_handler

    def __call__(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> Any:
        for each in self._handler.callbacks:
            if isinstance(each, DisthooksCallback) and logs:
                logs = {name: value for name, value in logs.items() if each.shows(name)}
        return self._true(args, state, control, logs=logs, **kwargs)


def _calling(callback: Any) -> tuple[Any, Mapping[str, Any]]:
    """The ``Trainer`` that is calling a callback, and the variables of its method.

    See [Note: the Trainer's own frame].
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, _transformers.Trainer) and callback in found.callback_handler.callbacks:
            return found, frame.f_locals
        frame = frame.f_back
    raise UsageError(
        "DisthooksCallback must be called by transformers' Trainer, or one derived from it, and none is calling: in a "
        "loop of your own use disthooks.prepare(model, optimizer), with Accelerate the prepare() of its integration"
    )
