"""``disthooks diff``: where two runs begin to compute other bits."""

from __future__ import annotations

import pathlib

import typer

from disthooks.run.cli.output import document, line


def diff(
    one: str = typer.Argument(..., help="A gradients.jsonl, or the directory of a run."),
    other: str = typer.Argument(..., help="That of the other run."),
    as_json: bool = typer.Option(False, "--json", help="One JSON document on stdout; docs/cli.md has its keys."),
    exit_code: bool = typer.Option(
        False, "--exit-code", help="End with 1 if the runs differ, or if not all of them was compared."
    ),
) -> None:
    """Say in which step, module and rank two runs begin to differ, bit for bit; both log stats.Fingerprints()."""
    from disthooks.report.diff import compare_logs
    from disthooks.report.log import file_of, read

    found = compare_logs(*(read(file_of(pathlib.Path(path))) for path in (one, other)))
    if as_json:
        document(found)
    else:
        for text in found["sentences"]:
            line(text)
    if exit_code and not (found["same"] and found["whole"]):
        raise typer.Exit(1)
