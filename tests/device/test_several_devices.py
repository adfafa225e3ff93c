"""Laws 1, 9 and 10 of one process with several devices: each has the limit for itself."""

from __future__ import annotations

import contextlib
import gc
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import disthooks as dh
from disthooks.errors import StoreError
from tests.support.sim import simulated
from tests.support.sim.carried import chain
from tests.support.stores.faulty import soon
from tests.support.stores.inside import device_bytes
from tests.support.threads import together

N = 256 << 10  # bytes of a tensor, which is too large to share a copy


@pytest.fixture
def two(device: torch.device) -> tuple[torch.device, torch.device]:
    if torch.accelerator.device_count() < 2:
        pytest.skip("needs two devices")
    return device, torch.device(device.type, 1)


def below(kind: str, folder: pathlib.Path) -> list[Any]:
    """The stores behind the first one."""
    disk = dh.OnDisk(folder, in_flight="2 MiB")
    return {"cpu": [dh.OnCpu()], "disk": [disk], "both": [dh.OnCpu("1 MiB"), disk]}[kind]


def on_device(tiers: dh.Tiered, device: torch.device) -> int:
    """Bytes that all stores of ``tiers`` hold on ``device``, in flight too."""
    held = tiers.stores[0].budget.of(device).held
    return held + device_bytes(tiers, device)


def is_empty(tiers: dh.Tiered) -> bool:
    gc.collect()
    return all(report.held == 0 for report in tiers.report())


@contextlib.contextmanager
def peaks(devices: tuple[torch.device, ...]) -> Iterator[dict[torch.device, int]]:
    """By device, the most bytes that were allocated inside beside those that were there before."""
    gc.collect()
    torch.accelerator.synchronize()
    before = {device: torch.accelerator.memory_allocated(device) for device in devices}
    for device in devices:
        torch.accelerator.reset_peak_memory_stats(device)
    found: dict[torch.device, int] = {}
    yield found
    found.update((device, torch.accelerator.max_memory_allocated(device) - before[device]) for device in devices)


def in_turn(x: torch.Tensor, y: torch.Tensor, lengths: tuple[int, int], watch: Any = lambda: None) -> Any:
    """Two chains on two devices in one thread, whose operators come in turn; then one sum that needs both."""
    for i in range(max(lengths)):
        x = x.sin() if i < lengths[0] else x
        y = y.sin() if i < lengths[1] else y
        watch()
    return x.sum() + y.sum().to(x.device)


def leaves(two: tuple[torch.device, torch.device]) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randn(N // 4, generator=random).to(device).requires_grad_() for device in two]


@pytest.mark.parametrize("devices", [("cpu", "meta"), None], ids=["cpu and meta", "two devices"])
def test_each_device_may_hold_the_limit(devices: tuple[str, str] | None, device: torch.device) -> None:
    found = [torch.device(name) for name in devices or (f"{device.type}:0", f"{device.type}:1", "cpu")]
    store = dh.OnDevice("1 MiB")
    tickets = [store.put(torch.empty(N // 4, device=device)) for device in found for _ in range(4)]
    assert store.budget.held == len(found) << 20
    assert store.budget.limit == 1 << 20
    (report,) = store.report()
    assert (report.held, report.limit, report.devices) == (len(found) << 20, 1 << 20, len(found))
    assert f"{len(found)}.0 MiB of 1.0 MiB on each of {len(found)} devices" in str(report)
    for at in found:
        with pytest.raises(StoreError, match=rf"OnDevice \({at}\) is full") as caught:
            store.put(torch.empty(1, device=at))
        assert (caught.value.wanted, caught.value.free) == (4, 0)
    for ticket in tickets:
        store.drop(ticket)
    assert store.budget.held == 0


def test_a_device_that_is_full_moves_no_tensor_of_another(two: tuple[torch.device, torch.device]) -> None:
    tiers = dh.Tiered(dh.OnDevice(8 * N), dh.OnCpu())
    few = [tiers.put(torch.full((N // 4,), -1.0, device=two[1])) for _ in range(6)]
    many = [tiers.put(torch.full((N // 4,), float(i), device=two[0])) for i in range(30)]
    assert [tiers.tier_of(ticket) for ticket in few] == [0] * 6
    assert sum(tiers.tier_of(ticket) == 0 for ticket in many) >= 6
    host = torch.ones(8 * N // 4)  # the CPU is a device of its own
    assert tiers.tier_of(tiers.put(host)) == 0
    assert [tiers.tier_of(ticket) for ticket in few] == [0] * 6
    for i, ticket in reversed(list(enumerate(many))):
        assert torch.equal(tiers.get(ticket).cpu(), torch.full((N // 4,), float(i)))
    for ticket in many + few:
        tiers.drop(ticket)


@pytest.mark.full_tier(kind=("cpu", "disk"))
@pytest.mark.full_tier(lengths=((40, 40),))
@pytest.mark.parametrize("kind", ["cpu", "disk", "both"])
@pytest.mark.parametrize("lengths", [(40, 40), (40, 13)], ids=["alike", "unlike"])
def test_two_devices_in_turn(
    kind: str, lengths: tuple[int, int], two: tuple[torch.device, torch.device], tmp_path: pathlib.Path
) -> None:
    """The bits of no hooks, the limit on each device at every moment, and only what does not fit is moved."""
    pair, limit = leaves(two), 8 * N
    truth = torch.autograd.grad(in_turn(*pair, lengths), pair)
    tiers = dh.Tiered(dh.OnDevice(limit), *below(kind, tmp_path))
    most = dict.fromkeys(two, 0)

    def watch() -> None:
        for device in two:
            most[device] = max(most[device], on_device(tiers, device))

    for number in range(4):
        if two[0].type == "sim":
            simulated.delays(200e-6, number)
        with peaks(two) as peak:
            with dh.saving(tiers, at_least=0):
                loss = in_turn(*pair, lengths, watch)
            assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(loss, pair), truth, strict=True))
            del loss
        # In backward also the gradients, what is read now, and what a disk has read for it.
        beside = (8 if kind == "cpu" else 10) * N
        assert all(nbytes <= limit + beside for nbytes in peak.values()), (number, peak)
    assert limit - 3 * N <= most[two[0]] <= limit
    assert limit - 3 * N <= most[two[1]] <= limit
    moved = sum(report.written + report.never_written + report.from_memory for report in tiers.report()[1:])
    assert moved >= 4 * sum(length * N - limit for length in lengths) - N
    assert soon(lambda: is_empty(tiers))


@pytest.mark.full_tier(each=(1,))
@pytest.mark.full_tier(kind=("disk",))
@pytest.mark.parametrize("kind", ["cpu", "disk"])
@pytest.mark.parametrize("each", [1, 2])
def test_threads_on_two_devices(
    each: int, kind: str, two: tuple[torch.device, torch.device], tmp_path: pathlib.Path
) -> None:
    """New threads in each step, as ``nn.DataParallel`` has them, and two threads on each device."""
    limit, length = 8 * N, 24
    tiers = dh.Tiered(dh.OnDevice(limit), *below(kind, tmp_path))
    pairs = [leaves(two) for _ in range(each)]
    inputs = [pair[i] for pair in pairs for i in range(2)]
    truth = [torch.autograd.grad(chain(x, length), x)[0] for x in inputs]
    wrong: list[Any] = []

    def work(i: int) -> None:
        try:
            x = inputs[i]
            with dh.saving(tiers, at_least=0):
                loss = chain(x, length)
            # Another thread of this device may put a tensor now, and move one, which is counted in both stores, and may
            # move the next one while the stores are asked one after the other.
            held = on_device(tiers, x.device)
            if held > limit + (each - 1) * 3 * N:
                wrong.append(held)
            if not torch.equal(torch.autograd.grad(loss, x)[0], truth[i]):
                wrong.append(i)
        except BaseException as error:
            wrong.append(error)

    for _ in range(4):
        with peaks(two) as peak:
            assert set(together([lambda i=i: work(i) for i in range(len(inputs))])) == {None}
        assert not wrong
        assert all(nbytes <= limit + each * 8 * N for nbytes in peak.values()), peak
    assert sum(report.written for report in tiers.report()[1:]) > 0
    assert soon(lambda: is_empty(tiers))
