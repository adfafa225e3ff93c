"""Law 9, never wrong, and law 6, at a fork while threads move tensors.

Both processes go on, each with its own file.
"""

from __future__ import annotations

import os
import pathlib
import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch

import disthooks as dh
from disthooks.errors import StoreError
from tests.support.stores.moving import chain, clean, pipe, slow, truth, write

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning"),
    pytest.mark.forks,
    pytest.mark.usefixtures("one_thread", "alone"),
]


def in_child(check: Callable[[], bool]) -> int:
    """The exit status of a fork that is 0 if ``check`` is true there; it is killed when it hangs."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if check() else 1)
        except BaseException:
            os._exit(2)
    end = time.monotonic() + 120
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -1


def right_step(store: dh.OnDisk) -> bool:
    x = torch.linspace(-2, 2, 5000, requires_grad=True)
    with dh.saving(pipe(store)):
        y = chain(x, 6)
    return torch.equal(torch.autograd.grad(y, x)[0], truth(x, 6))


def test_a_fork_while_threads_write_disturbs_nobody(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = dh.OnDisk(tmp_path, in_flight="64 KiB")
    monkeypatch.setattr(os, "pwrite", slow(write, 0.001))
    x, stop, wrong = torch.linspace(-2, 2, 5000), threading.Event(), []

    def train() -> None:
        while not stop.is_set():
            wrong.extend([] if right_step(store) else [1])

    busy = [threading.Thread(target=train) for _ in range(2)]
    for thread in busy:
        thread.start()

    def check() -> bool:
        held.clear()  # this drops them in the child
        mine = store.put(x)
        store.wait()
        same = torch.equal(store.get(mine), x)
        store.drop(mine)
        return same and right_step(store)

    try:
        for i in range(50):
            held = [(x + i, store.put(x + i)) for _ in range(3)]
            assert in_child(check) == 0
            assert all(torch.equal(store.get(ticket), tensor) for tensor, ticket in held)
            held.clear()
    finally:
        stop.set()
        for thread in busy:
            thread.join(120)
    assert not any(thread.is_alive() for thread in busy)
    assert not wrong
    assert clean(store)
    assert os.listdir(tmp_path) == []


def test_a_backward_in_a_child_is_an_error_that_says_so(tmp_path: pathlib.Path) -> None:
    store = dh.OnDisk(tmp_path)
    x = torch.linspace(-2, 2, 5000, requires_grad=True)
    with dh.saving(pipe(store)):
        y = chain(x, 12)
    store.wait()
    expected = truth(x)

    def check() -> bool:
        try:
            torch.autograd.grad(y, x)
        except StoreError as error:
            return "is a fork of it" in str(error).replace("\n", " ")
        return False

    assert in_child(check) == 0
    assert torch.equal(torch.autograd.grad(y, x)[0], expected)
