"""OnDisk from a device: right under random delays, beside the computation, bounded, and nothing is left."""

from __future__ import annotations

import gc
import pathlib
import threading

import pytest
import torch

import disthooks as dh
from disthooks.saved.pipeline import pipeline
from disthooks.saved.stores import group_file
from disthooks.saved.stores.copies import link_of
from tests.support.models import CASES, build, identical, step
from tests.support.sim import simulated
from tests.support.sim.carried import chain, given, gradient
from tests.support.stores.faulty import soon
from tests.support.stores.inside import device_bytes, worker_of
from tests.support.stores.moving import Gate, alone, shut  # noqa: F401


def clean(store: dh.OnDisk) -> bool:
    """Whether nothing is held, in flight, in the file or on its way any more."""
    moving = worker_of(store)

    def nothing() -> bool:
        gc.collect()
        busy = moving.in_flight
        moving.staging.poll()
        links = moving.staging._links.values()
        copying = any(link._sent or link._coming for link in links)
        moving.file.shrink(keep_peak=True)
        return not (busy or copying or moving.file.in_use or store.budget.held)

    return soon(nothing)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_bit_identical(case: str, direct: bool, tmp_path: pathlib.Path, device: torch.device) -> None:
    model, x = build(case)
    model, x = model.to(device), x.to(device)
    model.eval()  # a dropout mask is drawn on the device
    expected = step(model, x)
    store = dh.OnDisk(tmp_path, direct="auto" if direct else False, in_flight="256 KiB")
    for seed in range(3):
        if device.type == "sim":
            simulated.delays(200e-6, seed)
        saved = dh.saving(store, at_least=0)
        assert identical(step(model, x, saved), expected)
        report = saved.report()
        assert report.moved == report.stored > 1000
        assert report.held == 0
    assert store.report()[0].written + store.report()[0].never_written > 0
    assert clean(store)


@pytest.mark.usefixtures("alone")
def test_what_is_not_written_comes_from_memory(gate: Gate, tmp_path: pathlib.Path, device: torch.device) -> None:
    """From the device while its copy is under way, afterwards from pinned memory. Nobody waits for the disk."""
    store, tensor = dh.OnDisk(tmp_path, direct=False), torch.arange(10_000.0).to(device)
    ticket = store.put(tensor)
    outgoing = ticket.entry.outgoing
    first = store.get(ticket)
    assert torch.equal(first.cpu(), tensor.cpu())
    if outgoing is not None:  # on a busy machine the worker has waited for it before this test looks
        outgoing.wait()
    back = store.get(ticket)
    assert back.device == tensor.device
    assert back.data_ptr() != tensor.data_ptr()
    assert torch.equal(back.cpu(), tensor.cpu())
    assert store.report()[0].from_memory == 2 * tensor.nbytes
    gate.open.set()
    store.wait()
    assert ticket.entry.outgoing is None
    assert torch.equal(store.get(ticket).cpu(), tensor.cpu())
    store.drop(ticket)
    assert clean(store)


@pytest.mark.usefixtures("alone")
def test_the_forward_waits_at_the_bound_alone(gate: Gate, tmp_path: pathlib.Path, device: torch.device) -> None:
    store = dh.OnDisk(tmp_path, in_flight="1 MiB", direct=False)
    x = torch.zeros(32 << 10, device=device)  # 128 KiB each
    tickets: list[object] = []

    def put() -> None:
        tickets.extend(store.put(x + i) for i in range(12))

    thread = threading.Thread(target=put)
    thread.start()
    assert soon(lambda: store.report()[0].in_flight == 1 << 20)
    thread.join(0.3)
    assert thread.is_alive()
    assert store.report()[0].in_flight == 1 << 20
    assert store.budget.held == (1 << 20) + x.nbytes  # the one that waits counts
    gate.open.set()
    thread.join(120)
    assert not thread.is_alive()
    for i, ticket in enumerate(tickets):
        assert torch.equal(store.get(ticket).cpu(), x.cpu() + i)
        store.drop(ticket)


def test_what_is_on_the_device_is_handed_back_itself(tmp_path: pathlib.Path, device: torch.device) -> None:
    """And is held no longer than its copy takes."""
    if device.type != "sim":
        pytest.skip("only the simulated device can be made to hold a stream")
    store, tensor = dh.OnDisk(tmp_path), torch.arange(10_000.0).to(device)
    link = link_of(tensor.device)
    with simulated.held(link._out):
        ticket = store.put(tensor)
        assert store.get(ticket).data_ptr() == tensor.data_ptr()
        assert device_bytes(store) == tensor.nbytes
    store.wait()
    assert device_bytes(store) == 0
    store.drop(ticket)
    assert clean(store)


def test_dropped_while_it_is_copied(tmp_path: pathlib.Path, device: torch.device) -> None:
    """Its pinned memory must not be another one's before the device is done with it."""
    store = dh.OnDisk(tmp_path)
    for i in range(50):
        store.drop(store.put(torch.full((5000,), float(i), device=device)))
        ticket = store.put(torch.full((5000,), -float(i), device=device))
        assert torch.equal(store.get(ticket).cpu(), torch.full((5000,), -float(i)))
        store.wait()
        assert torch.equal(store.get(ticket).cpu(), torch.full((5000,), -float(i)))
        store.drop(ticket)
    assert clean(store)


def test_what_was_dropped_counts_until_it_is_copied(tmp_path: pathlib.Path, device: torch.device) -> None:
    """Graphs that are thrown away, faster than the link is: their copies hold memory at both ends."""
    if device.type != "sim":
        pytest.skip("holds a stream")
    store, x, link = dh.OnDisk(tmp_path, in_flight="64 KiB"), given(device, 4096), link_of(device)  # 16 KiB
    torch.accelerator.synchronize()
    before, most = torch.accelerator.memory_allocated(), []

    def forwards() -> None:
        for _ in range(12):
            with dh.saving(store, at_least=0):
                chain(x, 3)
            most.append(torch.accelerator.memory_allocated())

    thread = threading.Thread(target=forwards)
    with simulated.held(link._out):
        thread.start()
        assert soon(lambda: len(link._sent) == 4)
        thread.join(timeout=0.2)
        assert thread.is_alive()
        assert len(link._sent) == 4
    thread.join()
    assert len(most) == 12
    assert max(most) - before <= (64 << 10) + 4 * x.nbytes
    assert clean(store)


def test_its_threads_are_on_the_device(
    device: torch.device, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that write and read ahead; on another one CUDA would make a context, in each process of a node."""
    if torch.accelerator.device_count() < 2:
        pytest.skip("one device")
    seen: set[int] = set()

    def watched(name: str) -> None:
        real = getattr(group_file.GroupFile, name)

        def run(*args: object) -> object:
            if threading.current_thread().name.startswith("disthooks"):
                seen.add(torch.accelerator.current_device_index())
            return real(*args)

        monkeypatch.setattr(group_file.GroupFile, name, run)

    watched("write")
    watched("read")
    x = given(torch.device(device.type, 1), 20_000)
    store = dh.OnDisk(tmp_path)
    for _ in range(3):
        with dh.saving(pipeline(store, at_least=0)):
            y = chain(x)
        store.wait()
        (grad,) = torch.autograd.grad(y, x)
        assert torch.equal(grad.cpu(), gradient(x).cpu())
        del y
    assert seen == {1}
    assert torch.accelerator.current_device_index() == 0
    assert clean(store)
