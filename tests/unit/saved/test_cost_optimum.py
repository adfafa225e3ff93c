"""The cheapest mixture for 24 layers of 12 groups: against an integer program, and on the modelled clock."""

from __future__ import annotations

import dataclasses
import functools
import math
import random

import pytest

from disthooks.saved.cost import Kind, Rates, cheapest, seconds_of
from tests.support.sim import clock
from tests.support.sim.planned import PlannedTiered

pytestmark = pytest.mark.second_tier
np = pytest.importorskip("numpy")
optimize = pytest.importorskip("scipy.optimize", reason="scipy solves the integer program")

LAYERS, MIB = 24, (16, 16, 16, 4, 4, 16, 16, 16, 43, 43, 43, 1)
PRODUCTS = (1, 2, 7, 8)  # of the groups of a layer
LINKS = {"PCIe 4": 25e9, "NVLink-C2C": 225e9, "disk": 1e9}  # bytes a second, each way
# Seconds to compute a group again, for each second of its operator in forward: products of matrices, and the others.
AGAIN = {"cheap": (1.0, 0.1), "dear": (2.0, 1.0)}


@functools.cache
def decoder() -> clock.Tape:
    """A layer takes 4 ms in forward, 90% of it in products."""
    dice, steps = random.Random(0), [("rest", 2.0 * (1 << 30))]
    saved = tuple(clock.Saved(mib << 20, module=f"{i}") for i in range(LAYERS) for mib in MIB)
    times = [
        dice.uniform(0.5, 1.5) * (0.9e-3 if i in PRODUCTS else 0.05e-3) for _ in range(LAYERS) for i in range(len(MIB))
    ]
    for i, seconds in enumerate(times):
        steps += [("run", seconds), ("put", i), ("release", i)]
    steps.append(("backward", 0))
    for i, seconds in reversed(list(enumerate(times))):
        steps += [("get", i), ("run", 2 * seconds), ("drop", i)]
    return clock.Tape("decoder", saved, tuple(steps))


def table(again: str) -> list[Kind]:
    """Bytes and seconds of each group."""
    times = [seconds for kind, seconds in decoder().steps if kind == "run"][: LAYERS * len(MIB)]
    product, other = AGAIN[again]
    return [
        Kind(str(i), saved.nbytes, seconds * (product if i % len(MIB) in PRODUCTS else other))
        for i, (saved, seconds) in enumerate(zip(decoder().saved, times, strict=True))
    ]


def least(kinds: list[Kind], excess: float, rates: Rates) -> float:
    """The least seconds for computing again and moving, by an integer program: each group is computed again or not.

    Its unknowns are the groups, and for how long forward and backward wait for the link.
    """
    nbytes, seconds = (np.array([getattr(kind, name) for kind in kinds]) for name in ("nbytes", "seconds"))
    waits = []
    for computing, pace, wait in ((rates.forward, rates.out, (1, 0)), (rates.backward, rates.back, (0, 1))):
        hidden = max(0.0, computing - pace * rates.tensor)
        waits.append(optimize.LinearConstraint([*(nbytes * pace), *wait], lb=excess * pace - hidden))
    most = [*(1 for _ in kinds), math.inf, math.inf]
    whole = [*(1 for _ in kinds), 0, 0]
    found = optimize.milp([*seconds, 1, 1], integrality=whole, bounds=optimize.Bounds(0, most), constraints=waits)
    assert found.success, found.message
    return float(found.fun)


def replayed(dropped: dict[str, Kind], limit: int, rates: clock.Rates) -> float:
    """Seconds of a step on the clock, with the plan of a ``Tiered``, if some groups are computed again."""

    def change(saved: clock.Saved, number: int) -> clock.Saved:
        kind = dropped.get(str(number))
        return saved if kind is None else dataclasses.replace(saved, stored=0, restore_s=kind.seconds)

    tape = decoder()
    tape = dataclasses.replace(tape, saved=tuple(change(saved, i) for i, saved in enumerate(tape.saved)))
    plan = PlannedTiered(limit)
    return [clock.replay(tape, plan, rates) for _ in range(3)][-1].step_s


@pytest.mark.parametrize("share", [0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
@pytest.mark.parametrize("again", AGAIN)
@pytest.mark.parametrize("link", LINKS)
def test_no_choice_of_groups_and_no_fixed_order_is_faster(link: str, again: str, share: float) -> None:
    tape, kinds = decoder(), table(again)
    (forward, backward), limit = tape.seconds(), int(share * tape.nbytes)
    rates = Rates(forward, backward, 1 / LINKS[link], 1 / LINKS[link], tensor=max(MIB) << 20)
    excess = tape.nbytes - limit
    found = cheapest(kinds, excess, rates)
    chosen = {kind.name: kind for kind in kinds if found.again[kind.name] > 0}  # the last one as a whole
    seconds = forward + backward + seconds_of(kinds, dict.fromkeys(chosen, 1.0), excess, rates)
    assert seconds <= 1.001 * (forward + backward + least(kinds, excess, rates))

    # The clock agrees with the table, and no other way under the same limit is faster.
    on_clock = clock.Rates(to_host=LINKS[link], to_device=LINKS[link])
    step = replayed(chosen, limit, on_clock)
    assert step == pytest.approx(seconds, rel=0.005)
    others = {
        "the fixed order": replayed(_first(kinds, excess), limit, on_clock),
        "Tiered by hand": replayed({}, limit, on_clock),
        "a selective checkpoint that keeps products": replayed(_cheap(kinds), limit, on_clock),
        "every layer in a checkpoint": 2 * forward + backward,
    }
    for name, other in others.items():
        assert step <= other * (1 + 1e-3), name


def _cheap(kinds: list[Kind]) -> dict[str, Kind]:
    """All groups but the products."""
    return {kind.name: kind for i, kind in enumerate(kinds) if i % len(MIB) not in PRODUCTS}


def _first(kinds: list[Kind], excess: float) -> dict[str, Kind]:
    """What ``fit`` computes again as long as no seconds are known: as much as does not fit, the first saved first."""
    dropped, left = {}, excess
    for kind in kinds:
        if left > 0:
            dropped[kind.name] = kind
            left -= kind.nbytes
    return dropped
