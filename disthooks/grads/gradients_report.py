"""``GradientsReport``: the engine of an attachment, and what its steps cost."""

from __future__ import annotations

from dataclasses import dataclass

from disthooks._tensors import format_bytes


@dataclass(frozen=True)
class GradientsReport:
    """The engine of an attachment, and the cost of its steps; ``print`` shows it in words.

    >>> print(GradientsReport("DDP", (0, 1), 8, rounds=1, collectives=(0, 2), bytes=(0, 2048), steps=60))
    DDP, 2 ranks, 8 parameters, 60 steps
    a step that is not logged makes no all-reduce
    a logged step measures once, and makes 2 all-reduces of 2.0 KiB in all

    Attributes:
        engine: which engine was found.
        ranks: the global ranks whose gradients belong together.
        parameters: how many parameters the optimizer holds.
        rounds: how many measurements a logged step takes; each rule that measures gradients which another rule rewrote
            adds one, and so do statistics of the update.
        collectives: all-reduces in a step that is not logged, and in one that is; at most two a round.
        bytes: how many bytes each rank gives to them, in a step that is not logged, and in one that is.
        steps: how many steps there have been.
        lacks_step: whether there were more backwards since the last step than any step had: the loop steps with
            something else than the optimizer that is watched.
    """

    engine: str
    ranks: tuple[int, ...]
    parameters: int
    rounds: int
    collectives: tuple[int, int]
    bytes: tuple[int, int]
    steps: int
    lacks_step: bool = False

    def __str__(self) -> str:
        ranks = f"{len(self.ranks)} ranks" if len(self.ranks) > 1 else "1 rank"
        usual, logged = map(_all_reduces, self.collectives, self.bytes)
        times = {0: "nothing", 1: "once", 2: "twice"}.get(self.rounds, f"{self.rounds} times")
        return (
            f"{self.engine}, {ranks}, {self.parameters} parameters, {self.steps} steps\n"
            f"a step that is not logged makes {usual}\n"
            f"a logged step measures {times}, and makes {logged}"
            + ("\n" + no_step_followed(self.steps) if self.lacks_step else "")
        )


def no_step_followed(steps: int) -> str:
    return (
        f"after {steps} steps there were more backwards than a step has, and no step of this optimizer followed: rules "
        "and statistics see the steps of the watched optimizer alone. Call gradients() with the optimizer whose step() "
        "the loop calls"
    )


def _all_reduces(many: int, nbytes: int) -> str:
    return f"{many} all-reduce{'s' if many > 1 else ''} of {format_bytes(nbytes)} in all" if many else "no all-reduce"
