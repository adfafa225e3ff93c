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

_MOST = 10  # how many steps, files or line numbers a text names


class Log(NamedTuple):
    """The content of a log file.

    Attributes:
        records: one dict for each logged step, in the order of the lines.
        half: whether the last line is not whole, because the run is writing it, or was killed.
        broken: the numbers of other lines that are no records; the first line is 1.
    """

    records: list[dict[str, Any]]
    half: bool
    broken: list[int]


def report(
    path: str = typer.Argument(..., help="A gradients.jsonl, or the directory of a run."),
    as_json: bool = typer.Option(False, "--json", help="One JSON document on stdout; docs/cli.md has its keys."),
) -> None:
    """Tell what a run logged: for each number its first, median, last and largest value, and the non-finite steps.

    If a file has several runs, they are shown one after the other. Counts are summed over the steps. Of numbers that
    name a rank, the most frequent ones are shown.
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

    kept = _last_life(records)
    names = list(dict.fromkeys(name for record in kept for name in record))
    shown = [name for name in names if "/param/" not in name]
    columns: dict[str, dict[str, Any]] = {"number": {}, "count": {}, "total": {}, "label": {}}
    makers = {"number": _numbers, "count": _counts, "total": _totals, "label": _labels}
    for name in shown:
        kind = meaning(name)
        made = makers[kind](name, kept) if kind in makers and name not in ("run", "restart", "optimizer") else None
        if made is not None:
            columns[kind][name] = made
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
        "numbers": columns["number"],
        "counts": columns["count"],
        "totals": columns["total"],
        "labels": columns["label"],
        "single": sum("/param/" in name for name in names),
        "nonfinite": _not_finite(kept),
    }


def _last_life(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each step once, in order. If a restarted run made a step again, its last record counts."""
    return sorted({record["step"]: record for record in records}.values(), key=lambda record: int(record["step"]))


def _values(name: str, records: Sequence[dict[str, Any]]) -> list[float]:
    return [number for record in records if (number := _number(record.get(name))) is not None]


def _numbers(name: str, records: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """First, median, last and largest; median and largest of what is finite."""
    values = _values(name, records)
    if not values:
        return None
    finite = [value for value in values if math.isfinite(value)] or [math.nan]
    off = sum(not math.isfinite(value) for value in values)
    return {
        "first": values[0],
        "median": statistics.median(finite),
        "last": values[-1],
        "max": max(finite),
        "not_finite": off,
    }


def _counts(name: str, records: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The sum over the steps, and the number of steps in which the count was not zero."""
    values = _values(name, records)
    return {"sum": sum(values), "steps": sum(value != 0 for value in values)} if values else None


def _totals(name: str, records: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The last value of a running total."""
    values = _values(name, records)
    return {"last": values[-1]} if values else None


def _labels(name: str, records: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """How often each rank was named, the most frequent first."""
    counted = collections.Counter(value for record in records if isinstance(value := record.get(name), (int, float)))
    return {str(int(value)): times for value, times in counted.most_common()} if counted else None


def _number(value: Any) -> float | None:
    """``value`` as a float; None if it is none. ``Jsonl`` writes numbers that are not finite as strings."""
    if isinstance(value, (int, float)):
        return float(value)
    return float(value) if value in ("nan", "inf", "-inf") else None


def _not_finite(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps with gradients that were not finite, and the parameters and ranks that the records name."""
    found = []
    for record in records:
        if _is_off(record):
            places = [place for place in record.get("nonfinite_at") or [] if isinstance(place, dict)]
            found.append({"step": record["step"], "at": places})
    return found


def _is_off(record: dict[str, Any]) -> bool:
    """Whether gradients of this step were not finite."""
    counted = _number(record.get("nonfinite"))
    if counted is not None:
        return counted > 0
    if record.get("nonfinite_at"):
        return True
    norm = _number(record.get("grad_norm"))
    return norm is not None and not math.isfinite(norm)


# -- for people


def _show(file: pathlib.Path, run: dict[str, Any], several: bool) -> None:
    for text in _about(file, run, several):
        line(text)
    keys = ("first", "median", "last", "max")
    rows = [
        (name, *(f"{told[key]:.4g}" for key in keys), str(told["not_finite"] or ""))
        for name, told in run["numbers"].items()
    ]
    if rows:
        console().print(table(rows, ("", *keys, "not finite"), right=(1, 2, 3, 4, 5)))
    counts = [(name, f"{told['sum']:.10g}", str(told["steps"])) for name, told in run["counts"].items()]
    if counts:
        console().print(table(counts, ("", "in all", "steps"), right=(1, 2)))
    totals = [(name, f"{told['last']:.4g}") for name, told in run["totals"].items()]
    if totals:
        console().print(table(totals, ("", "in all"), right=(1,)))
    for name, told in run["labels"].items():
        line(f"{name}: {', '.join(f'{label} in {times}' for label, times in itertools.islice(told.items(), _MOST))}")
    if run["single"]:
        line(f"{run['single']} numbers of single parameters are not shown")
    for text in _told(run["nonfinite"], run["steps"]):
        line(text)


def _about(file: pathlib.Path, run: dict[str, Any], several: bool) -> Iterator[str]:
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


def _told(found: Sequence[dict[str, Any]], steps: int) -> Iterator[str]:
    if found:
        yield f"not finite in {len(found)} of {steps} logged steps:"
    for each in found[:_MOST]:
        named = [f"{place.get('param')} on {_rank(place.get('rank'))}" for place in each["at"]]
        rest = f" and {len(named) - _MOST} more" if len(named) > _MOST else ""
        yield f"  step {each['step']}: {', '.join(named[:_MOST]) or 'no parameter is named'}{rest}"
    if len(found) > _MOST:
        yield f"  and {len(found) - _MOST} more"


def _rank(rank: Any) -> str:
    return "no rank before the reduction" if rank is None else f"rank {rank}"
