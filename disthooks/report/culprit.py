"""``Culprit``: what went wrong in a run, with the evidence; ``Timeline``: all of it, and what the log cannot show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch


@dataclass(frozen=True)
class Culprit:
    """What went wrong.

    Attributes:
        kind: "noted", "nonfinite", "loss", "replicas", "weights", "batch", "forward", "backward", "gradient", "update",
            "learning rate", "dead", "slow" or "jump".
        first: the first step in which it can have begun.
        step: the last one: the step in which it was seen. If every step is logged, both are the same.
        where: the module or parameter; "" if it is of the whole model.
        rank: the rank; None if it is of all ranks, or not known.
        what: what happened, in words; no full stop.
        evidence: sentences with the numbers, and with what came of it.
        advice: what to do.

    >>> print(Culprit("dead", 21, 30, "up", None, "all outputs of up became zero").text)
    Steps 21 to 30: all outputs of up became zero.
    """

    kind: str
    first: int
    step: int
    where: str
    rank: int | None
    what: str
    evidence: list[str] = field(default_factory=list)
    advice: str = ""

    @property
    def strength(self) -> str:
        """ "certain" what was seen as it is said, "unusual" what a number is, "noted" what is no fault."""
        return _STRENGTHS.get(self.kind, "unusual")

    @property
    def text(self) -> str:
        on = "" if self.rank is None or " on rank" in self.what else f" on rank {self.rank}"
        return f"{steps_said(self.first, self.step)}{on}: {self.what}."

    def document(self) -> dict[str, Any]:
        fields = dict(vars(self))
        del fields["what"]
        return fields | {"strength": self.strength, "text": self.text}


class Timeline(NamedTuple):
    """What a log tells of a run: what went wrong, and what it has numbers of, and what it cannot show.

    What went wrong is in the order of steps; what is no fault, of the kind "noted", comes last.
    """

    culprits: list[Culprit]
    looked_at: list[str]
    unseen: list[str]


def steps_said(first: int, last: int) -> str:
    """A range of steps.

    >>> steps_said(30, 30), steps_said(21, 30)
    ('Step 30', 'Steps 21 to 30')
    """
    return f"Step {last}" if first >= last else f"Steps {first} to {last}"


def made(
    kind: str, steps: tuple[int, int], where: str, rank: int | None, what: str, evidence: Sequence[str] = ()
) -> Culprit:
    """A culprit with the advice of its kind; ``steps`` are the first and the last in which it can have begun."""
    return Culprit(kind, *steps, where, rank, what, list(evidence), ADVICE[kind])


def module_of(name: str) -> str:
    return name.rpartition(".")[0] or name


def whole(values: torch.Tensor | None, at: int, place: int) -> int | None:
    """The number of a rank; None if there is none."""
    found = math.nan if values is None else float(values[at, place])
    return int(found) if math.isfinite(found) else None


_STRENGTHS = {
    "nonfinite": "certain",
    "loss": "certain",
    "replicas": "certain",
    "weights": "certain",
    "learning rate": "noted",
    "noted": "noted",
}
#: By kind.
ADVICE = {
    "noted": "",
    "nonfinite": "Look at the data of this step and at the module's inputs.",
    "loss": "Look at the batch of this step, and at what the loss divides by or takes the logarithm of.",
    "replicas": "Restart from the last checkpoint. If the same rank is named again, test the memory of its device.",
    "weights": "Look whether all ranks have the same seed or checkpoint, the same learning rate, and gradients that no "
    "rank changes by itself.",
    "batch": "Look at the batch of this step.",
    "forward": "Run the step again from a checkpoint. If the jump comes again, look at the batch and at this module.",
    "backward": "Run the step again from a checkpoint. If the jump comes again, look at this module's backward.",
    "gradient": "Run the step again from a checkpoint. If the jump comes again, look at what computes this gradient.",
    "update": "The gradient was as usual, so the optimizer's state of this parameter is wrong: restart from the last "
    "checkpoint, and test the memory of the device if it comes again.",
    "learning rate": "Look at the schedule, or at the checkpoint that the optimizer was restored from.",
    "dead": "Look at the layer's bias and at its learning rate; start it again from an earlier checkpoint.",
    "slow": "",
    "jump": "Look at the data of this step, and at what changed in the run.",
}
