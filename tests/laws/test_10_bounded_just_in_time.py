"""Law 10, bounded, in time.

Saved tensors come back when backward wants them; what comes much earlier takes memory.
"""

from __future__ import annotations

import itertools
import pathlib
import time
from typing import Any, ClassVar

import pytest
import torch

import disthooks as dh
from disthooks.saved.report import SavedReport
from disthooks.saved.stores.host import AlignedPool
from tests.support.stores.faulty import soon
from tests.support.stores.inside import worker_of

pytestmark = pytest.mark.any_device


class Slow(torch.autograd.Function):
    """Saves its input, takes its time in backward, and notes there how much is read ahead."""

    noted: ClassVar[list[int]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, store: dh.OnDisk, seconds: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.store, ctx.seconds = store, seconds
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        (x,) = ctx.saved_tensors
        time.sleep(ctx.seconds / 2)
        mover = worker_of(ctx.store)
        Slow.noted.append(sum(group.nbytes for group in list(mover._ahead.groups) if group.ahead))
        time.sleep(ctx.seconds / 2)
        return grad * 2 + 0 * x, None, None


def _step(store: dh.OnDisk, seconds: float, count: int = 8) -> SavedReport:
    x = torch.randn(256, 1024, requires_grad=True)  # a MiB
    Slow.noted = []
    with dh.saving(store, at_least=0) as saved:
        y = x
        for _ in range(count):
            y = Slow.apply(y, store, seconds)
    store.wait()
    y.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2.0**count))
    return saved.report()


@pytest.mark.second_tier
def test_a_long_backward_has_little_read_ahead(tmp_path: pathlib.Path) -> None:
    """The first backward reads as much as it may; the second one knows how long it takes."""
    store = dh.OnDisk(tmp_path)
    _step(store, 0.3)
    most = max(Slow.noted)
    assert most >= 6 << 20
    _step(store, 0.0, count=5)  # another model's
    _step(store, 0.3)
    assert max(Slow.noted) <= most // 2
    (tier,) = store.report()
    assert tier.ahead >= 10 << 20  # of 16 MiB; the first read of each backward cannot come ahead


def _read_ahead(stored: Any) -> bool:
    """Whether the tensor is in memory within seconds, before anybody asks for it."""
    return soon(lambda: stored.entry.is_ahead)


def test_one_is_read_ahead_where_there_is_room_for_one(tmp_path: pathlib.Path) -> None:
    """The tensor that is taken makes room for the next one."""
    x = torch.randn(256, 1024)
    store = dh.OnDisk(tmp_path, in_flight=x.nbytes)
    tickets = [store.put(x + i) for i in range(4)]
    store.wait()
    for stored, following in itertools.pairwise(reversed(tickets)):
        store.get(stored)
        assert _read_ahead(following)


def test_a_backward_that_does_not_wait_keeps_no_memory_to_read_into(tmp_path: pathlib.Path) -> None:
    store = dh.OnDisk(tmp_path)
    for _ in range(2):
        _step(store, 0.05)
    assert worker_of(store).buffers._bytes <= 2 << 20


@pytest.mark.parametrize("rows", [256, 16])
def test_nothing_stays_to_be_read_of_a_graph_that_is_gone(rows: int, tmp_path: pathlib.Path) -> None:
    """Reads that were planned are dropped, and their places in the file are free.

    So it is where small tensors are written together, too.
    """
    store = dh.OnDisk(tmp_path)
    _step(store, 0.3, count=4)
    x = torch.randn(rows, 1024, requires_grad=True)
    with dh.saving(store, at_least=0):
        first, y = Slow.apply(x * 2, store, 0.3), x
        for _ in range(2):
            y = Slow.apply(y, store, 0.3)
        store.wait()  # small tensors are written together up to here
        y = Slow.apply(y, store, 0.3)
    store.wait()
    assert y.grad_fn.saved_tensors  # this reads the last one and plans the reads of the others
    del first
    assert store.report()[0].held == 3 * x.nbytes  # it is let go of while others are to be read with it
    del y
    (tier,) = store.report()
    assert tier.held == 0
    mover = worker_of(store)
    assert soon(lambda: mover.in_flight == 0 and not mover._ahead.planned)
    store.release_idle()
    assert soon(lambda: mover.file.in_use == 0)  # a thread may be reading in this moment


class Reads(torch.autograd.Function):
    """Saves ``data``; its gradient is that of ``x + data.sum()``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(data)
        return x + data.sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        (data,) = ctx.saved_tensors
        return grad, grad.sum().expand_as(data)


@pytest.mark.parametrize("writes", [False, True])
def test_far_readers_see_what_was_saved_whatever_nearer_ones_do(writes: bool, tmp_path: pathlib.Path) -> None:
    """This holds in several backwards of one graph, and when each reader writes into the tensor that it got."""

    class Notes(Reads):
        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple:
            (data,) = ctx.saved_tensors
            seen.append(data.clone())
            if writes:
                data.zero_()
            return grad, grad.sum().expand_as(data)

    seen: list[torch.Tensor] = []
    leaf = torch.randn(64, 64, requires_grad=True)
    shared = leaf * 1
    expected = [shared.detach().clone() if i % 4 == 0 else (leaf + i).detach() for i in range(12)]
    store = dh.OnDisk(tmp_path)
    with dh.saving(store, at_least=0):
        y = torch.zeros(1, requires_grad=True)
        for i in range(12):
            y = Notes.apply(y, shared if i % 4 == 0 else leaf + i)
    store.wait()
    for _ in range(1 if writes else 3):
        seen.clear()
        y.backward(retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(seen, reversed(expected), strict=True))


def test_the_memory_to_read_into_is_bounded() -> None:
    pool = AlignedPool(keep=64 << 10)
    leases = [pool.lease(16 << 10) for _ in range(6)]  # more than it keeps: they are in use
    assert pool._bytes == 6 * (16 << 10)
    del leases
    held = pool.lease(16 << 10)
    assert sum(len(block) for block in pool._idle) == 48 << 10
    pool.trim(0)
    assert not pool._idle
    assert len(held) == 16 << 10
