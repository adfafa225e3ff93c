"""Where reports go. A sink is called with a dict for each logged step, on the first rank alone.

A function will do. One that has ``open()`` has it called once when it is attached, so that it can refuse early.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from disthooks.errors import UsageError

__all__ = ["Console", "Jsonl", "Sink"]

Sink = Callable[[dict[str, Any]], object]
Numbers = Callable[[], Mapping[str, Any]]


def as_numbers(what: Any) -> Numbers:
    """The function that gives what is to be logged of ``what``: itself, or an object with reports.

    >>> as_numbers(lambda: {"lr": 0.1})()
    {'lr': 0.1}
    """
    if hasattr(what, "report") and hasattr(what.report(), "record"):
        return lambda: cast("Mapping[str, Any]", what.report().record())
    if not callable(what):
        raise UsageError(
            f"also={what!r}: give an object whose report() has a record(), or a function that returns a dict"
        )
    return cast(Numbers, what)


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
        """Print one line; empty lists are left out."""
        self.print("  ".join(f"{name} {_shown(value)}" for name, value in record.items() if value != []))


def write(sinks: Sequence[Sink], record: Mapping[str, Any]) -> list[Sink]:
    """Give ``record`` to every sink; those that did not fail.

    A sink that raises is named in a warning and left out: raising here, on one rank, would leave the others waiting.
    """
    left = []
    for sink in sinks:
        try:
            sink(dict(record))
            left.append(sink)
        except Exception as error:
            warnings.warn(f"{sink!r} failed and is left out from now on: {error!r}", RuntimeWarning, stacklevel=3)
    return left


def add_to(record: dict[str, Any], also: Sequence[Numbers]) -> list[Numbers]:
    """Put what each of ``also`` has to say into ``record``; those that did not fail. As for a sink, none raises."""
    left = []
    for numbers in also:
        try:
            more = numbers()
            if taken := sorted(record.keys() & more.keys()):
                raise UsageError(f"{taken} are logged already")
            record.update(more)
            left.append(numbers)
        except Exception as error:
            warnings.warn(f"{numbers!r} failed and is left out from now on: {error!r}", RuntimeWarning, stacklevel=4)
    return left


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        items = [_item(item) for item in value[:4]]
        return ", ".join(items) + (f" and {len(value) - 4} more" if len(value) > 4 else "")
    return str(value)


def _item(item: object) -> str:
    if isinstance(item, Mapping) and "param" in item:
        return f"{item['param']} on {_rank(item.get('rank'))}"
    return _shown(item)


def _rank(rank: int | None) -> str:
    return "no rank before the reduction" if rank is None else f"rank {rank}"


def _strict(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _strict(item) for key, item in value.items()}
    return [_strict(item) for item in value] if isinstance(value, (list, tuple)) else value
