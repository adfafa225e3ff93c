"""Tiers from a device: gradients are right, and the limit holds, with what is in flight."""

from __future__ import annotations

import contextlib
import gc
import pathlib
import threading

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks.saved.stores.copies import link_of
from disthooks.saved.stores.host import pool_of
from disthooks.saved.stores.tiers import Tiered
from tests.support.models import CASES, build, identical, step
from tests.support.sim import simulated
from tests.support.sim.carried import chain
from tests.support.stores.faulty import soon
from tests.support.stores.inside import device_bytes, offload_of


def down(folder: pathlib.Path, kind: str) -> list[object]:
    """What comes below the first tier."""
    disk = dh.OnDisk(folder, in_flight="2 MiB")
    return {"cpu": [dh.OnCpu()], "disk": [disk], "both": [dh.OnCpu("96 KiB"), disk]}[kind]


def counted_on_device(tiers: Tiered) -> int:
    """Bytes that all tiers hold on the device, in flight too."""
    return tiers.stores[0].budget.held + device_bytes(tiers)


def nothing_left(tiers: Tiered) -> bool:
    def empty() -> bool:
        gc.collect()
        return counted_on_device(tiers) == 0 and all(report.held == 0 for report in tiers.report())

    return soon(empty)


@pytest.mark.full_tier(kind=("cpu",))
@pytest.mark.parametrize("kind", ["cpu", "disk", "both"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_bit_identical(case: str, kind: str, tmp_path: pathlib.Path, device: torch.device) -> None:
    model, x = build(case)
    model, x = model.to(device).eval(), x.to(device)
    expected = step(model, x)
    tiers = dh.Tiered(dh.OnDevice("64 KiB"), *down(tmp_path, kind))
    for seed in range(3):
        if device.type == "sim":
            simulated.delays(200e-6, seed)
        saved = dh.saving(tiers, at_least=0)
        assert identical(step(model, x, saved), expected)
        assert saved.report().held == 0
    assert sum(report.written + report.never_written for report in tiers.report()[1:]) > 0
    assert nothing_left(tiers)


@pytest.mark.full_tier(kind=("cpu", "disk"))
@pytest.mark.parametrize("kind", ["cpu", "disk", "both"])
def test_the_limit_holds_what_is_in_flight_too(kind: str, tmp_path: pathlib.Path, device: torch.device) -> None:
    """At every moment of the forward, and the device's own peak beside what the chain itself has there."""
    n = 512 << 10  # bytes of a tensor, which is too large to be joined with others
    limit, length = 8 * n, 40
    x = torch.randn(n // 4, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
    (expected,) = torch.autograd.grad(chain(x, length), x)
    tiers = dh.Tiered(dh.OnDevice(limit), *down(tmp_path, kind))
    most = 0
    for _ in range(3):
        gc.collect()
        torch.accelerator.synchronize()
        before = torch.accelerator.memory_allocated(device)
        torch.accelerator.reset_peak_memory_stats(device)
        with dh.saving(tiers, at_least=0):
            y = x
            for _ in range(length):
                y = y.sin()
                most = max(most, counted_on_device(tiers))
        forward = torch.accelerator.max_memory_allocated(device) - before
        # The newest that is not packed yet, the one that the operator makes, and the one that comes to the store.
        assert forward <= limit + 3 * n
        (grad,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(grad.cpu(), expected.cpu())
        # In backward: the sum's gradient, two of the chain, what is read now and what comes ahead of it.
        assert torch.accelerator.max_memory_allocated(device) - before <= limit + 8 * n
        del y, grad
    assert limit - 3 * n <= most <= limit
    assert nothing_left(tiers)


def test_nobody_waits_on_the_host(device: torch.device) -> None:
    if device.type != "sim":
        pytest.skip("waits are counted in the simulated device")
    x = torch.randn(20_000).to(device).requires_grad_()
    tiers = dh.Tiered(dh.OnDevice("400 KiB"), dh.OnCpu())
    for _ in range(2):
        with dh.saving(tiers, at_least=0), simulated.counted() as forward:
            y = chain(x, 30)
        y.backward()
    assert forward["to_host_async_bytes"] >= 20 * x.nbytes
    assert forward.waits == 0


@pytest.mark.parametrize("others", [0, 100 << 10], ids=["one length", "two lengths"])
def test_the_link_works_from_the_first_put_and_from_the_first_get_on(others: int, device: torch.device) -> None:
    """From the second step on, what does not fit is sent at its put and comes back into what is freed; nothing else."""
    n, count, limit = 512 << 10, 20, 12 << 19  # twelve fit; without a plan the window of an eighth takes two of them
    host = dh.OnCpu()
    tiers = dh.Tiered(dh.OnDevice(limit), host)

    def moved() -> tuple[int, int]:
        (report,) = host.report()
        return report.written, report.read

    for number in range(6):
        step, before = [n, n - others][number % 2], moved()
        sent, tickets = [], []
        for i in range(count):
            tickets.append(tiers.put(torch.full((step // 4,), float(i)).to(device)))
            sent.append((moved()[0] - before[0]) // step)
            assert counted_on_device(tiers) <= limit
        tiers.wait()  # what is still on its way out would take the room that backward begins with
        back = []
        for i in reversed(range(count)):
            assert torch.equal(tiers.get(tickets[i]).cpu(), torch.full((step // 4,), float(i)))
            back.append((moved()[1] - before[1]) // step)
            tiers.drop(tickets.pop())
            assert counted_on_device(tiers) <= limit
        if number == 0:
            assert sent[:10] == [0] * 10  # not known yet: they stay while they fit
        else:
            stays = limit // step
            assert sent == [min(i + 1, count - stays) for i in range(count)]
            # Each get frees room for one more; two are asked back together.
            assert all(brought >= min(i - 1, count - stays) for i, brought in enumerate(back))
            assert back[-1] == count - stays
    assert nothing_left(tiers)


@pytest.mark.parametrize("limit", ["1 GiB", "256 KiB", 0])
def test_moved_are_the_bytes_that_left_the_device(limit: int | str, device: torch.device) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8))).to(device)
    x = torch.randn(512, 64, device=device)
    with dh.save_activations(model, "*", dh.Tiered(dh.OnDevice(limit), dh.OnCpu())) as saving:
        for _ in range(3):
            model(x).sum().backward()
    report = saving.report()
    behind = report.tiers[1]
    assert report.moved == behind.written + behind.never_written
    assert report.moved == sum(site.moved for site in report.sites.values())
    assert (report.moved == 0) == (limit == "1 GiB")
    assert (report.moved == report.stored) == (limit == 0)


def test_in_flight_holds_below_a_tier(device: torch.device) -> None:
    """``OnCpu`` has at most its own bytes on the device, also where the device's limit leaves more; all come ahead."""
    n, count = 512 << 10, 24
    host = dh.OnCpu(in_flight=3 * n)
    tiers = dh.Tiered(dh.OnDevice(16 * n), host)
    ahead = 0
    for _ in range(3):
        tickets = []
        for i in range(count):
            tickets.append(tiers.put(torch.full((n // 4,), float(i)).to(device)))
            assert device_bytes(host) <= 3 * n
        tiers.wait()
        before = host.report()[0].ahead
        for i in reversed(range(count)):
            assert torch.equal(tiers.get(tickets[i]).cpu(), torch.full((n // 4,), float(i)))
            tiers.drop(tickets.pop())
            assert device_bytes(host) <= 3 * n
        ahead = host.report()[0].ahead - before
    assert ahead == 8 * n  # all that had left
    assert nothing_left(tiers)


def test_a_limit_that_falls_between_steps_holds_from_the_first_put_on(sim: torch.device) -> None:
    """While no copy leaves the device: the computation waits for those that are over the limit."""
    n, count = 512 << 10, 12
    near, host = dh.OnDevice(8 * n), dh.OnCpu()
    tiers = dh.Tiered(near, host)
    values = [torch.full((n // 4,), float(i)).to(sim) for i in range(count)]
    for number in range(4):
        with simulated.held(link_of(values[0].device)._out) if number == 3 else contextlib.nullcontext():
            tickets = []
            for value in values:
                tickets.append(tiers.put(value))
                assert counted_on_device(tiers) <= near.budget.limit
        for ticket, value in zip(reversed(tickets), reversed(values), strict=True):
            assert torch.equal(tiers.get(ticket).cpu(), value.cpu())
            tiers.drop(ticket)
        if number == 2:
            near.budget.set_limit(3 * n)
    del ticket
    tickets.clear()
    assert nothing_left(tiers)


def test_a_store_in_a_tier_still_looks_ahead_by_itself(device: torch.device) -> None:
    """One ``OnCpu`` for a block of its own and below a device's limit, by turns."""
    x = torch.randn(20_000).to(device).requires_grad_()
    host = dh.OnCpu(in_flight=4 * x.nbytes)
    tiers = dh.Tiered(dh.OnDevice(4 * x.nbytes), host)
    ahead = []
    for _ in range(3):
        for store in (host, host, tiers):
            before = host.report()[0].ahead
            with dh.saving(store, at_least=0):
                y = chain(x, 30)
            y.backward()
            del y
            gc.collect()
        ahead.append(host.report()[0].ahead - before)
        assert offload_of(host, device).most == 4 * x.nbytes
    tiers = dh.Tiered(dh.OnDevice(4 * x.nbytes), host)
    held = [tiers.put(x.detach().clone()) for _ in range(3)]  # they stay, and leave one tensor's room
    assert [ticket.tier for ticket in held] == [0] * 3
    assert offload_of(host, device).most == 4 * x.nbytes
    with dh.saving(host, at_least=0):
        y = chain(x, 30)
    before = host.report()[0].ahead
    y.backward()
    assert host.report()[0].ahead - before > 10 * x.nbytes


def test_from_host_to_disk_nothing_waits_and_nothing_is_copied(sim: torch.device, tmp_path: pathlib.Path) -> None:
    """While no copy leaves the device: the disk takes over the memory into which the copies are to come."""
    n = 512 << 10
    tiers = dh.Tiered(dh.OnDevice(2 * n), dh.OnCpu(2 * n), dh.OnDisk(tmp_path, in_flight="64 MiB"))
    values = [torch.full((n // 4,), float(i)) for i in range(8)]
    sources, tickets = [value.to(sim) for value in values], []
    torch.accelerator.synchronize()
    before = pool_of(sources[0].device, True).in_use
    with simulated.held(link_of(sources[0].device)._out):
        thread = threading.Thread(target=lambda: tickets.extend(map(tiers.put, sources)))
        thread.start()
        thread.join(60)
        is_done = not thread.is_alive()
        pinned = pool_of(sources[0].device, True).in_use - before
    thread.join()
    assert is_done
    assert [ticket.tier for ticket in tickets] == [2] * 5 + [1] * 2 + [0]
    assert pinned == 7 * n  # seven have left the device, and each has one place in host memory
    tiers.wait()
    for ticket, value in zip(reversed(tickets), reversed(values), strict=True):
        assert torch.equal(tiers.get(ticket).cpu(), value)
        tiers.drop(ticket)
    del ticket
    tickets.clear()
    assert nothing_left(tiers)
