"""A time that no plan can beat: how long a step takes at least if saved tensors may move and device memory is limited.

An integer program that decides for each saved tensor whether it stays or moves has an optimum that is no less than
this, because the bound lets bytes be divided and the link know the future:

- At a moment of forward, what does not fit into the limit has been sent. The link begins when the first tensor is
  saved, and the operators after that moment take their time.
- At a moment of backward, what does not fit is brought back later, and what reads the last of it comes after that.
"""

from __future__ import annotations

from tests.support.sim.clock import Rates, Tape


def least_seconds(tape: Tape, peak: float, rates: Rates) -> float:
    """Seconds of a step of ``tape`` under any plan that moves tensors and never has more than ``peak`` bytes."""
    totals = tape.seconds()
    tail = _after_last_read(tape)
    least, begin, rest, live, computed, phase = [*totals], None, 0.0, 0, 0.0, 0
    for kind, value in tape.steps:
        if kind == "run":
            computed += value
        elif kind == "rest":
            rest = value
        elif kind == "put":
            begin = computed if begin is None else begin
            live += tape.saved[int(value)].stored
        elif kind == "drop":
            live -= tape.saved[int(value)].stored
        elif kind == "backward":
            phase, computed = 1, 0.0
        excess = max(0.0, rest + live - peak)
        if excess and not phase:
            least[0] = max(least[0], (begin or 0.0) + excess / rates.to_host + totals[0] - computed)
        elif excess:
            least[1] = max(least[1], computed + excess / rates.to_device + tail)
    return sum(least)


def _after_last_read(tape: Tape) -> float:
    """Seconds of the operators after the last read."""
    seconds = 0.0
    for kind, value in reversed(tape.steps):
        if kind == "get":
            break
        seconds += value if kind == "run" else 0.0
    return seconds
