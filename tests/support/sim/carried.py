"""Small steps of a device through OnCpu, and what has to be true of the store before and after."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import disthooks as dh
from tests.support.sim import simulated
from tests.support.stores.inside import offload_of
from tests.support.stores.moving import chain, pipe

#: All tensors go to the store, however small.
every = pipe


def given(device: torch.device, numel: int = 50_000, seed: int = 0) -> torch.Tensor:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    return values.to(device).requires_grad_()


def gradient(x: torch.Tensor, length: int = 12) -> torch.Tensor:
    """Without hooks."""
    return torch.autograd.grad(chain(x, length), x)[0]


def step(store: Any, x: torch.Tensor, length: int = 12) -> torch.Tensor:
    with dh.saving(every(store)):
        y = chain(x, length)
    return torch.autograd.grad(y, x)[0]


def is_clean(store: dh.OnCpu, device: torch.device) -> bool:
    """Whether nothing is held any more: on the device, in flight, under the limit."""
    torch.accelerator.synchronize(device)
    offload = offload_of(store, device)
    idle = offload.device_bytes == 0 and not (offload._staying or offload._flying or offload._coming)
    return idle and store.budget.held == 0 and not offload._link._sent and not offload._link._coming


def tier(store: dh.OnCpu) -> Any:
    return store.report()[0]


@contextlib.contextmanager
def no_waits(device: torch.device) -> Iterator[None]:
    """Inside the host never waits for the device."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return
    with simulated.counted() as counts:
        yield
    assert counts.waits == 0, dict(counts)


def only_simulated(device: torch.device) -> None:
    if device.type != "sim":
        pytest.skip("what only the simulated device can say, or do on request")
