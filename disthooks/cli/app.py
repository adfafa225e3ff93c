"""The commands put together, and ``disthooks launch``, which hands its words on."""

# [Note: the command line waits for no torch]
# To import torch takes more than a second, and `disthooks --help` shall answer at once. So no file of a command imports
# torch, or a module of disthooks that does, at its top: a command imports what it needs when it runs, and what runs a
# model is in workload.py (docs/decisions.md, 73).

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import typer
from typer.core import TyperCommand

from disthooks._version import __version__
from disthooks.cli.check import check
from disthooks.cli.env import env
from disthooks.cli.explain import explain
from disthooks.cli.report import report
from disthooks.errors import DisthooksError, as_line

F = TypeVar("F", bound=Callable[..., Any])


class _Untouched(TyperCommand):
    """A command that hands all its words on: none is read here, not even ``--help`` or ``--``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep the words as they are."""
        ctx.args = list(args)
        return []


def _with_short_errors(command: F) -> F:
    """Make ``command`` print an error of disthooks in one line instead of a traceback."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except DisthooksError as error:
            print(as_line(error), file=sys.stderr)
            raise typer.Exit(1) from None

    return cast(F, run)


def launch(words: typer.Context) -> None:
    """Start a script under accelerate (or torchrun, deepspeed) with its hooks: launch [LAUNCHER] OPTIONS SCRIPT ARGS.

    LAUNCHER is torchrun, deepspeed or accelerate, which it is when there is none. Every word after "launch" goes to
    the launcher as it stands, and every word after the script to the script.
    """
    from disthooks.launcher import main

    raise typer.Exit(main(list(words.args)))


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


_HELP = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None, context_settings=_HELP)


@app.callback(invoke_without_command=True)
def _whole(
    words: typer.Context,
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Where saved tensors live between forward and backward, and what happens to gradients before the step.

    What a run does stands in a YAML file; these commands look at it, at the machine and at what a run left.
    """
    if words.invoked_subcommand is None:
        print(words.get_help())
        raise typer.Exit(2)


for _command in (env, check, explain, report):
    app.command(context_settings=_HELP)(_with_short_errors(_command))
app.command(cls=_Untouched, add_help_option=False)(_with_short_errors(launch))

# Typer has a click of its own since 0.16 and does not export it: the base class of its errors is found from one.
_UsageError: Any = typer.BadParameter.__mro__[1]


def run(words: list[str] | None = None) -> int:
    """Run the command that ``words`` name, by default the words of this process.

    Returns:
        The exit code; 2, with one line that says why, if the words are wrong.
    """
    try:
        code = typer.main.get_command(app).main(words, prog_name="disthooks", standalone_mode=False)
    except _UsageError as error:
        context = getattr(error, "ctx", None)
        where = context.command_path if context is not None else "disthooks"
        print(as_line(f"{error.format_message()} ({where} -h says what there is)"), file=sys.stderr)
        return 2
    except (typer.Abort, KeyboardInterrupt):
        return 130
    return code if isinstance(code, int) else 0
