"""Law 9, never wrong, on a disk that is full, fails, tears or forgets: an error is raised, and then all goes on."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import resource
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import disthooks as dh
from disthooks.errors import StoreError
from tests.support.stores.inside import file_of, worker_of
from tests.support.stores.moving import (
    Gate,
    Nth,
    chain,
    clean,
    error_of,
    forward,
    pipe,
    read,
    right,
    slow,
    step,
    truth,
    write,
)

pytestmark = pytest.mark.usefixtures("one_thread", "alone")


def full_in_forward(store: dh.OnDisk) -> StoreError:
    """Run a forward that the disk has no room for; the backward of the part that was done is right."""
    x = torch.linspace(-2, 2, 30_000, requires_grad=True)
    y, done, error = x, 0, None
    try:
        with dh.saving(pipe(store)):
            while done < 100:
                y, done = y.sin(), done + 1
    except StoreError as found:
        error = found
    assert error is not None
    assert 8 <= done < 100, error
    expected = x
    for _ in range(done):
        expected = expected.sin()
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad, torch.autograd.grad(expected.sum(), x)[0])
    assert error.wanted >= x.nbytes  # several tensors may be written together
    del y
    error.__traceback__ = None
    return error


def test_a_file_that_has_no_room_to_grow_in_forward_is_an_error(tmp_path: pathlib.Path) -> None:
    """The system refuses the write, as it does on a full disk."""
    store, before = dh.OnDisk(tmp_path, in_flight="256 KiB"), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        for _ in range(2):
            error = full_in_forward(store)
            assert (error.path, error.free > 0) == (str(tmp_path), True)
            assert "File too large" in str(error)
            assert clean(store)
            assert right(store, length=5)  # a step that fits is right again
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert right(store, 30_000, 30)


BOTH = pytest.mark.parametrize("direct", ["auto", False])


def no_io(*_: object) -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def takes_nothing(*_: object) -> int:
    return 0


@BOTH
@pytest.mark.parametrize(("instead", "why"), [(no_io, "Input/output error"), (takes_nothing, "nothing was taken")])
@pytest.mark.parametrize("n", [1, 7, 12])
def test_a_write_that_fails_is_an_error(
    n: int, instead: Callable, why: str, direct: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dh.OnDisk(tmp_path, direct=direct)
    x = torch.linspace(-2, 2, 5000, requires_grad=True)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", Nth(write, n, instead))
        graphs: list[torch.Tensor] = []
        error = error_of(lambda: (graphs.extend(forward(store, x)), store.wait()))
    assert why in str(error)
    assert (error.path, error.free > 0) == (str(tmp_path), True)
    assert 20_000 <= error.wanted < 20_000 + 4096
    for y in graphs:  # the forward was done: its backward is right and raises nothing
        assert torch.equal(torch.autograd.grad(y, x)[0], truth(x))
    y = graphs.clear()
    assert clean(store)
    assert right(store)


@BOTH
@pytest.mark.parametrize("n", [1, 5])
def test_a_read_that_fails_is_an_error(
    n: int, direct: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read ahead of need that fails is tried again when backward wants the tensor.

    A read that fails every time is an error, and backward may be run again.
    """
    store = dh.OnDisk(tmp_path, direct=direct)
    with monkeypatch.context() as patch:
        once = Nth(read, n, no_io)
        patch.setattr(os, "preadv", once)
        with contextlib.suppress(StoreError):  # a thread or the backward may have been first
            assert step(store)
        assert once.calls >= n
    x = torch.linspace(-2, 2, 5000, requires_grad=True)
    with dh.saving(pipe(store)):
        y = chain(x, 12)
    store.wait()
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", no_io)
        for _ in range(2):
            error = error_of(lambda: torch.autograd.grad(y, x, retain_graph=True))
            assert "Input/output error" in str(error)
            assert (error.path, error.wanted) == (str(tmp_path), x.nbytes)
    assert torch.equal(torch.autograd.grad(y, x)[0], truth(x))
    y = None
    assert clean(store)


SIZES = [1, 511, 4096, 4097, 100_003, (8 << 20) + 77]  # bytes; the last is more than one system call moves


def bytes_of(memory: memoryview, most: int, aligned: bool) -> memoryview:
    """The first bytes of ``memory``. A direct call moves whole sectors, and may report fewer bytes."""
    return memory[: most // 512 * 512] if aligned else memory[:most]


@BOTH
@pytest.mark.parametrize("most", [1, 1000, 5000, 65_536 + 100])
def test_short_writes_and_reads_are_completed(
    most: int, direct: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call may move any part of the bytes. In direct mode less than a page is no progress, and that is an error."""
    store = dh.OnDisk(tmp_path, direct=direct)
    sizes = [size for size in SIZES if size / most < 2000]
    tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    aligned = file_of(store).direct
    monkeypatch.setattr(os, "pwrite", lambda fd, memory, at: write(fd, bytes_of(memory, most, aligned), at))
    monkeypatch.setattr(os, "preadv", lambda fd, into, at: read(fd, [bytes_of(into[0], most, aligned)], at))
    for tensor in tensors:
        ticket = store.put(tensor)
        if aligned and most < 4096:
            assert "nothing was taken" in str(error_of(store.wait))
        else:
            store.wait()
        assert torch.equal(store.get(ticket), tensor)
        store.drop(ticket)
    assert clean(store)


@BOTH
@pytest.mark.parametrize("left", [0, 1000, 40_000])
def test_a_file_that_was_cut_off_is_an_error(left: int, direct: Any, tmp_path: pathlib.Path) -> None:
    store = dh.OnDisk(tmp_path, direct=direct)
    x = torch.linspace(-2, 2, 5000, requires_grad=True)
    with dh.saving(pipe(store)):
        y = chain(x, 12)
    store.wait()
    os.truncate(file_of(store)._fd, left)
    assert "too soon" in str(error_of(y.backward))
    del y
    assert clean(store)
    assert right(store)


def test_many_writes_that_fail_are_one_error(tmp_path: pathlib.Path, gate: Gate) -> None:
    """Tensors that were in flight when the error was raised are in memory, and the backward runs."""
    store, x = dh.OnDisk(tmp_path, direct=False), torch.linspace(-2, 2, 5000, requires_grad=True)
    gate.call = slow(no_io, 0.005)
    (y,) = forward(store, x)
    gate.open.set()
    assert "Input/output error" in str(error_of(lambda: [store.drop(store.put(x)) for _ in range(100_000)]))
    assert worker_of(store).in_flight > 0
    (grad,) = torch.autograd.grad(y, x, retain_graph=True)
    assert torch.equal(grad, truth(x))
    store.wait()
    assert torch.equal(torch.autograd.grad(y, x)[0], truth(x))
    assert "Input/output error" in str(
        error_of(lambda: (store.put(x), store.wait()))
    )  # another failure is another error
    gate.call = write
    del y
    assert clean(store)
    assert right(store)


def test_no_thread_finds_a_file_that_is_being_closed(tmp_path: pathlib.Path) -> None:
    """Three threads make, use and forget a store for one directory, so the last store of one is gone as another begins.

    The file had a destructor, and a thread that asked for the file of the directory meanwhile got the closed one.
    """
    right: list[int] = []

    def work(number: int) -> None:
        for i in range(500):
            value, store = torch.full((20_000,), float(1000 * number + i)), dh.OnDisk(tmp_path)
            ticket = store.put(value)
            store.wait()
            assert torch.equal(store.get(ticket), value)
            store.drop(ticket)
            store.release_idle()  # or the thread that writes would keep the file for a second
            del ticket, store
        right.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert sorted(right) == [0, 1, 2]


def test_backward_says_whose_tensor_it_was(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, model = dh.OnDisk(tmp_path), torch.nn.Sequential(torch.nn.Linear(8, 50_000), torch.nn.Sigmoid())
    with dh.save_activations(model, "1", store):
        y = model(torch.ones(1, 8))
    store.wait()
    monkeypatch.setattr(os, "preadv", no_io)
    with pytest.raises(StoreError, match=r"to bring back what '1' saved: .*Input/output error"):
        y.sum().backward()
