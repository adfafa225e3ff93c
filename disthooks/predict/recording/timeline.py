"""``Timeline``: how much memory is in use at each moment of a step, for what, and where the peak is."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable
from typing import NamedTuple

from disthooks.predict.recording.record import CATEGORIES, STAYING, Phase, StepRecord


class Sample(NamedTuple):
    """The memory in use at one moment: bytes for each of ``CATEGORIES``, in that order."""

    moment: int
    phase: Phase
    module: str
    nbytes: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.nbytes)


class Share(NamedTuple):
    module: str
    category: str
    nbytes: int


class Timeline:
    """The memory of a step on the device (or in the host's memory), after each operator that changed it."""

    def __init__(self, record: StepRecord, rounded: Callable[[int], int] | None = None, device: str = "device") -> None:
        self._record, self._rounded, self._device = record, rounded, device
        self.samples: list[Sample] = []
        self.peak, self._peak_change = 0, -1
        self._fill()

    def _fill(self) -> None:
        record, rounded = self._record, self._rounded
        rank = {category: position for position, category in enumerate(CATEGORIES)}
        sizes: dict[int, int] = collections.defaultdict(int)  # bytes asked for, by allocation
        now, total = [0] * len(CATEGORIES), 0
        highest, at_highest, last_moment = 0, tuple(now), 0
        for number, (moment, allocation, nbytes) in enumerate(record.changes):
            found = record.allocations[allocation]
            if found.device != self._device:
                continue
            if moment != last_moment:
                self._sample(last_moment, at_highest)
                highest, last_moment = -1, moment
            before = sizes[allocation]
            sizes[allocation] = after = before + nbytes
            step = nbytes if rounded is None else rounded(after) - rounded(before)
            now[rank[found.category]] += step
            total += step
            if total > highest:
                highest, at_highest = total, tuple(now)
            if total > self.peak:
                self.peak, self._peak_change = total, number
        self._sample(last_moment, at_highest)

    def _sample(self, moment: int, nbytes: tuple[int, ...]) -> None:
        record = self._record
        phase: Phase = "before"
        for each, begin in record.phases.items():
            if begin <= moment:
                phase = each
        position = record.operators[min(moment, len(record.operators) - 1)].module if record.operators else 0
        name = record.modules[position].name if record.modules else ""
        self.samples.append(Sample(moment, phase, name, nbytes))

    @property
    def peak_sample(self) -> Sample:
        return max(self.samples, key=lambda each: each.total)

    def of_the_step(self, phase: Phase) -> int:
        """Bytes in use when ``phase`` begins, without those that stay from step to step: weights, states, inputs."""
        record, end = self._record, self._record.phases.get(phase, 0)
        changes = itertools.takewhile(lambda each: each.moment < end, record.changes)
        return sum(
            each.nbytes
            for each in changes
            if record.allocations[each.allocation].device == self._device
            and record.allocations[each.allocation].category not in STAYING
        )

    def at_peak(self) -> list[Share]:
        """What is in memory at the peak, by module and category, the largest first."""
        record, sizes = self._record, collections.Counter[int]()
        for number, (_, allocation, nbytes) in enumerate(record.changes):
            if number > self._peak_change:
                break
            if record.allocations[allocation].device == self._device:
                sizes[allocation] += nbytes
        shares: collections.Counter[tuple[str, str]] = collections.Counter()
        for allocation, nbytes in sizes.items():
            found = record.allocations[allocation]
            taken = nbytes if self._rounded is None else self._rounded(nbytes)
            shares[record.modules[found.module].name, found.category] += taken
        return [Share(name, category, nbytes) for (name, category), nbytes in shares.most_common() if nbytes]

    def curve(self, points: int = 600) -> list[Sample]:
        """At most ``points`` samples that keep the highest of each stretch, the peak among them."""
        if len(self.samples) <= points:
            return list(self.samples)
        each = -(-len(self.samples) // points)
        parts = [self.samples[begin : begin + each] for begin in range(0, len(self.samples), each)]
        return [max(part, key=lambda sample: sample.total) for part in parts]
