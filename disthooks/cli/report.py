"""``disthooks report``: the numbers that a run logged, as a table."""

from __future__ import annotations

import itertools
import json
import math
import pathlib
import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

import typer

from disthooks.cli.tables import console, line, table
from disthooks.errors import UsageError

_MOST = 10  # steps that are named one by one


class Log(NamedTuple):
    """What a file holds.

    Attributes:
        records: one for each logged step, as they were written.
        half: whether the last line is not whole: the run is writing it, or was killed.
        broken: numbers of other lines that are no records.
    """

    records: list[dict[str, Any]]
    half: bool
    broken: list[int]


def report(path: str = typer.Argument(..., help="A gradients.jsonl, or the directory of a run.")) -> None:
    """Tell what a run logged: for each number its first, median, last and largest value, and the non-finite steps."""
    file = _file(pathlib.Path(path))
    log = read(file)
    if log.broken and not log.records:
        raise UsageError(
            f"{file}: none of its {len(log.broken)} lines is a record of a run; give what the sink Jsonl wrote"
        )
    if not log.records:
        line(f"{file}: no step is logged there yet")
    else:
        _show(file, log.records)
    if log.half:
        line("the last line is not whole and was left out: the run is writing it, or was killed")
    if log.broken:
        line(f"{len(log.broken)} lines are no records and were left out: {log.broken[:_MOST]}")


def _file(path: pathlib.Path) -> pathlib.Path:
    """The file itself, or the one in a directory."""
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
    """All whole records.

    Raises:
        UsageError: when the file cannot be read.
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


def _show(file: pathlib.Path, records: list[dict[str, Any]]) -> None:
    steps = [record["step"] for record in records]
    line(f"{file}: {len(records)} logged steps, {min(steps)} to {max(steps)}")
    if any(later <= earlier for earlier, later in itertools.pairwise(steps)):
        line("steps come again: the run was restarted, or several wrote into one file")
    names = list(dict.fromkeys(name for record in records for name in record if name != "step"))
    rows = [row for name in names if "/param/" not in name and (row := _row(name, records))]
    heads = ("", "first", "median", "last", "max", "not finite")
    console().print(table(rows, heads, right=(1, 2, 3, 4, 5)))
    single = sum("/param/" in name for name in names)
    if single:
        line(f"{single} numbers of single parameters are not shown")
    for text in _not_finite(records):
        line(text)


def _row(name: str, records: list[dict[str, Any]]) -> tuple[str, ...] | None:
    """First, median, last and largest of one number; the last two of what is finite."""
    values = [number for record in records if (number := _number(record.get(name))) is not None]
    if not values:
        return None
    finite = [value for value in values if math.isfinite(value)] or [math.nan]
    told = (values[0], statistics.median(finite), values[-1], max(finite))
    return name, *(f"{value:.4g}" for value in told), str(sum(not math.isfinite(value) for value in values) or "")


def _number(value: Any) -> float | None:
    """A number, also one that JSON cannot hold and that ``Jsonl`` writes as a word."""
    if isinstance(value, (int, float)):
        return float(value)
    return float(value) if value in ("nan", "inf", "-inf") else None


def _not_finite(records: list[dict[str, Any]]) -> Iterator[str]:
    """The steps in which something was not finite, with the parameters and ranks that the records name."""
    found = [record for record in records if _is_off(record)]
    if found:
        yield f"not finite in {len(found)} of {len(records)} logged steps:"
    for record in found[:_MOST]:
        places = record.get("nonfinite_at") or []
        named = [f"{place.get('param')} on {_rank(place.get('rank'))}" for place in places if isinstance(place, dict)]
        rest = f" and {len(named) - _MOST} more" if len(named) > _MOST else ""
        yield f"  step {record['step']}: {', '.join(named[:_MOST]) or 'no parameter is named'}{rest}"
    if len(found) > _MOST:
        yield f"  and {len(found) - _MOST} more"


def _is_off(record: dict[str, Any]) -> bool:
    """Whether gradients of this step were not finite."""
    counted = _number(record.get("nonfinite"))
    if counted is not None:
        return counted > 0
    norm = _number(record.get("grad_norm"))
    return norm is not None and not math.isfinite(norm)


def _rank(rank: Any) -> str:
    return "no rank before the reduction" if rank is None else f"rank {rank}"
