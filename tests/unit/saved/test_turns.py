"""Which tensor of a tier is wanted last: by the last backward, where it is known."""

from __future__ import annotations

import gc
import weakref

import torch

import disthooks as dh
from tests.support.stores.copies import Copies


def step(tiers: dh.Tiered, order: list[int]) -> list[int]:
    """Put as many, read them in ``order``, and drop each; in which tier each was."""
    tickets = [tiers.put(torch.full((16,), float(i))) for i in range(len(order))]
    where = [tiers.tier_of(ticket) for ticket in tickets]
    for i in order:
        assert torch.equal(tiers.get(tickets[i]), torch.full((16,), float(i)))
        tiers.drop(tickets[i])
    return where


def test_the_order_of_the_last_backward_says_who_moves() -> None:
    """A first one that is wanted first, as a shortcut over all of a model may be, stays from the second step on."""
    tiers = dh.Tiered(dh.OnDevice(3 * 64), Copies())
    order = [0, 5, 4, 3, 2, 1]
    assert step(tiers, order) == [1, 1, 1, 0, 0, 0]
    assert step(tiers, order) == [0, 1, 1, 1, 0, 0]
    assert step(tiers, [5, 4, 3, 2, 1, 0]) == [0, 1, 1, 1, 0, 0]
    assert step(tiers, [5, 4, 3, 2, 1, 0]) == [1, 1, 1, 0, 0, 0]
    assert [store.budget.held for store in tiers.stores] == [0, 0]


def test_what_is_never_read_goes_first() -> None:
    tiers = dh.Tiered(dh.OnDevice(3 * 64), Copies())
    for where in ([1, 1, 0, 0, 0], [1, 0, 1, 0, 0]):
        tickets = [tiers.put(torch.zeros(16)) for _ in range(5)]
        assert [tiers.tier_of(ticket) for ticket in tickets] == where
        for i in (4, 3, 1, 0):
            tiers.get(tickets[i])
        for ticket in tickets:
            tiers.drop(ticket)


def test_tiers_that_are_gone_need_no_collection_of_garbage() -> None:
    """Else their stores, and the files of these, would stay until one."""
    gc.collect()
    gc.disable()
    try:
        tiers = dh.Tiered(dh.OnDevice(3 * 64), Copies())
        for _ in range(3):
            step(tiers, [3, 2, 1, 0])
        alive = [weakref.ref(tiers), weakref.ref(tiers.open()), *map(weakref.ref, tiers.stores)]
        del tiers
        assert [one() for one in alive] == [None] * len(alive)
    finally:
        gc.enable()
