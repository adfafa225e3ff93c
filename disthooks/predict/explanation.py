"""``Explanation``: what one step of a model saves and needs, before anything runs."""

from __future__ import annotations

import collections
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from disthooks._tensors import format_bytes
from disthooks.predict.page import page
from disthooks.predict.record import CATEGORIES, StepRecord, Unknown
from disthooks.predict.run import Situation
from disthooks.predict.timeline import Sample, Share, Timeline

_STATE = ("parameters", "buffers", "gradients", "optimizer state")


@dataclass(frozen=True)
class ModuleRow:
    """What one module saves.

    Attributes:
        name: as in ``model.named_modules()``; "" for the model.
        kind: the name of its class.
        parent: the position of the module that contains it; -1 for the model.
        own: bytes saved in its own forward, without those of the modules inside.
        whole: bytes saved while it ran, with those of the modules inside.
        operators: the bytes of ``own`` by the operator that saved them, the largest first.
    """

    name: str
    kind: str
    parent: int
    own: int
    whole: int
    operators: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Peak:
    """The moment at which most memory is in use.

    Attributes:
        nbytes: bytes in use.
        phase: "before", "forward", "backward" or "optimizer".
        module: the name of the module that ran.
        operator: the operator that ran.
        by_category: bytes for each category that has any.
        shares: whose bytes they are: module and category, the largest first.
    """

    nbytes: int
    phase: str
    module: str
    operator: str
    by_category: Mapping[str, int]
    shares: tuple[Share, ...]


@dataclass(frozen=True)
class Explanation:
    """What one training step saves for backward and needs in memory, predicted.

    Attributes:
        model: the name of what was explained.
        situation: how the step runs.
        record: everything that was recorded.
        timeline: the memory of the device over time.
        warnings: what the user should know.
    """

    model: str
    situation: Situation
    record: StepRecord = field(repr=False)
    timeline: Timeline = field(repr=False)
    warnings: tuple[str, ...] = ()

    @functools.cached_property
    def modules(self) -> tuple[ModuleRow, ...]:
        """A row for each module, in the order of ``model.named_modules()``."""
        record = self.record
        own: list[collections.Counter[str]] = [collections.Counter() for _ in record.modules]
        for each in record.counted():
            own[each.module][each.operator] += record.allocations[each.allocation].nbytes
        whole = [sum(by_operator.values()) for by_operator in own]
        for position in range(len(whole) - 1, 0, -1):  # a module stands behind the one that contains it
            whole[record.modules[position].parent] += whole[position]
        return tuple(
            ModuleRow(name, kind, parent, sum(by.values()), total, dict(by.most_common()))
            for (name, kind, parent), by, total in zip(record.modules, own, whole, strict=True)
        )

    @property
    def saved_bytes(self) -> int:
        """Bytes that autograd keeps for backward: each memory once, weights not counted."""
        return self.modules[0].whole if self.modules else 0

    @property
    def by_module(self) -> dict[str, int]:
        """The saved bytes of each module with the modules inside it, by name; "" is the model."""
        return {row.name: row.whole for row in self.modules}

    @functools.cached_property
    def by_operator(self) -> dict[str, int]:
        """The saved bytes by the operator that saved them, the largest first."""
        total: collections.Counter[str] = collections.Counter()
        for row in self.modules:
            total.update(row.operators)
        return dict(total.most_common())

    @property
    def weight_copies(self) -> int:
        """The part of :attr:`saved_bytes` that is autocast's copies of weights."""
        record = self.record
        return sum(
            record.allocations[each.allocation].nbytes for each in record.counted() if each.kind == "weight copy"
        )

    @property
    def peak_bytes(self) -> int:
        """The most bytes in use at one moment of the step."""
        return self.timeline.peak

    @functools.cached_property
    def peak(self) -> Peak:
        """Where the most bytes are in use, and whose they are."""
        sample = self.timeline.peak_sample
        operators = self.record.operators
        running = operators[min(sample.moment, len(operators) - 1)].name if operators else ""
        return Peak(
            sample.total,
            sample.phase,
            sample.module,
            running,
            _categories(sample),
            tuple(self.timeline.at_peak()),
        )

    @property
    def unknown(self) -> tuple[Unknown, ...]:
        """What could not be known, and what was assumed instead."""
        return tuple(self.record.unknown)

    @property
    def state(self) -> dict[str, int]:
        """Bytes of the parameters, buffers, gradients and the optimizer's state of this rank, by category."""
        total: collections.Counter[str] = collections.Counter()
        for each in self.record.allocations:
            if each.category in _STATE:
                total[each.category] += each.nbytes
        return {name: total[name] for name in _STATE}

    def to_dict(self) -> dict[str, Any]:
        """All of it as a document that JSON can hold; docs/cli.md has its keys."""
        position = {row.name: number for number, row in enumerate(self.modules)}
        phases = list(self.record.phases)
        points = [
            [each.moment, phases.index(each.phase) if each.phase in phases else -1, position[each.module], *each.nbytes]
            for each in self.timeline.curve()
        ]
        peak = self.peak
        return {
            "model": self.model,
            "situation": self.situation.to_dict(),
            "saved": self.saved_bytes,
            "weight_copies": self.weight_copies,
            "peak": {
                "nbytes": peak.nbytes,
                "phase": peak.phase,
                "module": peak.module,
                "operator": peak.operator,
                "categories": dict(peak.by_category),
                "shares": [each._asdict() for each in peak.shares[:50]],
            },
            "state": self.state,
            "modules": [
                {
                    "module": row.name,
                    "class": row.kind,
                    "parent": row.parent,
                    "own": row.own,
                    "whole": row.whole,
                    "operators": dict(row.operators),
                }
                for row in self.modules
            ],
            "operators": self.by_operator,
            "curve": {"categories": list(CATEGORIES), "phases": phases, "points": points},
            "unknown": [each._asdict() for each in self.unknown],
            "warnings": list(self.warnings),
        }

    def to_html(self) -> str:
        """The explanation as one HTML page that needs no network, with its figures and pictures."""
        return page(self.to_dict())

    def __str__(self) -> str:
        at = f"in the {self.peak.phase} of {self.peak.module or 'the model'}"
        lines = [
            f"{self.model}: autograd saves {format_bytes(self.saved_bytes)}; "
            f"the peak is {format_bytes(self.peak_bytes)}, {at}"
        ]
        lines += [f"  {name}: {format_bytes(nbytes)}" for name, nbytes in self.peak.by_category.items()]
        return "\n".join(lines)


def _categories(sample: Sample) -> dict[str, int]:
    pairs = zip(CATEGORIES, sample.nbytes, strict=True)
    return dict(sorted(((name, nbytes) for name, nbytes in pairs if nbytes), key=lambda pair: -pair[1]))
