"""Law 6, nothing left: without the collector, bytes in the store and in memory go however a step ends."""

from __future__ import annotations

import contextlib
import gc
import os
import pathlib
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks._torch import top_hooks
from disthooks.errors import StoreError
from tests.support.stores.faulty import (  # noqa: F401
    AsAsked,
    Watch,
    fail,
    full,
    interrupt,
    left,
    line,
    no_collector,
    soon,
    suppressed,
)

pytestmark = pytest.mark.usefixtures("no_collector")

STORES = ["disk", "copies", "functions"]
WAYS = ["in place", "wrapper", "saving"]


class Step:
    """A small model whose saved tensors go through a pair, in one of three ways, and the memory of its steps."""

    def __init__(self, way: str, kind: str, folder: object, **faults: Any) -> None:
        self.to, self.account = line(kind, folder, **faults)
        self.wait = getattr(self.to, "store", self.to).wait
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
        self.block: Any = contextlib.nullcontext()
        if way == "in place":
            self.report = dh.save_activations(self.model, "", self.to).report
        elif way == "wrapper":
            self.model = dh.SaveWith(self.model, self.to)
            self.report = self.model.report
        else:
            self.block = dh.saving(self.to)
            self.report = self.block.report
        self.watch = Watch()
        self.x = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))

    def forward(self) -> torch.Tensor:
        with self.watch, self.block:
            return self.model(self.x).sum()

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        with self.watch:
            loss.backward(**options)

    def assert_all_is_back(self) -> None:
        assert top_hooks(True) is None
        self.model.zero_grad()
        self.wait()  # what a thread writes in this moment is in memory until it is written
        assert left(lambda: self.wait() or self.report().held, self.account, self.watch.alive) == (0, 0, 0)


@pytest.fixture(params=[(way, kind) for way in WAYS for kind in STORES], ids=", ".join)
def make(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Callable[..., Step]:
    return lambda **faults: Step(*request.param, tmp_path, **faults)


# -- ends of a step


def test_after_a_backward(make: Callable[..., Step]) -> None:
    step = make()
    loss = step.forward()
    assert step.report().held > 0
    assert step.watch.alive() > 0
    step.backward(loss)
    del loss
    step.assert_all_is_back()


def test_after_a_graph_was_dropped(make: Callable[..., Step]) -> None:
    step = make()
    for _ in range(3):
        step.forward()
    step.assert_all_is_back()


def test_after_a_graph_was_retained(make: Callable[..., Step]) -> None:
    step = make()
    loss = step.forward()
    held = step.report().held
    for _ in range(3):
        step.backward(loss, retain_graph=True)
    assert step.report().held == held
    del loss
    step.assert_all_is_back()


def test_with_a_list_of_losses(make: Callable[..., Step]) -> None:
    step = make()
    losses = [step.forward() for _ in range(3)]
    held = step.report().held
    step.backward(losses.pop())
    assert 0 < step.report().held < held
    step.backward(losses.pop())
    losses.clear()
    step.assert_all_is_back()


@pytest.mark.parametrize("what", [fail, interrupt])
@pytest.mark.parametrize("when", ["forward", "backward", "put", "get"])
def test_after_something_went_wrong(when: str, what: Callable, make: Callable[..., Step]) -> None:
    """In a hook of a module or a tensor, or in the store itself; an interrupt is a real one."""
    step = make(**{f"{when}_at": 3, "then": what} if when in ("put", "get") else {})
    handle = _break(step.model, when, what)
    with suppressed(AsAsked, KeyboardInterrupt):
        step.backward(step.forward())
    handle.remove()
    step.assert_all_is_back()
    loss = step.forward()
    step.backward(loss)
    del loss
    step.assert_all_is_back()


def _break(model: nn.Module, when: str, what: Callable) -> Any:
    if when == "backward":
        return model[1].register_forward_hook(lambda module, args, y: y.register_hook(what) and None)
    return model[3 if when == "forward" else 4].register_forward_hook(what if when == "forward" else _nothing)


def _nothing(*_: object) -> None:
    """A hook that does nothing."""


@pytest.mark.parametrize("at", [1, 2, 3])
def test_after_a_store_was_full_or_could_not_be_read(at: int, make: Callable[..., Step]) -> None:
    for fault in ({"put_at": at}, {"get_at": at}):
        step = make(**fault, then=full)
        with suppressed(StoreError):
            step.backward(step.forward())
        step.assert_all_is_back()


def test_at_a_limit(tmp_path: pathlib.Path) -> None:
    """The forward that does not fit leaves nothing, and the next one that does fit runs."""
    store = dh.OnDisk(tmp_path, limit=10_000)  # two pages
    model = dh.SaveWith(
        nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16)), dh.pipeline(dh.AtLeast(0), store)
    )
    for rows in (8, 100, 8, 1000, 8):
        if rows == 8:
            model(torch.ones(rows, 8)).sum().backward()
        else:
            with suppressed(StoreError):
                model(torch.ones(rows, 8))
        assert store.account.held == model.report().held == 0


def test_interrupted_while_writing(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a step that waits for its disk spends its time: the place in the file is free again, too."""
    store, x = dh.OnDisk(tmp_path), torch.ones(64, 64, requires_grad=True)
    write = os.pwrite

    def interrupted(*args: Any) -> int:
        done = write(*args)
        interrupt()
        return done

    for _ in range(5):
        ticket = None
        with monkeypatch.context() as patch, suppressed(KeyboardInterrupt):
            patch.setattr(os, "pwrite", interrupted)
            ticket = store.put(x)
            store.wait()
        store.drop(ticket)
        assert store.account.held == 0
        store.wait()
    for _ in range(2):
        ticket = store.put(x)
        store.wait()
        store.drop(ticket)
    assert os.fstat(store._mover.arenas[0]._fd).st_size == x.nbytes


def test_reading_again_after_a_failed_read(make: Callable[..., Step]) -> None:
    """A backward whose read failed leaves the graph as it was: it can be run again."""
    plain, step = make(), make(get_at=1)
    loss = step.forward()
    with suppressed(AsAsked):
        step.backward(loss)
    step.backward(loss)
    plain.model.load_state_dict(step.model.state_dict())
    plain.backward(plain.forward())
    for a, b in zip(step.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    del loss
    step.assert_all_is_back()


@pytest.mark.parametrize("hooks", [True, False])
def test_what_torch_keeps_of_a_failed_backward(hooks: bool, tmp_path: pathlib.Path) -> None:
    """Nodes that were next stay in torch's queue, with or without hooks, until an older graph or the thread's end."""
    oldest, x, watch = torch.ones(1, requires_grad=True).exp(), torch.ones(64, requires_grad=True), Watch()
    saved = dh.saving(dh.pipeline(dh.AtLeast(0), dh.OnDisk(tmp_path)))
    with watch, saved if hooks else contextlib.nullcontext():
        branches = x.exp(), x.sin().exp()  # the later one is differentiated first
        branches[1].register_hook(fail)
        y = branches[0] + branches[1]
    with suppressed(AsAsked):
        y.sum().backward()
    del y, branches
    assert (saved.report().held if hooks else watch.alive()) > 0
    oldest.backward()
    assert saved.report().held == 0
    assert soon(lambda: watch.alive() == 0)


# -- what goes away before the graph does


@pytest.mark.parametrize("gone", ["hooks", "model", "everything"])
def test_a_graph_outlives_what_made_it(gone: str, make: Callable[..., Step]) -> None:
    step, plain = make(), make()
    plain.model.load_state_dict(step.model.state_dict())
    plain.backward(plain.forward())
    x, weight, report, account, watch = step.x.requires_grad_(), next(step.model.parameters()), *_parts(step)
    loss = step.forward()
    if gone == "hooks" and hasattr(report.__self__, "remove"):
        report.__self__.remove()
    elif gone == "model":
        step.model = nn.Identity()
    elif gone == "everything":
        del step
    loss.backward()
    assert torch.equal(weight.grad, next(plain.model.parameters()).grad)
    weight.grad = x.grad = None
    del loss, weight
    assert left(lambda: report().held, account) == (0, 0)
    if gone == "everything":
        assert soon(lambda: watch.alive() == 0)


def _parts(step: Step) -> tuple:
    return step.report, step.account, step.watch


def test_removed_while_a_graph_is_alive(tmp_path: pathlib.Path) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.ones(4, 8)
    (truth,) = torch.autograd.grad(model(x).sum(), model[0].weight)
    store = dh.OnDisk(tmp_path)
    saving = dh.save_activations(model, "", dh.pipeline(dh.AtLeast(0), store))
    loss, account = model(x).sum(), store.account
    saving.remove()
    del store
    assert saving.report().held == 2 * x.nbytes
    assert account.held == 2 * 4096  # a file has whole pages
    assert torch.equal(torch.autograd.grad(loss, model[0].weight)[0], truth)
    assert saving.report().held == account.held == 0


class Keeps(nn.Module):
    """Keeps its last output, as many models do for a loss or a picture."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("table", torch.zeros(1000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = self.layer(x).tanh()
        return self.last


@pytest.mark.parametrize("way", ["in place", "wrapper"])
def test_a_graph_does_not_keep_its_module(way: str, tmp_path: pathlib.Path) -> None:
    """Nor is there a cycle through the graph, which the collector could not see."""
    to = dh.pipeline(dh.AtLeast(0), dh.OnDisk(tmp_path))
    model = keeps = Keeps()
    if way == "in place":
        ledger = dh.save_activations(model, "", to)._ledger  # the handle itself keeps what it can be removed from
    else:
        model = dh.SaveWith(keeps, to)
        ledger = model._site.ledger
    table = weakref.ref(keeps.table)
    model(torch.ones(4, 8))
    assert ledger.report().held > 0
    del model, keeps
    gc.collect()
    assert table() is None
    assert ledger.report().held == 0
