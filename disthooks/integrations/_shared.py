"""Functions of all integrations: they import a framework, attach a configuration, and load files of a checkpoint."""

# [Note: state beside a framework's checkpoint]
# The state of rules and statistics is written into the folder of a framework's checkpoint, as a file of its own:
# `disthooks.pt`. Accelerate's `register_for_checkpointing` is not used, because accelerate refuses to load a checkpoint
# with another number of registered objects: a checkpoint that was made with disthooks could not be loaded without it,
# and the reverse (docs/decisions.md, 67). A checkpoint without the file gives a warning, and rules begin anew.
# What `fit` has learnt is another one on each rank, so each rank writes a file of its own, and reads it if there are as
# many ranks as before. Otherwise each rank reads the file of rank 0: what it says of layers and of Recompute holds on
# every rank, and what a step needs beside saved tensors does not, so `fit` learns that again.

from __future__ import annotations

import collections
import contextlib
import functools
import importlib
import os
import pathlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from disthooks._match import is_of_class
from disthooks._ranks import global_rank, world_ranks
from disthooks.config import Plan, Prepared
from disthooks.config.agree import check_not_alone
from disthooks.config.locate import engine_config, locate_config, read_plan
from disthooks.config.plan import attach
from disthooks.errors import UsageError
from disthooks.grads.attachment import Gradients
from disthooks.saved.fit import Fitted


def framework(module: str, wanted_by: str, install: str) -> Any:
    """Import a module of a framework.

    Raises:
        ImportError: when the framework is not installed; the message says what installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        root = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != root:
            raise  # the framework is installed, and a package that it needs is missing
        raise ImportError(
            f"{wanted_by} needs {root}, which is not installed: pip install {install}", name=root
        ) from None


def attach_found(config: Any, model: nn.Module, optimizer: Any, sinks: Iterable[Any] = ()) -> Prepared:
    """Attach ``config``, or the configuration that is found; an error on one rank is raised on every rank."""
    check_not_alone()

    def plan() -> Plan:  # `attach` calls it, and gathers the errors of all ranks
        return config if isinstance(config, Plan) else read_plan(locate_config(config, engine_config(model)))

    return attach(plan, model, optimizer, sinks)


def fitted_of(prepared: Prepared | None) -> Fitted | None:
    """What ``fit: true`` of a configuration attached; None without it."""
    return prepared.saving.fitted if prepared is not None and prepared.saving is not None else None


def load_into(gradients: Gradients, file: pathlib.Path) -> bool:
    """Load the state of ``gradients`` from ``file``. If there is no such file, warn and return False.

    See [Note: state beside a framework's checkpoint].
    """
    if not file.exists():
        warnings.warn(
            f"{file} does not exist: the checkpoint was made without disthooks, so rules and statistics begin anew",
            RuntimeWarning,
            stacklevel=3,
        )
        return False
    try:
        gradients.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
    except UsageError as error:
        raise UsageError(f"{file}: {error}") from None
    return True


class BatchIndices:
    """Notes for each micro-batch which samples it has: ``{"indices": [...]}``, if a batch sampler draws them.

    A loader gives the batches in the order in which its sampler draws them, though workers are ahead of the training.

    Args:
        gradients: gets the notes.
        is_resumed: whether the first epoch begins in its middle: which batches are left out there is not known here.
    """

    def __init__(self, gradients: Gradients, is_resumed: bool = False) -> None:
        self._gradients, self._epochs = gradients, -1 if is_resumed else 0
        self._drawn: collections.deque[Any] = collections.deque()

    def follow(self, loader: Any) -> Any:
        """Let the batch sampler of ``loader``, which is returned, tell what it draws, until the attachment ends."""
        # accelerate's dispatcher draws the batches of all ranks on the first one.
        sampler = None if is_of_class(loader, "DataLoaderDispatcher") else getattr(loader, "batch_sampler", None)
        if sampler is not None:
            kind = type(sampler)
            drawing = type(kind.__name__, (kind,), {"__iter__": lambda own: self._draw(kind.__iter__(own))})
            with contextlib.suppress(TypeError):  # a class of an extension
                sampler.__class__ = drawing
                self._gradients.on_remove(functools.partial(setattr, sampler, "__class__", kind))
        return loader

    def _draw(self, batches: Iterator[Any]) -> Iterator[Any]:
        self._drawn.clear()
        self._epochs += 1
        for indices in batches:
            if self._epochs > 0:
                self._drawn.append(indices)
            yield indices

    def note(self) -> None:
        if self._drawn:
            indices = self._drawn.popleft()
            with contextlib.suppress(UsageError, TypeError):  # no log to be written beside, or indices of another kind
                if None not in indices:  # so torch counts the samples of an IterableDataset
                    self._gradients.note_data({"indices": list(indices)})


def save_fit(fitted: Fitted, folder: str | os.PathLike[str], i: int = 0) -> None:
    """Write what ``fitted`` has learnt on this rank into a checkpoint's folder, if that exists; on every rank."""
    file = _fit_file(folder, i)
    if file.parent.is_dir():  # a Trainer that has made no checkpoint must not find an empty one later
        torch.save({"ranks": len(world_ranks()), "fit": fitted.state_dict()}, file)


def load_fit(fitted: Fitted, folder: str | os.PathLike[str], i: int = 0) -> None:
    """Load what :func:`save_fit` has written. See [Note: state beside a framework's checkpoint]."""
    mine = _fit_file(folder, i)
    file = mine if mine.exists() else _fit_file(folder, i, rank=0)
    if file.exists():
        found = torch.load(file, map_location="cpu", weights_only=True)
        is_own = file == mine and found["ranks"] == len(world_ranks())
        fitted.load_state_dict(found["fit"] if is_own else of_any_rank(found["fit"]))


def of_any_rank(state: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a state of :class:`Fitted` that holds on another rank, and with another number of ranks.

    >>> of_any_rank({"needs": {(8, True): {64: 32}}, "least": {}, "again": {}, "layers": {"0": True}})
    {'needs': {}, 'least': {}, 'again': {}, 'layers': {'0': True}}
    """
    return {**state, "needs": {}, "least": {}}


def _fit_file(folder: str | os.PathLike[str], i: int, rank: int | None = None) -> pathlib.Path:
    return pathlib.Path(folder, f"disthooks_fit_{i}_rank_{global_rank() if rank is None else rank}.pt")


def file_in(folder: str | os.PathLike[str], i: int) -> pathlib.Path:
    """The file in a checkpoint's folder that holds the state of the ``i``-th attachment."""
    return pathlib.Path(folder, f"disthooks_{i}.pt" if i else "disthooks.pt")
