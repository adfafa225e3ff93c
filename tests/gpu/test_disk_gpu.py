"""What only a real GPU shows of OnDisk and Tiered: pinned pages, and its allocator's own peak."""

from __future__ import annotations

import gc
import pathlib

import pytest
import torch

import disthooks as dh
from disthooks.saved.stores.host import PAGE
from tests.support.stores.moving import chain

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_it_is_written_from_pinned_pages(tmp_path: pathlib.Path) -> None:
    store = dh.OnDisk(tmp_path)
    ticket = store.put(torch.randn(1 << 20, device="cuda"))
    outgoing = ticket.entry.outgoing
    if outgoing is not None:
        assert outgoing.host.is_pinned()
        assert outgoing.host.data_ptr() % PAGE == 0
    store.wait()
    store.drop(ticket)


def test_many_steps_are_right_and_nothing_grows(tmp_path: pathlib.Path) -> None:
    store = dh.OnDisk(tmp_path, in_flight="32 MiB")
    tiers = dh.Tiered(dh.OnDevice("64 MiB"), dh.OnCpu(), store)
    x = torch.randn(2 << 20, device="cuda", requires_grad=True)  # 8 MiB
    (expected,) = torch.autograd.grad(chain(x, 40), x)
    held = []
    for i in range(60):
        with dh.saving(store if i % 2 else tiers, at_least=0):
            y = chain(x, 40)
        (grad,) = torch.autograd.grad(y, x)
        assert torch.equal(grad, expected)
        del y, grad
        gc.collect()
        torch.cuda.synchronize()
        store.wait()
        held.append(torch.cuda.memory_allocated())
    assert max(held[20:]) <= max(held[:20]) + (32 << 20)


def test_the_peak_of_tiers(tmp_path: pathlib.Path) -> None:
    n, limit = 8 << 20, 64 << 20
    x = torch.randn(n // 4, device="cuda", requires_grad=True)
    for below in ((dh.OnCpu(),), (dh.OnDisk(tmp_path),)):
        tiers = dh.Tiered(dh.OnDevice(limit), *below)
        for _ in range(3):
            torch.cuda.synchronize()
            gc.collect()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            with dh.saving(tiers, at_least=0):
                y = chain(x, 60)
            assert torch.cuda.max_memory_allocated() - before <= limit + 3 * n
            y.backward()
            assert torch.cuda.max_memory_allocated() - before <= limit + 8 * n
            x.grad, y = None, None
