"""One worker, ``python -m disthooks.run``: read the command line, begin a session, run the script, and exit."""

# [Note: the script runs as Python would run it]
# The script runs as the module `__main__`, in a new module object, with its own `sys.argv` and `sys.path[0]`. Pickles,
# dataclasses and the spawn method of multiprocessing look up names in `__main__`. `runpy` is not enough: it removes the
# module when the script ends, while threads and exit functions still use it. A traceback begins at the script's own
# first frame.
#
# [Note: the launcher's error file]
# torchrun names a file for each worker, and its report at the end of the job is made of these files. A script that has
# torch's ``@record`` writes it; for all others the worker does, and it turns on faulthandler, as ``@record`` does.

from __future__ import annotations

import builtins
import difflib
import faulthandler
import importlib.machinery
import importlib.util
import io
import json
import os
import pathlib
import runpy
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn

from disthooks.config.locate import ConfigLocation, locate_config, read_plan
from disthooks.config.source import VARIABLE
from disthooks.errors import DisthooksError, UsageError, as_line
from disthooks.run.session import Session

USAGE = """usage: python -m disthooks.run [--hooks FILE] [--] SCRIPT ARGS...
       python -m disthooks.run [--hooks FILE] -m MODULE ARGS...

Runs SCRIPT (or MODULE) as python would and attaches what FILE says when it trains. Without --hooks the file is
what DISTHOOKS_CONFIG names, else the 'disthooks' of DeepSpeed's configuration, else ./disthooks.yaml or
./hooks.yaml."""

# The deepspeed launcher puts these options in front of all other arguments. They belong to the script.
_OF_DEEPSPEED = ("--local_rank=", "--local-rank=")


@dataclass(frozen=True)
class Command:
    """A worker's command line: a script, or the name of a module; its arguments; the file that ``--hooks`` names."""

    target: str
    module: bool = False
    args: tuple[str, ...] = ()
    hooks: str | None = None


def parse(argv: Sequence[str]) -> Command:
    """Read the options in front of the script. All words after the script are its arguments.

    >>> parse(["--hooks", "h.yaml", "train.py", "--hooks", "mine"])
    Command(target='train.py', module=False, args=('--hooks', 'mine'), hooks='h.yaml')
    >>> parse(["--local_rank=1", "-m", "pkg.train", "-m"]).args
    ('--local_rank=1', '-m')
    """
    rest, hooks, module = list(argv), None, False
    passed: list[str] = []
    while rest and rest[0].startswith("-") and not module:
        option, _, value = rest.pop(0).partition("=")
        if option == "--":
            break
        if option in ("-h", "--help"):
            print(USAGE)
            sys.exit(0)
        if f"{option}=".startswith(_OF_DEEPSPEED):
            passed.append(f"{option}={value}")
        elif option == "--hooks":
            hooks = value or (rest.pop(0) if rest else None)
            if not hooks:
                raise UsageError("--hooks needs the path of a file")
        elif option in ("-m", "--module"):
            module = True
        else:
            raise UsageError(f"disthooks.run has no option {option}; the script's own options stand after it")
    if rest and rest[0] in ("-m", "--module") and not module:  # after --
        module, rest = True, rest[1:]
    if not rest:
        raise UsageError("there is no script to run")
    return Command(rest[0], module, (*passed, *rest[1:]), hooks)


def check_target(target: str, module: bool) -> None:
    """Raise UsageError if there is no script or module of that name, before a configuration is searched for."""
    if module:
        name = target.partition(".")[0]
        here = pathlib.Path(name)
        try:
            exists = here.is_dir() or here.with_suffix(".py").exists() or importlib.util.find_spec(name) is not None
        except (ImportError, ValueError):
            exists = False
        if not exists:
            raise UsageError(
                f"there is no module {target!r}: Python finds none in {os.getcwd()} or where it is installed"
            )
    elif not os.path.exists(target):
        path = pathlib.Path(target)
        scripts = [each.name for each in path.parent.glob("*.py")] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, scripts, n=1, cutoff=0.6)
        hint = f"; did you mean {str(path.parent / near[0])!r}?" if near else ""
        raise UsageError(f"there is no script {target!r} in {path.parent.resolve()}{hint}")


def execute(command: Command) -> None:
    """Run the script or module; its exceptions are raised. See [Note: the script runs as Python would run it]."""
    if command.module:
        _module(command)
    elif pathlib.Path(command.target).is_dir() or command.target.endswith((".zip", ".pyz")):
        sys.argv = [command.target, *command.args]
        _first_on_path(command.target)
        runpy.run_path(command.target, run_name="__main__")
    else:
        _script(command)


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
    """Make a new ``__main__``. See [Note: the script runs as Python would run it]."""
    main = types.ModuleType("__main__")
    vars(main).update(names, __builtins__=builtins)
    sys.modules["__main__"] = main
    return main


def _first_on_path(folder: str) -> None:
    """Put ``folder`` first on the path, in the place of the working directory, which ``python -m`` has put there."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[:1] = [folder]


_FAULTY = 2
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the script of the command line, and end the process with its exit code; 2 if it was not started."""
    try:
        command = parse(sys.argv[1:] if argv is None else argv)
    except UsageError as error:
        print(f"{as_line(error)}\n{USAGE}", file=sys.stderr)
        sys.exit(_FAULTY)
    try:
        check_target(command.target, command.module)
        location = configuration(command)
        if command.hooks:  # the script's own disthooks.prepare(model, optimizer) finds the same file
            os.environ[VARIABLE] = os.path.abspath(command.hooks)
        session = Session(read_plan(location), location, command.hooks)
    except DisthooksError as error:
        print(as_line(error), file=sys.stderr)
        sys.exit(_FAULTY)
    session.arm()
    if _ERROR_FILE in os.environ:  # see [Note: the launcher's error file]
        faulthandler.enable()
    _run(command, session)


def _run(command: Command, session: Session) -> NoReturn:
    """Run the script, take the hooks off, and end as the script ends."""
    here = os.getpid()
    try:
        execute(command)
    except SystemExit as error:
        session.finish(here, failed=error.code not in (None, 0))
        raise
    except KeyboardInterrupt:
        session.finish(here, failed=True)
        raise
    except BaseException as error:
        # The file is written first, with the time of the error: taking the hooks off may wait for the device.
        trace = _of_script(error)
        error = error.with_traceback(trace)
        if os.getpid() == here:
            _write_error_file(error)
        sys.excepthook(type(error), error, trace)
        session.finish(here, failed=True)
        sys.exit(1)
    session.finish(here)
    sys.exit(0)


def _of_script(error: BaseException) -> TracebackType | None:
    """The traceback of ``error`` from the script's first frame on, as Python would show it without disthooks."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def _write_error_file(error: BaseException) -> None:
    """See [Note: the launcher's error file]."""
    path = os.environ.get(_ERROR_FILE)
    if path and not os.path.exists(path):  # no @record in the script
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)


def configuration(command: Command) -> ConfigLocation:
    """Find the configuration. DeepSpeed's is searched for in the JSON files that the script's arguments name."""
    return locate_config(command.hooks, _deepspeed_config(command.args))


def _deepspeed_config(args: Sequence[str]) -> dict[str, Any] | None:
    values = [argument.rpartition("=")[2] for argument in args]  # FILE in --deepspeed_config=FILE, or an argument FILE
    for name in [*values, os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "")]:
        if name.endswith(".json") and pathlib.Path(name).is_file():
            try:
                config = json.loads(pathlib.Path(name).read_text())
            except (OSError, ValueError):
                continue
            if isinstance(config, dict) and "disthooks" in config:
                return config
    return None
