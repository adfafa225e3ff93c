"""Laws 6, 9 and 10 where small tensors are joined, and at the ends of what a store can be asked."""

from __future__ import annotations

import errno
import os
import pathlib
from typing import Any

import pytest
import torch

import disthooks as dh
from disthooks.errors import StoreError
from disthooks.saved.stores import mover as moving
from disthooks.saved.stores.scratch_file import CHUNK
from tests.support.stores.copies import Copies
from tests.support.stores.faulty import soon

ALL = dh.AtLeast(0)
write = os.pwrite


def test_a_slab_is_never_larger_than_the_memory_it_is_joined_in(tmp_path: pathlib.Path) -> None:
    """Tensors of a byte take 64 in a slab: counted as one, a megabyte of them would be written past its end."""
    store = dh.OnDisk(tmp_path)
    values = torch.arange(200, dtype=torch.uint8)
    tickets = [store.put(values[i % 200 : i % 200 + 1]) for i in range(40_000)]
    store.wait()
    slabs = {id(slab): slab for ticket in tickets if (slab := ticket.ticket.slab) is not None}
    assert len(slabs) > 1
    for slab in slabs.values():
        assert slab.members[-1].offset + slab.members[-1].nbytes <= moving._JOINED + moving._SMALL < CHUNK
    assert all(store.get(ticket).item() == i % 200 for i, ticket in enumerate(tickets))


def test_tensors_of_every_size_together(tmp_path: pathlib.Path) -> None:
    generator = torch.Generator().manual_seed(0)
    store = dh.OnDisk(tmp_path, checksum=True)
    tensors = [torch.rand(int(10 ** (torch.rand((), generator=generator) * 5.5))) for _ in range(300)]
    tickets = [store.put(tensor) for tensor in tensors]
    store.wait()
    assert max(len(ticket.ticket.slab.members) for ticket in tickets) > 2
    for i in torch.randperm(300, generator=generator).tolist():
        assert torch.equal(store.get(tickets[i]), tensors[i])
    for ticket in tickets:
        store.drop(ticket)
    store.rest()
    assert soon(lambda: store._mover.arenas[0]._used == 0)


def test_what_was_dropped_is_not_waited_for(tmp_path: pathlib.Path) -> None:
    store = dh.OnDisk(tmp_path)
    ticket = store.put(torch.ones(5000))
    store.wait()
    store.drop(ticket)
    with pytest.raises(StoreError, match="after it was dropped"):
        store.get(ticket)


def test_nobody_waits_for_threads_that_ended_with_the_process(tmp_path: pathlib.Path) -> None:
    """A step in a function that runs at exit, after the store's own: what is put stays in memory."""
    store, x = dh.OnDisk(tmp_path, in_flight=20_000), torch.linspace(-2, 2, 5000, requires_grad=True)
    store._mover.close()
    with dh.saving(ALL, store):
        y = x.sin().cos().tan().sum()
    store.wait()
    (got,) = torch.autograd.grad(y, x)
    assert torch.equal(got, torch.autograd.grad(x.sin().cos().tan().sum(), x)[0])


def test_the_failure_of_another_tensor_is_not_that_of_this_one(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind ``Tiered`` nothing is lost and nothing is said: the first was written, the second is in memory."""
    tiers, first, second = dh.Tiered(dh.OnDisk(tmp_path), Copies()), torch.rand(5000), torch.rand(5000)

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    one = tiers.put(first)
    tiers.wait()
    monkeypatch.setattr(os, "pwrite", full)
    two = tiers.put(second)
    assert soon(lambda: tiers.stores[0]._mover._failed is not None)
    assert torch.equal(tiers.get(one), first)
    assert torch.equal(tiers.get(two), second)


def test_the_lines_of_tiers_do_not_grow() -> None:
    """What fits into the first tier is never taken out of its line to make room."""
    tiers = dh.Tiered(dh.OnDevice("1 GiB"), Copies())
    stays = tiers.put(torch.zeros(1))
    for _ in range(10_000):
        tiers.drop(tiers.put(torch.ones(1)))
    assert len(tiers._queues[0]) < 2100
    assert tiers._queues[0].last() is stays


def test_advice_is_about_what_went_to_a_disk(tmp_path: pathlib.Path) -> None:
    x = torch.ones(64, 64, requires_grad=True)
    with dh.saving(dh.Functions(lambda t: t, lambda t: t)) as functions:
        x.exp().sum().backward()
    with dh.saving(dh.OnCpu()) as in_place:
        (x.exp() + x[0, :2].exp().sum()).sum().backward()
    assert functions.report().advice() == []
    assert not any("worth moving" in advice for advice in in_place.report().advice())
    with dh.saving(ALL, dh.OnDisk(tmp_path, in_flight=0)) as small:
        y = x.exp().sin().cos().sum()
    y.backward()
    assert "less than is worth moving" in str(small.report())
