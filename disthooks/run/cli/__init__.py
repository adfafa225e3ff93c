"""The command line: one file for each command of ``disthooks``, and ``app``, which has all of them."""

from __future__ import annotations

import sys

from disthooks.errors import as_line


def main() -> None:
    """Run the command line; without typer and rich, say how to get them."""
    try:
        from disthooks.run.cli.app import run
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("typer", "rich", "click"):
            raise
        sys.exit(as_line("the command line needs typer and rich: pip install 'disthooks[cli]'"))
    sys.exit(run())
