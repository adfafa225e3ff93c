"""The command line: all commands in one app."""

# [Note: the command line waits for no torch]
# Importing torch takes more than a second, and `disthooks --help` should answer at once. So no file of a command
# imports torch at its top, nor a module of disthooks that imports torch. A command imports what it needs when it runs.
# The functions that run a model are in workload.py, which imports torch (decision 73).

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import typer

from disthooks import __version__
from disthooks.errors import DisthooksError, as_line
from disthooks.run.cli.check import check
from disthooks.run.cli.diff import diff
from disthooks.run.cli.explain import explain
from disthooks.run.cli.output import line
from disthooks.run.cli.replay import replay
from disthooks.run.cli.report import report
from disthooks.run.cli.watch import watch

F = TypeVar("F", bound=Callable[..., Any])


def _with_short_errors(command: F) -> F:
    """Make ``command`` print an error of disthooks in one line on stderr, instead of a traceback, and exit with 1.

    ``diff`` exits with 2, as diff and cmp do: with ``--exit-code`` 1 means that the runs differ.
    """

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except DisthooksError as error:
            line(as_line(error), error=True)
            raise typer.Exit(2 if command is diff else 1) from None

    return cast(F, run)


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

    A YAML file says what a run does. These commands check that file, and show the log of a run.
    """
    if words.invoked_subcommand is None:
        print(words.get_help())
        raise typer.Exit(2)


for _command in (check, explain, report, watch, diff, replay):
    app.command(context_settings=_HELP)(_with_short_errors(_command))

# Typer has its own copy of click since 0.16 and does not export it, so the base class of its errors is taken from one
# of them.
_UsageError: Any = typer.BadParameter.__mro__[1]


def run(words: list[str] | None = None) -> int:
    """Run one command. Returns the exit code: 130 after Ctrl-C, 2 for wrong arguments, and what the command says."""
    try:
        code = typer.main.get_command(app).main(words, prog_name="disthooks", standalone_mode=False)
    except _UsageError as error:
        context = getattr(error, "ctx", None)
        where = context.command_path if context is not None else "disthooks"
        line(as_line(f"{error.format_message()} ({where} -h says what there is)"), error=True)
        return 2
    except (typer.Abort, KeyboardInterrupt):
        return 130
    return code if isinstance(code, int) else 0
