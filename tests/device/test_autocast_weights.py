"""Autocast's copies of weights on a device: each weight is waited for once, and is dropped from the first step on."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import disthooks as dh
from tests.support.sim import simulated

STEPS = 5


def _model(device: torch.device) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)).to(device), torch.randn(32, 64).to(device)


def _step(model: nn.Module, x: torch.Tensor) -> None:
    with torch.autocast(x.device.type, torch.bfloat16):
        loss = model(x).square().sum()
    loss.backward()


@pytest.mark.parametrize("lag", [0, 5, simulated.FOR_EVER])
def test_each_step_drops_all_copies_and_waits_in_the_first_alone(device: torch.device, lag: int) -> None:
    if device.type != "sim":
        pytest.skip("how far a real host runs ahead nobody decides")
    model, x = _model(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    truth, _ = _model(device)
    other = torch.optim.SGD(truth.parameters(), lr=0.01)
    dropped, waits = [], []
    with simulated.lag(lag) if lag else contextlib.nullcontext():
        for _ in range(STEPS):
            with simulated.counted() as plain:
                other.zero_grad()
                _step(truth, x)
                other.step()
            with simulated.counted() as counts, dh.save_activations(model, "", dh.OnCpu()) as saving:
                optimizer.zero_grad()
                _step(model, x)
                optimizer.step()
            dropped.append(saving.report().recast)
            waits.append(counts.waits - plain.waits)
    assert dropped == [dropped[0]] * STEPS
    assert dropped[0] == 96 * 64 * 2  # the input of the first layer needs no gradient, so it does not save its weight
    assert waits[0] > 0
    assert waits[1:] == [0] * (STEPS - 1)
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(model.parameters(), truth.parameters(), strict=True))


def _trained_in_one_context(device: torch.device, hooks: bool) -> tuple[list[torch.Tensor], int]:
    """The gradients of three steps, in which no change of a weight is counted, and the bytes that were cast again."""
    model, x = _model(device)
    seen, recast = [], 0
    with torch.autocast(device.type, torch.bfloat16):
        for _ in range(3):
            with dh.save_activations(model, "", dh.OnCpu()) if hooks else contextlib.nullcontext() as saving:
                loss = model(x).square().sum()
                seen += torch.autograd.grad(loss, list(model.parameters()))
            del loss
            torch.accelerator.synchronize(device)
            for weight in model.parameters():
                weight.data.mul_(1.5)
            recast += saving.report().recast if saving else 0
    return [grad.cpu() for grad in seen], recast


def test_a_copy_that_is_older_than_its_weight_stays(device: torch.device) -> None:
    """Autocast's cache lives as long as its context, here for all steps: torch trains with the first copies."""
    truth, _ = _trained_in_one_context(device, False)
    found, recast = _trained_in_one_context(device, True)
    assert all(torch.equal(a, b) for a, b in zip(found, truth, strict=True))
    assert recast == 96 * 64 * 2


@pytest.mark.parametrize("forwards", [1, 2, 3])
def test_a_weight_that_is_moved_comes_back_by_its_checksum(device: torch.device, forwards: int) -> None:
    """As engines move weights: until a backward has seen a weight where it was, a checksum is taken."""
    model, x = _model(device)
    truth = torch.autograd.grad(_loss(model, x), list(model.parameters()))
    with dh.save_activations(model, "", dh.OnCpu()) as saving:
        for _ in range(2):
            losses = [_loss(model, x) for _ in range(forwards)]
            for loss in losses:
                weight = model[2].weight
                weight.data = weight.data.clone()
                found = torch.autograd.grad(loss, list(model.parameters()))
                assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(found, truth, strict=True))
    assert saving.report().recast == 2 * forwards * 96 * 64 * 2


def _loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast(x.device.type, torch.bfloat16):
        return model(x).square().sum()
