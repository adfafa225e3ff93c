"""Watching adds no host sync, and sees DataParallel's replicas on their devices."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import disthooks as dh

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(inplace=True), nn.Linear(32, 4)).cuda()


def test_no_host_sync() -> None:
    model, x = _net(), torch.randn(16, 8, device="cuda")
    model(x).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with dh.trace(model, print=None) as traced, dh.features(model, "*", copy=True) as seen:
            model(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert seen["0"].is_cuda
    assert {"forward_pre", "forward"} == {event.kind for event in traced.events}
