"""``disthooks launch``: start a training script with a hooks file under a launcher."""

from __future__ import annotations

import importlib

import typer


def launch(words: typer.Context) -> None:
    """Start a script under accelerate (or torchrun, deepspeed) with its hooks: launch [LAUNCHER] OPTIONS SCRIPT ARGS.

    LAUNCHER is torchrun, deepspeed or accelerate, which it is when there is none. Every word after "launch" goes to
    the launcher as it stands, and every word after the script to the script.
    """
    # Asked for by name: of this package no other file, and no other command, needs it.
    started: int = importlib.import_module("disthooks.launching").main(list(words.args))
    raise typer.Exit(started)
