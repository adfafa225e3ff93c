"""The command line: ``disthooks env | check | explain | report | launch``, one file for each."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; without typer and rich, say how to get them."""
    try:
        from disthooks.cli.app import app
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("typer", "rich", "click"):
            raise
        sys.exit("the command line needs typer and rich: pip install 'disthooks[cli]'")
    app(prog_name="disthooks")
