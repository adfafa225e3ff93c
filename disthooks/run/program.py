"""Running a script or a module the way python does: as ``__main__``, with its own ``sys.argv`` and ``sys.path[0]``."""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import io
import os
import pathlib
import runpy
import sys
import types
from typing import Any

from disthooks.run.command import Command

_HERE = str(pathlib.Path(__file__).parent)


def execute(command: Command) -> None:
    """Run it to its end; what it raises passes through, ``SystemExit`` too."""
    if command.module:
        _module(command)
    elif pathlib.Path(command.target).is_dir() or command.target.endswith((".zip", ".pyz")):
        sys.argv = [command.target, *command.args]
        _first_on_path(command.target)
        runpy.run_path(command.target, run_name="__main__")
    else:
        _script(command)


def shortened(error: BaseException) -> types.TracebackType | None:
    """The traceback of ``error`` from the script on, as python would show it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_HERE):
        trace = trace.tb_next
    return trace


def _script(command: Command) -> None:
    path = command.target
    sys.argv = [path, *command.args]
    _first_on_path(os.path.dirname(os.path.realpath(path)))
    try:
        with io.open_code(os.path.abspath(path)) as file:
            source = file.read()
    except OSError as error:
        print(f"{sys.executable}: can't open file {os.path.abspath(path)!r}: {error}", file=sys.stderr)
        sys.exit(2)
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    main = _main(__file__=path, __loader__=loader, __spec__=None, __package__=None, __cached__=None)
    exec(loader.source_to_code(source, path), main.__dict__)


def _module(command: Command) -> None:
    sys.argv = ["-m", *command.args]
    _first_on_path(os.getcwd())
    spec = importlib.util.find_spec(command.target)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{command.target}.__main__")
    code: Any = spec.loader.get_code(spec.name) if spec and isinstance(spec.loader, _Coded) else None
    if spec is None or code is None:
        print(f"{sys.executable}: No module named {command.target}", file=sys.stderr)
        sys.exit(1)
    sys.argv[0] = spec.origin or command.target
    names = {"__file__": spec.origin, "__loader__": spec.loader, "__cached__": spec.cached}
    main = _main(__spec__=spec, __package__=spec.parent, **names)
    exec(code, main.__dict__)


_Coded = (importlib.machinery.SourceFileLoader, importlib.machinery.SourcelessFileLoader)


def _main(**names: Any) -> types.ModuleType:
    """A new ``__main__``; it stays when the script has ended: threads and exit functions still use it."""
    main = types.ModuleType("__main__")
    vars(main).update(names, __builtins__=builtins)
    sys.modules["__main__"] = main
    return main


def _first_on_path(folder: str) -> None:
    """``python -m disthooks.run`` put the working directory first; python would put ``folder`` there."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[:1] = [folder]
