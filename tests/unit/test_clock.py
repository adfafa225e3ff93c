"""The modelled clock: times and peaks that a person can compute, and the tapes that are committed."""

from __future__ import annotations

import json
import pathlib
import random
import sys
from typing import Any

import pytest

from tests.support import ROOT
from tests.support.sim.bound import least_seconds
from tests.support.sim.checkpointed import checkpointed
from tests.support.sim.clock import Machine, Memory, Policy, Rates, Result, Saved, Tape, largest_limit, replay
from tests.support.sim.planned import Planned, PlannedTiered

pytestmark = pytest.mark.full_tier
RATES = Rates(device=100.0, to_host=10.0, to_device=10.0, disk_write=5.0, disk_read=5.0, flops=1000.0, copy_s=0.0)
TAPES = ROOT / "benchmarks" / "tapes"


def tape(count: int = 4, nbytes: int = 10, seconds: float = 1.0) -> Tape:
    """So many layers: each takes ``seconds``, saves ``nbytes`` and is read in the reverse order."""
    steps: list[tuple[str, float]] = [("rest", 5)]
    for i in range(count):
        steps += [("run", seconds), ("put", i), ("release", i)]
    steps.append(("backward", 0))
    for i in reversed(range(count)):
        steps += [("get", i), ("run", seconds), ("drop", i)]
    return Tape("layers", (Saved(nbytes),) * count, tuple(steps))


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


def test_streams_events_and_the_host() -> None:
    machine = Machine(RATES)
    done = machine.operator(nbytes=200)  # 2 s
    assert machine.operator(nbytes=100, flops=5000).time == 7.0, "5 s of products are longer than 1 s of bytes"
    assert machine.to_host(50, done).time == 7.0, "it waits for the first operator alone"
    back = machine.to_device(50)
    assert back.time == 5.0, "the other direction is free"
    assert not machine.query(back), "the host is ahead of the streams"
    machine.synchronize(back)
    assert machine.query(back)
    assert machine.host == 5.0
    assert machine.to_disk(10, back).time == 7.0
    machine.wait_event(machine.compute, machine.to_host(10))
    assert machine.compute.stalled == 1.0
    assert machine.out.busy_within(0.0, 4.0) == 2.0


def test_the_peak_of_memory_is_by_time_and_not_by_order() -> None:
    memory = Memory()
    memory.allocate(10, 0.0)
    memory.free(10, 5.0)
    memory.allocate(7, 1.0)
    memory.free(7, 2.0)
    memory.allocate(10, 5.0)
    assert memory.peak == 17
    assert memory.live(3.0) == 10


def test_the_plan_sends_the_first_and_keeps_the_last() -> None:
    plan = Planned([50, None], group=10)
    first, result = (replay(tape(8), plan, RATES) for _ in range(2))
    assert first.sent == 80, "it is not known what comes, so every full group is sent"
    assert first.brought == 30, "of these only the first had to leave"
    assert result.sent == result.brought == 30, "eight of 10 bytes less the limit"
    for each in (first, result):
        assert (each.forward_s, each.backward_s) == (8.0, 8.0), "1 s a tensor: it is hidden behind the operators"
        assert each.peak <= 5 + 50 + 10, "the newest tensor is there when it is put"


def test_a_tape_is_written_and_read(tmp_path: pathlib.Path) -> None:
    tape().write(tmp_path / "tape.json")
    found = Tape.read(tmp_path / "tape.json")
    assert found == tape()
    assert found.timed(0.1, 0.2).seconds() == pytest.approx((0.1, 0.2))


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


def test_the_plan_is_as_fast_as_wanted_and_nothing_is_idle(benchmark: Any, committed: Any) -> None:
    assert len(committed["wanted"]) == 4
    for each in committed["wanted"]:
        assert each["here"] <= each["wanted"], each
    rates, decoder = Rates(**committed["rates"]), benchmark.read("decoder bf16")
    coded = decoder.coded(benchmark.codecs(decoder, rates)["Recompute"])
    plan = Planned(
        [committed["workloads"]["decoder bf16"]["rows"]["Recompute, plan in groups at -50%"]["limit_bytes"], None]
    )
    result = benchmark.steps_of(coded, plan, rates)[-1]
    spans = plan.machine.out.spans
    assert len(spans) == 1, "the link never pauses"
    assert spans[0][0] < 0.01 * result.forward_s, "from the first group on"
    assert spans[0][1] > 0.99 * result.forward_s, "to the end of forward"


def test_a_checkpoint_around_each_block_keeps_inputs_and_computes_forward_again(benchmark: Any) -> None:
    decoder = benchmark.read("decoder bf16")
    inputs = checkpointed(decoder, benchmark.block_of)
    forward, backward = inputs.seconds()
    assert forward == pytest.approx(0.08)
    assert backward == pytest.approx(0.16 + 0.08, rel=0.05), "all but the last layers"
    layers = decoder.about["layers"]
    assert layers <= len(inputs.saved) <= layers + 8
    assert min(value for kind, value in inputs.steps if kind == "rest") >= 0
    assert replay(inputs, Policy()).held == inputs.nbytes
