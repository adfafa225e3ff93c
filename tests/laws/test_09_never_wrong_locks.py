"""Law 9, never wrong, and never a hang: a report stops no training, and a destructor waits for no lock."""

from __future__ import annotations

import contextlib
import gc
import pathlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import disthooks as dh
from disthooks.saved.pipeline import pipeline
from disthooks.saved.stores.base import StoreReport
from tests.support.models import identical, perceptron, step
from tests.support.stores.copies import Copies
from tests.support.stores.inside import worker_of

LIMIT = 60.0  # seconds, for what takes milliseconds unless it hangs


@contextlib.contextmanager
def often(*functions: Callable[[], object]) -> Iterator[list[int]]:
    """A thread for each of ``functions`` that calls it again and again; how often each was called."""
    stop, counts = threading.Event(), [0] * len(functions)

    def call(i: int) -> None:
        while not stop.wait(0.001):
            functions[i]()
            counts[i] += 1

    threads = [threading.Thread(target=call, args=(i,), daemon=True) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    try:
        yield counts
    finally:
        stop.set()
        for thread in threads:
            thread.join(LIMIT)
        assert not any(thread.is_alive() for thread in threads), "a thread hangs"


def in_time(function: Callable[[], object]) -> bool:
    """Whether ``function`` returned; it runs in a thread of its own."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(LIMIT)
    return not thread.is_alive()


def test_a_report_that_waits_for_its_store_stops_nobody() -> None:
    asked, may, told = threading.Event(), threading.Event(), []

    class Silent(Copies):
        """Does not answer when it is asked for a report, until it may."""

        def report(self) -> tuple[StoreReport, ...]:
            asked.set()
            may.wait(LIMIT)
            return (StoreReport("Silent()", held=7),)

    model, x = perceptron(), torch.randn(8, 64)
    expected = step(model, x)
    saving = dh.save_activations(model, "*", pipeline(Silent(), at_least=0))
    asks = threading.Thread(target=lambda: told.append(saving.report()), daemon=True)
    asks.start()
    assert asked.wait(LIMIT)
    found: list[Any] = []
    assert in_time(lambda: found.extend(step(model, x))), "a step waits for a report"
    assert identical(found, expected)
    may.set()
    asks.join(LIMIT)
    assert told[0].tiers[0].held == 7
    assert told[0].calls == 1


@pytest.mark.forks
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
@pytest.mark.first_tier(is_tiered=(True,))
@pytest.mark.parametrize("is_tiered", [False, True])
def test_a_monitor_works_beside_forked_workers(is_tiered: bool, tmp_path: pathlib.Path) -> None:
    disk = dh.OnDisk(tmp_path, in_flight="64 KiB")
    store = dh.Tiered(dh.OnCpu("12 KiB"), dh.OnDevice("16 KiB"), disk) if is_tiered else disk
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(16, 64))
    model = perceptron()
    expected = [step(model, x) for _ in range(4) for (x,) in DataLoader(data, batch_size=8)]
    saving = dh.save_activations(model, "*", pipeline(store, at_least=0))
    found: list[Any] = []

    def train() -> None:
        for _ in range(4):
            for (x,) in DataLoader(data, batch_size=8, num_workers=2, multiprocessing_context="fork"):
                found.append(step(model, x))

    with often(saving.report, saving.report, saving.report) as counts:
        assert in_time(train), "training hangs"
    assert min(counts) > 0
    assert all(identical(one, other) for one, other in zip(found, expected, strict=True))


def test_a_destructor_waits_for_no_lock(tmp_path: pathlib.Path) -> None:
    """Another thread holds the lock of the store while a graph is dropped, and a block is left by a collection."""
    x, store = torch.randn(64, 64, requires_grad=True), dh.OnDisk(tmp_path)

    def body() -> Iterator[torch.Tensor]:
        with dh.saving(store, at_least=0):
            yield x.exp()

    running = body()
    kept = [next(running)]
    holds, may_go = threading.Event(), threading.Event()

    def hold() -> None:
        with worker_of(store)._lock:
            holds.set()
            may_go.wait(2 * LIMIT)

    holder = threading.Thread(target=hold)
    holder.start()
    assert holds.wait(LIMIT)
    begin = time.monotonic()
    del running
    gc.collect()
    kept.clear()
    assert time.monotonic() - begin < LIMIT
    may_go.set()
    holder.join()
    assert store.budget.held == 0
