"""A model from its name: ``package.module:function`` or ``path/to/file.py:function``."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import pathlib
import sys
import traceback
from types import ModuleType
from typing import Any

from disthooks.errors import UsageError


def build(name: str) -> tuple[Any, Any]:
    """The module that the function makes, and example inputs, None when it gives none.

    Raises:
        UsageError: when there is no such function, when it raises, or what it returns holds no module.
    """
    from torch import nn

    where, _, function = name.rpartition(":")
    if not where or not function:
        raise UsageError(f"{name!r}: give package.module:function, or path/to/file.py:function, which makes the model")
    if where.endswith(".py") and not pathlib.Path(where).is_file():
        beside = [path.name for path in pathlib.Path(where).parent.glob("*.py")]
        raise UsageError(f"{name}: there is no file {where!r}{_near(pathlib.Path(where).name, beside)}")
    try:
        module = _imported(where)
        if not hasattr(module, function):
            there = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
            own = [each for each in there if inspect.getmodule(getattr(module, each)) is module]
            raise UsageError(f"{name}: {where} has no {function!r}{_near(function, own or there)}")
        made = getattr(module, function)()
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{name}: {said(error)}") from error
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise UsageError(f"{name} gave {type(made).__name__}: it has to return a module, or (module, example inputs)")
    return model, inputs


def _imported(where: str) -> ModuleType:
    """A module by name or by path; one beside the working directory too, as for ``python -m``."""
    if not where.endswith(".py"):
        sys.path.insert(0, str(pathlib.Path.cwd()))
        return importlib.import_module(where)
    path = pathlib.Path(where).resolve()
    sys.path.insert(0, str(path.parent))  # as when it is run
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{where} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses and pickles look for it there
    spec.loader.exec_module(module)
    return module


def _near(name: str, known: list[str]) -> str:
    """The nearest of ``known`` to ``name``, or the first of them."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; there are {', '.join(sorted(known)[:8])}" if known else ""


def said(error: BaseException) -> str:
    """What an error of somebody's code says, and where it was raised, in one line."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"
