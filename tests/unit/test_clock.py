"""The plan on the modelled clock: beside a bound that no plan can beat, and in the figures that are committed."""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import pytest

from tests.support import ROOT
from tests.support.sim.clock import Policy, Rates, Result, Saved, Tape, largest_limit, replay
from tests.support.sim.planned import PlannedTiered

pytestmark = pytest.mark.full_tier
TAPES = ROOT / "benchmarks" / "tapes"


def decoder(layer_s: float) -> Tape:
    """24 layers of 12 saved tensors, whose operators take up to three times as long as others."""
    dice, steps, sizes = random.Random(0), [("rest", 2.0 * (1 << 30))], (16, 16, 16, 4, 4, 16, 16, 16, 43, 43, 43, 1)
    saved = tuple(Saved(mib << 20) for _ in range(24) for mib in sizes)
    for i in range(len(saved)):
        steps += [("run", layer_s / 12 * dice.uniform(0.5, 1.5)), ("put", i), ("release", i)]
    steps.append(("backward", 0))
    for i in reversed(range(len(saved))):
        steps += [("get", i), ("run", layer_s / 6 * dice.uniform(0.5, 1.5)), ("drop", i)]
    return Tape("decoder", saved, tuple(steps))


def least_seconds(tape: Tape, peak: float, rates: Rates) -> float:
    """Seconds of a step of ``tape`` under any plan that moves tensors and never has more than ``peak`` bytes.

    An integer program that decides for each saved tensor whether it stays or moves has an optimum that is no less than
    this, because the bound lets bytes be divided and the link know the future:

    - At a moment of forward, what does not fit into the limit has been sent. The link begins when the first tensor is
      saved, and the operators after that moment take their time.
    - At a moment of backward, what does not fit is brought back later, and what reads the last of it comes after that.
    """
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


# The link takes 4.3 ms for what a layer saves, so the shorter the layers, the more of the copies is not hidden.
@pytest.mark.parametrize("layer_s", [0.5e-3, 1e-3, 2e-3, 4e-3])
@pytest.mark.parametrize("share", [0.4, 0.6, 0.8, 0.9])
def test_the_plan_of_tiered_is_close_to_what_no_plan_can_beat(layer_s: float, share: float) -> None:
    step, rates = decoder(layer_s), Rates()
    plain = replay(step, Policy(), rates)

    def steps(limit: int) -> list[Result]:
        policy = PlannedTiered(limit)
        return [replay(step, policy, rates) for _ in range(3)]

    limit = largest_limit(steps, share * plain.peak, 2 * step.nbytes)
    assert limit is not None
    last, least = steps(limit)[-1], least_seconds(step, share * plain.peak, rates)
    assert plain.step_s * (1 - 1e-9) <= least <= last.step_s * (1 + 1e-9)
    # The bound leaves out what a copy takes besides its bytes, and each tensor may be copied both ways. Beside that, no
    # more than 3% are lost, however long the operators take in proportion to each other.
    assert last.step_s <= min(1.03 * least + 2 * len(step.saved) * rates.copy_s, 1.07 * least)
    assert last.sent > 0


@pytest.mark.parametrize(("name", "gigabytes", "rest"), [("resnet152", 45.4, 0.2), ("decoder", 21.1, 3.9)])
def test_the_committed_tapes_are_whole(name: str, gigabytes: float, rest: float) -> None:
    found = Tape.read(TAPES / f"{name}.json")
    numbers = {kind: [int(value) for k, value in found.steps if k == kind] for kind in ("put", "get", "drop", "rest")}
    assert numbers["put"] == list(range(len(found.saved))) == sorted(numbers["get"])
    assert set(numbers["drop"]) <= set(numbers["put"])
    assert found.nbytes / 1e9 == pytest.approx(gigabytes, abs=0.1)
    assert min(numbers["rest"]) / 1e9 >= rest, "the weights are there"


@pytest.fixture(scope="module")
def benchmark() -> Any:
    sys.path.append(str(ROOT / "benchmarks"))
    import simulated

    return simulated


@pytest.fixture(scope="module")
def committed() -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / "simulated.json").read_text())


def test_the_committed_figures_are_those_of_the_plan_of_today(benchmark: Any, committed: Any) -> None:
    assert committed["simulated"] is True
    assert committed["assumed"] == benchmark.ASSUMED
    rates, decoder = Rates(**committed["rates"]), benchmark.read("decoder bf16")
    rows, plain = committed["workloads"]["decoder bf16"]["rows"], replay(decoder, Policy(), rates)
    assert rows["nothing"] == benchmark.row([plain], plain)
    coded = decoder.coded(benchmark.codecs(decoder, rates)["Recompute and products"])
    found = rows["Recompute and products, Tiered at -50%"]
    steps = benchmark.steps_of(coded, PlannedTiered(found["limit_bytes"]), rates)
    assert found == benchmark.row(steps, plain) | {"limit_bytes": found["limit_bytes"]}


def test_the_plan_is_as_fast_as_wanted(committed: Any) -> None:
    assert len(committed["wanted"]) == 4
    for each in committed["wanted"]:
        assert each["here"] <= each["wanted"], each
