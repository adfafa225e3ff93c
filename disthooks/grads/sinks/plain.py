"""Sinks that need nothing installed: a file of lines, and the terminal."""

from __future__ import annotations

import json
import math
import os
import pathlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from disthooks.errors import UsageError
from disthooks.grads.sinks import runs
from disthooks.grads.sinks.base import Opened
from disthooks.grads.sinks.records import is_empty, shown


@dataclass(frozen=True)
class Jsonl:
    """One line of JSON for each logged step, appended to a file and there as soon as it is written.

    It is strict JSON: a number that is not finite is written as ``"nan"``, ``"inf"`` or ``"-inf"``. Each line also has
    ``run``, which tells the runs apart that write to one file (see :mod:`disthooks.grads.sinks.runs`), ``restart``, how
    often the launcher had restarted it, and ``time``, the seconds since 1970 when the line was written.

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
        """Make the directories and the file; what is returned writes the lines, all of one run."""
        try:
            path = pathlib.Path(self.path)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("a").close()
        except OSError as error:
            raise UsageError(f"Jsonl: {os.fspath(self.path)!r} cannot be written: {error.strerror}") from error
        return Lines(self)

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Append one line."""
        self.append(record, runs.run())

    def append(self, record: Mapping[str, Any], run: str) -> None:
        """Append one line of ``run``."""
        whole = {**record, "run": run, "restart": runs.restart(), "time": round(time.time(), 3)}
        with pathlib.Path(self.path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(_strict(whole), allow_nan=False) + "\n")


class Lines(Opened):
    """The lines of one attachment in the file of a :class:`Jsonl`."""

    def __init__(self, sink: Jsonl) -> None:
        super().__init__(sink)
        self._sink, self._path = sink, os.path.abspath(sink.path)
        self._run = runs.begin(self._path)

    def __call__(self, record: dict[str, Any]) -> None:
        """Append one line."""
        self._sink.append(record, self._run)

    def close(self) -> None:
        """The next attachment that opens the file begins another run."""
        runs.end(self._path)


@dataclass(frozen=True)
class Console:
    """One short line for each logged step.

    Args:
        print: what it is printed with; a progress bar's own function, say.

    >>> Console()({"step": 50, "grad_norm": 1.25, "nonfinite": 2, "nonfinite_at": [{"param": "w", "rank": 1}]})
    step 50  grad_norm 1.25  nonfinite 2  nonfinite_at w on rank 1
    """

    print: Callable[[str], object] = print

    def __post_init__(self) -> None:
        if not callable(self.print):
            raise UsageError(f"Console: print must be a function of a line, got {self.print!r}")

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Print one line, without what is empty and what is of a single parameter."""
        told = {name: value for name, value in record.items() if "/param/" not in name and not is_empty(value)}
        self.print("  ".join(f"{name} {shown(value)}" for name, value in told.items()))


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _strict(item) for key, item in value.items()}
    return [_strict(item) for item in value] if isinstance(value, (list, tuple)) else value
