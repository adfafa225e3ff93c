"""Saved tensors of a device in host memory: exact, beside the computation, within bounds, and nothing left."""

from __future__ import annotations

import contextlib
import gc
import math
import threading
import types

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import disthooks as dh
from disthooks.saved.stores import copies
from disthooks.saved.stores.order import TimedOrder
from tests.support.models import CASES, build, identical
from tests.support.models import step as train
from tests.support.sim import simulated
from tests.support.sim.carried import chain, every, given, gradient, is_clean, no_waits, only_simulated, step, tier
from tests.support.stores.inside import in_host, limit_device, offload_of

MiB = 1 << 20


@pytest.mark.parametrize("in_flight", ["512 MiB", "300 KiB", "64 KiB", 0])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_bit_identical(device: torch.device, case: str, in_flight: int | str) -> None:
    model, x = build(case)
    model, x = model.to(device), x.to(device)
    store = dh.OnCpu(in_flight=in_flight)
    saved = dh.saving(every(store))
    with sdpa_kernel(SDPBackend.MATH):
        truth = train(model, x)
        assert identical(train(model, x), truth)
        for _ in range(4):
            assert identical(train(model, x, saved), truth)
    report = saved.report()
    assert report.moved == report.stored > 10_000
    assert report.held == 0
    assert is_clean(store, device)
    if in_flight == 0:
        assert tier(store).written == report.stored


def test_nothing_waits_on_the_host(device: torch.device) -> None:
    """Neither forward nor backward, from the third step on: the first ones make page-locked memory."""
    x = given(device, 200_000)
    for in_flight in ("512 MiB", "2 MiB", 0):
        store = dh.OnCpu(in_flight=in_flight)
        truth = gradient(x)
        for _ in range(2):
            step(store, x)
        torch.accelerator.synchronize(device)
        with no_waits(device):
            found = [step(store, x) for _ in range(3)]
        assert all(torch.equal(other, truth) for other in found)
        assert is_clean(store, device)


def test_the_last_ones_are_not_copied(device: torch.device) -> None:
    """12 tensors of 200 KB are saved, of which five fit into what may be held on the device."""
    x = given(device)
    size = x.nbytes
    store = dh.OnCpu(in_flight=5 * size)
    step(store, x)
    before = tier(store)
    assert torch.equal(step(store, x), gradient(x))
    assert is_clean(store, device)
    after = tier(store)
    assert after.written - before.written == 7 * size
    assert after.read - before.read <= 7 * size
    assert after.never_written - before.never_written == 5 * size
    assert after.from_memory - before.from_memory >= 5 * size


@pytest.mark.parametrize("parts", [0, 1, 3])
def test_the_bound_holds(device: torch.device, parts: int) -> None:
    """What it holds on the device is never more than in_flight, or the newest tensor alone; while copies take long."""
    only_simulated(device)
    simulated.delays(2e-3)
    x = given(device)
    store = dh.OnCpu(in_flight=parts * x.nbytes)
    offload = offload_of(store, device)
    most = max(parts, 1) * x.nbytes
    for _ in range(3):
        with dh.saving(every(store)):
            y = x
            for _ in range(12):
                y = torch.sin(y)
                torch.cos(torch.zeros(1, device=device, requires_grad=True))  # the next operator: contents are taken
                assert offload._bytes + offload._back_bytes <= most
            y = y.sum()
        assert torch.equal(torch.autograd.grad(y, x)[0], gradient(x))
        del y
        assert is_clean(store, device)


def test_device_memory_falls(device: torch.device) -> None:
    x = given(device, 250_000)

    def peak(context: object) -> int:
        torch.accelerator.synchronize(device)
        gc.collect()
        torch.accelerator.reset_peak_memory_stats(device)
        before = torch.accelerator.memory_allocated(device)
        with context:
            y = chain(x, 40)
        torch.autograd.grad(y, x)
        torch.accelerator.synchronize(device)
        return torch.accelerator.max_memory_allocated(device) - before

    plain = peak(torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t))
    store = dh.OnCpu(in_flight="3 MiB")
    ours = [peak(dh.saving(every(store))) for _ in range(3)]
    assert plain > 38 * x.nbytes
    assert max(ours) < plain / 3
    assert max(ours) < 3 * MiB + 6 * x.nbytes


def test_small_ones_of_all_kinds(device: torch.device) -> None:
    store = dh.OnCpu()
    values = [
        torch.randn(33, 7),
        torch.rand(1001) > 0.5,
        torch.tensor([7], dtype=torch.uint8),
        torch.tensor(3.5, dtype=torch.float64),
        torch.empty(0, 4),
        torch.randn(40, 50).t()[::2],
        torch.randn(5, 5).to(torch.bfloat16),
        torch.arange(1000)[3:5],
    ]
    values = [value.to(device) for value in values]
    tickets = [store.put(value) for value in values]
    for waited in (False, True):
        for ticket, value in zip(tickets, values, strict=True):
            back = store.get(ticket)
            assert (back.dtype, back.device, back.shape) == (value.dtype, value.device, value.shape)
            assert torch.equal(back.cpu(), value.cpu())
            assert torch.equal(in_host(store, ticket), value.cpu()) or not waited
        store.wait()
        torch.accelerator.synchronize(device)
    for ticket in tickets:
        store.drop(ticket)
    assert is_clean(store, device)


def test_a_small_part_does_not_keep_the_rest(device: torch.device) -> None:
    large = torch.zeros(4 * MiB, device=device)
    store = dh.OnCpu()
    ticket = store.put(large[5000:7000])
    torch.accelerator.synchronize(device)
    before = torch.accelerator.memory_allocated(device)
    del large
    assert torch.accelerator.memory_allocated(device) <= before - 16 * MiB
    assert torch.equal(store.get(ticket).cpu(), torch.zeros(2000))


def test_it_comes_back_ahead(device: torch.device) -> None:
    """In the order of the last backward, and in the reverse one of the forward where there is none."""
    x = given(device)
    store = dh.OnCpu(in_flight=4 * x.nbytes)
    for _ in range(5):
        assert torch.equal(step(store, x, 20), gradient(x, 20))
    assert is_clean(store, device)
    seen = tier(store)
    assert seen.ahead > seen.read / 2
    assert seen.in_vain == 0
    assert 0 < seen.read <= seen.written


def test_each_is_brought_in_the_last_moment(device: torch.device) -> None:
    """Copies of 1.5 s come one after the other: the second has to begin before the first is wanted, the third not."""
    offload = offload_of(dh.OnCpu(), device)
    offload._link = types.SimpleNamespace(back=types.SimpleNamespace(pace=0.001))

    class Transfer:
        nbytes, coming = 1000, None

    transfers = [Transfer() for _ in range(3)]
    for due, count in (([1.0, 2.0, 10.0], 2), ([1.0, 1.5, 2.0], 3), ([5.0, 9.0, 11.0], 1), ([1.0, 20.0, 30.0], 1)):
        assert offload._how_many(dict(zip(transfers, due, strict=True)), 0.5, due[0]) == count
    assert offload._how_many(dict.fromkeys(transfers, math.nan), None, None) == 3
    transfers[0].coming = types.SimpleNamespace(is_done=lambda: True)
    assert offload._how_many(dict(zip(transfers, [1.0, 3.0, 9.0], strict=True)), 0.5, 1.0) == 1


def test_memory_that_is_not_page_locked_if_asked_for(device: torch.device) -> None:
    x = given(device)
    for pin in (True, False):
        store = dh.OnCpu(pin_memory=pin, in_flight=0)
        assert torch.equal(step(store, x), gradient(x))
        assert offload_of(store, device).pool.tensor(x.shape, x.dtype).is_pinned() is pin


def test_the_order_changes(device: torch.device) -> None:
    """Wrong guesses cost time, never a wrong tensor."""
    store = dh.OnCpu(in_flight="600 KiB")
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(30_000, generator=generator) for _ in range(20)]
    sources = [value.to(device) for value in values]
    for _ in range(8):
        tickets = [store.put(source.clone()) for source in sources]
        for i in torch.randperm(20, generator=generator).tolist():
            found = store.get(tickets[i])
            assert torch.equal(found.cpu(), values[i])
            if i % 3:
                store.drop(tickets[i])
        for i in range(0, 20, 3):
            store.drop(tickets[i])
        tickets.clear()
        assert is_clean(store, device)
    assert tier(store).ahead > 0


def test_a_branch_that_is_not_used(device: torch.device) -> None:
    """What was brought ahead for nobody goes."""
    x = given(device)
    store = dh.OnCpu(in_flight=4 * x.nbytes)
    for _ in range(4):
        with dh.saving(every(store)):
            unused, used = chain(x), chain(x)
        assert torch.equal(torch.autograd.grad(used, x)[0], gradient(x))
        del unused, used
        assert is_clean(store, device)


def test_lanes_forget_what_is_long_ago() -> None:
    class Ticket:
        position, dropped, nbytes = 0, False, 8

    lane = TimedOrder()
    for count in range(1, 40):
        tickets = [Ticket() for _ in range(count)]
        for ticket in tickets:
            lane.put(ticket)
        for ticket in tickets:
            lane.read(ticket)
        for ticket in tickets:
            ticket.dropped = True
            lane.drop(ticket)
    assert len(lane._rounds) <= 8
    assert not lane._turns
    assert not lane._before


def test_the_time_of_copies_is_shared_out_among_modules(device: torch.device) -> None:
    model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Tanh()) for _ in range(3)])
    model.to(device)
    store = dh.OnCpu(in_flight="256 KiB")
    with dh.save_activations(model, "?", store) as saving:
        for _ in range(2):
            y = model(torch.randn(512, 256, device=device))
            store.wait()
            y.square().mean().backward()
    torch.accelerator.synchronize()
    report = saving.report()
    (tier,) = report.tiers
    assert tier.write_seconds > 0
    assert tier.read_seconds > 0
    assert all(site.copy_seconds > 0 for site in report.sites.values())
    total = sum(site.copy_seconds for site in report.sites.values())
    assert total == pytest.approx(tier.write_seconds + tier.read_seconds)


def test_the_limit_counts_what_copies_are_still_at(device: torch.device) -> None:
    """What nobody wants any more is in use until its copy is done; who needs the room waits for that."""
    only_simulated(device)
    store = dh.OnCpu("4 MiB", in_flight="64 MiB")
    x = torch.randn(1 << 18, device=device)
    link, done = copies.link_of(device), []
    with simulated.held(link._out):
        for _ in range(4):
            store.put(x)  # and dropped
        assert store.budget.held == 4 << 20
        waits = threading.Thread(target=lambda: done.append(store.put(x)), daemon=True)
        waits.start()
        waits.join(0.3)
        assert waits.is_alive()
    waits.join(60)
    assert done
    assert tier(store).held <= 4 << 20
    assert torch.equal(store.get(done[0]).cpu(), x.cpu())
    with simulated.held(link._back):
        store.wait()
        for _ in range(3):  # brought back, and not there yet when it is dropped
            ticket = store.put(x.clone())
            offload_of(store, device).set_device_limit(0)
            store.get(ticket)
            del ticket
        assert tier(store).held > 1 << 20
    done.clear()
    assert is_clean(store, device)


def test_a_copy_that_ends_between_two_looks_at_it_is_no_error(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies of tensors in front of a dropped one end just after the store has asked for them."""
    only_simulated(device)
    x = torch.randn(1 << 18, device=device)
    store = dh.OnCpu(in_flight=3 * x.nbytes)
    offload = offload_of(store, device)
    with contextlib.ExitStack() as gate:
        gate.enter_context(simulated.held(offload._link._out))
        tickets = [store.put(x.clone()) for _ in range(3)]
        store.drop(tickets.pop())  # its copy is under way, so its host memory is in use
        poll = offload._link.poll

        def then_all_end() -> None:
            poll()
            gate.close()
            offload._link._out.synchronize()

        monkeypatch.setattr(offload._link, "poll", then_all_end)
        limit_device(store, 0, device)
    monkeypatch.undo()
    for ticket in tickets:
        assert torch.equal(store.get(ticket).cpu(), x.cpu())
        store.drop(ticket)
    assert is_clean(store, device)


def test_a_dropped_tensor_gives_its_host_memory_back_before_the_others_go(device: torch.device) -> None:
    store = dh.OnCpu(in_flight=0)
    tickets = [store.put(torch.zeros(MiB, device=device)) for _ in range(4)]
    store.wait()
    pool = offload_of(store, device).pool
    used = pool.in_use
    for number in range(3, 0, -1):
        store.drop(tickets.pop())
        store.wait()
        assert pool.in_use <= used - (4 - number) * 4 * MiB
    store.drop(tickets.pop())
