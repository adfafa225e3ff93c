"""What the integrations of Accelerate and of transformers share."""

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
from disthooks.config.locate import engine_config, find, read_found
from disthooks.config.plan import attach
from disthooks.errors import UsageError
from disthooks.grads.attach import Gradients


def framework(module: str, wanted_by: str, install: str) -> Any:
    """``module``, imported.

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
            raise  # the framework is there, and something that it needs is not
        raise ImportError(
            f"{wanted_by} needs {root}, which is not installed: pip install {install}", name=root
        ) from None


def attach_found(config: Any, model: nn.Module, optimizer: Any, sinks: Iterable[Any] = ()) -> Prepared:
    """Attach what ``config`` says, or what is found; one rank that cannot read it leaves none waiting for it."""
    check_not_alone()
    return attach(functools.partial(_plan_of, config, model), model, optimizer, sinks)


def _plan_of(config: Any, model: nn.Module) -> Plan:
    """The plan that ``config`` is, or that is found for a model which an engine has taken."""
    return config if isinstance(config, Plan) else read_found(find(config, engine_config(model)))


def load_into(gradients: Gradients, file: pathlib.Path) -> bool:
    """Go on from a file that ``state_dict()`` was saved to; a warning if there is none.

    Raises:
        UsageError: when it is of other rules or statistics; the message names the file.
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
    """Where a checkpoint has the state of the ``i``-th attachment."""
    return pathlib.Path(folder, f"disthooks_{i}.pt" if i else "disthooks.pt")
