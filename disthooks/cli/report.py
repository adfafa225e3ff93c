"""``disthooks report``: show the numbers that a run logged, as tables or as one JSON document."""

from __future__ import annotations

import collections
import itertools
import json
import math
import pathlib
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import typer

from disthooks.cli.output import console, document, line, table
from disthooks.errors import UsageError

_MOST = 10  # a text names at most so many steps, files or line numbers


class Log(NamedTuple):
    """The content of a log file.

    Attributes:
        records: one dict for each logged step, in the order of the lines.
        half: whether the last line is incomplete, because the run is writing it, or was killed.
        broken: the numbers of other lines that are no records; the first line has number 1.
    """

    records: list[dict[str, Any]]
    half: bool
    broken: list[int]


def report(
    path: str = typer.Argument(..., help="A gradients.jsonl, or the directory of a run."),
    as_json: bool = typer.Option(False, "--json", help="One JSON document on stdout; docs/cli.md has its keys."),
) -> None:
    """Tell what a run logged: for each number its first, median, last and largest value, and the non-finite steps.

    If a file has several runs, they are shown one after the other. Counts are summed over the steps. For a number that
    names a rank, the ranks that were named most often are shown.
    """
    file = _file(pathlib.Path(path))
    log = read(file)
    if log.broken and not log.records:
        raise UsageError(
            f"{file}: none of its {len(log.broken)} lines is a record of a run; give what the sink Jsonl wrote"
        )
    told = [summary(run) for run in runs_in(log.records)]
    if as_json:
        document({"file": str(file), "half": log.half, "broken": log.broken, "runs": told})
        return
    if not log.records:
        line(f"{file}: no step is logged there yet")
    for run in told:
        _show(file, run, several=len(told) > 1)
    if log.half:
        line("the last line is not whole and was left out: the run is writing it, or was killed")
    if log.broken:
        line(f"{len(log.broken)} lines are no records and were left out: {log.broken[:_MOST]}")


def _file(path: pathlib.Path) -> pathlib.Path:
    """``path`` itself if it is a file, or the one log in the directory ``path``."""
    if path.is_file():
        return path
    if not path.is_dir():
        raise UsageError(f"{path}: there is no such file or directory; give what the sink Jsonl was given as path")
    named = sorted(path.rglob("gradients.jsonl")) or sorted(path.rglob("*.jsonl"))
    if len(named) != 1:
        what = f"{len(named)} logs: {', '.join(map(str, named[:_MOST]))}" if named else "no .jsonl file"
        raise UsageError(f"{path} has {what}; give the file")
    return named[0]


def read(file: pathlib.Path) -> Log:
    """Read the records of a log.

    Raises:
        UsageError: if the file cannot be read.
    """
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror}") from error
    tail, records, broken = lines.pop(), [], []
    for number, text in enumerate(lines, 1):
        record = _record(text)
        if record is not None:
            records.append(record)
        elif text.strip():
            broken.append(number)
    last = _record(tail)
    return Log(records + ([last] if last else []), bool(tail.strip()) and last is None, broken)


def _record(text: str) -> dict[str, Any] | None:
    try:
        record = json.loads(text)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def runs_in(records: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The records of each run, and of each optimizer in it, in the order in which they begin.

    Records without the key ``run`` count as one run: older versions did not write it.

    >>> records = [{"step": 0, "run": "a"}, {"step": 0, "run": "b"}, {"step": 1, "run": "a"}]
    >>> [[record["step"] for record in run] for run in runs_in(records)]
    [[0, 1], [0]]
    """
    found: dict[tuple[Any, Any], list[dict[str, Any]]] = {}
    for record in records:
        found.setdefault((record.get("run"), record.get("optimizer")), []).append(record)
    return list(found.values())


def summary(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of one run in plain values; docs/cli.md has the keys."""
    from disthooks.grads.sinks.base import meaning

    # Each step once, in order. If a restarted run made a step again, its last record counts.
    kept = sorted({record["step"]: record for record in records}.values(), key=lambda record: int(record["step"]))
    names = list(dict.fromkeys(name for record in kept for name in record))
    figures: dict[str, dict[str, Any]] = {"number": {}, "count": {}, "total": {}, "label": {}}
    for name in names:
        kind = meaning(name)
        if kind in figures and "/param/" not in name and name not in ("run", "restart", "optimizer"):
            found = _figures(kind, [record.get(name) for record in kept])
            if found:
                figures[kind][name] = found
    times = [record["time"] for record in records if isinstance(record.get("time"), (int, float))]
    return {
        "run": records[0].get("run"),
        "optimizer": records[0].get("optimizer"),
        "restarts": max((record.get("restart") or 0 for record in records), default=0),
        "began": min(times, default=None),
        "ended": max(times, default=None),
        "steps": len(kept),
        "first_step": kept[0]["step"],
        "last_step": kept[-1]["step"],
        "again": any(later["step"] <= earlier["step"] for earlier, later in itertools.pairwise(records)),
        "repeated": len(records) - len(kept),
        "numbers": figures["number"],
        "counts": figures["count"],
        "totals": figures["total"],
        "labels": figures["label"],
        "single": sum("/param/" in name for name in names),
        "nonfinite": _not_finite(kept),
    }


def _figures(kind: str, column: Sequence[Any]) -> dict[str, Any]:
    """The figures of one name over all steps; empty if the column has no number.

    Args:
        kind: what the name means: "number", "count", "total" or "label".
        column: the value in each record; None in a record without the name.
    """
    if kind == "label":  # the number of a rank: how often each rank was named, the most frequent first
        named = collections.Counter(value for value in column if isinstance(value, (int, float)))
        return {str(int(value)): times for value, times in named.most_common()}
    values = [number for value in column if (number := _number(value)) is not None]
    if not values:
        return {}
    if kind == "count":
        return {"sum": sum(values), "steps": sum(value != 0 for value in values)}
    if kind == "total":  # each record has the sum up to its step
        return {"last": values[-1]}
    finite = [value for value in values if math.isfinite(value)]
    return {
        "first": values[0],
        "median": statistics.median(finite or [math.nan]),
        "last": values[-1],
        "max": max(finite or [math.nan]),
        "not_finite": len(values) - len(finite),
    }


def _number(value: Any) -> float | None:
    """``value`` as a float; None if it is no number. ``Jsonl`` writes numbers that are not finite as strings."""
    if isinstance(value, (int, float)):
        return float(value)
    return float(value) if value in ("nan", "inf", "-inf") else None


def _not_finite(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps with gradients that were not finite, and the parameters and ranks that the records name."""
    found = []
    for record in records:
        count, norm = _number(record.get("nonfinite")), _number(record.get("grad_norm"))
        if count is not None:  # the statistic NonFinite has counted
            is_nonfinite = count > 0
        else:
            is_nonfinite = bool(record.get("nonfinite_at")) or (norm is not None and not math.isfinite(norm))
        if is_nonfinite:
            places = [place for place in record.get("nonfinite_at") or [] if isinstance(place, dict)]
            found.append({"step": record["step"], "at": places})
    return found


# -- for people


def _show(file: pathlib.Path, run: dict[str, Any], several: bool) -> None:
    for text in _heading(file, run, several):
        line(text)
    keys = ("first", "median", "last", "max")
    numbers = [
        (name, *(f"{told[key]:.4g}" for key in keys), str(told["not_finite"] or ""))
        for name, told in run["numbers"].items()
    ]
    counts = [(name, f"{told['sum']:.10g}", str(told["steps"])) for name, told in run["counts"].items()]
    totals = [(name, f"{told['last']:.4g}") for name, told in run["totals"].items()]
    tables: list[tuple[list[Any], tuple[str, ...]]] = [
        (numbers, ("", *keys, "not finite")),
        (counts, ("", "in all", "steps")),
        (totals, ("", "in all")),
    ]
    for rows, heads in tables:
        if rows:
            console().print(table(rows, heads, right=range(1, len(heads))))
    for name, told in run["labels"].items():
        line(f"{name}: {', '.join(f'{label} in {times}' for label, times in itertools.islice(told.items(), _MOST))}")
    if run["single"]:
        line(f"{run['single']} numbers of single parameters are not shown")
    found = run["nonfinite"]
    if found:
        line(f"not finite in {len(found)} of {run['steps']} logged steps:")
    for each in found[:_MOST]:
        named = []
        for place in each["at"]:
            rank = place.get("rank")  # None if the reduction made the gradient infinite or NaN
            where = "no rank before the reduction" if rank is None else f"rank {rank}"
            named.append(f"{place.get('param')} on {where}")
        rest = f" and {len(named) - _MOST} more" if len(named) > _MOST else ""
        line(f"  step {each['step']}: {', '.join(named[:_MOST]) or 'no parameter is named'}{rest}")
    if len(found) > _MOST:
        line(f"  and {len(found) - _MOST} more")


def _heading(file: pathlib.Path, run: dict[str, Any], several: bool) -> Iterator[str]:
    named = f", run {run['run']}" if run["run"] is not None and several else ""
    named += f", optimizer {run['optimizer']}" if run["optimizer"] is not None else ""
    yield f"{file}{named}: {run['steps']} logged steps, {run['first_step']} to {run['last_step']}"
    if run["began"] is not None:
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run["began"]))
        again = f", restarted {run['restarts']} times" if run["restarts"] else ""
        yield f"from {began}, {run['ended'] - run['began']:.0f} s{again}"
    if run["again"] and run["run"] is None:
        why = "the run was restarted, or several wrote into one file"
        yield f"steps come again: {why}; of each step the last line counts"
    elif run["repeated"]:
        yield f"{run['repeated']} steps come again; of each the last line counts"
