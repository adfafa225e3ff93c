"""``plan_within``: the plan that keeps a step within a budget and adds the least time, from predictions alone."""

# [Note: the plan for a budget]
# Three ways are tried: to move saved tensors to a store, to drop what is cheap to compute again and move the rest, and
# the same with outputs of linear layers. Each has one number, the bytes of saved tensors that stay on the device. The
# first run has 0 of them. A limit that is larger by some bytes makes the peak larger by no more than these and a
# tensor, so each further run adds what the last one left of the budget, until one is over it. From then on the limit is
# searched by halves. The first step counts, too: a store does not know in it what will be saved, so it moves the first
# saved when its limit is reached, and not from the first put on. The way that adds the least time is the answer. Times
# are those of the advice: of the operators by a table of devices, and of the transfer as far as it is longer than the
# step, at the speeds that `disthooks env` has measured if they are given.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from disthooks._tensors import format_bytes
from disthooks.errors import UsageError
from disthooks.predict.answers.advice import Advice, Candidate, Speeds, Trial, far_store, keeping
from disthooks.predict.explanation import Explanation
from disthooks.predict.fake.builder import Builder

#: The part of the budget that may be left over when the search for one limit ends, and runs for one limit at most.
_CLOSE, _RUNS = 0.01, 6
_WAYS: dict[str, dict[str, Any]] = {
    "move saved tensors": {},
    "compute cheap tensors again, and move others": {"recompute": {"kind": "Recompute"}},
    "compute cheap tensors and outputs of linear layers again, and move others": {
        "recompute": {"kind": "Recompute", "products": 1}
    },
}


def plan_within(
    builder: Builder,
    explanation: Explanation,
    budget: int,
    progress: Callable[[str], None] | None = None,
    speeds: Speeds | None = None,
) -> Advice | None:
    """The plan of a hooks file with which the step of ``explanation`` needs no more than ``budget`` bytes.

    None if the step is within the budget as it is; a UsageError, which says how much is missing, if no plan keeps it.
    See [Note: the plan for a budget].
    """
    if explanation.peak_bytes <= budget:
        return None
    runs: list[Advice] = []
    trial = Trial(builder, explanation, progress, {}, 0.0, speeds)
    found = [best for way in _WAYS if (best := _largest(trial, explanation, way, budget, runs)) is not None]
    if not found:
        least = min((each.nbytes for each in runs), default=explanation.peak_bytes)
        raise UsageError(
            f"no plan keeps {format_bytes(budget)}: with all saved tensors moved the step needs {format_bytes(least)}, "
            f"{format_bytes(least - budget)} more; a smaller batch, activation checkpointing, or FSDP need less "
            "(disthooks explain says how much)"
        )
    return min(found, key=lambda each: each.seconds)


def _largest(trial: Trial, explanation: Explanation, way: str, budget: int, runs: list[Advice]) -> Advice | None:
    """The advice with the most saved tensors on the device that keeps the budget; None if none does."""
    best, stays, last, fits, fails = None, 0, "", 0, -1
    for _ in range(_RUNS):
        run = trial.of(_candidate(explanation, way, stays))
        left = budget - run[0].nbytes if run else -1
        if not run or (left >= 0 and run[0].text == last):  # all that is left to move stays already
            break
        last = run[0].text
        runs += run
        if left >= 0:
            best, fits = run[0], stays
        else:
            fails = stays
        if fails == 0 or 0 <= left < _CLOSE * budget:
            break
        # A little less than what is left, since an allocator rounds. Of large tensors the peak grows in jumps.
        stays = stays + left - (budget >> 9) if fails < 0 else (fits + fails) // 2
    return best


def _candidate(explanation: Explanation, way: str, stays: int) -> Candidate:
    _, where = far_store(explanation.situation, explanation.saved_bytes)
    return keeping(explanation, stays, f"{way} to {where}, {stays >> 20} MiB stay", **_WAYS[way])
