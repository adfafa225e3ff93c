"""What of the way to host memory and back only CUDA itself can show: page-locking, overlap, no synchronisation."""

from __future__ import annotations

import pathlib

import pytest
import torch

import disthooks as dh
from disthooks.saved.stores.copies import Link
from disthooks.saved.stores.host import PAGE, PinnedPool

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


def test_it_is_written_from_pinned_pages(tmp_path: pathlib.Path) -> None:
    store = dh.OnDisk(tmp_path)
    ticket = store.put(torch.randn(1 << 20, device="cuda"))
    outgoing = ticket.entry.outgoing
    if outgoing is not None:
        assert outgoing.host.is_pinned()
        assert outgoing.host.data_ptr() % PAGE == 0
    store.wait()
    store.drop(ticket)
