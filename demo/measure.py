"""Measure blocks of steps with and without disthooks, turn about, in one run."""

from __future__ import annotations

import itertools
import json
import pathlib
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ranks import Ranks, peak, reset_peak

from disthooks.saved.report import SavedReport

BYTES = ("stored", "moved", "shared", "kept")  # of what an attachment reports


class Step(NamedTuple):
    """One step: the mean loss over the ranks in bits per byte, and the seconds of the slowest rank."""

    step: int
    saved: bool
    loss: float
    seconds: float


@dataclass
class Mode:
    """What was seen with saving on, or off: the largest of any rank, and bytes added up over the ranks."""

    seconds: list[float] = field(default_factory=list)
    peak: float = 0.0
    resting: float = 0.0
    rise: float = 0.0
    bytes: dict[str, float] = field(default_factory=lambda: dict.fromkeys(BYTES, 0.0))

    def summary(self) -> dict[str, Any]:
        """The numbers of the table."""
        quarters = statistics.quantiles(self.seconds, n=4) if len(self.seconds) > 1 else self.seconds * 3
        return {
            "steps": len(self.seconds),
            "step_seconds": statistics.median(self.seconds),
            "step_seconds_quartiles": [quarters[0], quarters[2]],
            "peak_bytes": int(self.peak),
            "resting_bytes": int(self.resting),
            "rise_bytes": int(self.rise),
            **{f"{name}_bytes": int(count) for name, count in self.bytes.items()},
        }


class Measure:
    """All steps and both modes; rank 0 writes each step to ``steps.jsonl`` as its block ends."""

    def __init__(self, ranks: Ranks, folder: pathlib.Path) -> None:
        self.ranks, self.log = ranks, folder / "steps.jsonl"
        self.steps: list[Step] = []
        self.modes = {False: Mode(), True: Mode()}
        if ranks.first:
            self.log.write_text("")

    @contextmanager
    def block(self, saved: bool) -> Iterator[list[tuple[int, float, float]]]:
        """Collect (number, loss, seconds) of the steps in the ``with``, and the peak of memory meanwhile."""
        taken: list[tuple[int, float, float]] = []
        reset_peak(self.ranks)
        resting = peak(self.ranks)
        yield taken
        self._add(saved, taken, resting, peak(self.ranks))

    def _add(self, saved: bool, taken: list[tuple[int, float, float]], resting: float, top: float) -> None:
        numbers, losses, seconds = zip(*taken, strict=True)
        means = [loss / self.ranks.world for loss in self.ranks.sum(losses)]
        *slowest, resting, top, rise = self.ranks.max([*seconds, resting, top, top - resting])
        steps = [Step(n, saved, loss, s) for n, loss, s in zip(numbers, means, slowest, strict=True)]
        mode = self.modes[saved]
        mode.seconds += slowest
        mode.resting, mode.peak, mode.rise = max(mode.resting, resting), max(mode.peak, top), max(mode.rise, rise)
        self.steps += steps
        if self.ranks.first:
            with self.log.open("a") as file:
                file.writelines(json.dumps(step._asdict()) + "\n" for step in steps)

    def add_report(self, report: SavedReport) -> None:
        """Add the bytes that one attachment saw, on all ranks."""
        totals = self.ranks.sum([getattr(report, name) for name in BYTES])
        for name, total in zip(BYTES, totals, strict=True):
            self.modes[True].bytes[name] += total

    def _ratios(self) -> list[float]:
        """Of each pair of blocks the time of a step with disthooks over that without: a slow minute slows both down."""
        blocks = [list(steps) for _, steps in itertools.groupby(self.steps, key=lambda step: step.saved)]
        medians = [statistics.median(step.seconds for step in block) for block in blocks]
        has_both = any(step.saved for step in self.steps) and not self.steps[0].saved
        return [saved / plain for plain, saved in zip(medians[::2], medians[1::2], strict=False)] if has_both else []

    def summary(self) -> dict[str, Any]:
        """Both modes, as far as they were run, and the loss of the first and the last steps."""
        few = min(4, len(self.steps))
        return {
            "loss_first": statistics.fmean(step.loss for step in self.steps[:few]),
            "loss_last": statistics.fmean(step.loss for step in self.steps[-few:]),
            "loss_steps": few,
            "ratios": self._ratios(),
            "without": self.modes[False].summary() if self.modes[False].seconds else None,
            "with": self.modes[True].summary() if self.modes[True].seconds else None,
        }
