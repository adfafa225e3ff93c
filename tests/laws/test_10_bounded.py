"""Law 10, bounded.

"Every store takes a byte limit, the bytes in flight included. At the limit a `Tiered` store spills to the next tier;
any other waits or raises, as it was told."

This file shows limits of each store and of tiers. Its siblings show what is in flight, and that tensors come back
neither late nor much too early.
"""

from __future__ import annotations

import copy
import gc
import pathlib
import pickle
import subprocess
import threading
from typing import Any

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks._torch import StorageRef
from disthooks.errors import StoreError, UsageError
from disthooks.saved.stores.disk import OnDisk
from tests.support.models import Tiny, identical, step, tokens
from tests.support.stores.copies import Copies
from tests.support.stores.faulty import soon
from tests.support.stores.inside import file_of, queue_of
from tests.support.stores.moving import chain, truth

# --- A limit holds


@pytest.mark.any_device
def test_a_limit_holds_and_a_step_within_it_passes(tmp_path: pathlib.Path) -> None:
    model = Tiny()
    with dh.save_activations(model, "blocks.*", dh.OnDisk(tmp_path)) as saving:
        y = model(tokens())
        need = saving.report().held
        del y
    truth = step(model, tokens())
    exact = dh.OnDisk(tmp_path, limit=need)
    with dh.save_activations(model, "blocks.*", exact):
        for _ in range(3):
            assert identical(step(model, tokens()), truth)
    tight = dh.OnDisk(tmp_path, limit=need - 1)
    with dh.save_activations(model, "blocks.*", tight) as saving:
        with pytest.raises(StoreError, match=r"to store what 'blocks\.\d+' saved: .* is full: wanted") as caught:
            model(tokens())
        assert caught.value.wanted > caught.value.free >= 0
        del caught
        assert tight.budget.held == saving.report().held == 0


@pytest.mark.any_device
def test_a_limit_for_the_node_is_shared_by_its_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    for store in (dh.OnDisk(tmp_path, "1 MiB per node"), dh.OnCpu("1 MiB per node"), dh.OnDevice("1 MiB per node")):
        assert store.report()[0].limit == 1 << 18
        assert pickle.loads(pickle.dumps(store)).report()[0].limit == 1 << 18


# --- A limit bounds what is resident: storages that are kept alive, and blocks of the file


@pytest.mark.parametrize("kind", ["cpu", "device", "disk", "codec"])
def test_a_part_of_a_large_tensor_does_not_keep_all_of_it(kind: str, tmp_path: pathlib.Path) -> None:
    disk, x = dh.OnDisk(tmp_path), torch.ones(64, 64, requires_grad=True)
    stages: list[Any] = {
        "cpu": [dh.Tiered(dh.OnCpu("256 KiB"), disk)],
        "device": [dh.Tiered(dh.OnDevice("256 KiB"), disk)],
        "disk": [disk],
        "codec": [dh.Compact(), dh.Tiered(dh.OnDevice("256 KiB"), disk)],
    }[kind]
    refs, results = [], []
    with dh.saving(*stages, at_least=0) as saved:
        for i in range(24):
            with torch.no_grad():
                h = torch.full((64, 64, 64), float(i + 1))  # 1 MiB
            refs.append(StorageRef(h.untyped_storage()))
            results.append((x * h[:, -1]).sum())
            del h
    assert saved.report().held == 24 * 64 * 64 * 4
    gc.collect()
    assert all(ref.get() is None for ref in refs), "a view keeps the storage that it lies over"
    sum(results).backward()
    assert torch.equal(x.grad, torch.full((64, 64), float(sum(range(1, 25)))))
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


MIB = 1 << 20


def _blocks(store: OnDisk) -> int:
    return file_of(store).resident


def test_one_survivor_does_not_keep_the_blocks_of_its_slab(tmp_path: pathlib.Path) -> None:
    store = dh.OnDisk(tmp_path, "2 MiB")
    kept: list[tuple[Any, torch.Tensor]] = []
    for i in range(60):  # of sixteen tensors that are written together one stays
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
    assert file_of(store)._has_holes
    store.wait()
    for ticket, was in here:
        assert torch.equal(store.get(ticket), was)
        store.drop(ticket)


def test_a_store_without_a_limit_lifts_no_other_limit(tmp_path: pathlib.Path) -> None:
    unlimited, store = dh.OnDisk(tmp_path).open(), dh.OnDisk(tmp_path, "2 MiB").open()
    kept = []
    for _ in range(60):
        tickets = [store.put(torch.rand(16 << 10)) for _ in range(8)]
        store.wait()
        kept.append(tickets.pop())  # one of each group stays for a while, and its extent with it
        for ticket in [*tickets, *kept[:-4]]:
            store.drop(ticket)
        del kept[:-4]
    assert store.file.resident <= 2 << 20
    assert unlimited.put(torch.rand(1 << 20)).runtime is not store.worker


# --- Tiers: a tier that is full sends down the tensors that backward reads last, and nothing is lost or held twice


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(64, 64, requires_grad=True)


@pytest.mark.any_device
def test_the_oldest_go_down_and_every_limit_holds(x: torch.Tensor, tmp_path: pathlib.Path) -> None:
    n = x.nbytes
    tiers = dh.Tiered(dh.OnDevice(3 * n), dh.OnCpu(2 * n), dh.OnDisk(tmp_path))
    with dh.saving(tiers, at_least=0) as saved:
        y = chain(x, 10)
        assert all(report.limit is None or report.held <= report.limit for report in tiers.report())
    tiers.wait()
    assert [report.held for report in tiers.report()] == [3 * n, 2 * n, 5 * n]
    assert tiers.report()[2].written == 5 * n
    y.backward()
    assert torch.equal(x.grad, truth(x, 10))
    assert [report.held for report in tiers.report()] == [0, 0, 0]
    assert [tier.name.partition("(")[0] for tier in saved.report().tiers] == ["OnDevice", "OnCpu", "OnDisk"]
    assert tiers.report()[2].read + tiers.report()[2].from_memory == 5 * n  # the newest never went to disk


@pytest.mark.any_device
def test_a_large_one_goes_past_a_small_tier(x: torch.Tensor) -> None:
    """The tensors that are in the small tier stay there, because making room would not help."""
    tiers = dh.Tiered(dh.OnDevice(2 * x.nbytes), Copies())
    small = [tiers.put(torch.zeros(64, 64)) for _ in range(2)]
    large = tiers.put(torch.zeros(640, 64))
    assert [tiers.tier_of(ticket) for ticket in (*small, large)] == [0, 0, 1]


@pytest.mark.any_device
def test_a_last_tier_that_is_full_is_an_error(x: torch.Tensor) -> None:
    tiers = dh.Tiered(dh.OnDevice(2 * x.nbytes), Copies(x.nbytes))
    with dh.saving(tiers, at_least=0) as saved, pytest.raises(StoreError, match="last tier is full") as caught:
        chain(x, 10)
    assert (caught.value.wanted, caught.value.free) == (x.nbytes, 0)
    del caught
    gc.collect()
    assert saved.report().held == 0
    assert [store.budget.held for store in tiers.stores] == [0, 0]
    with dh.saving(tiers, at_least=0):
        y = chain(x, 3)
    y.backward()
    assert torch.equal(x.grad, truth(x, 3))


@pytest.mark.any_device
def test_a_full_disk_spills_to_the_next(x: torch.Tensor, tmp_path: pathlib.Path) -> None:
    """A small file system is really full.

    Nothing is lost, nothing raises, and the disk is used again when it is empty.
    """
    disk = tmp_path / "small"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "t", str(disk)], check=False).returncode:
        pytest.skip("mounting a small tmpfs needs privileges")
    try:
        tiers = dh.Tiered(dh.OnDisk(disk, in_flight=0), Copies())
        for _ in range(3):
            x.grad = None
            with dh.saving(tiers, at_least=0):
                y = chain(x, 20)
                assert tiers.stores[1].budget.held > 0
            assert tiers.report()[0].held > 0
            y.backward()
            assert torch.equal(x.grad, truth(x, 20))
            del y
            assert [store.budget.held for store in tiers.stores] == [0, 0]
    finally:
        del tiers
        gc.collect()
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.any_device
def test_a_tensor_dropped_while_another_thread_reads_it_is_let_go_of() -> None:
    class Slow(dh.OnCpu):
        def get(self, ticket: object) -> torch.Tensor:
            began.set()
            go_on.wait(120)
            return super().get(ticket)

    began, go_on = threading.Event(), threading.Event()
    store = Slow()
    tiers = dh.Tiered(store, dh.OnDevice("1 MiB"))
    ticket = tiers.put(torch.ones(100))
    thread = threading.Thread(target=tiers.get, args=(ticket,))
    thread.start()
    assert began.wait(120)
    tiers.drop(ticket)
    assert store.budget.held == 400
    go_on.set()
    thread.join(120)
    assert store.budget.held == 0


@pytest.mark.any_device
def test_tiers_refuse_what_cannot_work_and_are_copied(tmp_path: pathlib.Path) -> None:
    functions = dh.Functions(lambda t: t, lambda t: t)
    for bad in [(), (dh.OnCpu(),), (dh.OnCpu(), functions), (dh.OnCpu(), "disk")]:
        with pytest.raises(UsageError, match="Tiered takes two or more"):
            dh.Tiered(*bad)
    with pytest.raises(UsageError, match=r"without a limit takes everything.*such as OnDevice\('8 GiB'\)"):
        dh.Tiered(dh.OnDevice(), dh.OnDisk(tmp_path))
    tiers = dh.Tiered(dh.OnDevice("1 MiB"), dh.OnDisk(tmp_path))
    for other in (copy.deepcopy(tiers), pickle.loads(pickle.dumps(tiers))):
        assert repr(other) == repr(tiers)
        assert other == tiers
    model = dh.SaveWith(nn.Linear(64, 64), tiers)
    model(torch.ones(64, 64)).sum().backward()
    assert "OnDevice" in str(model.report())


def test_the_queues_of_tiers_do_not_grow() -> None:
    """A tensor that fits into the first tier stays in its queue, so dropped ones must not pile up behind it."""
    tiers = dh.Tiered(dh.OnDevice("1 GiB"), Copies())
    stays = tiers.put(torch.zeros(1))
    for _ in range(10_000):
        tiers.drop(tiers.put(torch.ones(1)))
    assert len(queue_of(tiers, 0, torch.device("cpu"))) < 2100
    assert queue_of(tiers, 0, torch.device("cpu")).oldest() is stays
