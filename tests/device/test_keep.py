"""``OnCpu(keep=...)``, laws 1, 9 and 10: what stays on the device is never copied, the rest is sent at once."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

import disthooks as dh
from disthooks.errors import StoreError, UsageError
from tests.support.models import CASES, build, identical, step
from tests.support.sim import simulated
from tests.support.sim.carried import chain, every, given, gradient, no_waits
from tests.support.stores.faulty import soon

N = 512 << 10  # bytes of a tensor, which is too large to share a copy


def moved(store: dh.OnCpu) -> tuple[int, int]:
    """Bytes that went to the host, and bytes that came back."""
    _, host = store.report()
    return host.written, host.read


def on_device(store: dh.OnCpu, device: torch.device) -> int:
    """Bytes of saved tensors on ``device``: those that stay, and those in flight."""
    tiers = store.open()
    return tiers.stores[0].budget.of(device).held + tiers.stores[1].device_bytes(device)


def is_empty(store: dh.OnCpu) -> bool:
    gc.collect()
    torch.accelerator.synchronize()
    return all(report.held == 0 for report in store.report())


@pytest.mark.full_tier(keep=(1, "1 GiB"))
@pytest.mark.parametrize("keep", [1, "64 KiB", "1 GiB"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_bit_identical(case: str, keep: int | str, device: torch.device) -> None:
    model, x = build(case)
    model, x = model.to(device).eval(), x.to(device)
    expected = step(model, x)
    store = dh.OnCpu(keep=keep, in_flight="32 KiB")
    for seed in range(3):
        if device.type == "sim":
            simulated.delays(200e-6, seed)
        assert identical(step(model, x, dh.saving(every(store))), expected)
    assert (moved(store) == (0, 0)) == (keep == "1 GiB")
    assert soon(lambda: is_empty(store))


def test_what_stays_is_never_copied_and_the_rest_goes_from_the_first_put_on(device: torch.device) -> None:
    count, kept, flying = 20, 9, 3
    store = dh.OnCpu(keep=kept * N, in_flight=flying * N)
    for number in range(4):
        tickets, sent, before = [], [], moved(store)
        for i in range(count):
            tickets.append(store.put(torch.full((N // 4,), float(i)).to(device)))
            sent.append((moved(store)[0] - before[0]) // N)
            assert on_device(store, device) <= (kept + flying) * N
        if number:  # the first forward does not know what will come
            assert sent == [min(i + 1, count - kept) for i in range(count)]
        assert sent[-1] == count - kept
        store.wait()  # what is still on its way out would take the room for copies
        back = []
        for i in reversed(range(count)):
            assert torch.equal(store.get(tickets[i]).cpu(), torch.full((N // 4,), float(i)))
            back.append((moved(store)[1] - before[1]) // N)
            store.drop(tickets.pop())
            assert on_device(store, device) <= (kept + flying) * N
        if number:
            assert back[0] > 0  # into what is free of the room for copies; and then into what each read frees
            assert all(come >= min(i, count - kept) for i, come in enumerate(back))
        assert back[-1] == count - kept
    assert is_empty(store)


def test_the_bytes_on_the_device_are_those_that_were_allowed(device: torch.device) -> None:
    length, kept, flying = 40, 12, 4
    x = given(device, N // 4)
    truth = gradient(x, length)
    store = dh.OnCpu(keep=kept * N, in_flight=flying * N)
    for _ in range(3):
        gc.collect()
        torch.accelerator.synchronize()
        before = torch.accelerator.memory_allocated(device)
        torch.accelerator.reset_peak_memory_stats(device)
        with dh.saving(every(store)):
            y = chain(x, length)
        # The newest that is not packed yet, the one that the operator makes, and the one that comes to the store.
        assert torch.accelerator.max_memory_allocated(device) - before <= (kept + flying + 3) * N
        assert torch.equal(torch.autograd.grad(y, x)[0], truth)
        assert torch.accelerator.max_memory_allocated(device) - before <= (kept + flying + 8) * N
        del y
    written, read = moved(store)
    assert 3 * (length - kept - flying) * N <= read <= written <= 3 * (length - kept) * N
    stayed, _ = store.report()
    assert stayed.from_memory >= 3 * kept * N - 2 * N  # the first forward does not fill it to the last byte
    assert "stayed there until backward read them" in str(stayed)
    assert soon(lambda: is_empty(store))


def test_the_limit_counts_the_bytes_of_the_host_alone(device: torch.device) -> None:
    """So with a limit of what does not stay everything fits, and with one tensor less the last one is an error."""
    x, length, kept = given(device, N // 4), 20, 8
    truth = gradient(x, length)
    store = dh.OnCpu((length - kept) * N, keep=kept * N, in_flight=0)
    for _ in range(3):
        with dh.saving(every(store)):
            y = chain(x, length)
        assert store.budget.held == (length - kept) * N <= store.budget.limit
        assert [report.held for report in store.report()] == [kept * N, (length - kept) * N]
        assert torch.equal(torch.autograd.grad(y, x)[0], truth)
        with dh.saving(every(store)), pytest.raises(StoreError, match=r"saved: OnCpu is full: wanted") as caught:
            chain(x, length + 3)
        assert (caught.value.wanted, caught.value.free) == (N, 0)
        del caught
        assert soon(lambda: is_empty(store))


def test_a_tensor_that_is_larger_than_what_may_stay_goes_to_the_host(device: torch.device) -> None:
    store = dh.OnCpu(keep=2 * N, in_flight=N)
    large = torch.randn(2 * N).to(device)
    for _ in range(2):
        small = [store.put(torch.full((N // 4,), float(i)).to(device)) for i in range(2)]
        ticket = store.put(large)
        assert store.budget.held >= large.nbytes
        assert torch.equal(store.get(ticket), large)
        for i, one in enumerate(small):
            assert torch.equal(store.get(one).cpu(), torch.full((N // 4,), float(i)))
        for one in (ticket, *small):
            store.drop(one)
    assert soon(lambda: is_empty(store))


def test_tensors_of_the_cpu_are_held_in_place_and_count_against_the_limit() -> None:
    store = dh.OnCpu(3 * N, keep=8 * N)
    for _ in range(3):
        tensors = [torch.full((N // 4,), float(i)) for i in range(3)]
        tickets = [store.put(tensor) for tensor in tensors]
        assert [report.held for report in store.report()] == [0, 3 * N]
        with pytest.raises(StoreError, match="full"):
            store.put(tensors[0])
        for tensor, ticket in zip(tensors, tickets, strict=True):
            assert store.get(ticket) is tensor
            store.drop(ticket)
    assert store.budget.held == 0


def test_each_device_keeps_as_much(device: torch.device) -> None:
    if torch.accelerator.device_count() < 2:
        pytest.skip("needs two devices")
    two, kept = (device, torch.device(device.type, 1)), 6
    store = dh.OnCpu(keep=kept * N, in_flight=2 * N)
    truth = [gradient(given(at, N // 4, i), 12 + i) for i, at in enumerate(two)]
    wrong: list[object] = []

    def work(i: int, at: torch.device) -> None:
        try:
            x = given(at, N // 4, i)
            with dh.saving(every(store)):
                y = chain(x, 12 + i)
            if on_device(store, at) > (kept + 2) * N:
                wrong.append((at, on_device(store, at)))
            if not torch.equal(torch.autograd.grad(y, x)[0], truth[i]):
                wrong.append(at)
        except BaseException as error:
            wrong.append(error)

    for _ in range(4):
        threads = [threading.Thread(target=work, args=each) for each in enumerate(two)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
    kept_report, host = store.report()
    assert kept_report.devices == 2
    assert host.written >= 4 * (12 + 13 - 2 * (kept + 2)) * N
    assert soon(lambda: is_empty(store))


def test_nobody_waits_on_the_host(device: torch.device) -> None:
    x = given(device)
    store = dh.OnCpu(keep=10 * x.nbytes, in_flight=4 * x.nbytes)
    for _ in range(3):
        with no_waits(device), dh.saving(every(store)):
            y = chain(x, 30)
        y.backward()
        del y
    assert moved(store)[0] >= 3 * 16 * x.nbytes


@pytest.mark.parametrize("keep", [None, 0, "0 B"])
def test_without_it_all_is_as_before(keep: int | str | None) -> None:
    assert [report.name for report in dh.OnCpu(keep=keep).report()] == ["OnCpu()"]
    dh.Tiered(dh.OnCpu(keep=keep), dh.OnDevice())


@pytest.mark.parametrize("keep", ["10 parsecs", -1, "", True, "1 GiB per node"])
def test_what_is_no_size_is_refused(keep: object) -> None:
    with pytest.raises(UsageError, match="OnCpu keep"):
        dh.OnCpu(keep=keep)  # type: ignore[arg-type]


def test_it_is_no_tier_of_a_tiered(tmp_path: object) -> None:
    with pytest.raises(UsageError, match="in place of which OnDevice stands in front"):
        dh.Tiered(dh.OnCpu(keep="1 GiB"), dh.OnDisk(str(tmp_path)))
