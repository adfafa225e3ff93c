"""Where the launcher's options end and the script begins, as the launcher's own parser sees it."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from disthooks.errors import UsageError

LAUNCHERS = ("torchrun", "accelerate", "deepspeed")


@dataclass(frozen=True)
class Line:
    """A command line in its parts.

    Attributes:
        launcher: one of ``LAUNCHERS``.
        options: the launcher's.
        script: what is run; its name, or a module's.
        args: the script's.
        chosen: the options as the launcher reads them, and its defaults.
        hooks: the hooks file that ``--hooks`` names; None without.
    """

    launcher: str
    options: tuple[str, ...]
    script: str
    args: tuple[str, ...]
    chosen: argparse.Namespace
    hooks: str | None = None

    @property
    def module(self) -> bool:
        """Whether ``script`` is the name of a module."""
        return bool(getattr(self.chosen, "module", False))


def read(argv: Sequence[str]) -> Line:
    """Take ``argv`` (after ``disthooks launch``) apart.

    Raises:
        UsageError: when there is no script, an option that the launcher does not know, or one that disthooks cannot
            work with.
    """
    rest = list(argv)
    hooks: str | None = None
    if rest and rest[0].partition("=")[0] == "--hooks":  # in front of the launcher's name
        hooks = _hooks(rest.pop(0), rest)
    launcher = rest.pop(0) if rest and rest[0] in LAUNCHERS else "accelerate"
    if launcher == "accelerate" and rest[:1] == ["launch"]:
        rest.pop(0)
    parse = _PARSES[launcher]()
    options: list[str] = []
    while rest:
        word = rest.pop(0)
        if word == "--hooks" or word.startswith("--hooks="):
            hooks = _hooks(word, rest)
        elif word == "--" and rest:
            return _checked(launcher, options, rest, parse, hooks)
        elif not word.startswith("-") and _reads(parse, options):
            return _checked(launcher, options, [word, *rest], parse, hooks)
        else:
            options.append(word)
    raise UsageError(f"no script to run among the arguments of {launcher}: {_complaint(parse, options)}")


def _hooks(word: str, rest: list[str]) -> str:
    """The value of ``--hooks``: after its ``=``, or taken from the front of ``rest``."""
    value = word.partition("=")[2] if "=" in word else rest.pop(0) if rest else ""
    if not value:
        raise UsageError("--hooks needs the path of a file")
    return value


def command(line: Line, hooks: str | None) -> list[str]:
    """The arguments for the launcher: the same options, and ``disthooks.run`` with the script as its argument.

    The ``--`` keep launchers from taking the script's options for their own: argparse reads ``--run`` as torchrun's
    ``--run-path``, wherever it stands.
    """
    options = list(line.options)
    if not line.module:
        options.append("--module" if line.launcher == "deepspeed" else "-m")
    return [
        *options,
        "--",
        "disthooks.run",
        *(["--hooks", hooks] if hooks else []),
        *(["-m"] if line.module else ["--"]),
        line.script,
        *line.args,
    ]


def _checked(launcher: str, options: list[str], words: list[str], parse: _Parse, hooks: str | None) -> Line:
    script, *args = words
    chosen = _reads(parse, options)
    if chosen is None:
        raise UsageError(f"{launcher}: {_complaint(parse, [*options, '--', script])}")
    for option in ("no_python", "run_path"):
        if getattr(chosen, option, False):
            raise UsageError(
                f"--{option.replace('_', '-')} of {launcher}: the script has to be Python, run by disthooks"
            )
    return Line(launcher, tuple(options), script, tuple(args), chosen, hooks)


_Parse = Callable[[list[str]], argparse.Namespace]


class _Refused(Exception):
    """What a parser says instead of ending the process."""


def _reads(parse: _Parse, options: list[str]) -> argparse.Namespace | None:
    """What the launcher reads in ``options`` alone; None if a value is missing there, or something is unknown."""
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            return parse([*options, "--", "SCRIPT"])
    except (_Refused, SystemExit, ValueError):
        return None


def _complaint(parse: _Parse, words: list[str]) -> str:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parse(words)
    except (SystemExit, _Refused, ValueError) as error:
        last = said.getvalue().strip().splitlines()[-1:]
        return last[0] if last else str(error)
    return "give one"


def _torchrun() -> _Parse:
    from torch.distributed.run import get_args_parser

    return get_args_parser().parse_args


def _accelerate() -> _Parse:
    try:
        launch: Any = importlib.import_module("accelerate.commands.launch")
    except ImportError as error:
        raise UsageError("accelerate is not installed: disthooks launch torchrun ..., or install it") from error
    parse: _Parse = launch.launch_command_parser().parse_args
    return parse


def _deepspeed() -> _Parse:
    try:
        runner: Any = importlib.import_module("deepspeed.launcher.runner")
    except ImportError as error:
        raise UsageError("deepspeed is not installed: disthooks launch torchrun ..., or install it") from error
    parse: _Parse = runner.parse_args
    return parse


_PARSES: dict[str, Callable[[], _Parse]] = {"torchrun": _torchrun, "accelerate": _accelerate, "deepspeed": _deepspeed}
