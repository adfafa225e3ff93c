"""The sinks that need nothing installed: a file of JSON lines, and the terminal."""

# [Note: the name of a run]
# Several runs may write to one file, and a run that is restarted goes on in its file, so each line names its run. A run
# is everything that one launcher started: its restarts have the same name. The name is `DISTHOOKS_RUN` if that is set.
# Otherwise it is made of the time when the launcher, or this process if there is none, was started, and of the number
# of that process. A second training in one process, after the first one was detached, is a run of its own: its name
# ends in `.1`.
#
# [Note: columns]
# A model of 200 parameters has thousands of numbers in a step, and their names would be most of the file. So the first
# line of an attachment has the names of all parameters and modules, and in each line the numbers of one statistic of
# all parameters are one list, in the order of these names: "param": {"grad_norm": [...]}. They have seven digits, which
# is what float32 has. The bins of a histogram are the same in every line, so the first line with a histogram has their
# edges, and each has the places of the bins that are not empty: {"bins": [112, 113], "counts": [3, 1]}. A line that
# stands for itself, of a sink that was opened by hand, has the names that the record has. "schema" in the first line's
# "about" is the version of all this; it is 2, and version 1 had no columns.

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import pathlib
import re
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from disthooks._locks import new_lock
from disthooks._registry import register
from disthooks.errors import UsageError
from disthooks.grads.sinks.base import OF_RANKS, OpenSink, is_empty, shown
from disthooks.grads.stats.magnitudes import edges

VARIABLE = "DISTHOOKS_RUN"
SCHEMA = 2  # see [Note: columns]
_WHOLE = re.compile(r"(?<=[\[,])-?\d+(?=[,\]])")  # a number without point and exponent, in a list
_RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")

_lock = new_lock()
#: For each file how many attachments write to it now, and how many runs of this process have ended there.
_writers: dict[str, list[int]] = {}


def run() -> str:
    """The name of the run that this process is part of. See [Note: the name of a run]."""
    return os.environ.get(VARIABLE) or _run_name(os.getpid())


def restart() -> int:
    """How often the launcher and the scheduler have started this run again; 0 the first time."""
    told = (os.environ.get(name, "") for name in _RESTARTS)
    return sum(int(value) for value in told if value.isdigit())


def begin(path: str) -> str:
    """The name under which an attachment writes to ``path``: its own, unless another one writes there now."""
    with _lock:
        writers = _writers.setdefault(path, [0, 0])
        writers[0] += 1
        return f"{run()}.{writers[1]}" if writers[1] else run()


def end(path: str) -> None:
    """An attachment has written its last line to ``path``."""
    with _lock:
        writers = _writers.setdefault(path, [1, 0])
        writers[0] = max(0, writers[0] - 1)
        writers[1] += writers[0] == 0


@functools.cache
def _run_name(pid: int) -> str:
    """A name for the run of process ``pid``, from the number and the start of the process to which the run belongs."""
    # torchrun restarts its workers, so the run belongs to torchrun, which is the parent of this process.
    owner = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else pid
    try:  # Linux tells when the process was started, in ticks after the machine was booted
        ticks = int(pathlib.Path(f"/proc/{owner}/stat").read_text().rpartition(")")[2].split()[19])
        booted = next(line for line in pathlib.Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
        began = int(booted.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, StopIteration):
        began = time.time()
    mark = f"{socket.gethostname()} {owner} {began} {os.environ.get('TORCHELASTIC_RUN_ID', '')}"
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(began))
    return f"{stamp}-{hashlib.sha256(mark.encode()).hexdigest()[:6]}"


@register("sink")
@dataclass(frozen=True)
class Jsonl:
    """One line of JSON for each logged step, appended to a file and there as soon as it is written.

    It is strict JSON: a number that is not finite is written as ``"nan"``, ``"inf"`` or ``"-inf"``. Each line also has
    ``run``, which tells the runs apart that write to one file (a process has one for each file), ``restart``, how
    often the launcher had restarted it, and ``time``, the seconds since 1970 when the line was written. The first line
    of an attachment has ``about`` too: the engine, the number of ranks, the rules and the statistics; and ``names``, of
    parameters and modules. The numbers of all parameters are one list for each statistic: ``"param": {"grad_norm":
    [...]}``, in the order of ``names``.

    Args:
        path: of the file; the directories above it are made.

    Raises:
        UsageError: when attached, if the file cannot be written.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "run", "gradients.jsonl")
    ...     opened = Jsonl(path).open()
    ...     opened({"step": 0, "grad_norm": math.inf})
    ...     opened.close()
    ...     line = path.read_text()
    >>> line.startswith('{"step": 0, "grad_norm": "inf", "run": "'), list(json.loads(line))
    (True, ['step', 'grad_norm', 'run', 'restart', 'time'])
    """

    path: str | os.PathLike[str]

    def open(self) -> JsonlLines:
        """Make the directories and the file, and return the sink that writes the lines, all of one run."""
        try:
            path = pathlib.Path(self.path)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("a").close()
            if path.is_file():
                _end_line(path)
        except OSError as error:
            raise UsageError(f"Jsonl: {os.fspath(self.path)!r} cannot be written: {error.strerror}") from error
        return JsonlLines(self)

    def __call__(self, record: Mapping[str, Any]) -> None:
        self.append(record, run())

    def append(self, record: Mapping[str, Any], run: str) -> None:
        """Append one line of ``run``."""
        self._write(json.dumps(_strict(_whole(record, run)), allow_nan=False))

    def _write(self, line: str) -> None:
        with pathlib.Path(self.path).open("a", encoding="utf-8") as file:
            file.write(line + "\n")


class JsonlLines(OpenSink):
    """The lines of one attachment in the file of a :class:`Jsonl`. See [Note: columns]."""

    def __init__(self, sink: Jsonl) -> None:
        super().__init__(sink)
        self._sink, self._path = sink, os.path.abspath(sink.path)
        self._run = begin(self._path)
        self._unwritten = {"about", "names", "edges"}  # each is in the first line that needs it

    def __call__(self, record: dict[str, Any]) -> None:
        if not self.about:
            self._sink.append(record, self._run)
            return
        scalars, columns = self._apart(record)
        lists = [column for found in columns.values() for column in found.values()]
        needed = {"about"} | ({"names"} if lists or "group" in self.names else set())
        if any(
            isinstance(value, dict) and "bins" in value for values in [scalars.values(), *lists] for value in values
        ):
            needed.add("edges")
        head = {"about": {**self.about, "schema": SCHEMA}, "names": dict(self.names), "edges": edges().tolist()}
        scalars |= {name: value for name, value in head.items() if name in needed & self._unwritten}
        self._unwritten -= needed
        text = json.dumps(_strict(_whole(scalars, self._run)), allow_nan=False)[:-1]
        for of, found in columns.items():
            inside = ", ".join(f"{json.dumps(name)}: {_column(column)}" for name, column in found.items())
            text += f", {json.dumps(of)}: {{{inside}}}"
        self._sink._write(text + "}")

    def close(self) -> None:
        end(self._path)

    @functools.cached_property
    def _places(self) -> dict[str, dict[str, int]]:
        """For "param" and "module" the place of each name."""
        return {of: {name: place for place, name in enumerate(self.names[of])} for of in ("param", "module")}

    def _apart(self, record: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, list[Any]]]]:
        """The numbers of the step, and the columns: for "param" and "module" a list for each statistic."""
        scalars: dict[str, Any] = {}
        columns: dict[str, dict[str, list[Any]]] = {}
        for key, value in record.items():
            of = "param" if "/param/" in key else "module" if "/module/" in key else ""
            name, _, which = key.partition(f"/{of}/")
            place = self._places[of].get(which) if of else None
            if place is None:
                scalars[key] = _without_edges(value)
                continue
            found = columns.setdefault(of, {})
            if name not in found:
                found[name] = [None] * len(self.names[of])
            found[name][place] = _without_edges(value)
        return scalars, columns


def _end_line(path: pathlib.Path) -> None:
    """End the last line: a run that was killed may have left half of it, and the next one must not be joined to it."""
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        if size and file.read(1) != b"\n":
            file.write(b"\n")


def _whole(record: Mapping[str, Any], run: str) -> dict[str, Any]:
    return {**record, "run": run, "restart": restart(), "time": round(time.time(), 3)}


def _column(values: list[Any]) -> str:
    """A list in JSON, whose floats have seven digits, and are floats also where they are whole.

    >>> _column([0.0, 1.25, 1e20]), _column([12345678, None, float("nan")])
    ('[0.0,1.25,1e+20]', '[12345678, null, "nan"]')
    """
    if set(map(type, values)) == {float} and all(map(math.isfinite, values)):
        return _WHOLE.sub(r"\g<0>.0", f"[{','.join(map('{:.7g}'.format, values))}]")
    rounded = [float(f"{value:.7g}") if isinstance(value, float) else value for value in values]
    return json.dumps(_strict(rounded), allow_nan=False)


@functools.cache
def _bins() -> dict[float, int]:
    return {edge: place for place, edge in enumerate(edges().tolist())}


def _without_edges(value: Any) -> Any:
    """A histogram whose edges are the bins of all histograms, without them; any other value itself."""
    if not isinstance(value, dict) or value.keys() != {"edges", "counts"} or not value["counts"]:
        return value
    first = _bins().get(value["edges"][0])
    if first is None:
        return value
    filled = [(first + place, count) for place, count in enumerate(value["counts"]) if count]
    return {"bins": [place for place, _ in filled], "counts": [count for _, count in filled]}


#: The names that a console leaves out.
_NOT_TOLD = re.compile(rf"loop/|.*/(param|module)/|.*{OF_RANKS}$")


@register("sink", hidden=("print",))
@dataclass(frozen=True)
class Console:
    """One short line for each logged step.

    Args:
        print: the function that prints a line, such as a progress bar's own.

    >>> Console()({"step": 50, "grad_norm": 1.25, "nonfinite": 2, "nonfinite_at": [{"param": "w", "rank": 1}]})
    step 50  grad_norm 1.25  nonfinite 2  nonfinite_at w on rank 1
    """

    print: Callable[[str], object] = print

    def __post_init__(self) -> None:
        if not callable(self.print):
            raise UsageError(f"Console: print must be a function of a line, got {self.print!r}")

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Print one line, without empty values, values of single parameters and ranks, and what the loop set."""
        told = {name: value for name, value in record.items() if not (_NOT_TOLD.match(name) or is_empty(value))}
        self.print("  ".join(f"{name} {shown(value)}" for name, value in told.items()))


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _strict(item) for key, item in value.items()}
    return [_strict(item) for item in value] if isinstance(value, (list, tuple)) else value
