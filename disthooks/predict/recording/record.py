"""What a recorder saw of one training step: operators, memory that came and went, and the tensors that autograd saved.

A :class:`StepRecord` is plain data. :mod:`disthooks.predict.recording.timeline` and
:mod:`disthooks.predict.explanation` read it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

#: The parts of a training step, in their order. "before" is everything that is there when the forward begins.
Phase = Literal["before", "forward", "backward", "optimizer"]

#: What a piece of memory is for. If two hold, the first in this order counts.
CATEGORIES = (
    "parameters",
    "buffers",
    "master weights",
    "gradients",
    "optimizer state",
    "inputs",
    "gathered parameters",
    "communication",
    "saved for backward",
    "temporary",
)

#: The categories of what is there before a step and after it.
STAYING = frozenset(("parameters", "buffers", "master weights", "gradients", "optimizer state", "inputs"))

#: What a saved tensor is. Only an "activation", an "input" and a "weight copy" are memory that would not be there
#: without autograd, or that a plan can move; a "weight copy" is what autocast made of a weight.
SavedKind = Literal["activation", "input", "weight copy", "parameter", "buffer"]


class ModuleInfo(NamedTuple):
    """One module of the model; ``parent`` is the position of the module that contains it, -1 for the model itself."""

    name: str
    kind: str
    parent: int


class Operator(NamedTuple):
    """One operator that ran. Its position in :attr:`StepRecord.operators` is a moment of the step.

    ``module`` is the position of the module in whose forward, or in the backward of whose forward, it ran. For the
    other figures see ``Cost``.
    """

    name: str
    phase: Phase
    module: int
    flops: int = 0
    read: int = 0
    written: int = 0
    dtype: str = ""


@dataclass
class Allocation:
    """The memory of one storage, and the most bytes that it had; ``operator`` is "" if the recorder found it."""

    nbytes: int
    category: str
    operator: str
    module: int
    device: Literal["device", "host"] = "device"


class Change(NamedTuple):
    """Memory that came or, if ``nbytes`` is negative, went; ``moment`` is the position of the last operator."""

    moment: int
    allocation: int
    nbytes: int


class SavedTensor(NamedTuple):
    """One tensor that autograd saved.

    ``nbytes`` are those of its elements. ``is_first`` tells whether no tensor over this memory was saved before: each
    memory counts once.
    """

    allocation: int
    nbytes: int
    module: int
    operator: str
    kind: SavedKind
    is_first: bool
    shape: tuple[int, ...]
    dtype: str


class Unknown(NamedTuple):
    """Something that could not be known without running for real, and what was assumed instead."""

    what: str
    module: str
    assumed: str


@dataclass
class StepRecord:
    """One step: forward, backward, and the optimizer's step if there is one.

    ``phases`` has, for each part of the step, the position of its first operator.
    """

    modules: list[ModuleInfo] = field(default_factory=list)
    operators: list[Operator] = field(default_factory=list)
    allocations: list[Allocation] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    saved: list[SavedTensor] = field(default_factory=list)
    phases: dict[Phase, int] = field(default_factory=dict)
    unknown: list[Unknown] = field(default_factory=list)

    def counted(self) -> list[SavedTensor]:
        """The saved tensors that count: the first over each memory that is no weight."""
        return [each for each in self.saved if each.is_first and each.kind not in ("parameter", "buffer")]
