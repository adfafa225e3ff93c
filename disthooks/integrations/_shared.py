"""What the integrations share: importing a framework, attaching a configuration, files beside a checkpoint."""

# [Note: state beside a framework's checkpoint]
# What rules and statistics have learned is written into the folder of a framework's checkpoint, as a file of its own:
# `disthooks.pt`. Accelerate refuses to load a checkpoint with another number of registered objects, so that
# `register_for_checkpointing` would tie checkpoints to disthooks: one made with it could not be loaded without it, and
# the reverse (docs/decisions.md, 67). A checkpoint without the file gives a warning, and rules begin anew.

from __future__ import annotations

import functools
import importlib
import os
import pathlib
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from disthooks.config import Plan, Prepared
from disthooks.config.agree import check_not_alone
from disthooks.config.locate import engine_config, locate_config, read_plan
from disthooks.config.plan import attach
from disthooks.errors import UsageError
from disthooks.grads.attach import Gradients


def framework(module: str, wanted_by: str, install: str) -> Any:
    """Import a module of a framework.

    Args:
        module: of the framework.
        wanted_by: the name of the file that needs it, ``__name__`` there.
        install: what ``pip install`` takes.

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
    return attach(functools.partial(_plan_of, config, model), model, optimizer, sinks)


def _plan_of(config: Any, model: nn.Module) -> Plan:
    """The plan that ``config`` is, or that is found for a model which an engine has taken."""
    return config if isinstance(config, Plan) else read_plan(locate_config(config, engine_config(model)))


def load_into(gradients: Gradients, file: pathlib.Path) -> bool:
    """Load the state that a checkpoint has; a warning, and False, if it has none.

    See [Note: state beside a framework's checkpoint].

    Raises:
        UsageError: if the state is of other rules or statistics; the message names the file.
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


def file_in(folder: str | os.PathLike[str], i: int) -> pathlib.Path:
    """The file in a checkpoint's folder that has the state of the ``i``-th attachment."""
    return pathlib.Path(folder, f"disthooks_{i}.pt" if i else "disthooks.pt")
