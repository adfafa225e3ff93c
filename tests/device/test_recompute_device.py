"""Recompute on a device: a place is waited for until it is proven, once, and what comes back is right."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import disthooks as dh
from disthooks.saved.pipeline import pipeline
from tests.support.sim import simulated


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
    with dh.save_activations(model, "*", pipeline(dh.Recompute(), store, at_least=0)) as saving:
        for _ in range(6):
            grads = torch.autograd.grad(model(x).square().sum(), weights)
            torch.accelerator.synchronize(device)
            for grad, right in zip(grads, truth, strict=True):
                assert torch.equal(grad.cpu(), right.cpu())
        report = saving.report()
    assert report.recomputed > 0
    assert report.differed == {}
    assert report.held == 0


# -- the host runs ahead: no event is ever seen to be done before the host waits for it


@pytest.fixture
def ahead(device: torch.device) -> Iterator[None]:
    if device.type != "sim":
        pytest.skip("how far a real host runs ahead nobody decides")
    with simulated.ahead():
        yield


def _line() -> object:
    return pipeline(dh.Recompute(), dh.OnDevice("1 GiB"), at_least=0)


def _attached_once(model: nn.Module, x: torch.Tensor, steps: int) -> Iterator[int]:
    with dh.save_activations(model, "*", _line()) as saving:
        before = 0
        for _ in range(steps):
            model(x).square().sum().backward()
            yield saving.report().recomputed - before
            before = saving.report().recomputed


def _attached_anew(model: nn.Module, x: torch.Tensor, steps: int) -> Iterator[int]:
    for _ in range(steps):
        with dh.save_activations(model, "*", _line()) as saving:
            model(x).square().sum().backward()
        yield saving.report().recomputed


def _wrapped_anew(model: nn.Module, x: torch.Tensor, steps: int) -> Iterator[int]:
    for _ in range(steps):
        wrapped = [dh.SaveWith(block, _line()) for block in model]
        nn.Sequential(*wrapped)(x).square().sum().backward()
        yield sum(each.report().recomputed for each in wrapped)


def _in_a_block(model: nn.Module, x: torch.Tensor, steps: int) -> Iterator[int]:
    for _ in range(steps):
        with dh.saving(dh.Recompute(), dh.OnDevice("1 GiB"), at_least=0) as saved:
            loss = model(x).square().sum()
        loss.backward()
        yield saved.report().recomputed


@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize("run", [_attached_once, _attached_anew, _wrapped_anew, _in_a_block])
def test_each_step_drops_while_the_host_runs_ahead(run: object, device: torch.device) -> None:
    """The first one, because it waits for the comparison; the 2nd, 4th and 8th, in which it is compared again."""
    torch.manual_seed(0)
    model, x = nn.Sequential(Gated(), Gated()).to(device), torch.randn(48, 32).to(device)
    model(x).square().sum().backward()
    truth = [weight.grad.cpu() for weight in model.parameters()]
    dropped = []
    model.zero_grad()
    for recomputed in run(model, x, 9):  # type: ignore[operator]
        dropped.append(recomputed)
        assert all(torch.equal(p.grad.cpu(), right) for p, right in zip(model.parameters(), truth, strict=True))
        model.zero_grad()
    assert dropped[0] > 48 * 96 * 4
    assert dropped == [dropped[0]] * 9


@pytest.mark.usefixtures("ahead")
def test_the_host_waits_in_the_first_step_alone(device: torch.device) -> None:

    torch.manual_seed(0)
    model, x = nn.Sequential(Gated(), Gated()).to(device), torch.randn(48, 32).to(device)
    with simulated.counted() as plain:
        model(x).square().sum().backward()
    waits = []
    for _ in range(5):
        with simulated.counted() as counts, dh.save_activations(model, "*", _line()):
            model(x).square().sum().backward()
        waits.append(counts.waits - plain.waits)
    assert waits[0] > 0
    assert waits[1:] == [0] * 4


class Changed(nn.Module):
    """Changes what nobody saved, under ``no_grad``, by a factor that the graph does not show."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.sigmoid().neg()
        with torch.no_grad():
            y *= self.factor
        return y.exp().sigmoid().sum()


@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize("when", ["in the backward of that step", "in the next forward", "in both"])
def test_a_place_that_is_not_right_any_more_raises_once_the_device_says_so(when: str, device: torch.device) -> None:

    model, x = Changed(), torch.randn(64, 64).to(device).requires_grad_()
    saving = dh.save_activations(model, "", _line())
    model(x).backward()
    dropped = saving.report().recomputed
    assert dropped > 0
    model.factor = -1.0
    loss = model(x)  # the second step is compared again, and drops
    assert saving.report().recomputed == 2 * dropped
    raises = pytest.raises(dh.errors.StoreError, match=r"(?s)'Changed'.*no_grad.*check='always'")
    with simulated.ahead(0):
        torch.accelerator.synchronize(device)
        if when != "in the backward of that step":
            with raises:
                model(x)
        if when != "in the next forward":
            with raises:
                loss.backward()
    saving.remove()
    (truth,) = torch.autograd.grad(model(x), x)
    found = None
    with simulated.ahead(0), dh.save_activations(model, "", _line()) as saving:
        while found is None:  # each place that differs says so once, and stores from then on, in later attachments too
            torch.accelerator.synchronize(device)
            with contextlib.suppress(dh.errors.StoreError):
                (found,) = torch.autograd.grad(model(x), x)
    assert torch.equal(found.cpu(), truth.cpu())
    assert any("Changed" in place for place in saving.report().differed)


def _products() -> object:
    return pipeline(dh.Recompute(products=2), dh.OnDevice("1 GiB"), at_least=0)


@pytest.mark.usefixtures("ahead")
def test_a_product_is_computed_with_a_weight_that_was_moved(device: torch.device) -> None:
    """As engines do that free a weight and gather it again; the host does not wait for the comparison."""
    torch.manual_seed(0)
    model, x = Gated().to(device), torch.randn(48, 32).to(device)
    weights = list(model.parameters())
    truth = [grad.cpu() for grad in torch.autograd.grad(model(x).square().sum(), weights)]
    with dh.save_activations(model, "", _products()) as saving:
        for _ in range(4):
            loss = model(x).square().sum()
            storage = model.up.weight.untyped_storage()
            there = model.up.weight.detach().clone()
            storage.resize_(0)
            hole = torch.empty_like(there)  # so that the storage comes back elsewhere
            storage.resize_(there.nbytes)
            storage.copy_(there.untyped_storage())
            del hole
            found = torch.autograd.grad(loss, weights)
            assert all(torch.equal(grad.cpu(), right) for grad, right in zip(found, truth, strict=True))
        assert saving.report().rerun_flops > 0
        assert saving.report().differed == {}


def test_a_product_with_a_weight_that_came_back_changed_is_an_error(device: torch.device) -> None:
    torch.manual_seed(0)
    model, x = Gated().to(device), torch.randn(48, 32).to(device)
    with dh.save_activations(model, "", _products()):
        for _ in range(3):
            model(x).square().sum().backward()
        loss = model(x).square().sum()
        storage = model.up.weight.untyped_storage()
        other = model.up.weight.detach() * 2
        storage.resize_(0)
        hole = torch.empty_like(other)
        storage.resize_(other.nbytes)
        storage.copy_(other.untyped_storage())
        assert model.up.weight.data_ptr() != hole.data_ptr()

        def go_on(loss: torch.Tensor) -> None:  # the answer is read later, in this backward or in the next step
            for _ in range(3):
                loss.backward()
                torch.accelerator.synchronize(device)
                loss = model(x).square().sum()

        with pytest.raises(dh.errors.StoreError, match="not the same now"):
            go_on(loss)
