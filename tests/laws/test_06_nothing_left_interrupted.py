"""Law 6, Nothing left: Ctrl-C at any moment of a step leaves no byte counted, and the next steps go on.

Python 3.11 looks for signals when a Python function begins and when a call has returned. So a profile function raises
KeyboardInterrupt there, once for each trial. ``OnDisk`` has a test with real signals, too.
"""

from __future__ import annotations

import gc
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import disthooks as dh
from disthooks.saved.stores.base import Store
from tests.support import is_ours
from tests.support.stores.faulty import soon
from tests.support.stores.inside import device_bytes

NUMBERS = 32 * 1024  # of float32 in each tensor, 128 KiB
TRIALS = 60


class Owner:
    """Drops its ticket at its end, as a packed value does."""

    def __init__(self, store: Store) -> None:
        self.store, self.tickets = store, list[Any]()

    def __del__(self) -> None:
        for ticket in self.tickets:
            self.store.drop(ticket)


def step(store: Store, device: torch.device, small: bool, owners: list[Owner] | None = None) -> None:
    """Six tensors go into the store, and come back in reverse. Those that did not come back yet are in ``owners``."""
    owners = [] if owners is None else owners
    for number in range(6):
        owners.append(Owner(store))
        count = NUMBERS // 16 if small else NUMBERS
        owners[-1].tickets.append(store.put(torch.full((count,), float(number), device=device)))
    while owners:
        read(store, owners)
        del owners[-1]


def read(store: Store, owners: list[Owner]) -> None:
    """The last one has its own numbers."""
    for ticket in owners[-1].tickets:
        found = store.get(ticket)
        assert found[0].item() == found[-1].item() == len(owners) - 1


class Interrupt:
    """Raises KeyboardInterrupt at the moment number ``at``; counts the moments if ``at`` is 0."""

    def __init__(self, at: int = 0) -> None:
        self.at, self.count = at, 0

    def __call__(self, frame: Any, event: str, arg: object) -> None:
        if event in ("call", "c_return") and is_ours(frame.f_code, "saved"):
            self.count += 1
            if self.count == self.at:
                raise KeyboardInterrupt

    def __enter__(self) -> Interrupt:
        sys.setprofile(self)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)


KINDS: dict[str, Callable[[], Store]] = {
    "OnDevice": lambda: dh.OnDevice("64 MiB"),
    "OnCpu": lambda: dh.OnCpu("64 MiB", in_flight="256 KiB", pin_memory=False),
    "Tiered": lambda: dh.Tiered(dh.OnDevice("256 KiB"), dh.OnCpu("64 MiB", in_flight="256 KiB", pin_memory=False)),
    "OnDisk": lambda: dh.OnDisk(tempfile.gettempdir(), in_flight="256 KiB"),
}


@pytest.fixture
def quiet() -> Iterator[None]:
    """An interrupt in a destructor cannot be raised; Python says so on stderr, and pytest would fail the test."""
    said, sys.unraisablehook = sys.unraisablehook, lambda _: None
    gc.collect()
    gc.freeze()  # each trial collects: what the tests before left would take most of the time
    yield
    gc.unfreeze()
    sys.unraisablehook = said


def trials(kind: str, device: torch.device, small: bool) -> None:
    store = KINDS[kind]()
    for _ in range(2):
        step(store, device, small)
    with Interrupt() as counted:
        step(store, device, small)
    moments = range(1, counted.count + 1, max(1, counted.count // TRIALS))
    assert len(moments) >= TRIALS
    interrupted = 0
    for at in moments:
        store = KINDS[kind]()
        for _ in range(2):
            step(store, device, small)
        owners: list[Owner] = []
        try:
            with Interrupt(at):
                step(store, device, small, owners)
        except KeyboardInterrupt:  # a notebook goes on, and keeps the traceback with the tensors of the step
            interrupted += 1
            step(store, device, small)
            while owners:
                read(store, owners)
                del owners[-1]
        for _ in range(2):
            step(store, device, small)
        gc.collect()
        store.wait()
        held = [report.held for report in store.report()]
        assert held == [0] * len(held), f"after an interrupt at moment {at} of {counted.count}"
        assert soon(lambda store=store: device_bytes(store) == 0)  # copies of dropped tensors end by themselves
    assert interrupted >= TRIALS // 2  # the others were in destructors


@pytest.mark.parametrize("kind", ["OnDevice", "OnDisk", "Tiered"])
def test_nothing_is_left_of_a_step_that_was_interrupted(kind: str, quiet: None) -> None:
    trials(kind, torch.device("cpu"), small=False)


@pytest.mark.second_tier
@pytest.mark.full_tier(small=(False,))
@pytest.mark.parametrize("small", [False, True], ids=["large", "small"])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left_on_a_device(kind: str, small: bool, device: torch.device, quiet: None) -> None:
    trials(kind, device, small)


def test_a_read_that_was_interrupted_is_made_again(device: torch.device, quiet: None) -> None:
    """At each moment of the read of a tensor that is on its way back."""
    value = torch.arange(float(NUMBERS))
    for at in itertools.count(1):
        store = dh.OnCpu("64 MiB", pin_memory=False)
        ticket = store.put(value.to(device))
        store.wait()
        store.prefetch(ticket)
        try:
            with Interrupt(at) as counted:
                store.get(ticket)
        except KeyboardInterrupt:
            pass
        assert torch.equal(store.get(ticket).cpu(), value)
        store.drop(ticket)
        assert soon(lambda store=store: device_bytes(store) == 0)
        if counted.count < at:
            break
    assert at > 20
