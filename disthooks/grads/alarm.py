"""Errors that depend on a number on the device: raised at the next step, when reading it waits for nothing new."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from disthooks.grads.record import Copy

#: A number that all ranks have alike, and what to do with it on the host: raise, if it says so.
Alarm = tuple[torch.Tensor, Callable[[float], None]]


class Alarms:
    """Numbers on their way to the host, and what may be raised because of them.

    >>> def loud(value: float) -> None:
    ...     print(f"it was {value}")
    >>> alarms = Alarms()
    >>> alarms.set([(torch.tensor(2.0), loud)])
    >>> alarms.check()
    it was 2.0
    >>> alarms.check()
    """

    def __init__(self) -> None:
        self._set: list[tuple[Copy, Callable[[float], None]]] = []

    def set(self, alarms: Iterable[Alarm]) -> None:
        """Start copying the numbers of this step."""
        self._set = [(Copy([value]), tell) for value, tell in alarms]

    def check(self) -> None:
        """Read those of the step before; every rank reads the same, so all raise or none."""
        found, self._set = self._set, []
        for copy, tell in found:
            tell(float(copy.tensors()[0]))
