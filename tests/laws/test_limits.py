"""Law 10: a limit bounds what is resident, not what is said: storages that are kept alive, blocks of the file."""

from __future__ import annotations

import gc
import pathlib
from typing import Any

import pytest
import torch

import disthooks as dh
from disthooks._torch import StorageRef
from disthooks.errors import StoreError
from disthooks.saved.stores.disk import OnDisk
from tests.support.stores.faulty import soon

ALL = dh.AtLeast(0)
MIB = 1 << 20


def _forward(stages: list[Any], steps: int) -> tuple[Any, list[StorageRef], list[torch.Tensor], list[torch.Tensor]]:
    """A part of each of some large tensors is saved, and nothing else of them is needed."""
    x = torch.ones(64, 64, requires_grad=True)
    refs, results = [], []
    saved = dh.saving(ALL, *stages)
    with saved:
        for i in range(steps):
            with torch.no_grad():
                h = torch.full((64, 64, 64), float(i + 1))  # 1 MiB
            refs.append(StorageRef(h.untyped_storage()))
            results.append((x * h[:, -1]).sum())
            del h
    return saved, refs, results, [x]


def _alive(refs: list[StorageRef]) -> int:
    gc.collect()
    storages = [storage for ref in refs if (storage := ref.get()) is not None]
    return sum(storage.nbytes() for storage in storages)


@pytest.mark.parametrize("kind", ["cpu", "device", "disk", "codec"])
def test_a_part_of_a_large_tensor_does_not_keep_all_of_it(kind: str, tmp_path: pathlib.Path) -> None:
    disk = dh.OnDisk(tmp_path)
    stages: list[Any] = {
        "cpu": [dh.Tiered(dh.OnCpu("256 KiB"), disk)],
        "device": [dh.Tiered(dh.OnDevice("256 KiB"), disk)],
        "disk": [disk],
        "codec": [dh.Compact(), dh.Tiered(dh.OnDevice("256 KiB"), disk)],
    }[kind]
    saved, refs, results, leaves = _forward(stages, 24)
    report = saved.report()
    assert report.held == 24 * 64 * 64 * 4
    assert _alive(refs) == 0, "a view keeps the storage that it lies over"
    sum(results).backward()
    assert leaves[0].grad is not None
    assert torch.equal(leaves[0].grad, torch.full((64, 64), float(sum(range(1, 25)))))
    assert saved.report().held == 0


@pytest.mark.parametrize("store", [dh.OnCpu("64 KiB"), dh.OnDevice("64 KiB")], ids=["cpu", "device"])
def test_a_store_counts_the_storage_that_a_view_keeps(store: Any) -> None:
    whole = torch.zeros(12_000)  # 48 KB
    ticket = store.put(whole[:10])
    assert store.report()[0].held == whole.nbytes
    with pytest.raises(StoreError, match="full"):
        store.put(torch.zeros(8000)[:10])
    store.drop(ticket)
    assert store.report()[0].held == 0


def _blocks(store: OnDisk) -> int:
    return sum(arena.resident for arena in store._mover.arenas)


def test_one_survivor_does_not_keep_the_blocks_of_its_slab(tmp_path: pathlib.Path) -> None:
    store = dh.OnDisk(tmp_path, "2 MiB")
    kept: list[tuple[Any, torch.Tensor]] = []
    for i in range(60):  # of sixteen that are written together one stays
        tensors = [torch.full((16_384,), float(100 * i + j)) for j in range(16)]  # 64 KiB each
        tickets = [store.put(tensor) for tensor in tensors]
        store.wait()
        for ticket in tickets[1:]:
            store.drop(ticket)
        del tickets[1:]
        if i % 4:
            store.drop(tickets[0])
        else:
            kept.append((tickets[0], tensors[0]))
        assert _blocks(store) <= 2 * MIB + MIB // 2, i  # the file system's own blocks, and one write that is under way
    assert len(kept) == 15
    assert store.report()[0].held == 15 * 65_536
    assert store.report()[0].written > 30 * MIB
    for ticket, tensor in kept:
        assert torch.equal(store.get(ticket), tensor)
        store.drop(ticket)
    assert soon(lambda: store.report()[0].held == 0)


@pytest.mark.parametrize("direct", [False, "auto"])
def test_holes_lose_nothing(direct: Any, tmp_path: pathlib.Path) -> None:
    """Tensors of many sizes come and go near the limit, in all orders; what comes back is what was put."""
    store = dh.OnDisk(tmp_path, "3 MiB", direct=direct, in_flight="256 KiB")
    draw = torch.Generator().manual_seed(0)
    here: list[tuple[Any, torch.Tensor]] = []
    for number in range(600):
        size = int(torch.randint(1, 60_000, (), generator=draw))
        tensor = torch.full((size,), number, dtype=torch.int32)
        while True:
            try:
                here.append((store.put(tensor), tensor))
                break
            except StoreError:
                ticket, was = here.pop(int(torch.randint(len(here), (), generator=draw)))
                assert torch.equal(store.get(ticket), was)
                store.drop(ticket)
        assert _blocks(store) <= 3 * MIB + MIB // 2
    assert any(arena._has_holes for arena in store._mover.arenas)
    store.wait()
    for ticket, was in here:
        assert torch.equal(store.get(ticket), was)
        store.drop(ticket)


def test_a_limit_leaves_no_room_to_measure_the_disk(tmp_path: pathlib.Path) -> None:
    small = dh.OnDisk(tmp_path, "2 MiB")
    assert not small._mover.arenas[0].may_be_measured
    large = dh.OnDisk(tmp_path, "1 GiB", checksum=True)  # in the same file: the limits add up
    assert small._mover.arenas[0].may_be_measured
    del large
