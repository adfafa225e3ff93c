"""What is computed on the simulated accelerator, whatever the delays, is what the CPU computes, bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from tests.support.models import build, identical, step
from tests.support.sim import simulated

pytestmark = pytest.mark.full_tier  # a test of the tests


def on_cpu(tensors: list) -> list:
    return [t.detach().cpu() for t in tensors]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["transformer", "convolution", "recurrent"])
def test_gradients_are_the_cpus(sim: torch.device, name: str, seed: int) -> None:
    simulated.delays(1e-3 * seed, seed)
    model, x = build(name)
    with sdpa_kernel(SDPBackend.MATH):
        truth = step(copy.deepcopy(model), x)
        found = on_cpu(step(model.to(sim), x.to(sim)))
    if name == "recurrent":  # torch adds the biases of a cell elsewhere on an accelerator
        torch.testing.assert_close(found, truth)
    else:
        assert identical(found, truth)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_keeps_the_random_numbers_of_the_device(sim: torch.device, reentrant: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.GELU()).to(sim)
    x = torch.ones(4, 8, device=sim, requires_grad=True)
    torch.manual_seed(0)
    truth = torch.autograd.grad(model(x).square().sum(), x)
    torch.manual_seed(0)
    assert identical(torch.autograd.grad(model(x).square().sum(), x), truth)
    torch.manual_seed(0)
    x.grad = None
    checkpoint(model, x, use_reentrant=reentrant).square().sum().backward()
    assert identical([x.grad], list(truth))


def test_views_and_copies_of_all_kinds(sim: torch.device) -> None:
    def results(device: torch.device | str) -> list:
        x = torch.arange(24.0, device=device).view(4, 6)
        z = torch.view_as_complex(x.view(4, 3, 2))
        y = torch.zeros(4, 6, device=device, dtype=torch.float64)
        y[:, ::2] = x[:, 1::2]
        y[1].add_(x[2])
        y.t()[0].copy_(x[0, :4])
        out = torch.empty(0, device=device)
        torch.add(x[0], 1, out=out)
        views = [x.unfold(1, 2, 2), x.t(), x[1:, ::3], x.expand(2, 4, 6), x.view(torch.int32), x.diagonal()]
        return [y, out, z.conj(), z.imag.neg(), x[x > 5], x.to(torch.bfloat16), x.bool(), *views]

    assert identical(on_cpu(results(sim)), results("cpu"))
