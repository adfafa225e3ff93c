"""Sinks that need nothing installed: a file of lines, and the terminal."""

from __future__ import annotations

import json
import math
import os
import pathlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from disthooks.errors import UsageError
from disthooks.grads.sinks.records import is_empty, shown


@dataclass(frozen=True)
class Jsonl:
    """One line of JSON for each logged step, appended to a file and there as soon as it is written.

    It is strict JSON: a number that is not finite is written as ``"nan"``, ``"inf"`` or ``"-inf"``.

    Args:
        path: of the file; the directories above it are made.

    Raises:
        UsageError: when attached, if the file cannot be written.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "run", "gradients.jsonl")
    ...     sink = Jsonl(path)
    ...     sink.open()
    ...     sink({"step": 0, "grad_norm": math.inf})
    ...     print(path.read_text(), end="")
    {"step": 0, "grad_norm": "inf"}
    """

    path: str | os.PathLike[str]

    def open(self) -> None:
        """Make the directories and the file."""
        try:
            path = pathlib.Path(self.path)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("a").close()
        except OSError as error:
            raise UsageError(f"Jsonl: {os.fspath(self.path)!r} cannot be written: {error.strerror}") from error

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Append one line."""
        with pathlib.Path(self.path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(_strict(record), allow_nan=False) + "\n")


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
