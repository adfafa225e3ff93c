"""``Stopwatch`` measures how long the computation takes for parts of a step, and never waits for a device."""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Iterator
from typing import cast

import torch

from disthooks._streams import current_stream, event_on, is_accelerator, is_capturing

Moment = float | torch.Event


class Stopwatch:
    """Seconds of parts of a step: by events on an accelerator, by the clock on a CPU.

    Attributes:
        is_on: whether parts are measured now. Two events for each part cost time, so they are not in every step.

    >>> watch = Stopwatch(torch.device("cpu"))
    >>> with watch.part("relu", 8):
    ...     pass
    >>> watch.read()
    >>> 0 < watch.pace("relu") < 0.1, watch.pace("tanh")
    (True, None)
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self.is_on = device, True
        self._open: collections.deque[tuple[str, float, Moment, Moment]] = collections.deque(maxlen=4096)
        self._sums: dict[str, tuple[float, float]] = {}  # seconds and amounts; the newest weigh most
        self._least: dict[str, float] = {}

    def now(self) -> Moment | None:
        """This moment of the computation; None while a CUDA graph is captured, whose events have no time."""
        if is_capturing(self._device):
            return None
        if is_accelerator(self._device):
            return event_on(current_stream(self._device), timed=True)
        return time.perf_counter()

    @contextlib.contextmanager
    def part(self, name: str, amount: float) -> Iterator[None]:
        """Measure what is computed inside as a part called ``name``, of so many bytes or layers."""
        begin = self.now() if self.is_on else None
        yield
        self.add(name, amount, begin, None if begin is None else self.now())

    def add(self, name: str, amount: float, begin: Moment | None, end: Moment | None) -> None:
        """Note that the part called ``name`` went on from ``begin`` to ``end``, if both are known."""
        if begin is not None and end is not None:
            self._open.append((name, amount, begin, end))

    def read(self) -> None:
        """Read the parts whose events have happened."""
        while self._open:
            name, amount, begin, end = self._open[0]
            if isinstance(begin, torch.Event) and isinstance(end, torch.Event):
                if not (begin.query() and end.query()):
                    return
                seconds = begin.elapsed_time(end) / 1000
            else:
                seconds = cast(float, end) - cast(float, begin)
            self._open.popleft()
            before, amounts = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = 0.9 * before + seconds, 0.9 * amounts + amount
            self._least[name] = min(seconds, self._least.get(name, seconds))

    def pace(self, name: str) -> float | None:
        """Seconds of the part called ``name`` for each of its amount; None if it was not measured."""
        found = self._sums.get(name)
        return None if found is None else found[0] / max(found[1], 1e-9)

    def least(self, name: str) -> float | None:
        """The shortest that the part called ``name`` was; None if it was not measured."""
        return self._least.get(name)
