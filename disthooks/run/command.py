"""What stands on the command line: options of disthooks, then the script; everything after it is the script's."""

from __future__ import annotations

import difflib
import importlib.util
import os
import pathlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from disthooks.errors import UsageError

USAGE = """usage: python -m disthooks.run [--hooks FILE] [--] SCRIPT ARGS...
       python -m disthooks.run [--hooks FILE] -m MODULE ARGS...

Runs SCRIPT (or MODULE) as python would and attaches what FILE says when it trains. Without --hooks the file is
what DISTHOOKS_CONFIG names, else the 'disthooks' of DeepSpeed's configuration, else ./disthooks.yaml or
./hooks.yaml."""

# The deepspeed launcher puts these in front, for the script.
_OF_THE_LAUNCHER = ("--local_rank=", "--local-rank=")


@dataclass(frozen=True)
class Command:
    """A script or module, its arguments, and the file of hooks if one is named."""

    target: str
    module: bool = False
    args: tuple[str, ...] = ()
    hooks: str | None = None


def parse(argv: Sequence[str]) -> Command:
    """Read the options in front of the script.

    Raises:
        UsageError: for an unknown option, or without a script.

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
        if f"{option}=".startswith(_OF_THE_LAUNCHER):
            passed.append(f"{option}={value}")
        elif option == "--hooks":
            hooks = value or (rest.pop(0) if rest else None)
            if not hooks:
                raise UsageError("--hooks needs the path of a file")
        elif option in ("-m", "--module"):
            module = True
        else:
            raise UsageError(f"{option} is no option of disthooks.run; the script's own options stand after it")
    return _command(rest, module, passed, hooks)


def check_target(target: str, module: bool) -> None:
    """Whether there is a script or a module of that name, before a configuration is looked for.

    Raises:
        UsageError: when there is none; it names the script beside it that has nearly this name.
    """
    if module:
        if not _is_module(target.partition(".")[0]):
            raise UsageError(
                f"there is no module {target!r}: Python finds none in {os.getcwd()} or where it is installed"
            )
    elif not os.path.exists(target):
        path = pathlib.Path(target)
        there = [each.name for each in path.parent.glob("*.py")] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, there, n=1, cutoff=0.6)
        hint = f"; did you mean {str(path.parent / near[0])!r}?" if near else ""
        raise UsageError(f"there is no script {target!r} in {path.parent.resolve()}{hint}")


def _is_module(name: str) -> bool:
    here = pathlib.Path(name)
    try:
        return here.is_dir() or here.with_suffix(".py").exists() or importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _command(rest: list[str], module: bool, passed: list[str], hooks: str | None) -> Command:
    if rest and rest[0] in ("-m", "--module") and not module:  # after --
        module, rest = True, rest[1:]
    if not rest:
        raise UsageError("there is no script to run")
    return Command(rest[0], module, (*passed, *rest[1:]), hooks)
