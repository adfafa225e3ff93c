"""Read the command line of ``disthooks launch``, and make the launcher's command line with ``disthooks.run`` in it."""

# [Note: where the script begins]
# Only the launcher's own parser knows whether a word is the script, or the value of the option before it. So this
# parser gets the words with `-- SCRIPT` behind them, one word more each time. The script is the first word without a
# dash for which the parser accepts all words before it. All words after the script are the script's arguments. In the
# new command line `--` stands before them, because argparse takes `--run` as short for torchrun's `--run-path` at any
# place.

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from disthooks.errors import UsageError

#: The module of each launcher, which has its parser and its ``main``.
MODULES = {
    "torchrun": "torch.distributed.run",
    "accelerate": "accelerate.commands.launch",
    "deepspeed": "deepspeed.launcher.runner",
}


@dataclass(frozen=True)
class LaunchCommand:
    """A command line in its parts; ``chosen`` are the values that the launcher's parser reads from ``options``."""

    launcher: str
    options: tuple[str, ...]
    script: str
    args: tuple[str, ...]
    chosen: argparse.Namespace
    hooks: str | None = None

    @property
    def module(self) -> bool:
        return bool(getattr(self.chosen, "module", False))


def read(argv: Sequence[str]) -> LaunchCommand:
    """Read the words after ``disthooks launch``. See [Note: where the script begins]."""
    rest = list(argv)
    hooks: str | None = None
    if rest and rest[0].partition("=")[0] == "--hooks":  # in front of the launcher's name
        hooks = _hooks_value(rest.pop(0), rest)
    launcher = rest.pop(0) if rest and rest[0] in MODULES else "accelerate"
    if launcher == "accelerate" and rest[:1] == ["launch"]:
        rest.pop(0)
    parse = _parser(launcher)
    options: list[str] = []
    while rest:
        word = rest.pop(0)
        if word == "--hooks" or word.startswith("--hooks="):
            hooks = _hooks_value(word, rest)
        elif word == "--" and rest:
            return _launch_command(launcher, options, rest, parse, hooks)
        elif not word.startswith("-") and _parsed(parse, options):
            return _launch_command(launcher, options, [word, *rest], parse, hooks)
        else:
            options.append(word)
    raise UsageError(f"no script to run among the arguments of {launcher}: {_complaint(parse, options)}")


def _hooks_value(word: str, rest: list[str]) -> str:
    """The value of ``--hooks``: the text after ``=``, or the first word of ``rest``, which is taken out."""
    value = word.partition("=")[2] if "=" in word else rest.pop(0) if rest else ""
    if not value:
        raise UsageError("--hooks needs the path of a file")
    return value


def launcher_arguments(command: LaunchCommand, hooks: str | None) -> list[str]:
    """The arguments for the launcher: its options, then ``disthooks.run``, whose argument is the script."""
    options = list(command.options)
    if not command.module:
        options.append("--module" if command.launcher == "deepspeed" else "-m")
    return [
        *options,
        "--",
        "disthooks.run",
        *(["--hooks", hooks] if hooks else []),
        *(["-m"] if command.module else ["--"]),  # See [Note: where the script begins]
        command.script,
        *command.args,
    ]


def _launch_command(
    launcher: str, options: list[str], words: list[str], parse: _Parse, hooks: str | None
) -> LaunchCommand:
    script, *args = words
    chosen = _parsed(parse, options)
    if chosen is None:
        raise UsageError(f"{launcher}: {_complaint(parse, [*options, '--', script])}")
    for option in ("no_python", "run_path"):
        if getattr(chosen, option, False):
            raise UsageError(
                f"--{option.replace('_', '-')} of {launcher}: the script has to be Python, run by disthooks"
            )
    return LaunchCommand(launcher, tuple(options), script, tuple(args), chosen, hooks)


_Parse = Callable[[list[str]], argparse.Namespace]


def _parsed(parse: _Parse, options: list[str]) -> argparse.Namespace | None:
    """The values that the launcher reads from ``options``; None if a value is missing or an option is not known."""
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            return parse([*options, "--", "SCRIPT"])
    except (SystemExit, ValueError):
        return None


def _complaint(parse: _Parse, words: list[str]) -> str:
    """The last line that the launcher's parser prints about ``words``."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            parse(words)
    except (SystemExit, ValueError) as error:
        last = printed.getvalue().strip().splitlines()[-1:]
        return last[0] if last else str(error)
    return "give one"


def _parser(launcher: str) -> _Parse:
    """The function of the launcher that reads its options."""
    try:
        module: Any = importlib.import_module(MODULES[launcher])
    except ImportError as error:
        raise UsageError(f"{launcher} is not installed: disthooks launch torchrun ..., or install it") from error
    parse: _Parse
    if launcher == "deepspeed":
        parse = module.parse_args
    else:
        parse = (module.launch_command_parser if launcher == "accelerate" else module.get_args_parser)().parse_args
    return parse
