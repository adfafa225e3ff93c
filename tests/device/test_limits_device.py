"""Law 10 on a device: small tensors that went to the host together count until their common memory goes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import disthooks as dh
from disthooks.errors import StoreError

KIB = 1 << 10


def _host(store: dh.OnCpu, device: torch.device) -> int:
    """Bytes of host memory that what was sent takes."""
    return store.open().offload(device).pool.in_use


def test_one_survivor_counts_as_the_memory_that_it_keeps(device: torch.device) -> None:
    store = dh.OnCpu("2 MiB", in_flight="1 MiB", pin_memory=False)
    before = _host(store, device)
    survivors: list[tuple[int, Any]] = []

    def group(number: int) -> None:
        """Four tensors of 32 KiB go together, and one of them stays."""
        tickets = [store.put(torch.full((8 * KIB,), float(number), device=device)) for _ in range(4)]
        store.wait()
        survivors.append((number, tickets[0]))
        for ticket in tickets[1:]:
            store.drop(ticket)

    def groups() -> None:
        for number in range(300):
            group(number)

    with pytest.raises(StoreError, match="full"):
        groups()
    assert 4 <= len(survivors) < 64
    assert _host(store, device) - before <= 2 * KIB * KIB + 256 * KIB
    for number, ticket in survivors:
        assert torch.equal(store.get(ticket).cpu(), torch.full((8 * KIB,), float(number)))
        store.drop(ticket)
    survivors.clear()
    del ticket
    torch.accelerator.synchronize()
    store.wait()
    assert store.report()[0].held == 0
    store.put(torch.ones(8 * KIB, device=device))  # there is room again
