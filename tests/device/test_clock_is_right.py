"""The modelled clock against the simulated accelerator: one tape through a store, and through the model of it.

Compared are the order of copies in both directions, with their bytes, and the peak of device memory. Copies are done
before the next call, in both. So what is compared is which tensors move and when they are asked for, and not how long a
copy takes: no test without a GPU can say that.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import disthooks as dh
from tests.support.sim import simulated
from tests.support.sim.clock import Machine, Policy, Rates, Saved, Tape, replay
from tests.support.sim.planned import PlannedTiered

pytestmark = pytest.mark.full_tier
KIB = 1 << 10
FAST = Rates(to_host=1e18, to_device=1e18, copy_s=0.0)


def layers(count: int, length: int = 8) -> Tape:
    """A small decoder: four storages a layer, none as large as another; what was saved first is read second."""
    dice, sizes = random.Random(count), []
    for i in range(count):
        sizes += [length * KIB * part + 512 * (4 * i + k) for k, part in enumerate((1, 1, 3, 3))]
    dice.shuffle(sizes)
    steps: list[tuple[str, float]] = [("rest", 0)]
    for i in range(len(sizes)):
        steps += [("run", 1e-3), ("put", i), ("release", i)]
    steps.append(("backward", 0))
    order = list(reversed(range(len(sizes))))
    order.insert(1, order.pop())
    for i in order:
        steps += [("get", i), ("run", 2e-3), ("drop", i)]
    return Tape("layers", tuple(Saved(nbytes) for nbytes in sizes), tuple(steps))


@dataclasses.dataclass
class Found:
    """What a step did: bytes of each copy to the host and of each back, in order, and the peak."""

    sent: list[int]
    brought: list[int]
    peak: int


def modelled(tape: Tape, policy: Policy) -> Found:
    machine = Machine(FAST)
    result = replay(tape, policy, machine=machine)
    return Found(machine.out.copied, machine.back.copied, result.peak)


def done(store: Any, device: torch.device) -> None:
    store.wait()
    torch.accelerator.synchronize(device)


def real(tape: Tape, store: Any, device: torch.device) -> Found:
    """The tape through ``store``, with bytes that are checked."""
    alive: dict[int, torch.Tensor] = {}
    tickets: dict[int, Any] = {}
    done(store, device)
    gc.collect()
    before = torch.accelerator.memory_allocated(device)
    torch.accelerator.reset_peak_memory_stats(device)
    with simulated.copies() as copies:
        for kind, value in tape.steps:
            number = int(value)
            if kind == "put":
                alive[number] = torch.full((tape.saved[number].nbytes,), number % 251, dtype=torch.uint8, device=device)
                tickets[number] = store.put(alive[number])
                done(store, device)
            elif kind == "get":
                alive[number] = store.get(tickets[number])
                done(store, device)
            elif kind in ("release", "drop"):
                tensor = alive.pop(number, None)
                if kind == "drop":
                    assert bool((tensor.cpu() == number % 251).all())  # on the CPU: it takes no device memory
                    store.drop(tickets.pop(number))
                del tensor
                done(store, device)
    peak = torch.accelerator.max_memory_allocated(device) - before
    sent = [nbytes for kind, nbytes in copies if kind == "to_host_async"]
    return Found(sent, [nbytes for kind, nbytes in copies if kind == "to_device_async"], peak)


def are_joined(found: Sequence[int], expected: Sequence[int]) -> bool:
    """Whether the copies ``found`` are those ``expected``, of which a store may have joined some in a row."""
    ends = set(itertools.accumulate(expected))
    return sum(found) == sum(expected) and ends.issuperset(itertools.accumulate(found))


@pytest.mark.parametrize("share", [0.3, 0.45, 0.6, 0.8])
def test_tiered_follows_the_plan_as_its_model_does(sim: torch.device, share: float) -> None:
    """The same copies in the same order, in both directions; the first step has no plan."""
    tape = layers(8)
    limit = int(share * tape.nbytes)
    store, policy = dh.Tiered(dh.OnDevice(limit), dh.OnCpu()), PlannedTiered(limit)
    largest = max(saved.nbytes for saved in tape.saved)
    for step in range(4):
        found, expected = real(tape, store, sim), modelled(tape, policy)
        assert are_joined(found.sent, expected.sent)
        assert sum(found.brought) == sum(found.sent), "no copy is in vain"
        if step:
            assert (found.sent, found.brought) == (expected.sent, expected.brought)
            assert found.peak == pytest.approx(expected.peak, abs=largest)
            assert found.peak <= limit + largest, "the tensor that is put, or read, is there already"
