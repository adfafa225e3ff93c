"""``Explanation``: what one training step of a model saves, and the memory that it needs, as predicted."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from disthooks._tensors import format_bytes
from disthooks.errors import UsageError
from disthooks.predict.hardware.allocator import AllocatorReport, events_of, least_limit, round_up, simulate
from disthooks.predict.hardware.roofline import phase_seconds, seconds_of
from disthooks.predict.recording.record import CATEGORIES, StepRecord, Unknown
from disthooks.predict.recording.timeline import Share, Timeline
from disthooks.predict.run import Situation, Step
from disthooks.report.page.page import page
from disthooks.saved.report import SavedReport

# [Note: a range]
# The peak counts every tensor that Python or autograd holds, with its size rounded as torch's allocator rounds it. The
# real peak may differ, so there is `peak_range`. Its lower end is the bytes of the tensors without rounding. Its upper
# end is the least memory with which the allocator completes the step: it contains fragmentation and the workspaces of
# cuBLAS. `NOT_COUNTED` names the memory that is in no figure.

#: How many shares of the peak a document has at most: enough for each module of a large model.
_SHARES = 1000
#: The figures of hooks that a run is compared with.
_FIGURES = ("stored", "moved", "shared", "recomputed", "recast", "kept")
#: Memory that no figure of a prediction contains.
NOT_COUNTED = (
    "memory that an operator takes for itself while it runs, such as the workspace of a convolution",
    "memory that the communication library takes (NCCL: some hundred MiB)",
    "tensors that the training loop keeps: logs, averages of weights, the outputs of the last step",
)
#: And, if a plan is attached to a model on the CPU:
_NOT_COUNTED_CPU = "the memory in which the hooks of the plan compute checksums (at most 1 MiB)"


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
        flops: floating-point operations of its own forward, and of the backward of it.
        seconds: the time of these on the device, roughly; 0.0 if the device has no name.
    """

    name: str
    kind: str
    parent: int
    own: int
    whole: int
    operators: Mapping[str, int] = field(default_factory=dict)
    flops: tuple[int, int] = (0, 0)
    seconds: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class Peak:
    """The moment at which most memory is in use.

    Attributes:
        nbytes: bytes in use.
        phase: "before", "forward", "backward" or "optimizer".
        module: the name of the module that ran.
        operator: the operator that ran.
        by_category: bytes for each category that has any.
        shares: bytes for each pair of a module and a category, the largest first.
    """

    nbytes: int
    phase: str
    module: str
    operator: str
    by_category: Mapping[str, int]
    shares: tuple[Share, ...]

    @property
    def where(self) -> str:
        """The moment as text, such as "in the backward of layers.3"."""
        alone = {"before": "before the forward", "optimizer": "in the optimizer's step"}
        return alone.get(self.phase) or f"in the {self.phase} of {self.module or 'the model'}"


class Memory:
    """The memory of one rank over a step.

    Attributes:
        timeline: the memory of the device over time.
        host: the most bytes in the host's memory: what an engine or a plan keeps there.
        disk: the most bytes on a disk.
    """

    def __init__(self, step: Step, situation: Situation) -> None:
        self._record, self._situation = step.record, situation
        rounded = round_up if situation.device == "cuda" else None
        self.timeline = Timeline(step.record, rounded)
        held = {"host": 0, "disk": 0} if step.planned is None else step.planned.placed.peak
        self.host = Timeline(step.record, None, "host").peak + held["host"]
        self.disk = held["disk"]

    @functools.cached_property
    def allocator(self) -> AllocatorReport | None:
        """How torch's caching allocator would serve the step; None on a CPU."""
        return simulate(events_of(self._record)) if self._situation.device == "cuda" else None

    @property
    def peak_bytes(self) -> int:
        """The most bytes in use at one moment of the step, as ``torch.cuda.max_memory_allocated()`` counts them."""
        return self.timeline.peak if self.allocator is None else self.allocator.allocated_peak + self.workspace

    @property
    def workspace(self) -> int:
        """Bytes of cuBLAS's workspaces: one for the thread of the forward, and one for that of the backward."""
        hardware = self._situation.hardware
        return 0 if hardware is None else 2 * hardware.workspace_bytes

    @functools.cached_property
    def peak_range(self) -> tuple[int, int]:
        """The least and the most bytes that the peak may be. See [Note: a range]."""
        if self.allocator is None:
            return self.timeline.peak, self.timeline.peak
        return self.allocator.requested_peak, least_limit(events_of(self._record), self.allocator) + self.workspace

    @property
    def held_bytes(self) -> int:
        """Bytes that the step itself has on the device when the backward begins, without weights and states."""
        return self.timeline.of_the_step("backward")

    @functools.cached_property
    def peak(self) -> Peak:
        """The moment at which most bytes are in use, and what they are."""
        sample, operators = self.timeline.peak_sample, self._record.operators
        running = operators[sample.moment].name if operators else ""
        pairs = [pair for pair in zip(CATEGORIES, sample.nbytes, strict=True) if pair[1]]
        categories = dict(sorted(pairs, key=lambda pair: -pair[1]))
        if (rest := self.peak_bytes - sample.total) > 0:
            categories["workspaces, rounding"] = rest
        return Peak(self.peak_bytes, sample.phase, sample.module, running, categories, tuple(self.timeline.at_peak()))

    def to_dict(self, position: Callable[[str], int], points: int = 600) -> dict[str, Any]:
        phases, peak = list(self._record.phases), self.peak
        curve = [
            [each.moment, phases.index(each.phase) if each.phase in phases else -1, position(each.module), *each.nbytes]
            for each in self.timeline.curve(points)
        ]
        return {
            "peak": {
                "nbytes": peak.nbytes,
                "range": list(self.peak_range),
                "phase": peak.phase,
                "module": peak.module,
                "operator": peak.operator,
                "categories": dict(peak.by_category),
                "shares": [each._asdict() for each in peak.shares[:_SHARES]],
            },
            "held": self.held_bytes,
            "host": self.host,
            "disk": self.disk,
            "curve": {
                "categories": list(CATEGORIES),
                "phases": phases,
                "begins": list(self._record.phases.values()),
                "moments": len(self._record.operators),
                "points": curve,
            },
        }


class Measured(NamedTuple):
    """One figure, predicted and measured, in bytes.

    Attributes:
        name: "peak", or the name of a figure in :class:`~disthooks.saved.report.SavedReport`, such as "moved"; that one
            is for one step.
        predicted: what the explanation says.
        measured: what the run says.
    """

    name: str
    predicted: int
    measured: int

    def __str__(self) -> str:
        text = f"{self.name}: predicted {format_bytes(self.predicted)}, measured {format_bytes(self.measured)}"
        more = self.measured - self.predicted
        return f"{text}, {format_bytes(abs(more))} {'more' if more > 0 else 'less'}" if more else f"{text}, the same"


@dataclass(frozen=True)
class Explanation:
    """What one training step saves for backward, and the memory that it needs, as predicted.

    Attributes:
        model: the name of what was explained.
        situation: how the step runs.
        step: the step without a plan.
        with_plan: the step with the situation's plan; None if it has none.

    >>> import torch
    >>> from disthooks import explain
    >>> print(explain(torch.nn.Linear(256, 256), torch.empty(512, 256), device="cpu", optimizer="sgd"))
    Linear: autograd saves 512.0 KiB; the peak is 2.0 MiB (2.0 MiB to 2.0 MiB), in the backward of the model
      temporary: 1.0 MiB
      inputs: 512.0 KiB
      parameters: 257.0 KiB
      gradients: 257.0 KiB
    """

    model: str
    situation: Situation
    step: Step = field(repr=False)
    with_plan: Step | None = field(default=None, repr=False)

    @property
    def record(self) -> StepRecord:
        """Everything that was recorded of the step without a plan."""
        return self.step.record

    @functools.cached_property
    def memory(self) -> Memory:
        """The memory of the step without a plan."""
        return Memory(self.step, self.situation)

    @functools.cached_property
    def planned(self) -> Memory | None:
        """The memory of the step with the plan; None if there is no plan."""
        return None if self.with_plan is None else Memory(self.with_plan, self.situation)

    @functools.cached_property
    def modules(self) -> tuple[ModuleRow, ...]:
        """A row for each module, in the order of ``model.named_modules()``."""
        record, hardware = self.record, self.situation.hardware
        own: list[collections.Counter[str]] = [collections.Counter() for _ in record.modules]
        for each in record.counted():
            own[each.module][each.operator] += record.allocations[each.allocation].nbytes
        flops = [[0, 0] for _ in record.modules]
        seconds = [[0.0, 0.0] for _ in record.modules]
        for operator in record.operators:
            if operator.phase in ("forward", "backward"):
                is_backward = operator.phase == "backward"
                flops[operator.module][is_backward] += operator.flops
                if hardware is not None:
                    seconds[operator.module][is_backward] += seconds_of(operator, hardware)
        whole = [sum(by_operator.values()) for by_operator in own]
        for position in range(len(whole) - 1, 0, -1):  # a module stands behind the one that contains it
            whole[record.modules[position].parent] += whole[position]
        return tuple(
            ModuleRow(
                name,
                kind,
                parent,
                sum(own[i].values()),
                whole[i],
                dict(own[i].most_common()),
                (flops[i][0], flops[i][1]),
                (seconds[i][0], seconds[i][1]),
            )
            for i, (name, kind, parent) in enumerate(record.modules)
        )

    @functools.cached_property
    def seconds(self) -> dict[str, float]:
        """The time of each part of the step, roughly; empty if the device has no name."""
        hardware = self.situation.hardware
        return {} if hardware is None else phase_seconds(self.record.operators, hardware)

    @property
    def reports(self) -> tuple[SavedReport, ...]:
        """The report that the hooks of each entry of the plan would give."""
        found = None if self.with_plan is None else self.with_plan.planned
        return () if found is None else tuple(found.reports())

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
    def timeline(self) -> Timeline:
        """The memory of the device over time; with the plan if there is one."""
        return (self.planned or self.memory).timeline

    @property
    def peak_bytes(self) -> int:
        """The most bytes in use at one moment of the step; with the plan if there is one."""
        return (self.planned or self.memory).peak_bytes

    @functools.cached_property
    def first_bytes(self) -> int:
        """The most bytes in use in the first step with the plan, which has learnt nothing yet; 0 without a plan."""
        step = self.with_plan or self.step
        return 0 if step.first is None else Memory(step._replace(record=step.first), self.situation).peak_bytes

    @property
    def needed_bytes(self) -> int:
        """The most bytes in use in any step: with a plan the first one may need more than the others."""
        return max(self.peak_bytes, self.first_bytes)

    @property
    def peak_range(self) -> tuple[int, int]:
        """The least and the most bytes that the peak may be. See [Note: a range]."""
        return (self.planned or self.memory).peak_range

    @property
    def peak(self) -> Peak:
        """The moment at which most bytes are in use, and what they are; with the plan if there is one."""
        return (self.planned or self.memory).peak

    @property
    def state(self) -> dict[str, int]:
        """Bytes that this rank holds after the backward, by kind: parameters, gradients, the optimizer's state, ..."""
        return self.step.state

    @property
    def unknown(self) -> tuple[Unknown, ...]:
        """Values that cannot be known without real data, and what was assumed instead."""
        steps = [self.step] if self.with_plan is None else [self.step, self.with_plan]
        return tuple(dict.fromkeys(each for step in steps for each in step.record.unknown))

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about the plan."""
        found = None if self.with_plan is None else self.with_plan.planned
        return () if found is None else (*found.warnings, *found.unknown)

    def beside(self, run: SavedReport | None = None, peak: int | None = None) -> tuple[Measured, ...]:
        """Compare the predicted figures with those of a real run (law 19).

        Args:
            run: what the run's ``saving.report()`` gave, after any number of whole steps with the same plan. Hooks
                count from the first step on, so each of their figures is divided by the number of steps.
            peak: the peak that the run measured, in bytes, such as ``torch.cuda.max_memory_allocated()``.

        Raises:
            UsageError: if the calls of the run's hooks are no multiple of those in one step with the plan.

        >>> import torch
        >>> from disthooks import OnDisk, explain, save_activations
        >>> model, x = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Tanh()), torch.ones(64, 256)
        >>> with save_activations(model, "1", OnDisk("/tmp")) as saving:
        ...     model(x).sum().backward()
        >>> print(explain(model, x, plan=[("1", OnDisk("/tmp"))], device="cpu").beside(saving.report())[1])
        moved: predicted 64.0 KiB, measured 64.0 KiB, the same
        """
        found: list[Measured] = []
        if run is not None:
            hooks = sum(self.reports, SavedReport())
            if not run.calls or not hooks.calls or run.calls % hooks.calls:
                raise UsageError(
                    f"the run's hooks ran in {run.calls} calls, and those of one step run in {hooks.calls}: take the "
                    "report after whole steps, and explain the same model with the same plan"
                )
            steps = run.calls // hooks.calls
            found += [Measured(name, getattr(hooks, name), round(getattr(run, name) / steps)) for name in _FIGURES]
        if peak is not None:
            found.append(Measured("peak", self.peak_bytes, peak))
        return tuple(found)

    def to_dict(self) -> dict[str, Any]:
        """All of it as a document that JSON can hold; docs/cli.md has its keys."""
        position = {row.name: number for number, row in enumerate(self.modules)}
        without = self.memory.to_dict(position.__getitem__)
        has_checksums = self.planned is not None and self.situation.device == "cpu"
        return {
            "model": self.model,
            "situation": self.situation.to_dict(),
            "saved": self.saved_bytes,
            "weight_copies": self.weight_copies,
            **without,
            "state": self.state,
            "seconds": self.seconds,
            "modules": [
                {
                    "module": row.name,
                    "class": row.kind,
                    "parent": row.parent,
                    "own": row.own,
                    "whole": row.whole,
                    "operators": dict(row.operators),
                    "flops": {"forward": row.flops[0], "backward": row.flops[1]},
                    "seconds": {"forward": row.seconds[0], "backward": row.seconds[1]},
                }
                for row in self.modules
            ],
            "operators": self.by_operator,
            "plan": self._plan_dict(position),
            "unknown": [each._asdict() for each in self.unknown],
            "not_counted": [*NOT_COUNTED, *([_NOT_COUNTED_CPU] if has_checksums else [])],
            "warnings": list(self.warnings),
        }

    def _plan_dict(self, position: Mapping[str, int]) -> dict[str, Any] | None:
        if self.planned is None:
            return None
        modules = []
        for report in self.reports:
            to = ", ".join(tier.name for tier in report.tiers)
            keys = ("tensors", "stored", "moved", "shared", "recomputed", "recast", "kept")
            for name, site in report.sites.items():
                modules.append({"module": name, "to": to} | {key: getattr(site, key) for key in keys})
        figures = {"modules": modules, "warnings": list(self.warnings), "first": self.first_bytes}
        return figures | self.planned.to_dict(position.__getitem__)

    def to_html(self) -> str:
        """The explanation as one HTML page, with its figures and pictures. The page needs no network."""
        return page("explain", self.to_dict())

    def __str__(self) -> str:
        low, high = self.peak_range
        lines = [
            f"{self.model}: autograd saves {format_bytes(self.saved_bytes)}; the peak is "
            f"{format_bytes(self.peak_bytes)} ({format_bytes(low)} to {format_bytes(high)}), {self.peak.where}"
        ]
        lines += [f"  {name}: {format_bytes(nbytes)}" for name, nbytes in self.peak.by_category.items()]
        if self.planned is not None:
            lines.append(f"  without the plan the peak is {format_bytes(self.memory.peak_bytes)}")
        lines += [f"  not known: {each.what}; assumed: {each.assumed}" for each in self.unknown]
        return "\n".join(lines)
