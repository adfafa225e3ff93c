"""Law 9, never wrong, when a thread that moves tensors fails, or when none can be started: nobody waits for ever.

And where a thread writes small tensors together, each is right by itself.
"""

from __future__ import annotations

import errno
import os
import pathlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import disthooks as dh
from disthooks.errors import StoreError
from disthooks.saved.pipeline import pipeline
from disthooks.saved.stores import tape as tapes
from disthooks.saved.stores.disk_read_ahead import ReadAhead
from disthooks.saved.stores.scratch_file import CHUNK
from tests.support.models import identical, perceptron
from tests.support.models import step as step_of
from tests.support.stores.copies import Copies
from tests.support.stores.faulty import soon
from tests.support.stores.inside import worker_of
from tests.support.stores.moving import Nth, error_of, movers, read, right, step, write

# --- A thread that raises


MAIN = threading.main_thread()


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Threads may die in these tests: pytest does not report them."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    others = movers()
    yield
    assert soon(lambda: set(movers()) <= set(others))


@pytest.mark.usefixtures("one_thread", "alone")
@pytest.mark.parametrize("kind", [SystemExit, MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("call", ["pwrite", "preadv"])
@pytest.mark.usefixtures("quiet")
def test_whatever_a_thread_raises_the_step_ends(
    call: str, kind: type[BaseException], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def instead(*_: object) -> int:
        raise kind

    move = write if call == "pwrite" else read
    fails = Nth(move, 2, instead)
    store = dh.OnDisk(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, lambda *args: (move if threading.current_thread() is MAIN else fails)(*args))
        if call == "pwrite":
            assert type(error_of(lambda: step(store), kind)) is kind
        else:  # it read ahead of need, so backward reads the tensor itself
            assert step(store)
    assert right(store)
    store.release_idle()


@pytest.mark.parametrize("method", ["forget_taken", "plan_after", "next"])
def test_an_error_of_the_worker_is_raised_and_nobody_waits_for_it(
    method: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next ``put`` or ``get`` raises it once, and what was put before is right."""
    store, x = dh.OnDisk(tmp_path, in_flight=20_000), torch.arange(3000.0)
    raised, faults, work, mine = 0, iter([True]), getattr(ReadAhead, method), worker_of(store)._ahead

    def fails(*args: object) -> object:
        if args[0] is mine and next(faults, False):  # threads of other tests may be idle
            raise MemoryError("no memory for the worker")
        return work(*args)

    monkeypatch.setattr(ReadAhead, method, fails)

    def tried(call: Callable[[], Any]) -> Any:
        nonlocal raised
        try:
            return call()
        except StoreError as error:
            raised += "no memory for the worker" in str(error)
            return call()

    stored = [tried(lambda i=i: store.put(x + i)) for i in range(8)]
    tried(store.wait)
    for i, ticket in reversed(list(enumerate(stored))):
        assert torch.equal(tried(lambda ticket=ticket: store.get(ticket)), x + i)
        store.drop(ticket)
    assert soon(lambda: tried(store.wait) is None and raised == 1)
    assert step(store)


# --- No thread can be started


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


def test_forward_says_what_to_do_and_hooks_can_be_removed(
    none_start: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    model = perceptron()
    expected = step_of(model, X)
    store = dh.OnDisk(tmp_path, in_flight="4 KiB")  # each tensor is to be written at once
    saving = dh.save_activations(model, "*", pipeline(store, at_least=0))
    for _ in range(2):
        with pytest.raises(StoreError, match=r"no thread can be started .* can't start new thread.*ulimit -u"):
            model(X)
    assert saving.report().tiers[0].held == 0
    saving.remove()
    assert identical(step_of(model, X), expected)
    none_start.undo()
    with dh.save_activations(model, "*", pipeline(store, at_least=0)) as again:  # the same store, when threads start
        assert identical(step_of(model, X), expected)
        store.wait()
        assert again.report().moved > 0


def test_what_is_in_memory_comes_back_and_a_wait_is_an_error(
    none_start: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    model = perceptron()
    expected = step_of(model, X)
    store = dh.OnDisk(tmp_path)  # it writes when it has a MiB
    with dh.save_activations(model, "*", pipeline(store, at_least=0)):
        model.zero_grad()
        loss = model(X).square().mean()
        with pytest.raises(StoreError, match="no thread can be started"):
            store.wait()
        loss.backward()
    assert identical([weight.grad for weight in model.parameters()], expected)


# --- Small tensors that are written together


@pytest.mark.second_tier
def test_a_slab_is_never_larger_than_the_memory_it_is_joined_in(tmp_path: pathlib.Path) -> None:
    """A tensor of one byte takes 64 bytes in a slab.

    If it counted as one byte, a megabyte of such tensors would be written past the end.
    """
    store = dh.OnDisk(tmp_path)
    values = torch.arange(200, dtype=torch.uint8)
    tickets = [store.put(values[i % 200 : i % 200 + 1]) for i in range(40_000)]
    store.wait()
    groups = {ticket.entry.group for ticket in tickets}
    assert len(groups) > 1
    assert all(group.members[-1].offset + group.members[-1].nbytes <= tapes.JOINED < CHUNK for group in groups)
    assert all(store.get(ticket).item() == i % 200 for i, ticket in enumerate(tickets))


def test_a_tensor_that_was_dropped_is_not_waited_for(tmp_path: pathlib.Path) -> None:
    store = dh.OnDisk(tmp_path)
    ticket = store.put(torch.ones(5000))
    store.wait()
    store.drop(ticket)
    with pytest.raises(StoreError, match="after it was dropped"):
        store.get(ticket)


def test_nobody_waits_for_threads_that_ended_with_the_process(tmp_path: pathlib.Path) -> None:
    """A step may run at exit, after the threads of the store ended. What it puts stays in memory."""
    store, x = dh.OnDisk(tmp_path, in_flight=20_000), torch.linspace(-2, 2, 5000, requires_grad=True)
    worker_of(store).close()
    with dh.saving(store, at_least=0):
        y = x.sin().cos().tan().sum()
    store.wait()
    (got,) = torch.autograd.grad(y, x)
    assert torch.equal(got, torch.autograd.grad(x.sin().cos().tan().sum(), x)[0])


def test_the_failure_of_another_tensor_is_not_that_of_this_one(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In ``Tiered`` nothing is lost and nothing raises: the first tensor was written, and the second is in memory."""
    tiers, first, second = dh.Tiered(dh.OnDisk(tmp_path), Copies()), torch.rand(5000), torch.rand(5000)

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    one = tiers.put(first)
    tiers.wait()
    monkeypatch.setattr(os, "pwrite", full)
    two = tiers.put(second)
    worker = worker_of(tiers.stores[0])
    with worker._lock:
        worker._flush()  # it is written at once
    assert soon(lambda: worker._failed is not None)
    assert torch.equal(tiers.get(one), first)
    assert torch.equal(tiers.get(two), second)


def test_wait_ends_while_another_thread_begins_a_group(tmp_path: pathlib.Path) -> None:
    """The group of the other thread is small, and nothing else would hand it over."""
    store, x = dh.OnDisk(tmp_path), torch.arange(100.0)
    stored, has_begun, is_done = [], threading.Event(), threading.Event()

    def go_on() -> None:
        while not is_done.is_set():
            stored.append(store.put(x))
            has_begun.set()
            is_done.wait(0.001)

    other = threading.Thread(target=go_on)
    other.start()
    try:
        assert has_begun.wait(10)
        for _ in range(20):
            store.wait()
    finally:
        is_done.set()
        other.join()
    assert all(torch.equal(store.get(ticket), x) for ticket in stored)
