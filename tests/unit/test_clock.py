"""The modelled clock: times and peaks that a person can compute, and the tapes that are committed."""

from __future__ import annotations

import dataclasses
import pathlib
import sys

import pytest

from tests.support import ROOT
from tests.support.sim.clock import Machine, Memory, Policy, Rates, Saved, Tape, largest_limit, replay
from tests.support.sim.policies import EverythingOut, FirstSavedFirst, NearTheLimit

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


def test_the_host_may_cost_time() -> None:
    machine = Machine(dataclasses.replace(RATES, host_call_s=3.0))
    machine.operator(100)
    assert machine.operator(100).time == 7.0, "the second call comes after 6 s"


def test_the_peak_of_memory_is_by_time_and_not_by_order() -> None:
    memory = Memory()
    memory.allocate(10, 0.0)
    memory.free(10, 5.0)
    memory.allocate(7, 1.0)
    memory.free(7, 2.0)
    memory.allocate(10, 5.0)
    assert memory.peak == 17
    assert memory.live(3.0) == 10


def test_nothing_keeps_everything() -> None:
    result = replay(tape(), Policy(), RATES)
    assert (result.forward_s, result.backward_s, result.stalled_s) == (4.0, 4.0, 0.0)
    assert (result.peak, result.held, result.sent) == (45, 40, 0)


def test_offload_of_everything_is_as_fast_as_the_link_and_no_faster() -> None:
    slow = dataclasses.replace(RATES, to_host=5.0, to_device=5.0)  # 2 s for each tensor, which takes 1 s to compute
    result = replay(tape(8), EverythingOut(in_flight=20), slow)
    assert result.sent == result.brought == 80
    assert result.forward_s >= 12.0
    assert result.backward_s >= 16.0
    assert result.peak < replay(tape(8), Policy(), slow).peak


def test_the_plan_sends_the_first_and_keeps_the_last() -> None:
    plan = FirstSavedFirst(tape(8), limit=50, group=10)
    result = replay(tape(8), plan, RATES)
    assert result.sent == result.brought == 30, "eight of 10 bytes less the limit"
    assert (result.forward_s, result.backward_s) == (8.0, 8.0), "1 s a tensor: it is hidden behind the operators"
    assert result.peak <= 5 + 50


def test_the_plan_waits_rather_than_pass_its_limit() -> None:
    slow = dataclasses.replace(RATES, to_host=1.0)
    result = replay(tape(8), FirstSavedFirst(tape(8), limit=40, group=10), slow)
    assert result.stalled_s > 0
    assert result.peak <= 5 + 40 + 10, "the newest tensor is there when it is put"


def test_a_limit_is_found_for_a_peak() -> None:
    big = tape(8, 100 << 20, 1.0)
    limit = largest_limit(big, NearTheLimit, 500 << 20)
    assert limit is not None
    assert replay(big, NearTheLimit(limit)).peak <= 500 << 20
    assert largest_limit(big, NearTheLimit, 10) is None


def test_what_a_codec_makes_takes_time_and_memory() -> None:
    coded = tape().coded(lambda saved: dataclasses.replace(saved, stored=2, encode_s=0.5, restore_s=0.25))
    result = replay(coded, Policy(), RATES)
    assert (result.forward_s, result.backward_s) == (6.0, 5.0)
    assert result.held == 8
    assert result.peak == 5 + 10 + 8


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


def test_the_simulated_benchmark_gives_what_is_committed() -> None:
    import json

    sys.path.append(str(ROOT / "benchmarks"))
    import simulated

    found = json.loads((ROOT / "benchmarks" / "results" / "simulated.json").read_text())
    assert found["simulated"] is True
    tape_ = Tape.read(TAPES / "decoder.json")
    tape_ = tape_.timed(tape_.about["forward_s"], tape_.about["backward_s"])
    plain = replay(tape_, Policy())
    rows = found["workloads"]["decoder bf16"]["rows"]
    assert rows["nothing"] == simulated.row(plain, plain)
    assert rows["OnCpu"] == simulated.row(replay(tape_, EverythingOut()), plain)
