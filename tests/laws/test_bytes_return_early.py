"""Law 6, nothing left: saved outputs, functions of one's own, and code that is left half way, without the collector."""

from __future__ import annotations

import pathlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks._torch import top_hooks
from tests.support.stores.faulty import AsAsked, Watch, left, line, no_collector, suppressed  # noqa: F401

pytestmark = pytest.mark.usefixtures("no_collector")

STORES = ["disk", "copies", "functions"]

# -- outputs that are saved, and functions of one's own

OUTPUTS = [torch.relu, torch.exp, torch.sigmoid, torch.tanh, torch.sqrt, lambda x: x.softmax(0), lambda x: x.cumprod(0)]


@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("function", OUTPUTS)
def test_a_saved_output_makes_no_cycle(function: Callable, kind: str, tmp_path: pathlib.Path) -> None:
    to, account = line(kind, tmp_path)
    watch, saved, x = Watch(), dh.saving(to), torch.ones(64, requires_grad=True)
    with watch, saved:
        y = function(x)
    assert saved.report().held >= x.nbytes
    del y
    assert left(lambda: saved.report().held, account, watch.alive) == (0, 0, 0)


class Own(torch.autograd.Function):
    """Saves an input, an output and something between, and keeps one more as an attribute."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fails: bool) -> torch.Tensor:
        between = x.exp()
        y = between * 2
        ctx.save_for_backward(x, between, y)
        ctx.shape, ctx.between, ctx.fails = x.shape, between, fails
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        _, between, y = ctx.saved_tensors
        if ctx.fails:
            raise AsAsked
        return grad * (y - between), None


@pytest.mark.parametrize("end", ["backward", "dropped", "fails"])
@pytest.mark.parametrize("kind", STORES)
def test_functions_of_ones_own(kind: str, end: str, tmp_path: pathlib.Path) -> None:
    to, account = line(kind, tmp_path)
    watch, saved, x = Watch(), dh.saving(to), torch.ones(64, requires_grad=True)
    with watch, saved:
        y = Own.apply(x, end == "fails")
    assert saved.report().held == 3 * x.nbytes
    if end == "backward":
        y.sum().backward()
    elif end == "fails":
        with suppressed(AsAsked):
            y.sum().backward()
    x.grad = None
    del y
    assert left(lambda: saved.report().held, account, watch.alive) == (0, 0, 0)


# -- code that is left half way


def _halves(saved: dh.saving, x: torch.Tensor) -> Iterator[torch.Tensor]:
    with saved:
        y = x.exp()
        yield y
        yield y.exp()


@pytest.mark.parametrize("how", ["dropped", "closed", "thrown into"])
@pytest.mark.parametrize("kind", STORES)
def test_an_abandoned_generator(kind: str, how: str, tmp_path: pathlib.Path) -> None:
    """The block in it is left when the generator is, and its graph goes with it."""
    to, account = line(kind, tmp_path)
    saved, x = dh.saving(to), torch.ones(64, requires_grad=True)
    generator = _halves(saved, x)
    next(generator)
    if how == "closed":
        generator.close()
    elif how == "thrown into":
        with suppressed(AsAsked):
            generator.throw(AsAsked())
    del generator
    assert top_hooks(True) is None
    assert (saved.report().held, account()) == (0, 0)


class Stages(nn.Module):
    """A forward that gives its stages one by one."""

    def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        for _ in range(3):
            x = x.exp()
            yield x


@pytest.mark.parametrize("kind", STORES)
def test_an_abandoned_generator_module(kind: str, tmp_path: pathlib.Path) -> None:
    """Its hooks are off whenever its consumer's code runs."""
    to, account = line(kind, tmp_path)
    model = dh.SaveWith(Stages(), to)
    stages = model(torch.ones(64, requires_grad=True))
    next(stages)
    next(stages)
    assert top_hooks(True) is None
    assert model.report().held >= 64 * 4
    del stages
    assert top_hooks(True) is None
    assert (model.report().held, account()) == (0, 0)


def test_an_abandoned_coroutine(tmp_path: pathlib.Path) -> None:
    saved = dh.saving(dh.pipeline(dh.AtLeast(0), dh.OnDisk(tmp_path)))

    @types.coroutine
    def pause() -> Iterator[None]:
        yield

    async def work() -> None:
        with saved:
            y = torch.ones(64, requires_grad=True).exp()
            await pause()
            y.sum().backward()

    coroutine = work()
    coroutine.send(None)
    assert top_hooks(True) is not None
    coroutine.close()
    assert top_hooks(True) is None
    assert saved.report().held == 0
