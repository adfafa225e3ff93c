"""The sinks that need nothing installed: a file of JSON lines, and the terminal."""

# [Note: the name of a run]
# Several runs may write to one file, and a run that is restarted goes on in its file, so each line names its run. A run
# is everything that one launcher started: its restarts have the same name. The name is `DISTHOOKS_RUN` if that is set.
# Otherwise it is made of the time when the launcher, or this process if there is none, was started, and of the number
# of that process. A second training in one process, after the first one was detached, is a run of its own: its name
# ends in `.1`.

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import pathlib
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from disthooks._locks import new_lock
from disthooks._registry import register
from disthooks.errors import UsageError
from disthooks.grads.sinks.base import OpenSink, is_empty, shown

VARIABLE = "DISTHOOKS_RUN"
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
    of an attachment has ``about`` too: the engine, the number of ranks, the rules and the statistics.

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

    def open(self) -> Lines:
        """Make the directories and the file, and return the sink that writes the lines, all of one run."""
        try:
            path = pathlib.Path(self.path)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("a").close()
        except OSError as error:
            raise UsageError(f"Jsonl: {os.fspath(self.path)!r} cannot be written: {error.strerror}") from error
        return Lines(self)

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Append one line."""
        self.append(record, run())

    def append(self, record: Mapping[str, Any], run: str) -> None:
        """Append one line of ``run``."""
        whole = {**record, "run": run, "restart": restart(), "time": round(time.time(), 3)}
        with pathlib.Path(self.path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(_strict(whole), allow_nan=False) + "\n")


class Lines(OpenSink):
    """The lines of one attachment in the file of a :class:`Jsonl`."""

    def __init__(self, sink: Jsonl) -> None:
        super().__init__(sink)
        self._sink, self._path = sink, os.path.abspath(sink.path)
        self._run = begin(self._path)

    def __call__(self, record: dict[str, Any]) -> None:
        about, self.about = self.about, {}
        self._sink.append({**record, "about": dict(about)} if about else record, self._run)

    def close(self) -> None:
        end(self._path)


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
        """Print one line, without empty values and without values of single parameters."""
        told = {name: value for name, value in record.items() if "/param/" not in name and not is_empty(value)}
        self.print("  ".join(f"{name} {shown(value)}" for name, value in told.items()))


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _strict(item) for key, item in value.items()}
    return [_strict(item) for item in value] if isinstance(value, (list, tuple)) else value
