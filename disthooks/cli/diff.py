"""``disthooks diff``: where two runs begin to compute other bits."""

from __future__ import annotations

import pathlib

import typer

from disthooks.cli.output import document, line
from disthooks.errors import UsageError


def diff(
    one: str = typer.Argument(..., help="A gradients.jsonl, or the directory of a run."),
    other: str = typer.Argument(..., help="That of the other run."),
    as_json: bool = typer.Option(False, "--json", help="One JSON document on stdout; docs/cli.md has its keys."),
    exit_code: bool = typer.Option(False, "--exit-code", help="End with 1 if the runs differ."),
) -> None:
    """Say in which step, module and rank two runs begin to differ, bit for bit; both log stats.Fingerprints()."""
    from disthooks.report import diff as compared
    from disthooks.report.log import Run, file_of, read

    def last_run(path: str) -> Run:
        runs = read(file_of(pathlib.Path(path))).runs
        if not runs:
            raise UsageError(f"{path}: no step is logged there yet")
        return runs[-1]

    found = compared.compare(last_run(one), last_run(other))
    if as_json:
        document(compared.document(found))
    else:
        for text in compared.sentences(found):
            line(text)
    if exit_code and found.first is not None:
        raise typer.Exit(1)
