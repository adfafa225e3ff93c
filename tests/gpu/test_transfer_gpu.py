"""What of the way to host memory and back only CUDA itself can show: page-locking, overlap, no synchronisation."""

from __future__ import annotations

import pytest
import torch

import disthooks as dh
from disthooks.saved.stores.copies import Link
from disthooks.saved.stores.host import PinnedPool

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
MiB = 1 << 20


@pytest.fixture
def cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def test_copies_run_beside_the_computation(cuda: torch.device) -> None:
    """Seen by events: a copy begins before the product that was launched first ends."""
    link, pool = Link(cuda), PinnedPool(cuda)
    x, a = torch.ones(64 * MiB, device=cuda), torch.randn(8192, 8192, device=cuda)
    host = pool.tensor(x.shape, x.dtype)
    link.send(x, host).wait()
    link.poll()
    begin, end = torch.Event(cuda, enable_timing=True), torch.Event(cuda, enable_timing=True)
    for _ in range(2):
        begin.record(torch.accelerator.current_stream(cuda))
        for _ in range(20):
            a = (a @ a).clamp(-1, 1)
        sent = link.send(x, host)
        b = a
        for _ in range(20):
            b = (b @ b).clamp(-1, 1)
        coming = link.bring(sent.host, sent.done)
        for _ in range(20):
            b = (b @ b).clamp(-1, 1)
        end.record(torch.accelerator.current_stream(cuda))
        torch.cuda.synchronize()
    assert sent.done.elapsed_time(end) > 0
    assert coming.done.elapsed_time(end) > 0


@pytest.mark.parametrize("in_flight", ["1 GiB", "96 MiB", 0])
def test_a_step_does_not_synchronise(cuda: torch.device, in_flight: int | str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *[part for _ in range(6) for part in (torch.nn.Linear(1024, 1024), torch.nn.GELU(), torch.nn.LayerNorm(1024))]
    ).to(cuda)
    x = torch.randn(8192, 1024, device=cuda)

    def run() -> list[torch.Tensor]:
        model.zero_grad()
        model(x).square().mean().backward()
        return [parameter.grad for parameter in model.parameters()]

    truth = [grad.clone() for grad in run()]
    with dh.save_activations(model, "*", dh.OnCpu(in_flight=in_flight)) as saving:
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = [grad.clone() for _ in range(3) for grad in run()]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(found, truth * 3, strict=True))
    assert saving.report().moved > 500 * MiB


def test_memory_of_another_stream_is_let_go_of(cuda: torch.device) -> None:
    """A batch that a loader's stream allocated: the bound lets go of it while its copy is under way."""
    loader, wrong = torch.cuda.Stream(), 0
    store = dh.OnCpu(in_flight=0)
    expected = [torch.full((16 * MiB,), float(i)) for i in range(4)]
    pins = [value.pin_memory() for value in expected]
    for _ in range(10):
        tickets = []
        for value in pins:
            with torch.cuda.stream(loader):
                batch = value.to(cuda, non_blocking=True)
            torch.cuda.current_stream().wait_stream(loader)
            batch.record_stream(torch.cuda.current_stream())
            tickets.append(store.put(batch))
            del batch
        wrong += sum(not torch.equal(store.get(t).cpu(), v) for t, v in zip(tickets, expected, strict=True))
        for ticket in tickets:
            store.drop(ticket)
    assert wrong == 0


def test_pinned_memory_does_not_grow(cuda: torch.device) -> None:
    store = dh.OnCpu(in_flight="64 MiB")
    x = torch.randn(4 * MiB, device=cuda, requires_grad=True)
    held = []
    for _ in range(200):
        with dh.saving(store):
            y = x
            for _ in range(12):
                y = y.sin()
        y.sum().backward()
        del y
        torch.cuda.synchronize()  # what is still being copied is still held
        store.wait()
        held.append((store.open().offload(cuda).pool.held, torch.cuda.memory_allocated()))
    assert len(set(held[20:])) == 1
