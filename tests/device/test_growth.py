"""Nothing grows: device memory and page-locked memory are after many steps what they were after a few."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import disthooks as dh
from disthooks.saved.attach import SavingHandle
from disthooks.saved.pipeline import pipeline
from disthooks.saved.stores.host import pool_of
from tests.support.models import Tiny, tokens
from tests.support.sim import simulated

EARLY = 24
STEPS = 2000 if os.environ.get("DISTHOOKS_FULL") else 500  # on a GPU

PIPELINES: dict[str, Callable[[], object]] = {
    "cpu": dh.OnCpu,
    "quantized": lambda: pipeline(dh.Quantize(8), dh.OnCpu()),
    "tiers": lambda: dh.Tiered(dh.OnDevice("256 KiB"), dh.OnCpu()),
    "disk": lambda: dh.OnDisk("/tmp"),
}


def pinned(device: torch.device) -> int:
    """Bytes of page-locked memory that are in use; of a GPU's torch knows nothing, for the pool locks its own."""
    pool = pool_of(device, True)
    others = 0 if device.type == "cuda" else simulated.pinned_bytes() - pool.held
    return pool.in_use + others


def used(device: torch.device, saving: SavingHandle) -> tuple[int, int]:
    gc.collect()
    torch.accelerator.synchronize()  # first: what is still being copied is still held
    saving.report()  # reads the errors of codecs, which until then are scalars on the device
    torch.accelerator.synchronize()
    return torch.accelerator.memory_allocated(device), pinned(device)


@pytest.mark.full_tier
@pytest.mark.parametrize("kind", PIPELINES)
def test_memory_does_not_grow(device: torch.device, kind: str) -> None:
    torch.manual_seed(0)
    model, steps = Tiny().to(device), STEPS if device.type == "cuda" else 72
    inputs = [tokens(seed, batch=2 + seed % 3).to(device) for seed in range(4)]  # sizes that come back
    with sdpa_kernel(SDPBackend.MATH), dh.save_activations(model, "blocks.*", PIPELINES[kind]()) as saving:
        for number in range(steps):
            step(model, inputs[number % 4], number)
            if number == EARLY:
                early = used(device, saving)
        late = used(device, saving)
    assert saving.report().moved > steps * 10_000
    assert saving.report().held == 0
    assert late[0] <= early[0], "bytes on the device"
    assert late[1] <= early[1] + (1 << 20), "page-locked bytes"


def step(model: nn.Module, x: torch.Tensor, number: int) -> None:
    """Of some the backward never comes."""
    loss = model(x).square().mean()
    if number % 7:
        loss.backward()
        model.zero_grad()
