"""The tape of a model with ``torch.utils.checkpoint`` around each block, made from its tape without."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from tests.support.sim.clock import Step, Tape

NAMED = ("put", "release", "get", "drop")  # steps whose value is the number of a storage


def checkpointed(tape: Tape, block_of: Callable[[str], str]) -> Tape:
    """The tape with a checkpoint around each block.

    What a block returns is saved, as the input of the next one. All else that is saved within a block lasts in forward
    as long as forward needs it, and is computed again, the whole block at once, before its backward.

    ``block_of`` says the block of a module from its name, and "" outside of blocks.
    """
    made = _Made(tape, block_of)
    for kind, value in tape.steps:
        made.step(kind, value)
    place = {number: i for i, number in enumerate(made.kept)}
    steps = tuple((kind, place[int(value)] if kind in NAMED else value) for kind, value in made.steps)
    return dataclasses.replace(tape, saved=tuple(tape.saved[number] for number in made.kept), steps=steps)


class _Made:
    """The steps so far; storages have the numbers of the tape without checkpoints.

    Attributes:
        kept: the storages that are saved with checkpoints, too.
    """

    def __init__(self, tape: Tape, block_of: Callable[[str], str]) -> None:
        self.saved, self.block_of, self.steps = tape.saved, block_of, list[Step]()
        blocks: dict[str, list[int]] = {}
        for number, saved in enumerate(tape.saved):
            blocks.setdefault(block_of(saved.module), []).append(number)
        outside = blocks.pop("", [])
        self.inside = {name: numbers[:-1] for name, numbers in blocks.items()}
        self.of = {number: name for name, numbers in self.inside.items() for number in numbers}
        self.kept = sorted([*outside, *(numbers[-1] for numbers in blocks.values())])
        self.inputs = {name: max(n for n in self.kept if n < numbers[0]) for name, numbers in blocks.items()}
        self.seconds = dict.fromkeys(blocks, 0.0)  # of each block's forward
        self.since = 0.0  # seconds of forward since the last storage of a block was saved
        self.rest = self.extra = 0.0
        self.is_backward = False
        self.read: set[int] = set()  # inputs that were read for a forward that runs again
        self.again: set[str] = set()

    def step(self, kind: str, value: float) -> None:
        self._time(kind, value)
        number = int(value)
        name = self.of.get(number, "") if kind in NAMED else ""
        if kind == "rest":
            self.rest = value
            self._grow(0)
        elif not name:
            if not (kind == "get" and number in self.read):
                self.steps.append((kind, value))
        elif kind == "put":
            self._grow(self.saved[number].nbytes)
        elif kind == "get":
            self._run_again(name)
        elif kind == ("drop" if self.is_backward else "release"):
            self._grow(-self.saved[number].nbytes)

    def _time(self, kind: str, value: float) -> None:
        if kind == "backward":
            self.is_backward = True
        elif kind == "run" and not self.is_backward:
            self.since += value
        elif kind == "put" and (name := self.block_of(self.saved[int(value)].module)):
            self.seconds[name] += self.since
            self.since = 0.0

    def _grow(self, nbytes: float) -> None:
        """So many bytes more that are not those of saved storages."""
        self.extra += nbytes
        self.steps.append(("rest", self.rest + self.extra))

    def _run_again(self, name: str) -> None:
        if name in self.again:
            return
        self.again.add(name)
        if self.inputs[name] not in self.read:
            self.read.add(self.inputs[name])
            self.steps.append(("get", self.inputs[name]))
        self._grow(sum(self.saved[number].nbytes for number in self.inside[name]))
        self.steps.append(("run", self.seconds[name]))
