"""Law 4: what backward was given may become a gradient, and be added to; nobody else sees that."""

from __future__ import annotations

import gc
import pathlib

import pytest
import torch

import disthooks as dh


class Prepared(torch.autograd.Function):
    """Computes its gradient in forward, as fused losses do, and returns what it saved."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gradient)  # type: ignore[attr-defined]
        return (x.detach() * gradient).sum()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.saved_tensors[0], None  # type: ignore[attr-defined]


STORES = {
    "disk": lambda folder: dh.pipeline(dh.AtLeast(0), dh.OnDisk(folder)),
    "kept": lambda folder: dh.pipeline(dh.AtLeast("1 GiB"), dh.OnDisk(folder)),
    "in place": lambda folder: dh.OnCpu(),
}


@pytest.mark.parametrize("store", STORES)
def test_a_saved_tensor_that_is_returned_as_a_gradient(store: str, tmp_path: pathlib.Path) -> None:
    gradient = torch.rand(64, 64)
    content = gradient.clone()
    x = torch.ones(64, 64, requires_grad=True)
    with dh.saving(STORES[store](tmp_path)):
        loss = Prepared.apply(x, gradient)
    for count in range(1, 4):
        loss.backward(retain_graph=True)
        torch.testing.assert_close(x.grad, count * content)
    x.grad.zero_()
    loss.backward(retain_graph=True)
    assert torch.equal(x.grad, content)
    assert torch.equal(gradient, content)


@pytest.mark.parametrize("store", STORES)
def test_three_losses_that_saved_the_same(store: str, tmp_path: pathlib.Path) -> None:
    gradient = torch.rand(64, 64)
    content = gradient.clone()
    x = torch.ones(64, 64, requires_grad=True)
    with dh.saving(STORES[store](tmp_path)) as saved:
        losses = [Prepared.apply(x, gradient) for _ in range(3)]
        losses.pop(0).backward()  # inside: not all of it is stored yet
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(x.grad, 3 * content)
    assert torch.equal(gradient, content)
    del loss, losses
    assert saved.report().held == 0


def test_a_default_device_is_not_the_stores(tmp_path: pathlib.Path) -> None:
    """``torch.device`` as a context reaches into every call that names no device, ours too."""
    x = torch.randn(64, 64, requires_grad=True)
    with torch.device("meta"), dh.saving(dh.OnDisk(tmp_path)) as saved:
        y = x.sin().cos()
        (got,) = torch.autograd.grad(y, x, x.detach())
    assert saved.report().moved > 0
    assert torch.equal(got, torch.autograd.grad(x.sin().cos(), x, x.detach())[0])


def test_a_generator_that_a_collection_ends(tmp_path: pathlib.Path) -> None:
    """It may be ended in the middle of anything of ours, whatever lock is held: it must not wait."""
    saved = dh.saving(dh.pipeline(dh.AtLeast(0), dh.OnDisk(tmp_path)))

    class Owner:
        @saved
        def steps(self) -> object:
            yield torch.ones(8, requires_grad=True).sin()

    gc.set_threshold(1)
    try:
        for _ in range(50):
            owner = Owner()
            owner.body = owner.steps()
            next(owner.body)
            del owner
            with saved:
                torch.ones(8, requires_grad=True).sin().cos()
    finally:
        gc.set_threshold(700, 10, 10)
