"""Recompute on a device: nobody waits for the proof, and what comes back is right all the same."""

from __future__ import annotations

import pathlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import disthooks as dh


class Gated(nn.Module):
    """LayerNorm, SwiGLU, a batch norm, an in-place ReLU and a residual."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm, self.batch = nn.LayerNorm(width), nn.BatchNorm1d(width)
        self.gate, self.up = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        y = F.relu(self.batch(self.down(F.silu(self.gate(y)) * self.up(y))), inplace=True)
        return x + y


@pytest.mark.parametrize("kind", ["cpu", "disk", "device"])
def test_gradients_are_those_without_hooks(kind: str, device: torch.device, tmp_path: pathlib.Path) -> None:
    store = {"cpu": dh.OnCpu(), "disk": dh.OnDisk(tmp_path), "device": dh.OnDevice("1 GiB")}[kind]
    torch.manual_seed(0)
    model = nn.Sequential(Gated(), Gated(), Gated()).to(device)
    x = torch.randn(48, 32).to(device)
    weights = list(model.parameters())
    truth = torch.autograd.grad(model(x).square().sum(), weights)
    with dh.save_activations(model, "*", dh.pipeline(dh.AtLeast(0), dh.Recompute(), store)) as saving:
        for _ in range(6):
            grads = torch.autograd.grad(model(x).square().sum(), weights)
            torch.accelerator.synchronize(device)
            for grad, right in zip(grads, truth, strict=True):
                assert torch.equal(grad.cpu(), right.cpu())
        report = saving.report()
    assert report.recomputed > 0
    assert report.differed == {}
    assert report.held == 0


def test_once_it_is_proven_the_host_waits_for_nothing(device: torch.device) -> None:
    simulated = pytest.importorskip("simulated")
    if device.type != "sim":
        pytest.skip("it counts what the simulated device was waited for")
    torch.manual_seed(0)
    model, x = nn.Sequential(Gated(), Gated()).to(device), torch.randn(48, 32).to(device)

    def step() -> None:
        model(x).square().sum().backward()

    with simulated.counted() as plain:
        step()
    with dh.save_activations(model, "*", dh.pipeline(dh.AtLeast(0), dh.Recompute(), dh.OnDevice("1 GiB"))) as saving:
        for _ in range(8):  # the 8th is the last that is compared for long
            step()
            torch.accelerator.synchronize(device)
        before = saving.report().recomputed
        with simulated.counted() as counts:
            step()
        assert saving.report().recomputed > before
    assert counts.waits == plain.waits


def test_always_waits_for_the_answer_and_drops(device: torch.device) -> None:
    """It would never drop anything if it only asked."""
    torch.manual_seed(0)
    model, x = nn.Sequential(Gated(), Gated()).to(device), torch.randn(48, 32).to(device)
    truth = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    line = dh.pipeline(dh.AtLeast(0), dh.Recompute(check="always"), dh.OnDevice("1 GiB"))
    with dh.save_activations(model, "*", line) as saving:
        for step in range(1, 4):
            grads = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
            assert all(torch.equal(grad.cpu(), right.cpu()) for grad, right in zip(grads, truth, strict=True))
            if step == 1:
                first = saving.report().recomputed
    assert first > 0
    assert saving.report().recomputed == 3 * first
