"""``disthooks report``: say what went wrong in a run that was logged, then show its numbers."""

from __future__ import annotations

import contextlib
import json
import pathlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import typer

from disthooks.errors import UsageError
from disthooks.run.cli.output import console, document, line, table

if TYPE_CHECKING:
    from disthooks.report.log import Log

#: The numbers that the terminal shows first.
_FIRST = ("loss", "grad_norm", "grad_norm/peak", "clip_ratio", "update_ratio", "lr", "saved/moved_per_step")
_ROWS = 10  # numbers that the terminal shows


def report(
    path: str = typer.Argument(..., help="A gradients.jsonl, or the directory of a run."),
    output: str = typer.Option(None, "--output", "-o", help="Write one page of HTML."),
    compare: str = typer.Option(None, "--compare", help="With -o: another run, whose curves the page shows too."),
    as_json: bool = typer.Option(False, "--json", help="One JSON document on stdout; docs/cli.md has its keys."),
) -> None:
    """Say what went wrong in a run, and show the numbers that it logged.

    The report begins with a few sentences: what went wrong first, in which layer, rank and step, and what to do; how
    often gradients were clipped, and what saving tensors elsewhere moved and cost. The figures follow. If a file has
    several runs, they are shown one after the other.
    """
    from disthooks.report.log import file_of, read
    from disthooks.report.summary import summary

    file = file_of(pathlib.Path(path))
    log = read(file)
    if log.broken and not log.runs:
        place, why = next(iter(log.broken.items()))
        none = f"none of its {len(log.broken)} lines is a record of a run (line {place}: {why})"
        raise UsageError(f"{file}: {none}; give what the sink Jsonl wrote")
    if output is not None:
        _write(file, log, pathlib.Path(output), compare)
        if not as_json:
            line(f"wrote {output}")
    told = [summary(run) for run in log.runs]
    if as_json:
        broken = {"broken": list(log.broken), "why_broken": log.broken_said()}
        document({"file": str(file), "half": log.half, **broken, "runs": told})
        return
    if not log.runs:
        line(f"{file}: no step is logged there yet")
    for run in told:
        _show(file, run, several=len(told) > 1)
    if log.half:
        line("the last line is not whole and was left out: the run is writing it, or was killed")
    for text in log.broken_said():
        line(text)


def _write(file: pathlib.Path, log: Log, output: pathlib.Path, compare: str | None) -> None:
    """Write the page of the last run in ``log``."""
    from disthooks.report.document import document as page_document
    from disthooks.report.log import file_of, read
    from disthooks.report.page.page import page

    other = None
    if compare is not None:
        runs = read(file_of(pathlib.Path(compare))).runs
        if not runs:
            raise UsageError(f"--compare: {compare}: no step is logged there yet")
        other = runs[-1]
    notes = []
    if log.half:
        notes.append("The last line of the log is not whole: the run is writing it, or was killed.")
    notes += [f"{text[:1].upper()}{text[1:]}." for text in log.broken_said()]
    if len(log.runs) > 1:
        notes.append(f"The log has {len(log.runs)} runs; this page shows the last one.")
    predicted = None
    if (beside := file.with_name("explain.json")).is_file():  # of `disthooks explain --json`
        with contextlib.suppress(OSError, ValueError):
            predicted = json.loads(beside.read_text(encoding="utf-8"), parse_int=float)  # of any length
    if log.runs:
        told = page_document(log.runs[-1], str(file), notes, other, predicted if isinstance(predicted, dict) else None)
    else:
        told = {"name": str(file), "notes": notes}
    try:
        output.write_text(page("report", told), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"-o: {output}: cannot be written: {error.strerror}") from error


def _show(file: pathlib.Path, run: dict[str, Any], several: bool) -> None:
    for text in _heading(file, run, several):
        line(text)
    named = {culprit["text"]: culprit for culprit in run["culprits"]}
    for place, text in enumerate(run["verdict"]):
        line(text)
        if text in named and not place:  # of the first one the evidence, and what to do
            for more in named[text]["evidence"]:
                line(f"  {more}")
            if named[text]["advice"]:
                line(f"  What to do: {named[text]['advice']}")
    _show_figures(run)


def _show_figures(run: dict[str, Any]) -> None:
    from disthooks.report.sentences import figure

    def order(name: str) -> tuple[int, str]:
        place = next((at for at, first in enumerate(_FIRST) if name == first), len(_FIRST))
        return place, "" if place < len(_FIRST) else name

    keys = ("first", "median", "last", "max")
    # What the loop changed is in the sentences.
    names = sorted((name for name in run["numbers"] if not name.startswith("loop/")), key=order)
    shown = []
    for name in names[:_ROWS]:
        told = run["numbers"][name]
        at = "" if told["max_step"] is None else f"step {told['max_step']}"
        shown.append((name, *(figure(name, told[key]) for key in keys), at, str(told["not_finite"] or "")))
    if shown:
        heads = ("", *keys, "max at", "not finite")
        console().print(table(shown, heads, right=range(1, len(heads))))
    others = len(run["numbers"]) - len(shown) + len(run["counts"]) + len(run["totals"]) + run["single"]
    if others:
        line(
            f"{others} more numbers, of single parameters too: -o report.html draws them, --json has those of the step"
        )


def _heading(file: pathlib.Path, run: dict[str, Any], several: bool) -> Iterator[str]:
    named = f", run {run['run']}" if run["run"] is not None and several else ""
    named += f", optimizer {run['optimizer']}" if run["optimizer"] is not None else ""
    yield f"{file}{named}: {run['steps']} logged steps, {run['first_step']} to {run['last_step']}"
    if about := run["about"]:
        ranks = f"{about.get('ranks', '?')} rank{'s' if about.get('ranks') != 1 else ''}"
        what = f"{about.get('engine', 'a run')}, {ranks}, {about.get('parameters', '?')} parameters"
        yield f"{what}, every {about.get('every', '?')}; rules: {', '.join(about.get('rules', ())) or 'none'}"
    if run["began"] is not None:
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run["began"]))
        again = f", restarted {run['restarts']} times" if run["restarts"] else ""
        yield f"from {began}, {run['ended'] - run['began']:.0f} s{again}"
    if run["again"] and run["run"] is None:
        why = "the run was restarted, or several wrote into one file"
        yield f"steps come again: {why}; of each step the last line counts"
    elif run["repeated"]:
        yield f"{run['repeated']} steps come again; of each the last line counts"
