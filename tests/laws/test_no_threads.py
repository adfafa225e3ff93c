"""Law 9: where no thread can be started there is a StoreError that says what to do, and nothing hangs."""

from __future__ import annotations

import pathlib
import threading
from typing import Any

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks.errors import StoreError
from tests.support.models import identical

ALL = dh.AtLeast(0)
X = torch.linspace(-1, 1, 16 * 64).view(16, 64)


@pytest.fixture
def none_start(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The system starts no thread for this library."""
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name.startswith("disthooks"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    return monkeypatch


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())


def _step(model: nn.Module) -> list[Any]:
    model.zero_grad()
    model(X).sum().backward()
    return [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]


def test_forward_says_what_to_do_and_remove_works(none_start: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    model = _model()
    expected = _step(model)
    store = dh.OnDisk(tmp_path, in_flight="4 KiB")  # each tensor is to be written at once
    saving = dh.save_activations(model, "*", dh.pipeline(ALL, store))
    for _ in range(2):
        with pytest.raises(StoreError, match=r"no thread can be started .* can't start new thread.*ulimit -u"):
            model(X)
    assert saving.report().tiers[0].held == 0
    saving.remove()
    assert identical(_step(model), expected)
    none_start.undo()
    with dh.save_activations(model, "*", dh.pipeline(ALL, store)) as again:  # the same store, when threads start
        assert identical(_step(model), expected)
        store.wait()
        assert again.report().moved > 0


def test_what_is_in_memory_comes_back_and_waiting_is_an_error(
    none_start: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    model = _model()
    expected = _step(model)
    store = dh.OnDisk(tmp_path)  # it writes when there is a MiB
    with dh.save_activations(model, "*", dh.pipeline(ALL, store)):
        model.zero_grad()
        loss = model(X).sum()
        with pytest.raises(StoreError, match="no thread can be started"):
            store.wait()
        loss.backward()
    assert identical([weight.grad for weight in model.parameters()], expected)


def test_reads_need_no_thread(none_start: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    none_start.undo()
    store = dh.OnDisk(tmp_path)
    tensors = [torch.full((1000,), float(i)) for i in range(8)]
    tickets = [store.put(tensor) for tensor in tensors]
    store.wait()
    store.rest()  # which ends the threads

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    none_start.setattr(threading.Thread, "start", refused)
    for ticket, tensor in zip(reversed(tickets), reversed(tensors), strict=True):
        store.prefetch(ticket)
        assert torch.equal(store.get(ticket), tensor)
        store.drop(ticket)


def test_one_thread_is_enough(none_start: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    started: list[threading.Thread] = []
    none_start.undo()

    def once(thread: threading.Thread, real: Any = threading.Thread.start) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        real(thread)

    none_start.setattr(threading.Thread, "start", once)
    store = dh.OnDisk(tmp_path, in_flight="64 KiB")
    tickets = [(torch.full((9000,), float(i)), store.put(torch.full((9000,), float(i)))) for i in range(30)]
    for tensor, ticket in tickets:
        assert torch.equal(store.get(ticket), tensor)
        store.drop(ticket)
    assert len(started) == 1
