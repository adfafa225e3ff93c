"""Steps of the ways, timed one after another, and what came of them."""

from __future__ import annotations

import dataclasses
import gc
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from peers import NOTHING, Way
from torch import nn

import disthooks as dh
from disthooks.saved.report import SavedReport


class Measured:
    """Times, peaks, bytes and gradients of one way, a figure a step."""

    def __init__(self, way: Way) -> None:
        self.way = way
        self.forward: list[float] = []
        self.backward: list[float] = []
        self.peaks: list[int] = []
        self.identical = True
        self.written = 0
        self.reports: list[SavedReport] = []

    def seconds(self, phase: str = "") -> float:
        """The median of a phase, or of the whole step."""
        phases = [getattr(self, phase)] if phase else [self.forward, self.backward]
        return statistics.median(map(sum, zip(*phases, strict=True)))

    def row(self, plain: Measured) -> dict[str, Any]:
        """The medians."""
        if self.way.why_not:
            return {"not_run": self.way.why_not}
        step, base = self.seconds(), plain.seconds()
        row = {
            "step_seconds": round(step, 4),
            "ratio": round(step / base, 3),
            "added_seconds": round(step - base, 4),
            "forward_seconds": round(self.seconds("forward"), 4),
            "backward_seconds": round(self.seconds("backward"), 4),
            "peak_bytes": int(statistics.median(self.peaks)),
            "written_bytes_per_step": self.written,
            "gradients_identical": self.identical,
            "steps_seconds": [round(a + b, 4) for a, b in zip(self.forward, self.backward, strict=True)],
        }
        return row | ({"report": self._report()} if self.reports else {})

    def _report(self) -> dict[str, Any]:
        """What ``report()`` said of the last step; the waits are medians."""
        report = dataclasses.asdict(self.reports[-1])
        for name in ("pack_seconds", "unpack_seconds"):
            report[name] = round(statistics.median(getattr(one, name) for one in self.reports), 4)
        return report


class Bench:
    """A model, its batch, and the ways that take turns on it.

    The first round is not counted; its step without hooks gives the gradients that all others are compared with.

    Args:
        flush: count as forward also the time until all is written, so that backward has to read all of it.
    """

    def __init__(self, model: nn.Module, x: torch.Tensor, ways: Sequence[Way], flush: bool = False) -> None:
        self.model, self.x, self.ways, self.flush = model, x, ways, flush
        self.gradients: list[torch.Tensor] = []
        self.results = {way.name: Measured(way) for way in ways}

    def round(self, number: int) -> None:
        """A step of each way; number -1 is for warming up. Each round begins with another way."""
        first = max(number, 0) % len(self.ways)
        for way in [*self.ways[first:], *self.ways[:first]]:
            if not way.why_not:
                into = self.results[way.name] if number >= 0 else Measured(way)
                try:
                    self._step(way, into)
                except Exception as error:
                    if number >= 0 or not way.may_fail:
                        raise
                    way.why_not = f"{type(error).__name__}: {error}"
                    continue
                if way.name == NOTHING and not self.gradients:
                    self.gradients = [p.grad.clone() for p in self.model.parameters()]
                into.identical &= all(
                    torch.equal(p.grad, other) for p, other in zip(self.model.parameters(), self.gradients, strict=True)
                )

    def rows(self) -> dict[str, dict[str, Any]]:
        return {name: measured.row(self.results[NOTHING]) for name, measured in self.results.items()}

    def _step(self, way: Way, into: Measured) -> None:
        """One forward and backward, with the peak memory during it."""
        self.model.zero_grad()
        gc.collect()
        os.sync()  # what the way before left to the system to write, this one shall not wait for
        cuda, written = self.x.is_cuda, way.written()
        torch.cuda.reset_peak_memory_stats() if cuda else dh.memory.reset_peak_resident()
        self._synchronize()
        begin = time.perf_counter()
        with way.context() as context:
            loss = self.model(self.x).square().mean()
        if self.flush:
            way.flush()
        self._synchronize()
        middle = time.perf_counter()
        loss.backward()
        self._synchronize()
        into.backward.append(time.perf_counter() - middle)
        into.forward.append(middle - begin)
        into.peaks.append(torch.cuda.max_memory_allocated() if cuda else dh.memory.peak_resident())
        if isinstance(context, dh.saving):
            into.reports.append(context.report())
        into.written = into.reports[-1].moved if into.reports else way.written() - written
        way.rest()

    def _synchronize(self) -> None:
        if self.x.is_cuda:
            torch.cuda.synchronize()
