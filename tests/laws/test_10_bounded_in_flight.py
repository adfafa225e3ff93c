"""Law 10, bounded, in flight.

What OnDisk writes and reads beside the computation, in which order, and how much at once.
"""

from __future__ import annotations

import collections
import os
import pathlib
from typing import Any

import pytest
import torch

import disthooks as dh
from disthooks.errors import StoreError
from tests.support.stores.faulty import soon
from tests.support.stores.inside import file_of, worker_of
from tests.support.stores.moving import Gate, chain, clean, opened, pipe, read, right, slow, truth, write

pytestmark = pytest.mark.usefixtures("one_thread", "alone")
X = torch.linspace(-2, 2, 5000)


def test_what_is_dropped_in_time_is_never_written(tmp_path: pathlib.Path, gate: Gate) -> None:
    store = opened(gate, tmp_path)
    stats = worker_of(store).stats
    tickets = [store.put(X)]
    assert soon(lambda: gate.waiting == 1)
    tickets += [store.put(X + i) for i in range(8)]
    for ticket in tickets:
        store.drop(ticket)
    assert worker_of(store).in_flight == X.nbytes
    gate.open.set()
    store.wait()
    assert (stats.never_written, gate.waiting) == (8 * X.nbytes, 1)
    assert clean(store)


def forward(store: dh.OnDisk, length: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    x = X.clone().requires_grad_()
    with dh.saving(pipe(store)):
        return x, chain(x, length)


def test_what_is_wanted_in_time_is_never_read(
    tmp_path: pathlib.Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "preadv", None)
    store = opened(gate, tmp_path, direct=False)
    x, y = forward(store)
    assert torch.equal(torch.autograd.grad(y, x)[0], truth(x))
    stats = worker_of(store).stats
    assert stats.from_memory == 12 * X.nbytes
    gate.open.set()
    del y
    assert clean(store)
    assert stats.read == 0
    assert stats.written <= 2 * X.nbytes


def step(store: dh.OnDisk, length: int = 12) -> Any:
    """A step whose tensors are all on disk before its backward begins; what moved in it."""
    stats = worker_of(store).stats
    before = stats.read, stats.ahead, stats.in_vain
    x, y = forward(store, length)
    store.wait()
    assert torch.equal(torch.autograd.grad(y, x)[0], truth(x, length))
    del y
    assert clean(store)
    return [now - then for now, then in zip((stats.read, stats.ahead, stats.in_vain), before, strict=True)]


def test_a_prefetch_takes_no_room_from_what_was_read_before_it(tmp_path: pathlib.Path) -> None:
    """``Tiered`` asks for more than ``in_flight`` has room for, in the order in which backward reads."""
    store = dh.OnDisk(tmp_path, in_flight=3 * X.nbytes)
    disk, stats = store.open(), worker_of(store).stats
    tickets = [disk.put(X + i) for i in range(6)]
    disk.wait()
    for ticket in tickets[:3]:
        disk.prefetch(ticket)
    assert soon(lambda: stats.read == 3 * X.nbytes)
    for ticket in tickets[3:]:
        disk.prefetch(ticket)
    for i, ticket in enumerate(tickets):
        assert torch.equal(disk.get(ticket), X + i)
        disk.drop(ticket)
    assert (stats.read, stats.in_vain) == (6 * X.nbytes, 0)
    del tickets, ticket
    assert clean(store)


def orders(tickets: list) -> dict[str, list]:
    return {"reverse": tickets[::-1], "as put": tickets, "odd ones first": tickets[1::2] + tickets[::2]}


@pytest.mark.parametrize("first", ["reverse", "as put", "odd ones first"])
@pytest.mark.parametrize("second", ["reverse", "as put", "odd ones first"])
def test_any_order_comes_out_right_and_the_same_order_is_read_ahead(
    first: str, second: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same order again is read ahead, and any other comes out right.

    Reads begin just in time, by the pace of the last backward. A busy machine may upset that, so there are ten tries.
    """
    monkeypatch.setattr(os, "preadv", slow(read, 0.001))
    store = dh.OnDisk(tmp_path, in_flight=5 * X.nbytes + 1000)
    stats = worker_of(store).stats

    def read_all(order: str) -> tuple[int, int]:
        """The bytes that were read ahead, and in vain."""
        tickets = [(i, store.put(X + i)) for i in range(12)]
        store.wait()
        ahead, in_vain = stats.ahead, stats.in_vain
        for i, ticket in orders(tickets)[order]:
            assert torch.equal(store.get(ticket), X + i)
            store.drop(ticket)
        del tickets, ticket
        assert clean(store)
        return stats.ahead - ahead, stats.in_vain - in_vain

    read_all(first)
    read_all(second)
    again = (read_all(second) for _ in range(10))
    assert any(ahead >= 11 * X.nbytes and in_vain == 0 for ahead, in_vain in again)


@pytest.mark.parametrize("budget", [0, 19_999, 65_000, 100_001])
def test_never_more_than_in_flight_is_on_its_way(
    budget: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound holds for writes and for reads; a tensor that is larger than the bound goes alone."""
    store = dh.OnDisk(tmp_path, in_flight=budget)
    offload, most = worker_of(store), collections.Counter()

    def look(name: str, call: Any) -> Any:
        def looked(*args: Any) -> int:
            most["written"] = max(most["written"], sum(group.size for group in offload._in_flight()))
            # What backward takes in this moment is not ahead of it.
            ahead = (
                group.nbytes
                for group in list(offload._ahead.groups)
                if group is not group.tape.last and (group.is_planned or group.is_reading or group.ahead)
            )
            most["ahead"] = max(most["ahead"], sum(ahead))
            return slow(call, 0.0005)(*args)

        return looked

    monkeypatch.setattr(os, "pwrite", look("written", write))
    monkeypatch.setattr(os, "preadv", look("ahead", read))
    sizes = [20_000, 4, 12_345, 100_000, 33_333, 20_000, 8_000, 1] * 2
    for _ in range(2):
        tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
        tickets = [store.put(tensor) for tensor in tensors]
        store.wait()
        for tensor, ticket in zip(reversed(tensors), reversed(tickets), strict=True):
            assert torch.equal(store.get(ticket), tensor)
            store.drop(ticket)
    assert most["written"] <= max(budget, 100_000)
    assert most["ahead"] <= max(budget, 100_000)
    if budget > 65_000:
        assert min(most.values()) > 65_000  # so many bytes are on their way at once
    tickets.clear()
    del ticket
    assert clean(store)


def test_each_process_has_a_directory_of_its_own(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rank3").mkdir()
    monkeypatch.setenv("LOCAL_RANK", "3")
    store = dh.OnDisk(tmp_path / "rank{local_rank}")
    assert right(store)
    assert os.path.realpath(file_of(store).directory) == str(tmp_path / "rank3")


@pytest.mark.parametrize("direct", [True, False, "auto"])
@pytest.mark.parametrize("where", ["disk", "memory"])
def test_direct_writes_are_used_where_they_are_possible(where: str, direct: Any, tmp_path: pathlib.Path) -> None:
    folder = "/dev/shm" if where == "memory" else tmp_path
    if not os.path.isdir(folder):
        pytest.skip("no /dev/shm")
    if direct is True and not file_of(dh.OnDisk(folder)).direct:
        with pytest.raises(StoreError, match="takes no direct writes"):
            dh.OnDisk(folder, direct=True)
        return
    store = dh.OnDisk(folder, direct=direct)
    assert file_of(store).direct is (direct is not False and file_of(store).why_buffered == "")
    assert right(store)
    assert step(store)[0] == 12 * X.nbytes


def test_space_is_used_again_and_given_back(tmp_path: pathlib.Path) -> None:
    store = dh.OnDisk(tmp_path)
    file = file_of(store)

    def size() -> int:
        return os.fstat(file._fd).st_size

    for _ in range(3):
        assert right(store)
        assert size() <= 12 * 20_480
    assert right(store, numel=500_000)
    assert size() >= 2_000_000
    for _ in range(20):  # the last steps needed less
        assert right(store)
    assert size() <= 2 * 12 * 20_480
    tickets = [store.put(X) for _ in range(10)]
    store.wait()
    for ticket in tickets[5:]:
        store.drop(ticket)  # they lie at the end, so the file is cut there
    store.release_idle()
    assert size() <= 5 * 20_480
    for ticket in tickets[:5]:
        assert torch.equal(store.get(ticket), X)
        store.drop(ticket)
    store.release_idle()
    assert size() == 0
