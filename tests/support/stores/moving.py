"""What the system calls of OnDisk are made to do, on request, and small steps to tell whether it stayed right."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import disthooks as dh
from disthooks.errors import StoreError
from disthooks.saved.pipeline import pipeline
from disthooks.saved.stores import tape
from tests.support import ROOT
from tests.support.stores.faulty import soon

write, read = os.pwrite, os.preadv  # the real ones


def pipe(store: Any) -> Any:
    return pipeline(store, at_least=0)


def chain(x: torch.Tensor, length: int = 12) -> torch.Tensor:
    """Each function saves what it gets: ``length`` tensors as large as ``x``."""
    for _ in range(length):
        x = x.sin()
    return x.sum()


def truth(x: torch.Tensor, length: int = 12) -> torch.Tensor:
    (grad,) = torch.autograd.grad(chain(x, length), x)
    return grad


def right(store: Any, numel: int = 5000, length: int = 12) -> bool:
    """Whether a step through ``store`` gives the gradient of one without, bit for bit, and leaves nothing."""
    x = torch.linspace(-2, 2, numel, requires_grad=True)
    with dh.saving(pipe(store)) as saved:
        y = chain(x, length)
    (grad,) = torch.autograd.grad(y, x)
    del y
    return torch.equal(grad, truth(x, length)) and saved.report().held == 0 and clean(store)


def clean(store: Any) -> bool:
    """Whether nothing is held, in flight or in the files any more: within seconds, for threads are at it."""
    opened = store.open()
    worker = opened.worker

    def nothing() -> bool:
        busy = worker.in_flight  # this applies the releases
        return not busy and store.budget.held == 0 and not _used(opened.file)

    return soon(nothing)


def _used(file: Any) -> int:
    file.shrink(keep_peak=True)
    return int(file.in_use)


def error_of(function: Callable[[], object], *kinds: type[BaseException]) -> BaseException:
    """What ``function`` raises, without its traceback, which holds what its frames hold."""
    try:
        function()
    except BaseException as error:
        if not isinstance(error, kinds or StoreError):
            raise
        error.__traceback__ = error.__context__ = error.__cause__ = None
        return error
    pytest.fail("nothing was raised")


def movers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "disthooks file worker"]


class Gate:
    """Stands in for ``call``, which waits here while the gate is shut."""

    def __init__(self, call: Callable[..., int]) -> None:
        self.call, self.open, self.waiting = call, threading.Event(), 0

    def __call__(self, *args: Any) -> int:
        self.waiting += 1
        assert self.open.wait(120)
        return self.call(*args)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tensors this small gain nothing by OpenMP, whose threads spin, and do not survive a fork."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def slow(call: Callable[..., int], seconds: float) -> Callable[..., int]:
    def late(*args: Any) -> int:
        time.sleep(seconds)
        return call(*args)

    return late


@pytest.fixture(name="gate")
def shut(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A gate before every write; open in the end, whatever happens."""
    gate = Gate(write)
    monkeypatch.setattr(os, "pwrite", gate)
    yield gate
    gate.open.set()


def opened(gate: Gate, folder: object, **options: Any) -> dh.OnDisk:
    """A new store may write to measure the disk; after that the gate is shut."""
    gate.open.set()
    store = dh.OnDisk(folder, **options)
    gate.open.clear()
    gate.waiting = 0
    return store


class Nth:
    """Stands in for ``call``: does something else at its n-th call, and counts them."""

    def __init__(self, call: Callable[..., int], n: int, instead: Callable[..., int]) -> None:
        self.call, self.n, self.instead, self.calls = call, n, instead, 0

    def __call__(self, *args: Any) -> int:
        self.calls += 1
        return (self.instead if self.calls == self.n else self.call)(*args)


def forward(store: dh.OnDisk, x: torch.Tensor) -> list[torch.Tensor]:
    with dh.saving(pipe(store)):
        return [chain(x, 12)]


def step(store: dh.OnDisk, wait: bool = True) -> bool:
    """A step that waits for its disk; whether it is right."""
    x = torch.linspace(-2, 2, 5000, requires_grad=True)
    (y,) = forward(store, x)
    if wait:
        store.wait()
    return torch.equal(torch.autograd.grad(y, x)[0], truth(x))


def script(text: str, *args: object, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Run it in a process of its own, which finds these helpers."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, "-c", text, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors are not joined: each is written when it is put."""
    monkeypatch.setattr(tape, "SMALL", 0)
