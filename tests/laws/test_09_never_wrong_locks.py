"""Law 9, never wrong, and never a hang.

All locks have one order, a fork takes them in it, and a report stops no training.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import pathlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import disthooks as dh
from disthooks import _fork_safe
from disthooks._fork_safe import Order
from disthooks.saved.stores.base import Store, StoreReport
from tests.support.locks import Orders
from tests.support.models import identical


def test_every_lock_is_made_in_one_place() -> None:
    root = pathlib.Path(dh.__file__).parent
    made = re.compile(r"\b(Lock|RLock|Semaphore|BoundedSemaphore|Barrier)\(")
    found = {str(file.relative_to(root)) for file in root.rglob("*.py") if made.search(file.read_text())}
    assert found == {"_fork_safe.py"}


ALL = dh.AtLeast(0)


#: What the programs below ask for while they hold something, each written down in ``Order`` as well.
SEEN = {
    (Order.ATTACH, Order.CLASSES),
    (Order.PACKED, Order.PACKED),
    (Order.PACKED, Order.PLACE),
    (Order.PACKED, Order.PLACED),
    (Order.PACKED, Order.IN_FLIGHT),
    (Order.PACKED, Order.POOL),
    (Order.PACKED, Order.TURNS),
    (Order.PACKED, Order.QUEUE),
    (Order.PACKED, Order.BUDGET),
    (Order.PACKED, Order.COUNTERS),
    (Order.PLACED, Order.PLACED),
    (Order.PLACED, Order.IN_FLIGHT),
    (Order.PLACED, Order.QUEUE),
    (Order.PLACED, Order.TURNS),
    (Order.PLACED, Order.BUDGET),
}


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))


def _step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(x).square().sum().backward()
    return [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]


def _stores(folder: pathlib.Path) -> dict[str, list[Any]]:
    return {
        "disk": [dh.OnDisk(folder, in_flight="64 KiB", checksum=True)],
        "tiers": [dh.Tiered(dh.OnCpu("12 KiB"), dh.OnDevice("16 KiB"), dh.OnDisk(folder, in_flight="64 KiB"))],
        "again": [dh.Recompute(), dh.OnDisk(folder, in_flight="64 KiB")],
        "codec": [dh.Cast(torch.bfloat16), dh.OnCpu()],
    }


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


@pytest.mark.full_tier
def test_locks_are_asked_for_in_their_order(orders: Orders, tmp_path: pathlib.Path) -> None:
    x = torch.randn(32, 64)
    for stages in _stores(tmp_path).values():
        model = _model()
        expected = _step(model, x)
        saving = dh.save_activations(model, "*", dh.pipeline(ALL, *stages))
        with dh.features(model, "0"), dh.trace(model), often(saving.report, gc.collect) as counts:
            first = _step(model, x)
            while min(counts) < 3:
                _step(model, x)
        assert len(first) == len(expected)
        saving.remove()
    assert not orders.wrong
    assert orders.pairs >= SEEN, f"not seen: {SEEN - orders.pairs}"


def test_a_fork_takes_every_shared_lock_in_order(orders: Orders, tmp_path: pathlib.Path) -> None:
    stores = _stores(tmp_path)
    saving = dh.saving(ALL, *stores["tiers"])
    orders.pairs.clear()
    _fork_safe._before()
    _fork_safe._after()
    taken = {order for pair in orders.pairs for order in pair}
    assert {
        Order.IN_FLIGHT,
        Order.POOL,
        Order.SCRATCH_FILE,
        Order.BUDGET,
        Order.COUNTERS,
        Order.OPENING,
        Order.ATTACH,
    } <= taken
    assert not [line for line in orders.wrong if line.split(" under ")[0] != line.split(" under ")[1]]
    assert saving.report().held == 0


def in_time(function: Callable[[], object]) -> bool:
    """Whether ``function`` returned; it runs in a thread of its own."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(LIMIT)
    return not thread.is_alive()


SHARED = [o for o in Order if o not in (Order.PACKED, Order.PLACED)]
#: Those that follow one another in the order are of the first tier.
PAIRS = [
    pair if pair in list(itertools.pairwise(SHARED)) else pytest.param(*pair, marks=pytest.mark.second_tier)
    for pair in itertools.combinations(SHARED, 2)
]


@pytest.mark.parametrize(("outer", "inner"), PAIRS, ids=lambda order: order.name)
def test_a_fork_waits_for_the_holder_of_the_outer_lock(outer: Order, inner: Order) -> None:
    """A thread has one lock, a fork begins, and the thread asks for the other lock.

    The thread and the fork both go on.
    """
    second, first = (
        _fork_safe.shared_lock(inner),
        _fork_safe.shared_lock(outer),
    )  # the inner one is the older one: age decides nothing
    holds, forking = threading.Event(), threading.Event()
    got: list[bool] = []

    def nests() -> None:
        with first:
            holds.set()
            forking.wait(LIMIT)
            deadline = time.monotonic() + 0.05  # the fork has this long to take what it must not take
            while time.monotonic() < deadline:
                got.append(second.acquire(timeout=LIMIT))
                second.release()

    def forks() -> None:
        forking.set()
        _fork_safe._before()
        _fork_safe._after()

    thread = threading.Thread(target=nests, daemon=True)
    thread.start()
    assert holds.wait(LIMIT)
    assert in_time(forks)
    thread.join(LIMIT)
    assert not thread.is_alive()
    assert got
    assert all(got)


class Silent(Store):
    """A store that does not answer when it is asked for a report, until it may."""

    def __init__(self) -> None:
        self.asked, self.may = threading.Event(), threading.Event()

    def put(self, tensor: torch.Tensor) -> Any:
        return tensor.clone()

    def get(self, ticket: Any) -> torch.Tensor:
        return ticket

    def drop(self, ticket: Any) -> None:
        pass

    def report(self) -> tuple[StoreReport, ...]:
        self.asked.set()
        self.may.wait(LIMIT)
        return (StoreReport("Silent()", held=7),)


def test_a_report_that_waits_for_its_store_stops_nobody() -> None:
    store, model, x, told = Silent(), _model(), torch.randn(8, 64), []
    expected = _step(model, x)
    saving = dh.save_activations(model, "*", dh.pipeline(ALL, store))
    asks = threading.Thread(target=lambda: told.append(saving.report()), daemon=True)
    asks.start()
    assert store.asked.wait(LIMIT)
    found: list[Any] = []
    assert in_time(lambda: found.extend(_step(model, x))), "a step waits for a report"
    assert identical(found, expected)
    store.may.set()
    asks.join(LIMIT)
    assert told[0].tiers[0].held == 7
    assert told[0].calls == 1


@pytest.mark.forks
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("kind", ["disk", "tiers"])
def test_a_monitor_works_beside_forked_workers(kind: str, tmp_path: pathlib.Path) -> None:
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(16, 64))
    model = _model()
    expected = [_step(model, x) for _ in range(4) for (x,) in DataLoader(data, batch_size=8)]
    saving = dh.save_activations(model, "*", dh.pipeline(ALL, *_stores(tmp_path)[kind]))
    found: list[Any] = []

    def train() -> None:
        for _ in range(4):
            for (x,) in DataLoader(data, batch_size=8, num_workers=2, multiprocessing_context="fork"):
                found.append(_step(model, x))

    with often(saving.report, saving.report, saving.report) as counts:
        assert in_time(train), "training hangs"
    assert min(counts) > 0
    assert all(identical(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.forks
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_locks_that_another_thread_makes_during_a_fork_are_free_in_the_child() -> None:
    child = os.fork()
    if child == 0:  # what happens at a fork, in a process whose other threads go on
        made: list[Any] = []

        def late() -> None:
            made.append(_fork_safe.shared_lock(Order.ATTACH))
            made[0].acquire()

        _fork_safe._before()
        thread = threading.Thread(target=late)
        thread.start()
        thread.join(LIMIT)
        _fork_safe._after_in_child()
        os._exit(0 if made[0].acquire(timeout=120) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_generator_that_a_collection_ends_takes_no_lock(orders: Orders, tmp_path: pathlib.Path) -> None:
    x = torch.randn(64, 64, requires_grad=True)

    def body() -> Iterator[torch.Tensor]:
        with dh.saving(ALL, dh.OnDisk(tmp_path)):
            yield x.exp()

    running = body()
    kept = next(running)
    orders.pairs.clear()
    with _fork_safe.shared_lock(Order.COUNTERS):  # whoever holds the last lock of all
        del running
        gc.collect()
    assert not orders.pairs
    kept.sum().backward()
    assert torch.equal(x.grad, x.detach().exp())
