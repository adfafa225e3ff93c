"""The life of a sink: opened on the first rank, called with each record, closed once."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from disthooks.errors import UsageError

Sink = Callable[[dict[str, Any]], object]
Numbers = Callable[[], Mapping[str, Any]]

#: Running totals whose growth from step to step is what a chart should show.
PER_STEP = tuple(f"saved/{name}" for name in ("stored", "moved", "loaded", "pack_seconds", "unpack_seconds"))


class Unopened:
    """A sink that is a description alone, frozen and picklable: what its ``open()`` returns is called in its place."""

    def open(self) -> Opened:
        """What takes the records; the sink itself can be opened again, by another attachment."""
        raise NotImplementedError

    def __call__(self, record: dict[str, Any]) -> None:
        """Never right: nothing is open here."""
        raise UsageError(f"{self!r} is not open: give it to gradients(sinks=[...]), or call what its open() returns")


class Opened:
    """What writes to a framework until ``close()``; warnings name it as the sink that it came from."""

    def __init__(self, sink: object) -> None:
        self._named = repr(sink)

    def __repr__(self) -> str:
        return self._named

    def __call__(self, record: dict[str, Any]) -> None:
        """Write one record."""
        raise NotImplementedError

    def close(self) -> None:
        """Write what is in buffers, and let go."""


def open_all(sinks: Iterable[Sink]) -> list[Sink]:
    """What is to be called for each of ``sinks``; when one cannot be opened, those before it are closed again."""
    opened: list[Sink] = []
    try:
        for sink in sinks:
            made = getattr(sink, "open", lambda: None)()
            opened.append(made if isinstance(made, Opened) else sink)
    except BaseException:
        close_all(opened)
        raise
    return opened


def close_all(sinks: Iterable[Sink]) -> None:
    """Close each of ``sinks`` that can be closed, once; one that cannot is named in a warning."""
    for sink in {id(sink): sink for sink in sinks}.values():
        try:
            getattr(sink, "close", lambda: None)()
        except Exception as error:
            warnings.warn(f"{sink!r} could not be closed: {error!r}", RuntimeWarning, stacklevel=3)


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


class Totals:
    """What the reports of ``what`` have in all; and, from the second record on, what that was per step since the last.

    >>> class Two:
    ...     def report(self):
    ...         return self
    ...     def record(self):
    ...         return {"saved/moved": 40, "saved/held": 0}
    >>> numbers = Totals(Two())
    >>> numbers.at(0), numbers.at(10)["saved/moved_per_step"]
    ({'saved/moved': 40, 'saved/held': 0}, 0.0)
    """

    def __init__(self, what: Any) -> None:
        self._what = what
        self._last: tuple[int, Mapping[str, Any]] | None = None

    def __repr__(self) -> str:
        return repr(self._what)

    def __call__(self) -> Mapping[str, Any]:
        """The totals."""
        return cast("Mapping[str, Any]", self._what.report().record())

    def at(self, step: int) -> dict[str, Any]:
        """The totals, and each of :data:`PER_STEP` as it was per step since the record before."""
        now = dict(self())
        last, self._last = self._last, (step, now)
        if last is None or step <= last[0]:
            return now
        steps = step - last[0]
        return now | {f"{name}_per_step": (now[name] - last[1][name]) / steps for name in PER_STEP if name in last[1]}


def as_numbers(what: Any) -> Numbers:
    """The function that gives what is to be logged of ``what``: itself, or an object with reports.

    >>> as_numbers(lambda: {"lr": 0.1})()
    {'lr': 0.1}
    """
    if hasattr(what, "report") and hasattr(what.report(), "record"):
        return Totals(what)
    if not callable(what):
        raise UsageError(
            f"also={what!r}: give an object whose report() has a record(), or a function that returns a dict"
        )
    return cast(Numbers, what)


def add_to(record: dict[str, Any], also: Sequence[Numbers]) -> list[Numbers]:
    """Put what each of ``also`` has to say into ``record``; those that did not fail. As for a sink, none raises."""
    left = []
    for numbers in also:
        try:
            more = numbers.at(record["step"]) if isinstance(numbers, Totals) else numbers()
            if taken := sorted(record.keys() & more.keys()):
                raise UsageError(f"{taken} are logged already")
            record.update(more)
            left.append(numbers)
        except Exception as error:
            warnings.warn(f"{numbers!r} failed and is left out from now on: {error!r}", RuntimeWarning, stacklevel=4)
    return left


def needed(module: str, package: str, sink: Unopened) -> Any:
    """The module of a framework, imported now that a sink asks for it; UsageError when it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UsageError(f"{sink!r} needs {package}: pip install {package} ({error})") from error


def check_prefix(sink: object, prefix: object) -> None:
    """Raise UsageError unless ``prefix`` can be put in front of a name."""
    if not isinstance(prefix, str):
        raise UsageError(f"{type(sink).__name__}: prefix is put in front of every name, as 'train/'; got {prefix!r}")
