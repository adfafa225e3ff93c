"""Reading ahead: which groups are read from files before backward asks for them, and when."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from typing import cast

from disthooks._streams import work_for
from disthooks.saved.stores.base import IOStats
from disthooks.saved.stores.tape import WRITTEN, Group

_MOST = 64  # groups to look ahead: backward departs from the expected order by a few
_MARGIN = 1.5  # a read is expected to take up to so many times as long as the last reads took


class ReadAhead:
    """The groups that are read before backward asks for them. It is used under the lock of the worker.

    Attributes:
        planned: the groups that no thread has begun to read.
        groups: those, and the groups that are being read, or that were read and are not all taken: the oldest first.
    """

    def __init__(self, limit: int, stats: IOStats) -> None:
        self._limit, self._stats = limit, stats
        self.planned: dict[Group, None] = {}
        self.groups: dict[Group, None] = {}

    def pause(self) -> float:
        """Seconds until the next read begins; infinite if none is planned."""
        start = min((group.start for group in self.planned), default=math.inf)
        return max(0.0, start - time.perf_counter())

    def next(self) -> Group | None:
        """The group whose read begins now, which is not planned any more; None if there is none."""
        group = min(self.planned, key=lambda group: group.start, default=None)
        if group is None or group.start > time.perf_counter():
            return None
        del self.planned[group]
        return group

    def forget(self, group: Group) -> None:
        self.planned.pop(group, None)
        self.groups.pop(group, None)
        group.is_planned = False

    def forget_taken(self) -> None:
        for group in list(self.groups):
            if not (group.is_planned or group.is_reading or group.ahead):
                del self.groups[group]

    def plan_after(self, group: Group, now: float) -> None:
        """Plan to read what backward will want after ``group``, each just in time.

        A tensor that is read too early takes memory, maybe while a long operation works with large tensors.
        """
        order = group.tape.order
        following = cast("Iterator[tuple[Group, float]]", itertools.islice(order.after(group), _MOST))
        due: dict[Group, float] = {}  # the groups that fit, in the order of reads
        room = self._limit
        for other, seconds in following:
            room -= other.nbytes
            if due and room < 0:
                break
            due[other] = seconds
        for other in due:
            self.plan(other, {group, *due}, group)
        latest = math.inf
        for other, seconds in reversed(due.items()):
            if other in self.planned:
                latest = min(latest, seconds) - _MARGIN * other.nbytes * self._stats.pace
                other.start = now + latest

    def plan(self, group: Group, wanted: set[Group], asked: Group | None = None) -> None:
        """Plan to read ``group`` at once. Groups that were read and are not ``wanted`` make room for it.

        The bytes of ``asked`` do not count, because backward takes them now.
        """
        if group.state != WRITTEN or group.is_reading or group in self.groups:
            return
        held = sum(other.nbytes for other in self.groups if other is not asked)
        for other in [other for other in self.groups if other not in wanted and other not in self.planned]:
            if held + group.nbytes <= self._limit:
                break
            held -= other.nbytes
            self._stats.in_vain += sum(entry.nbytes for entry in list(other.ahead))
            if other.device is not None:
                work_for(other.device)  # this thread frees events of it now
            other.ahead.clear()
            if not other.is_reading:
                del self.groups[other]
        if held and held + group.nbytes > self._limit:
            return
        group.start, group.is_planned = 0.0, True
        self.planned[group] = self.groups[group] = None
