"""``read``: the runs in a log that the sink ``Jsonl`` wrote."""

# [Note: a log is not trusted]
# A log may have been killed in the middle of a line, written by an older version, or made by somebody else. A line that
# is no record is left out and counted; a column that has another length than its names, or a value that is no number,
# is a missing number. Names are texts and nothing more: whoever shows them escapes them.

from __future__ import annotations

import itertools
import json
import math
import pathlib
import stat
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

from disthooks.errors import UsageError

_MOST = 10  # files that a text names
#: What columns are of: parameters and modules.
KINDS = ("param", "module")


class Log(NamedTuple):
    """The content of a log file.

    Attributes:
        runs: each run, and each optimizer in it, in the order in which they begin.
        half: whether the last line is incomplete, because the run is writing it, or was killed.
        broken: the numbers of other lines that are no records; the first line has number 1.
    """

    runs: list[Run]
    half: bool
    broken: list[int]


class Run:
    """The records of one run, each step once, in order.

    Attributes:
        name: what the launcher's start is called; None in logs that do not say it.
        optimizer: the number of the optimizer, where a run has several.
        about: what the first line says of the attachment.
        names: for "param" and "module" their names, in the order of the model.
        order: for "param" and "module" the places of the names in the order in which forward came to them.
        edges: the edges of the bins of histograms.
        records: the numbers of each step, without columns.
        columns: for "param" or "module" and a statistic, a number for each step and name: NaN where there is none, and
            infinity where it is not finite.
        texts: the same for statistics that are texts: for each record a list, or None.
        written: how many records there are, with those that were replaced by a later one of the same step.
        again: whether a step follows one that is not before it.
        restarts: how often the launcher started it again.
        began: seconds since 1970 of the first record, or None.
        ended: the same of the last.
    """

    def __init__(self, lines: Sequence[dict[str, Any]]) -> None:
        first = lines[0]
        self.name, self.optimizer = first.get("run"), first.get("optimizer")
        self.about: dict[str, Any] = next((x["about"] for x in lines if isinstance(x.get("about"), dict)), {})
        self.written = len(lines)
        self.again = any(later["step"] <= earlier["step"] for earlier, later in itertools.pairwise(lines))
        self.restarts = max((int(number(line.get("restart")) or 0) for line in lines), default=0)
        times = [line["time"] for line in lines if isinstance(line.get("time"), (int, float))]
        self.began, self.ended = min(times, default=None), max(times, default=None)
        self.edges: list[Any] = next((x["edges"] for x in lines if isinstance(x.get("edges"), list)), [])
        # If a restarted run made a step again, its last record counts.
        kept = sorted({line["step"]: line for line in lines}.values(), key=lambda line: int(line["step"]))
        self.names = _names(lines)
        self.order = _order(lines, self.names)
        self.records: list[dict[str, Any]] = []
        self.columns: dict[tuple[str, str], Table] = {}
        self.texts: dict[tuple[str, str], list[list[Any] | None]] = {}
        for at, line in enumerate(kept):
            self.records.append(self._apart(at, line, len(kept)))

    @property
    def steps(self) -> list[int]:
        """The step of each record."""
        return [record["step"] for record in self.records]

    def column(self, name: str) -> list[float | None]:
        """The number of the step under ``name`` in each record; None where there is none."""
        return [number(record.get(name)) for record in self.records]

    def labels(self, name: str) -> list[Any]:
        """The value under ``name`` in each record, as it is."""
        return [record.get(name) for record in self.records]

    def _apart(self, at: int, line: dict[str, Any], steps: int) -> dict[str, Any]:
        record: dict[str, Any] = {}
        for key, value in line.items():
            if key in KINDS and isinstance(value, dict):
                for statistic, column in value.items():
                    if len(column) == len(self.names[key]):
                        self._set(at, key, str(statistic), column, steps)
            elif (found := _single(key)) is not None:  # a log of version 1, or of a sink that was opened by hand
                of, statistic, name = found
                self._table(of, statistic, steps).set_one(at, self.names[of].index(name), value)
            elif key not in ("about", "names", "edges"):
                record[key] = value
        return record

    def _set(self, at: int, of: str, statistic: str, column: Any, steps: int) -> None:
        if isinstance(column, array):
            self._table(of, statistic, steps).set(at, column)
        else:
            self.texts.setdefault((of, statistic), [None] * steps)[at] = column

    def _table(self, of: str, statistic: str, steps: int) -> Table:
        key = of, statistic
        if key not in self.columns:
            self.columns[key] = Table(steps, len(self.names[of]))
        return self.columns[key]


class Table:
    """Numbers by step and name: float64, of shape (steps, names).

    >>> table = Table(2, 3)
    >>> table.set(1, _packed([1.0, "nan", None]))
    >>> table.row(1)
    array('d', [1.0, inf, nan])
    """

    def __init__(self, steps: int, names: int) -> None:
        self.steps, self.names = steps, names
        self.values = array("d", [math.nan]) * (steps * names)

    def set(self, at: int, column: array[float]) -> None:
        """Set the numbers of step number ``at``."""
        self.values[at * self.names : (at + 1) * self.names] = column

    def set_one(self, at: int, place: int, value: Any) -> None:
        """Set one number."""
        self.values[at * self.names + place] = _cell(value)

    def row(self, at: int) -> array[float]:
        """The numbers of step number ``at``."""
        return self.values[at * self.names : (at + 1) * self.names]


def _cell(value: Any) -> float:
    # See [Note: a log is not trusted].
    found = number(value)
    return math.nan if found is None else found if math.isfinite(found) else math.inf


def _names(lines: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    told: dict[str, Any] = next((x["names"] for x in lines if isinstance(x.get("names"), dict)), {})
    names = {of: list(map(str, told.get(of) or ())) for of in KINDS}
    seen = {of: set(found) for of, found in names.items()}
    for key in dict.fromkeys(key for line in lines for key in line):
        found = _single(key)
        if found is not None and found[2] not in seen[found[0]]:
            names[found[0]].append(found[2])
            seen[found[0]].add(found[2])
    return names


def _order(lines: Sequence[dict[str, Any]], names: dict[str, list[str]]) -> dict[str, list[int]]:
    """The order of calls. A parameter whose module was not called stands behind the one before it.

    >>> _order([{"names": {"called": [1, 0]}}], {"module": ["b", "a"], "param": ["b.w", "b.x", "a.w"]})
    {'module': [1, 0], 'param': [2, 0, 1]}
    """
    told: dict[str, Any] = next((x["names"] for x in lines if isinstance(x.get("names"), dict)), {})
    known = range(len(names["module"]))
    called = [place for place in told.get("called") or () if isinstance(place, int) and place in known]
    modules = list(dict.fromkeys([*called, *known]))
    when = {names["module"][place]: at for at, place in enumerate(called)}
    keys, last = [], -1
    for name in names["param"]:
        last = when.get(name.rpartition(".")[0], last)
        keys.append(last)
    return {"module": modules, "param": sorted(range(len(keys)), key=keys.__getitem__)}


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
    """``value`` as a float; None if it is no number. ``Jsonl`` writes numbers that are not finite as strings.

    >>> number(1), number("nan"), number("1"), number(True)
    (1.0, nan, None, 1.0)
    """
    if isinstance(value, (int, float)):
        return float(value)
    return float(value) if value in ("nan", "inf", "-inf") else None


def file_of(path: pathlib.Path) -> pathlib.Path:
    """``path`` itself if it is a file, or the one log in the directory ``path``.

    Raises:
        UsageError: if there is none, or several, or if it is no file: to read a named pipe may take for ever.
    """
    if path.is_dir():
        named = sorted(path.rglob("gradients.jsonl")) or sorted(path.rglob("*.jsonl"))
        if len(named) != 1:
            what = f"{len(named)} logs: {', '.join(map(str, named[:_MOST]))}" if named else "no .jsonl file"
            raise UsageError(f"{path} has {what}; give the file")
        path = named[0]
    if not path.exists():
        raise UsageError(f"{path}: there is no such file or directory; give what the sink Jsonl was given as path")
    if not path.is_file():
        raise UsageError(f"{path} is {_KINDS_OF_FILES.get(stat.S_IFMT(path.stat().st_mode), 'no file')}: give a file")
    return path


_KINDS_OF_FILES = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
}


def read(file: pathlib.Path) -> Log:
    """Read the runs of a log.

    Raises:
        UsageError: if the file cannot be read.
    """
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror}") from error
    *lines, tail = text.split("\n")
    found: dict[tuple[Any, Any], list[dict[str, Any]]] = {}
    broken = []
    for place, line in enumerate([*lines, tail], 1):
        record = _record(line)
        if record is not None:
            found.setdefault((str(record.get("run")), str(record.get("optimizer"))), []).append(record)
        elif line.strip() and place <= len(lines):
            broken.append(place)
    return Log(list(map(Run, found.values())), bool(tail.strip()) and _record(tail) is None, broken)


class Tail:
    """A log that is being written: the last records of the run that wrote last.

    Args:
        file: the log.
        most: how many records are kept.
    """

    def __init__(self, file: pathlib.Path, most: int = 600) -> None:
        self.file, self.most = file, most
        self._at, self._rest, self._who = 0, b"", ("", "")
        self._lines: list[dict[str, Any]] = []
        self._head: dict[str, Any] = {}  # what only one line of a run has

    def read(self) -> Run | None:
        """The run with what was written since the last call; None while no record is there.

        Raises:
            UsageError: if the file cannot be read.
        """
        try:
            with self.file.open("rb") as file:
                if self.file.stat().st_size < self._at:  # it was written anew
                    self.__init__(self.file, self.most)  # type: ignore[misc]
                file.seek(self._at)
                more = file.read()
        except OSError as error:
            raise UsageError(f"{self.file}: cannot be read: {error.strerror}") from error
        self._at += len(more)
        *lines, self._rest = (self._rest + more).split(b"\n")
        for line in lines:
            record = _record(line.decode("utf-8", errors="replace"))
            if record is not None:
                self._add(record)
        return Run([{**self._lines[0], **self._head}, *self._lines[1:]]) if self._lines else None

    def _add(self, record: dict[str, Any]) -> None:
        who = str(record.get("run")), str(record.get("optimizer"))
        if who != self._who:
            self._who, self._lines, self._head = who, [], {}
        self._head |= {name: record.pop(name) for name in ("about", "names", "edges") if name in record}
        self._lines.append(record)
        del self._lines[: -self.most]


def _record(text: str) -> dict[str, Any] | None:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int) or abs(record["step"]) >= 2**53:
        return None
    for of in KINDS:  # a long log has millions of numbers, and a list of floats takes four times the memory
        if isinstance(record.get(of), dict):
            record[of] = {
                name: column if name.startswith("fingerprint/") else _packed(column)
                for name, column in record[of].items()
                if isinstance(column, list)
            }
    return record


def _packed(column: list[Any]) -> array[float]:
    try:
        return array("d", column)
    except TypeError:  # some are no numbers
        return array("d", map(_cell, column))
