"""The commands put together. Nothing here imports torch: ``disthooks --help`` answers at once."""

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
from disthooks.cli.launch import launch
from disthooks.cli.report import report
from disthooks.errors import DisthooksError

F = TypeVar("F", bound=Callable[..., Any])


class _Untouched(TyperCommand):
    """A command whose words are all somebody else's: none is read here, not even ``--help`` or ``--``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep the words as they are."""
        ctx.args = list(args)
        return []


def _told(command: F) -> F:
    """``command`` whose errors, if they are of disthooks, are told in a line instead of a traceback."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except DisthooksError as error:
            print(f"disthooks: {' '.join(str(error).split())}", file=sys.stderr)
            raise typer.Exit(1) from None

    return cast(F, run)


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.callback()
def _whole(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Where saved tensors live between forward and backward, and what happens to gradients before the step.

    What a run does stands in a YAML file; these commands look at it, at the machine and at what a run left.
    """


for _command in (env, check, explain, report):
    app.command()(_told(_command))
app.command(cls=_Untouched, add_help_option=False)(_told(launch))
