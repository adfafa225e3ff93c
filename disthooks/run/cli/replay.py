"""``disthooks replay``: make a captured call of a module again here, and name the operator that made it bad."""

from __future__ import annotations

import typer

from disthooks.run.cli.output import document, line


def replay(
    folder: str = typer.Argument(..., help="A capture, such as runs/capture/step-37.rank-1."),
    model: str = typer.Option(..., help="package.module:function or file.py:function, which returns the model."),
    device: str = typer.Option("cpu", help="Where to run it."),
    as_json: bool = typer.Option(False, "--json", help="One JSON document on stdout; docs/cli.md has its keys."),
) -> None:
    """Make a captured call of a module again, and name the operator that made it infinite or NaN."""
    # The imports take a second or more, so `disthooks --help` does without them.
    from disthooks.report.replay import replay as make_again
    from disthooks.run.cli.workload import find

    found = make_again(folder, find(model), device)
    operator = found.operator
    if as_json:
        told = found._asdict() | {"operator": None if operator is None else operator._asdict()}
        document(told | {"verdict": found.verdict})
        return
    line(found.where)
    if operator is not None:
        line(f"made by {operator.name}{f' in {operator.node}' if operator.node else ''}")
        for head, texts in (("line", [operator.line]), ("given", operator.given), ("made", operator.made)):
            for text in filter(None, texts):
                line(f"  {head:>5}: {text}")
    line(found.verdict)
    for text in found.left_out:
        line(f"not in the capture: {text}")
