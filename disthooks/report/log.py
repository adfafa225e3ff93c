"""``read``: the runs in a log that the sink ``Jsonl`` wrote."""

from __future__ import annotations

import contextlib
import functools
import glob
import itertools
import json
import math
import pathlib
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from disthooks.errors import UsageError
from disthooks.grads.batch_notes import notes_file
from disthooks.report.lines import Lines
from disthooks.report.record import KINDS, NO_JSON, Record, packed, record_of

_MOST = 10  # files that a text names
_FEW = 3  # lines of which a text says why they are no records


class Log(NamedTuple):
    """The content of a log file.

    Attributes:
        runs: each run, and each optimizer in it, in the order in which they begin.
        half: whether the last line is incomplete, because the run is writing it, or was killed.
        broken: the numbers of other lines that are no records, and why; the first line has number 1.
    """

    runs: list[Run]
    half: bool
    broken: dict[int, str]

    def broken_said(self) -> list[str]:
        many = len(self.broken)
        told = [f"line {place} is no record: {why}" for place, why in list(self.broken.items())[:_FEW]]
        left_out = "lines are no records and were" if many > 1 else "line is no record and was"
        return [*told, f"{many} {left_out} left out"] if many else []


class Run:
    """The records of one run, each step once, in order.

    Attributes:
        name: what the launcher's start is called; None in logs that do not say it.
        names: for "param" and "module" their names, in the order of the model.
        groups: of each parameter the number of its group in the optimizer; empty if the log does not tell it.
        order: for "param" and "module" the places of the names in the order in which forward came to them.
        records: the numbers of each step, without columns.
        columns: for "param" or "module" and a statistic, a number for each step and name: NaN where there is none, and
            infinity where it is not finite.
        texts: the same for statistics that are texts: for each record a list, or None.
        batches: what ranks noted of the batches of steps that stand out, by step and rank.
        written: how many records there are, with those that were replaced by a later one of the same step.
        again: whether a step follows one that is not before it.
    """

    def __init__(self, lines: Sequence[Record]) -> None:
        first = lines[0]
        self.name, self.optimizer = first.run, first.optimizer
        self.about: dict[str, Any] = next((line.about for line in lines if line.about), {})
        self.ranks: int | None = self.about.get("ranks")
        self.written = len(lines)
        self.again = any(later.step <= earlier.step for earlier, later in itertools.pairwise(lines))
        self.restarts = max(line.restart for line in lines)
        times = [line.time for line in lines if line.time is not None]
        self.began, self.ended = min(times, default=None), max(times, default=None)
        # If a restarted run made a step again, its last record counts.
        kept = sorted({line.step: line for line in lines}.values(), key=lambda line: line.step)
        self.names = _names(lines)
        self.groups: list[int] = next((line.names for line in lines if line.names), {}).get("group", [])
        self.order = _order(lines, self.names)
        self.records: list[Record] = []
        self.columns: dict[tuple[str, str], Table] = {}
        self.texts: dict[tuple[str, str], list[list[Any] | None]] = {}
        self.batches: dict[tuple[int, int], str] = {}
        for at, line in enumerate(kept):
            self.records.append(self._apart(at, line, len(kept)))

    @property
    def steps(self) -> list[int]:
        return [record.step for record in self.records]

    def column(self, name: str) -> list[float | None]:
        """The number of the step under ``name`` in each record; None where there is none."""
        return [number(record.get(name)) for record in self.records]

    def labels(self, name: str) -> list[Any]:
        return [record.get(name) for record in self.records]

    def comparisons(self) -> list[tuple[int, Record]]:
        """The records with the numbers of a comparison of copies, each with how many steps were made before it."""
        compared = [record for record in self.records if record.replicas_differ is not None]
        return [(record.replicas_steps or record.step + 1, record) for record in compared]

    def _apart(self, at: int, line: Record, steps: int) -> Record:
        record = Record()
        for key, value in line.items():
            if key in KINDS:
                for statistic, column in value.items():
                    if isinstance(column, array) and len(column) == len(self.names[key]):
                        self._table(key, statistic, steps).rows[at] = column
                    elif len(column) == len(self.names[key]):
                        self.texts[key, statistic] = self.texts.get((key, statistic)) or [None] * steps
                        self.texts[key, statistic][at] = column
            elif (found := _single(key)) is not None:  # of a sink that was opened by hand
                of, statistic, name = found
                self._table(of, statistic, steps).set_one(at, self.names[of].index(name), value)
            elif key not in ("about", "names", "edges"):
                record[key] = value
        return record

    def _table(self, of: str, statistic: str, steps: int) -> Table:
        if (of, statistic) not in self.columns:
            self.columns[of, statistic] = Table(steps, len(self.names[of]))
        return self.columns[of, statistic]


class Table:
    """Numbers by step and name; float64. A step without numbers has no row.

    >>> table = Table(2, 3)
    >>> table.rows[1] = packed([1.0, "nan", None])
    >>> table.row(0), table.values()
    (array('d', [nan, nan, nan]), tensor([[nan, nan, nan],
            [1., inf, nan]], dtype=torch.float64))
    """

    def __init__(self, steps: int, names: int) -> None:
        self.names = names
        self.rows: list[array[float] | None] = [None] * steps

    def set_one(self, at: int, place: int, value: Any) -> None:
        row = self.rows[at] = self.row(at)
        row[place : place + 1] = packed([value])

    def row(self, at: int) -> array[float]:
        row = self.rows[at]
        return array("d", [math.nan]) * self.names if row is None else row

    def values(self) -> torch.Tensor:
        """All numbers, of shape (steps, names)."""
        missing = array("d", [math.nan]) * self.names
        whole = bytearray().join(missing if row is None else row for row in self.rows)
        return torch.frombuffer(whole, dtype=torch.float64).view(len(self.rows), self.names)


def _names(lines: Sequence[Record]) -> dict[str, list[str]]:
    told: dict[str, Any] = next((line.names for line in lines if line.names), {})
    names = {of: list(told.get(of, ())) for of in KINDS}
    seen = {of: set(found) for of, found in names.items()}
    for key in dict.fromkeys(key for line in lines for key in line):
        found = _single(key)
        if found is not None and found[2] not in seen[found[0]]:
            names[found[0]].append(found[2])
            seen[found[0]].add(found[2])
    return names


def _order(lines: Sequence[Record], names: dict[str, list[str]]) -> dict[str, list[int]]:
    """The order of calls. A parameter whose module was not called stands behind the one before it.

    >>> _order([Record(names={"called": [1, 0]})], {"module": ["b", "a"], "param": ["b.w", "b.x", "a.w"]})
    {'module': [1, 0], 'param': [2, 0, 1]}
    """
    told: dict[str, Any] = next((line.names for line in lines if line.names), {})
    known = range(len(names["module"]))
    called = [place for place in told.get("called", ()) if place in known]
    modules = list(dict.fromkeys([*called, *known]))
    when = {names["module"][place]: at for at, place in enumerate(called)}
    keys, last = [], -1
    for name in names["param"]:
        last = when.get(name.rpartition(".")[0], last)
        keys.append(last)
    return {"module": modules, "param": sorted(range(len(keys)), key=keys.__getitem__)}


@functools.lru_cache(maxsize=2**16)
def _single(key: str) -> tuple[str, str, str] | None:
    """Of the name of a single parameter's number: "param" or "module", the statistic, and the name of the parameter.

    >>> _single("grad_norm/param/a.weight"), _single("grad_norm")
    (('param', 'grad_norm', 'a.weight'), None)
    """
    for of in KINDS:
        statistic, slash, name = key.partition(f"/{of}/")
        if slash:
            return of, statistic, name
    return None


def number(value: Any) -> float | None:
    """``value`` as a float; None if it is no number."""
    return float(value) if isinstance(value, (int, float)) else None


def file_of(path: pathlib.Path) -> pathlib.Path:
    """``path`` itself if it is a file, or the one log in the directory ``path``; UsageError for anything else."""
    if path.is_dir():
        named = sorted(path.rglob("gradients.jsonl")) or sorted(path.rglob("*.jsonl"))
        if len(named) != 1:
            what = f"{len(named)} logs: {', '.join(map(str, named[:_MOST]))}" if named else "no .jsonl file"
            raise UsageError(f"{path} has {what}; give the file")
        path = named[0]
    if not path.exists():
        raise UsageError(f"{path}: there is no such file or directory; give what the sink Jsonl was given as path")
    if not path.is_file():
        raise UsageError(f"{path} is no regular file: give a file")  # to read a named pipe may take for ever
    return path


def read(file: pathlib.Path) -> Log:
    """Read the runs of a log."""
    lines, found, broken, many = Lines(file), dict[Any, list[Record]](), dict[int, str](), 0
    for many, line in enumerate(lines, 1):
        _add(line, many, found, broken)
    last: dict[int, str] = {}
    _add(lines.rest, many + 1, found, last)
    # What a run has begun to write is the beginning of an object, so the end of a page or of an array is none.
    half = lines.rest.lstrip().startswith(b"{") and NO_JSON in last.values()
    runs = list(map(Run, found.values()))
    for run in runs:
        run.batches = _batches(file, run)
    return Log(runs, half, broken if half else broken | last)


def _batches(log: pathlib.Path, run: Run) -> dict[tuple[int, int], str]:
    """What ranks noted of their batches while ``run`` was written (grads/batch_notes.py), by step and rank."""
    found: dict[tuple[int, int], str] = {}
    for file in sorted(log.parent.glob(notes_file(pathlib.Path(glob.escape(log.name)), "*").name)):
        with contextlib.suppress(OSError, ValueError):  # it cannot be read, or no rank wrote it
            rank = int(file.suffixes[-2].removeprefix(".rank-"))
            for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
                with contextlib.suppress(ValueError, KeyError, TypeError):  # a line that a killed run began
                    noted = json.loads(line)
                    if (run.began or 0) - 1 <= noted["time"] <= (run.ended or math.inf) + 60:
                        found[noted["step"], rank] = ", ".join(map(json.dumps, noted["data"]))
    return found


def _add(line: bytes, place: int, found: dict[Any, list[Record]], broken: dict[int, str]) -> None:
    """Add the record in ``line`` to those of its run, or say in ``broken`` why it is none."""
    try:
        record = record_of(line)
    except ValueError as error:
        if line.strip():
            broken[place] = str(error)
    else:
        found.setdefault(_who(record), []).append(record)


def _who(record: Record) -> tuple[Any, Any]:
    return record.run, record.optimizer


class Tail:
    """A log that is being written: the last records of the run that wrote last."""

    def __init__(self, file: pathlib.Path, most: int = 600) -> None:
        self.file, self.most = file, most
        self.broken = 0
        self._read = Lines(file)
        self._who: tuple[Any, Any] = None, None
        self._lines: list[Record] = []
        self._head: dict[str, Any] = {}  # what only one line of a run has
        self._run: Run | None = None

    def read(self) -> Run | None:
        """The run with what was written since the last call; None while no record is there."""
        if self._read.is_shorter():  # it was written anew
            self.__init__(self.file, self.most)  # type: ignore[misc]
        for line in self._read:
            try:
                self._add(record_of(line))
            except ValueError:
                self.broken += bool(line.strip())
        if self._run is None and self._lines:
            self._run = Run([Record(self._lines[0] | self._head), *self._lines[1:]])
        return self._run

    def _add(self, record: Record) -> None:
        if _who(record) != self._who:
            self._who, self._lines, self._head = _who(record), [], {}
        self._head |= {name: record.pop(name) for name in ("about", "names") if name in record}
        self._lines.append(record)
        self._run = None
        del self._lines[: -self.most]
